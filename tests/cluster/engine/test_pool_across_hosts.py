"""A draft pool and two engines on hosts of their own: one is cut off and comes back, and what an earlier lease has
drafted is sent again.

By default leases end, stale drafts are dropped and engines go on with a pool in one process (`test_draft_pools.py`,
`tests/actors/pool`, `tests/actors/coordinator/test_late_drafter.py`), and an engine runs over hosts
(`test_multinode.py`).
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.across_hosts import PROMPTS, answer
from tests.cluster.hosts import Host, network

pytestmark = [pytest.mark.multinode, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
LEASE_S = 10
COMMON = ["verify=coupled", "pipeline=branches", "pipeline.adaptive=false", "drafter.num_draft_tokens=4"]


class Script:
    """A script of this folder on a host: lines go in, records in JSON come out."""

    def __init__(self, host: Host, module: str, *arguments: object) -> None:
        self._process = subprocess.Popen(
            host.enter([sys.executable, "-P", "-m", f"tests.cluster.{module}", *arguments], ROOT),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=ENVIRONMENT,
            text=True,
            start_new_session=True,
        )
        self._said: queue.SimpleQueue[object] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put(json.loads(line))

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> object:
        return self._said.get(timeout=60)

    def ask(self, line: str) -> object:
        self.tell(line)
        return self.hear()

    def heard(self) -> Iterator[object]:
        """What was said since."""
        while not self._said.empty():
            yield self._said.get()

    def end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)


class RunningEngine:
    """Repeats its requests until the end; every answer has the tokens of plain decoding."""

    def __init__(self, host: Host, expected: list[list[int]], *overrides: str) -> None:
        self._script = Script(host, "across_hosts")
        self._script.tell(json.dumps(["keep on", *overrides, "cluster=inprocess", "cluster.num_cpus=1"]))
        self._expected = expected
        self.num_stale = self.num_losses = 0

    def until(self, condition: Callable[[int], bool]) -> None:
        """An answer of which `condition` holds: how many of its requests were drafted for."""
        deadline = time.monotonic() + 60
        for _ in self._script.heard():
            pass  # of the past
        while True:
            said = self._script.hear()
            assert isinstance(said, dict) and "error" not in said, said
            assert said["tokens"] == self._expected
            self.num_stale, self.num_losses = said["stale"], said["losses"]
            if condition(said["speculated"]):
                return
            assert time.monotonic() < deadline

    def is_settled(self) -> bool:
        """Whether its drafter is not lost for some seconds: orders of leases from before may still arrive."""
        self.until(lambda speculated: speculated == len(PROMPTS))
        num_losses = self.num_losses
        time.sleep(4)
        self.until(lambda speculated: speculated == len(PROMPTS))
        return self.num_losses == num_losses

    def end(self) -> None:
        self._script.tell("[]")
        self._script.end()


def test_a_partition_ends_one_lease_and_its_stale_drafts_are_refused(tmp_path, tiny_checkpoint, half_agreeing_drafter):
    target = [f"target.path={tiny_checkpoint('Llama')}", "target.device=cpu"]
    plain = answer([*target, "drafter=none", "cluster=inprocess", "cluster.num_cpus=1"])["tokens"]
    assert isinstance(plain, list)
    expected = plain[: len(PROMPTS)]
    with network(tmp_path, "lender", "near", "far") as (_, (lender, near, far)):
        pool = Script(
            lender,
            "pool_on_host",
            tmp_path / "run",
            "job=pool",
            f"job.listen=tcp://{lender.address}:*",
            f"job.secret_file={tmp_path / 'pool'}",
            f"job.lease_s={LEASE_S}",
            *(*target, "drafter=model", f"drafter.path={half_agreeing_drafter}", "drafter.device=cpu", *COMMON),
        )
        address, running = pool.hear(), []
        lent = [*target, "drafter=pool", f"drafter.pools=[{address}]", *COMMON, "cluster.silence_s=8"]
        lent.append(f"drafter.key_files=[{tmp_path / 'pool.keys' / 'secret'}]")
        try:
            running = [RunningEngine(host, expected, *lent) for host in (near, far)]
            for engine in running:
                engine.until(lambda speculated: speculated > 0)
            of_far = next(one for _, one, _, _ in leases(pool) if far.address in one)
            far.plug(is_in=False)
            running[1].until(lambda speculated: speculated == 0)
            wait_for(lambda: all(rows == 0 and why for _, one, rows, why in leases(pool) if one == of_far))
            running[0].until(lambda speculated: speculated > 0)
            far.plug(is_in=True)
            running[1].until(lambda speculated: speculated > 0)
            wait_for(running[1].is_settled)
            before, stale, losses = leases(pool), running[1].num_stale, running[1].num_losses
            num_planted = pool.ask(f"plant {of_far}")
            assert isinstance(num_planted, int) and num_planted > 100
            running[1].until(lambda speculated: speculated == len(PROMPTS))
            assert running[1].num_stale - stale < num_planted / 2, "as without them: some drafts are late"
            assert running[1].num_losses == losses
            assert [one[:2] for one in leases(pool)] == [one[:2] for one in before]
        finally:
            for engine in running:
                engine.end()
        wait_for(lambda: all(rows == 0 and why for _, _, rows, why in leases(pool)))
        pool.end()


def leases(pool: Script) -> list[tuple[int, str, int, str]]:
    """Number, engine, KV rows and end of each."""
    found = pool.ask("leases")
    assert isinstance(found, list)
    return found


def wait_for(condition: Callable[[], bool], within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
