"""`sbatch launch.sh` on a real Slurm with two nodes: right tokens, nothing left behind, nothing done twice.

The slow ones try what else `docs/slurm.md` promises.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.config.compose import load_config
from cluster.engine import Engine
from tests.cluster.hosts import PRIVATE_TMP
from tests.cluster.slurm_cluster import Slurm, slurm

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
LAUNCH = ROOT / "launch.sh"
NUM_PROMPTS = 60
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))},
    "SPECDEC_VENV": sys.prefix,
    "SPECDEC_TMP": PRIVATE_TMP,
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm"), ENVIRONMENT) as running:
        yield running


@pytest.fixture(scope="module")
def overrides(tiny_checkpoint, half_agreeing_drafter, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"def f{number}():"}) + "\n" for number in range(NUM_PROMPTS)))
    return [
        "drafter=model",
        f"target.path={tiny_checkpoint('Llama')}",
        "target.device=cpu",
        f"drafter.path={half_agreeing_drafter}",
        "drafter.device=cpu",
        f"job.prompts={prompts}",
        "job.limit=0",
        "job.trace=false",
        "job.baseline=false",
        "sampling.max_tokens=40",
        "sampling.ignore_eos=true",
        "cluster.dashboard=false",
    ]


def lines_of(run_dir: Path) -> list[dict]:
    path = run_dir / "completions.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def left_behind(cluster: Slurm) -> list[str]:
    """What jobs that are over have left on the nodes: processes, folders."""
    running = [line for host in cluster.hosts for line in host.processes() if "slurmd" not in line]
    return running + [host.run("ls", PRIVATE_TMP).strip() for host in cluster.hosts if host.run("ls", PRIVATE_TMP)]


def finished(cluster: Slurm, job: int, name: str | None = None) -> Path:
    """The run directory of a job, once it is over."""
    cluster.wait_for(job, lambda: cluster.is_over(job))
    return cluster.directory / "outputs" / "slurm" / (name or str(job))


def hosts_of(run_dir: Path) -> dict[str, str]:
    layout = json.loads((run_dir / "report.json").read_text())["layout"]
    return {place["identity"]: place["host"] for place in layout}


def niceness_of_ranks(cluster: Slurm) -> set[int]:
    lines = [line.split(None, 1) for host in cluster.hosts for line in host.run("ps", "-eo", "ni=,args=").splitlines()]
    return {int(nice) for nice, command in lines if command.startswith(("ray::target", "ray::draft"))}


@pytest.mark.extended
@pytest.mark.parametrize("starts_again", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_requeued_job_goes_on_and_a_cancelled_one_leaves_nothing(cluster: Slurm, overrides, starts_again):
    """The job has at first a part of each node, then all of both: Ray is started node by node, then by itself.

    By default it is cancelled while it waits for its second start, which takes as long as the first; that a start
    resumes is shown by the tests of the plan and of `job.resume`.
    """
    options = ["--nodes=2", "--cpus-per-task=1", "--gpus=2", "--time=10", LAUNCH]
    job = cluster.submit(*options, *overrides, "sampling.max_tokens=400", "job.concurrency=1")
    run_dir = cluster.directory / "outputs" / "slurm" / str(job)
    cluster.wait_for(job, lambda: lines_of(run_dir))
    assert niceness_of_ranks(cluster) == {os.nice(0)}
    cluster.ask("scontrol", "requeue", job)
    cluster.wait_for(job, lambda: cluster.state(job) == "PENDING")
    first, before = json.loads((run_dir / "report.json").read_text()), lines_of(run_dir)
    assert first["interrupted"] is True and 0 < first["num_requests"] < NUM_PROMPTS, cluster.outcome(job)
    assert not left_behind(cluster)

    if starts_again:
        cluster.ask("scontrol", "update", f"JobId={job}", "NumCPUs=4", "CPUsPerTask=2", "StartTime=now")
        cluster.wait_for(job, lambda: len(lines_of(run_dir)) > len(before) and (run_dir / "ray-symmetric.log").exists())
        assert niceness_of_ranks(cluster) == {os.nice(0)}
    cluster.ask("scancel", job)
    cluster.wait_for(job, lambda: cluster.is_over(job))
    report, lines = json.loads((run_dir / "report.json").read_text()), lines_of(run_dir)
    assert report["interrupted"] is True and report["num_requests"] > 0, cluster.outcome(job)
    if starts_again:
        assert lines[: report["num_resumed"]] == [line for line in before if line["finish_reason"] == "length"]
    places = {place["identity"]: place["host"] for place in report["layout"]}
    assert sorted(places.values()) == [host.address for host in cluster.hosts], "a node each"
    assert not left_behind(cluster)

    plain = [word for word in overrides if not word.startswith("drafter.")]
    local = load_config([*plain, "drafter=none", "cluster=inprocess", "cluster.num_cpus=1", "sampling.max_tokens=400"])
    whole = [line for line in lines if line["finish_reason"] == "length"]
    with Engine(local) as engine:
        completions = engine.generate([line["prompt"] for line in whole])
    assert [completion.token_ids for completion in completions] == [line["token_ids"] for line in whole]


@pytest.mark.slow
def test_a_heterogeneous_job_keeps_the_drafter_on_the_second_component(cluster: Slurm, overrides):
    first, second = (["--nodes=1", "--cpus-per-task=1", f"--nodelist={name}"] for name in ("n2", "n1"))
    job = cluster.submit(*first, ":", *second, LAUNCH, *overrides, "job.limit=2")
    run_dir = finished(cluster, job)
    assert (run_dir / "report.json").exists(), cluster.outcome(job)
    n1, n2 = (host.address for host in cluster.hosts)
    assert hosts_of(run_dir) == {"target-0": n2, "draft-0": n1}
    assert not left_behind(cluster)


@pytest.mark.slow
def test_ray_symmetric_run_on_whole_nodes(cluster: Slurm, overrides):
    job = cluster.submit("--nodes=2", "--cpus-per-task=2", LAUNCH, *overrides, "job.limit=2")
    run_dir = finished(cluster, job)
    assert (run_dir / "report.json").exists(), cluster.outcome(job)
    assert "Head node started" in (run_dir / "ray-symmetric.log").read_text()
    assert len(set(hosts_of(run_dir).values())) == 2
    assert not left_behind(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("printed", ["", "layout"], ids=["starting", "loading"])
def test_a_job_that_is_cancelled_before_its_first_token_leaves_nothing(cluster: Slurm, overrides, printed):
    """SIGTERM arrives twice."""
    job = cluster.submit("--nodes=2", "--cpus-per-task=1", LAUNCH, *overrides, "target.stretch=60")
    token = cluster.directory / "outputs" / "slurm" / str(job) / "ray-token"
    cluster.wait_for(job, lambda: token.exists() and printed in cluster.output(job))
    cluster.ask("scancel", "--batch", "--signal=TERM", job)
    cluster.ask("scancel", job)
    finished(cluster, job)
    output = cluster.output(job)
    assert output.count("SIGTERM: stopping") == 1 and "Traceback" not in output, output[-3000:]
    assert not token.exists() and not left_behind(cluster)


@pytest.mark.slow
def test_a_job_near_its_time_limit_requeues_itself_and_goes_on(cluster: Slurm, overrides):
    limits = ["--nodes=2", "--cpus-per-task=1", "--time=3", "--signal=B:USR1@60"]  # which Slurm takes as 60 to 120
    slow = ["sampling.max_tokens=400", "target.stretch=60"]
    job = cluster.submit(*limits, LAUNCH, *overrides, *slow, SPECDEC_REQUEUE="1")
    run_dir = cluster.directory / "outputs" / "slurm" / str(job)
    cluster.wait_for(job, lambda: "requeued" in cluster.output(job))
    assert json.loads((run_dir / "report.json").read_text())["interrupted"] is True
    before = len(lines_of(run_dir))
    cluster.wait_for(job, lambda: f"of {NUM_PROMPTS} prompts are already in" in cluster.output(job))
    cluster.wait_for(job, lambda: len(lines_of(run_dir)) > before)
    cluster.ask("scancel", job)
    finished(cluster, job)
    assert not left_behind(cluster)


@pytest.mark.slow
def test_an_array_runs_a_job_for_each_point(cluster: Slurm, overrides):
    seed = "sampling.seed=${oc.env:SLURM_ARRAY_TASK_ID}"
    options = ["--nodes=2", "--cpus-per-task=1", "--array=3-4", "--output=array-%a.out"]
    before = set((cluster.directory / "outputs" / "slurm").glob("*"))
    array = cluster.submit(*options, LAUNCH, *overrides, "job.limit=1", seed)
    cluster.wait_for(array, lambda: cluster.is_over(array))
    made = set((cluster.directory / "outputs" / "slurm").glob("*")) - before
    reports = [json.loads((run_dir / "report.json").read_text()) for run_dir in made]
    assert sorted(report["config"]["sampling"]["seed"] for report in reports) == [3, 4]
    assert not left_behind(cluster)


@pytest.mark.slow
def test_a_sweep_inside_one_job_runs_its_points_in_turn(cluster: Slurm, overrides):
    job = cluster.submit("--nodes=2", "--cpus-per-task=1", LAUNCH, "-m", *overrides, "job.limit=1", "sampling.seed=1,2")
    run_dir = finished(cluster, job)
    assert sorted(path.parent.name for path in run_dir.glob("*/report.json")) == ["0", "1"], cluster.outcome(job)


@pytest.mark.slow
def test_a_dry_run_in_an_allocation_prints_every_command(cluster: Slurm, overrides):
    output = cluster.ask("salloc", "--quiet", "--nodes=2", "--cpus-per-task=1", LAUNCH, "--dry-run", *overrides)
    lines = output.splitlines()
    assert "ray start --head" in lines[-3] and lines[-2].startswith("srun --overlap") and "cluster=slurm" in lines[-1]


@pytest.mark.slow
def test_an_allocation_runs_the_job_from_its_first_node_and_from_no_other(cluster: Slurm, overrides):
    run_dir = cluster.directory / "salloc"
    command = [LAUNCH, "cluster=slurm", *overrides, "job.limit=2", f"hydra.run.dir={run_dir}"]
    salloc = ["salloc", "--quiet", "--nodes=2", "--cpus-per-task=1"]
    first = ["srun", "--overlap", "--relative=0", "--nodes=1", "--ntasks=1"]
    with pytest.raises(AssertionError, match="this is n2, and the job has to be run from its first node, n1; use"):
        cluster.ask(*salloc, *command, host=1)
    cluster.ask(*salloc, *first, *command, host=1)
    assert json.loads((run_dir / "report.json").read_text())["interrupted"] is False
    assert len(set(hosts_of(run_dir).values())) == 2
    assert not left_behind(cluster)
