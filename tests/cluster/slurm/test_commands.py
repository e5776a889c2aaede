"""A job's commands word for word, since each word decides something on another machine: worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.slurm.plan import EXPLICIT, SYMMETRIC, Allocation, make_plan

ADDRESSES = {"n1": "10.0.0.1", "n2": "10.0.0.2", "g1": "10.0.0.3"}
TWO_PARTS = Allocation(1234, ({"n1": 4, "n2": 8}, {"g1": 2}), "")
PLACE: dict[str, Any] = dict(python="/env/bin/python", run_dir="/runs/7")
RUNS = ["/env/bin/python", "-P", "-m", "cluster.launch"]
STEP = ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none"]


def held(folder: str, ray: str, *, ends_it: str = "kill -TERM $ray", before: str = "", after: str = "") -> list[str]:
    """A shell that runs Ray in a folder of its own until it is signalled."""
    trapped = f"set -m; trap : TERM; trap '{ends_it}' USR2"
    waits = "ray=$!; while kill -0 $ray; do wait $ray; done 2>/dev/null"
    script = f"rm -rf {folder}; mkdir -m 700 {folder} || exit 1; {before}{trapped}; {ray} & {waits}; {after}"
    return ["bash", "-c", f"{script}rm -rf {folder}"]


def test_node_by_node_in_a_job_of_two_parts():
    plan = make_plan(
        TWO_PARTS,
        ADDRESSES,
        ["-m", "job=bench", "~x", "job.limit=3"],
        **PLACE,
        devices={"g1": "gpu:2"},
        resumes=True,
        tmp="/scratch",
        dashboard=False,
        bootstrap=EXPLICIT,
    )

    def ray(start: str, address: str, cpus: int, rest: str = "") -> list[str]:
        common = "--dashboard-agent-listen-port=29874 --min-worker-port=0 --max-worker-port=0 --disable-usage-stats"
        here = f"--node-ip-address={address} --num-cpus={cpus} --temp-dir=/scratch/specdec-1234/ray {common}"
        return held("/scratch/specdec-1234", f"/env/bin/ray start {start} {here}{rest} --block")

    of_head = " --include-dashboard=false --dashboard-port=29873 --ray-client-server-port=29875"
    joins = "--address=10.0.0.1:29872"
    assert plan.rays == {
        "n1": ray("--head --port=29872", "10.0.0.1", 4, of_head),
        "n2": [*STEP, "--nodelist=n2", "--het-group=0", *ray(joins, "10.0.0.2", 8)],
        "g1": [*STEP, "--nodelist=g1", "--gres=gpu:2", "--het-group=1", *ray(joins, "10.0.0.3", 2)],
    }
    words = ["-m", "cluster=slurm", "cluster.address=10.0.0.1:29872", "cluster.nodes=3", "hydra.run.dir=/runs/7"]
    words += ["hydra.sweep.dir=/runs/7", "job.resume=true"]
    words += ["placement.nodes={target:[10.0.0.1,10.0.0.2],draft:[10.0.0.3]}", "job=bench", "~x", "job.limit=3"]
    assert plan.launch == [*RUNS, *words]
    assert plan.environment == {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": "/runs/7/ray-token",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "1",
        "RAY_worker_niceness": "0",
        "RAY_NUM_REDIS_GET_RETRIES": "90",
        "PYTHONUNBUFFERED": "1",
    }


def test_all_nodes_in_one_step():
    plan = make_plan(Allocation(9, ({"n1": 4, "n2": 8},), ""), ADDRESSES, [], **PLACE, bootstrap=SYMMETRIC, wait_s=45)
    settings = "RAY_TMPDIR=/tmp/specdec-9 RAY_gcs_rpc_server_reconnect_timeout_s=5"
    start = "/env/bin/ray symmetric-run --address 10.0.0.1:20072 --min-nodes 2 --dashboard-agent-listen-port=20074"
    start += " --min-worker-port=0 --max-worker-port=0 --disable-usage-stats $of_head -- sleep infinity"
    of_head = "--include-dashboard=true --dashboard-port=20073 --ray-client-server-port=20075"
    script = held(
        "/tmp/specdec-9",
        f"{settings} RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=45 {start}",
        ends_it="kill -KILL -$ray",
        before=f'[ "$SLURM_PROCID" != 0 ] || of_head="{of_head}"; ',
        after="/env/bin/ray stop; ",
    )
    step = ["srun", "--overlap", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpu-bind=none", "--label"]
    assert plan.rays == {SYMMETRIC: [*step, *script]}
    words = ["cluster=slurm", "cluster.address=10.0.0.1:20072", "cluster.nodes=2", "hydra.run.dir=/runs/7"]
    assert plan.launch == [*RUNS, *words, "hydra.sweep.dir=/runs/7"]


@pytest.mark.parametrize(("address", "is_kept"), [("127.0.0.1", True), ("10.0.0.1", False)])
def test_ray_keeps_a_loopback_address_as_it_is(address: str, is_kept: bool):
    plan = make_plan(Allocation(9, ({"n1": 4},), ""), {"n1": address}, [], **PLACE)
    assert plan.environment.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") == ("0" if is_kept else None)
    assert [*plan.rays] == ["n1"] and "--include-dashboard=true" in plan.rays["n1"][-1]
