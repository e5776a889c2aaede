"""Hosts that are powered off under a running engine: who was on them goes elsewhere, waits, or ends it with a line."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.across_hosts import answer
from tests.cluster.engine.test_multinode import ENVIRONMENT, PORT, RAY, Driver, wait_until_answered
from tests.cluster.hosts import PRIVATE_TMP, Host, network

pytestmark = [pytest.mark.multinode, pytest.mark.slow, pytest.mark.timeout(400)]

WAIT_S = 120
# Ray takes a minute to give a silent node up unless it is configured otherwise.
HASTY = {
    f"RAY_health_check_{name}": str(value)
    for name, value in dict(initial_delay_ms=500, period_ms=500, timeout_ms=1000, failure_threshold=3).items()
}
COMMON = ["--num-cpus=1", f"--temp-dir={PRIVATE_TMP}/ray", "--disable-usage-stats", "--block"]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Three hosts of one core each; the driver lives on the first, with Ray's head."""

    switch: Host
    hosts: list[Host]
    driver: Driver
    directory: Path

    def join(self, host: Host) -> None:
        head = self.hosts[0].address
        command = [RAY, "start", f"--address={head}:{PORT}", f"--node-ip-address={host.address}", *COMMON]
        host.start(*command, log=self.directory / f"{host.name}.log", env=ENVIRONMENT | HASTY)

    def restore(self) -> None:
        """Hosts that were powered off are there again, with Ray."""
        for host in self.hosts:
            if not host.is_on:
                host.boot(self.switch)
                self.join(host)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("hosts")
    with network(directory, "n1", "n2", "n3") as (switch, hosts):
        first = hosts[0]
        head = [RAY, "start", "--head", f"--node-ip-address={first.address}", f"--port={PORT}", *COMMON]
        first.start(*head, "--include-dashboard=false", log=directory / "head.log", env=ENVIRONMENT | HASTY)
        wait_until_answered(first)
        target = [f"target.path={tiny_checkpoint('Llama')}", "target.device=cpu"]
        address = f"cluster.address={first.address}:{PORT}"
        # What adapts may find that drafts do not pay, on a busy machine for minutes.
        options = ["cluster=existing", address, "cluster.nodes=3", "cluster.silence_s=1", "pipeline.adaptive=false"]
        driver = Driver(first, [*target, *options])
        cluster = Cluster(switch, hosts, driver, directory)
        for host in hosts[1:]:
            cluster.join(host)
        yield cluster
        driver.end()


@pytest.fixture(scope="module")
def drafter(half_agreeing_drafter) -> list[str]:
    return [
        "drafter=model",
        f"drafter.path={half_agreeing_drafter}",
        "drafter.device=cpu",
        "drafter.num_draft_tokens=4",
    ]


@pytest.fixture(scope="module")
def expected(tiny_checkpoint) -> list[list[int]]:
    target = [f"target.path={tiny_checkpoint('Llama')}", "target.device=cpu"]
    return answer([*target, "drafter=none", "cluster=inprocess", "cluster.num_cpus=1"])["tokens"]


def until(answers: Iterator[dict], expected: list[list[int]], condition: Callable[[dict], bool]) -> dict:
    """The first answer that fulfils it; whatever was answered before has the tokens of an undisturbed run."""
    deadline = time.monotonic() + WAIT_S
    for said in answers:
        assert said["tokens"] == expected[: len(said["tokens"])]
        if condition(said):
            return said
        assert "error" not in said and time.monotonic() < deadline, said
    raise AssertionError("no more answers")


def speculates(said: dict) -> bool:
    return said.get("speculated", 0) > 0


def test_a_drafter_waits_for_its_node_while_tokens_are_made_plainly(cluster: Cluster, drafter, expected):
    third = cluster.hosts[2]
    answers = cluster.driver.keep_on(*drafter, "placement.nodes={target:[n1],draft:[n3]}")
    until(answers, expected, speculates)
    third.power_off()
    until(answers, expected, lambda said: "error" not in said and not speculates(said))
    gone_at = time.monotonic()
    until(answers, expected, lambda said: time.monotonic() - gone_at > 12)  # Ray has given the node up by then
    cluster.restore()
    said = until(answers, expected, speculates)
    assert said["hosts"] == {"target-0": cluster.hosts[0].address, "draft-0": third.address}
    answers.close()


def test_a_target_and_its_coordinator_go_where_there_is_room_and_end_with_a_line_where_there_is_none(
    cluster: Cluster, drafter, expected
):
    first, second, third = cluster.hosts
    answers = cluster.driver.keep_on(*drafter, "placement.nodes={target:[n2,n3],draft:[n1]}", "cluster.wait_s=15")
    said = until(answers, expected, speculates)
    assert said["hosts"] == {"target-0": second.address, "draft-0": first.address}
    second.power_off()
    said = until(answers, expected, lambda said: speculates(said) and said["hosts"]["target-0"] == third.address)
    assert said["hosts"]["draft-0"] == first.address
    third.power_off()
    said = until(answers, expected, lambda said: "error" in said)
    assert re.fullmatch(
        rf"target-0: node {re.escape(third.address)} is gone; needed elsewhere: 1 core, there is no other node it may "
        r"use; start Ray there again or on another node or allow more nodes with placement\.nodes; gave up after \d+ "
        r"s: to wait longer, raise cluster\.wait_s",
        said["error"],
    ), said["error"]
    answers.close()


def test_one_rank_of_a_target_that_is_lost_moves_and_meets_the_others(cluster: Cluster, expected):
    """The survivor waits in a collective for a peer whose loss no connection shows."""
    cluster.restore()
    first, second, third = (host.address for host in cluster.hosts)
    answers = cluster.driver.keep_on("target.tp=2", "drafter=ngram")
    said = until(answers, expected, lambda said: True)
    assert said["hosts"] == {"target-0": first, "target-1": second, "draft-0": first}
    cluster.hosts[1].power_off()
    until(answers, expected, lambda said: said["hosts"]["target-1"] == third)
    answers.close()
