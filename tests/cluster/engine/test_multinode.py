"""One engine over two hosts with addresses of their own: the same tokens, the layout that was asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.across_hosts import answer
from tests.cluster.hosts import PRIVATE_TMP, Host, network

pytestmark = [pytest.mark.multinode, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
RAY = Path(sys.executable).with_name("ray")
PORT = 6379
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
}

Ask = Callable[..., dict[str, object]]
"""Overrides of an engine -> what it answered."""


class Driver:
    """A process on a host that opens engines on the cluster as it is asked to."""

    def __init__(self, host: Host, cluster: list[str]) -> None:
        self._cluster = cluster
        self._script = subprocess.Popen(
            host.enter([sys.executable, "-P", "-m", "tests.cluster.across_hosts"], ROOT),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=ENVIRONMENT,
            text=True,
            start_new_session=True,
        )

    def ask(self, *overrides: str) -> dict[str, object]:
        self._tell([*self._cluster, *overrides])
        return self._hear()

    def keep_on(self, *overrides: str) -> Iterator[dict[str, object]]:
        """Answers of an engine that goes on, for as long as another is asked for."""
        self._tell(["keep on", *self._cluster, *overrides])
        try:
            while True:
                yield self._hear()
        finally:
            self._tell([])
            while self._hear() is not None:
                pass

    def _tell(self, line: list[str]) -> None:
        self._script.stdin.write(json.dumps(line) + "\n")
        self._script.stdin.flush()

    def _hear(self) -> dict[str, object] | None:
        """The next answer; between them Ray says what it thinks of lost nodes."""
        line = self._script.stdout.readline()
        while line and not line.startswith(("{", "null")):
            line = self._script.stdout.readline()
        return json.loads(line)

    def end(self) -> None:
        self._script.stdin.close()
        self._script.wait(60)
        self._script.stdout.close()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """Two hosts of one core each in a Ray cluster; the second has a device that only a drafter is configured to use."""
    directory = tmp_path_factory.mktemp("hosts")
    with network(directory, "n1", "n2") as (_, hosts):
        first, second = hosts
        common = ["--num-cpus=1", f"--temp-dir={PRIVATE_TMP}/ray", "--disable-usage-stats", "--block"]
        head = [RAY, "start", "--head", f"--node-ip-address={first.address}", f"--port={PORT}", *common]
        first.start(*head, "--include-dashboard=false", log=directory / "head.log", env=ENVIRONMENT)
        wait_until_answered(first)
        joining = [RAY, "start", f"--address={first.address}:{PORT}", f"--node-ip-address={second.address}", *common]
        second.start(*joining, log=directory / "second.log", env=ENVIRONMENT)
        yield hosts


def wait_until_answered(head: Host) -> None:
    """Waits until a process listens: asking with Ray's own command would take a second each time."""
    deadline = time.monotonic() + 60
    knock = f"exec 3<>/dev/tcp/{head.address}/{PORT}"
    while subprocess.run(head.enter(["bash", "-c", knock]), stderr=subprocess.DEVNULL, check=False).returncode:
        assert time.monotonic() < deadline, "Ray did not start"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def target(tiny_checkpoint) -> list[str]:
    return [f"target.path={tiny_checkpoint('Llama')}", "target.device=cpu"]


@pytest.fixture(scope="module")
def drafter(half_agreeing_drafter) -> list[str]:
    return [
        "drafter=model",
        f"drafter.path={half_agreeing_drafter}",
        "drafter.device=cpu",
        "drafter.num_draft_tokens=4",
    ]


@pytest.fixture(scope="module")
def expected(target) -> list[list[int]]:
    """Plain decoding by an engine of this process."""
    said = answer([*target, "drafter=none", "cluster=inprocess", "cluster.num_cpus=1"])
    return said["tokens"]


@pytest.fixture(scope="module")
def driver(hosts, target) -> Iterator[Driver]:
    cluster = [*target, "cluster=existing", f"cluster.address={hosts[0].address}:{PORT}", "cluster.nodes=2"]
    cluster.append("pipeline.adaptive=false")  # speculation does not pay for models this small
    driver = Driver(hosts[0], cluster)
    yield driver
    driver.end()


@pytest.fixture
def ask(driver) -> Ask:
    return driver.ask


LOOKUP = ["drafter=ngram", "drafter.placement=separate"]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("pipeline", "is_lookup"),
    [
        pytest.param("sync", False, marks=pytest.mark.slow),
        pytest.param("branches", False, marks=pytest.mark.slow),
        ("branches", True),
    ],
)
def test_target_and_drafter_on_hosts_of_their_own(ask: Ask, hosts, drafter, expected, pipeline, is_lookup):
    """By default the drafter is a lookup, whose process starts soon; models draft on Ray in `test_drill.py`, and on
    nodes of Slurm in `test_job.py`."""
    said = ask(
        *(LOOKUP if is_lookup else drafter),
        f"pipeline={pipeline}",
        "placement.nodes={target:[n2],draft:[n1]}",
        "cluster.interface=eth0",
    )
    assert said.get("error") is None and said["tokens"] == expected
    assert said["hosts"] == {"target-0": hosts[1].address, "draft-0": hosts[0].address}
    assert f"target-0: {hosts[1].address} cpu" in next(line for line in said["said"] if line.startswith("layout"))


@pytest.mark.slow
def test_a_target_whose_ranks_meet_over_the_network(ask: Ask, hosts, expected):
    said = ask("target.tp=2", "drafter=none")
    assert said.get("error") is None and said["tokens"] == expected
    assert [said["hosts"][f"target-{rank}"] for rank in (0, 1)] == [host.address for host in hosts]


@pytest.mark.slow
def test_what_a_cluster_lacks_is_said_while_waiting_and_at_the_end(ask: Ask):
    """By default it is said of nodes that are not there (`runtime/test_ray_nodes.py`)."""
    said = ask("drafter=ngram", "cluster.nodes=3", "cluster.wait_s=6")
    assert said["error"].startswith("cluster.nodes=3: only 2 joined: n1 (10.78.0.1), n2 (10.78.0.2)")
    assert sum(line.startswith("waiting for 5 s: cluster.nodes=3") for line in said["said"]) == 1


@pytest.mark.slow
def test_an_interface_that_is_not_there_is_named_with_those_that_are(ask: Ask):
    """By default the interface that is there is used (above), and another's line is that of the process
    (`runtime/test_ray_actors_of_backend.py`)."""
    said = ask("drafter=ngram", "cluster.interface=ib0")
    assert said["error"].startswith("cluster.interface=ib0: node n1 has no such interface with an IPv4 address")
    assert said["error"].endswith("it has eth0, lo")


@pytest.mark.slow
def test_a_drafter_that_is_cut_off_is_done_without_until_it_is_back(driver: Driver, hosts, drafter, expected):
    """The cable of its host is pulled and put in again: no token changes, no request fails, and speculation returns."""
    answers = driver.keep_on(*drafter, "placement.nodes={target:[n1],draft:[n2]}", "cluster.silence_s=1")

    def until(condition: Callable[[int], bool]) -> None:
        """Every answer on the way must have the tokens of an undisturbed run."""
        deadline = time.monotonic() + 100
        for said in answers:
            assert said["tokens"] == expected[: len(said["tokens"])]
            if condition(said["speculated"]):
                return
            assert time.monotonic() < deadline

    until(lambda speculated: speculated > 0)
    hosts[1].plug(is_in=False)
    try:
        until(lambda speculated: speculated == 0)
    finally:
        hosts[1].plug(is_in=True)
    until(lambda speculated: speculated > 0)
    answers.close()
