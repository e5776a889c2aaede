"""The threads of a product: nothing waits for one that has begun nothing, and who computes a part changes no bit."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from parallel.kernels import library
from parallel.kernels.products import Panels

pytestmark = pytest.mark.skipif(library.library() is None, reason="no compiler")
TASKS = Path("/proc/self/task")


@pytest.fixture
def num_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def product() -> tuple[Panels, torch.Tensor, torch.Tensor]:
    """Panels, rows, and their product by one thread."""
    generator = torch.Generator().manual_seed(3)
    panels = Panels(torch.randn(700, 384, generator=generator).to(torch.bfloat16))
    rows = torch.randn(5, 384, generator=generator)
    torch.set_num_threads(1)
    return panels, rows, panels.multiply(rows)


def test_a_thread_that_is_gone_is_done_without(num_threads):
    """A fork has the team's memory and not its threads: the one that calls computes all shares."""
    panels, rows, expected = product()
    num_threads(3)
    assert torch.equal(panels.multiply(rows), expected)
    child = os.fork()
    if not child:
        signal.alarm(20)
        os._exit(0 if panels.multiply(rows).numpy().tobytes() == expected.numpy().tobytes() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_more_threads_than_cores_in_several_teams_give_the_same_bits(num_threads):
    panels, rows, expected = product()
    different = []

    def multiply(count: int) -> None:
        torch.set_num_threads(count)
        different.extend(1 for _ in range(200) if not torch.equal(panels.multiply(rows), expected))

    threads = [threading.Thread(target=multiply, args=(count,)) for count in (2, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not different


@pytest.mark.skipif(not TASKS.exists(), reason="threads are counted in /proc")
def test_a_team_ends_with_the_thread_that_it_works_for(num_threads):
    panels, rows, _ = product()
    before, during = {*os.listdir(TASKS)}, set[str]()

    def multiply() -> None:
        torch.set_num_threads(4)
        panels.multiply(rows)
        during.update(os.listdir(TASKS))

    thread = threading.Thread(target=multiply)
    thread.start()
    thread.join()
    own = during - before - {str(thread.native_id)}
    assert len(own) == 3
    while own & {*os.listdir(TASKS)}:
        time.sleep(0.01)  # they end by themselves, a moment later
