"""Thousands of rounds leave nothing behind: memory, KV slots, file descriptors and the coordinator's own records."""

from __future__ import annotations

import gc
import os
import sys
import types
from collections import deque
from dataclasses import replace

import pytest

from actors.coordinator import Coordinator
from actors.messages import SamplingParams
from actors.options import ModelDrafterConfig, PipelineConfig, PipelineName
from actors.tally import Tally
from cluster.config import GenerateConfig
from cluster.engine import Engine

PIPELINES = ("sync", "pearl", "branches", "tree", "pingpong")
REQUESTS = 4
TOKENS = 40


@pytest.fixture
def coordinators(monkeypatch) -> list[Coordinator]:
    """Those that engines of this process make, for a look inside."""
    made: list[Coordinator] = []
    opened = Coordinator.__init__

    def noted(self, *arguments, **options):
        made.append(self)
        opened(self, *arguments, **options)

    monkeypatch.setattr(Coordinator, "__init__", noted)
    return made


def held_by(coordinator: Coordinator) -> int:
    """Entries in all containers that a coordinator reaches, but for what its tally counts in one window."""
    found, pending, seen = 0, [coordinator], set()
    while pending:
        one = pending.pop()
        if id(one) in seen or isinstance(one, (Tally, type, types.ModuleType, types.FunctionType, str, bytes)):
            continue
        seen.add(id(one))
        if isinstance(one, (dict, list, set, tuple, deque)):
            found += len(one)
            pending += [*one.keys(), *one.values()] if isinstance(one, dict) else list(one)
        else:
            pending += [getattr(one, name) for name in getattr(one, "__slots__", ()) if hasattr(one, name)]
            pending += vars(one).values() if hasattr(one, "__dict__") else ()
    return found


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def serve(engine: Engine, rounds: int, seed: int) -> int:
    """Waves of requests, greedy and sampled, until so many rounds have been; one of them is aborted in each wave."""
    done = 0
    engine.report(reset=True)
    while done < rounds:
        waves = [
            SamplingParams(max_tokens=TOKENS, temperature=float(i % 2), ignore_eos=True, seed=seed + i)
            for i in range(REQUESTS)
        ]
        asked = [engine.submit([5 + i, 7, 9 + seed % 5], sampling) for i, sampling in enumerate(waves)]
        asked[0].abort()
        for completion in asked[1:]:
            completion.result()
        done += engine.report(reset=True).counters["num_rounds"]
        seed += REQUESTS
    return done


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("pipeline", "adaptive", "rounds"),
    [("tree", True, 400)]
    + [pytest.param(name, adaptive, 2_000, marks=pytest.mark.slow) for name in PIPELINES for adaptive in (False, True)],
)
def test_rounds_leave_nothing_behind(
    tiny_launch, half_agreeing_drafter, one_free_thread, coordinators, pipeline, adaptive, rounds
):
    """The slow rows are 20,000 rounds in all, half of them with lengths that adapt."""
    drafter = ModelDrafterConfig(path=str(half_agreeing_drafter), num_draft_tokens=4, device="cpu")
    config = replace(
        tiny_launch(GenerateConfig(), drafter=drafter), pipeline=PipelineConfig(PipelineName(pipeline), adaptive)
    )
    with Engine(config) as engine:
        (coordinator,) = coordinators
        serve(engine, rounds // 2, seed=0)
        gc.collect()
        descriptors, memory, held = num_descriptors(), resident_bytes(), held_by(coordinator)
        blocks = sys.getallocatedblocks()
        done = serve(engine, rounds, seed=1000)
        gc.collect()
        assert num_descriptors() == descriptors
        assert sys.getallocatedblocks() - blocks < 3_000 + done, "what lives at a moment varies by thousands"
        assert held_by(coordinator) <= held + 20, "loads that are told apart, and nothing per request or round"
        # Allocators settle only after some thousand rounds, by then 10 to 20 MiB above the start.
        assert resident_bytes() - memory < 24 << 20
        assert coordinator.num_requests == 0 and not coordinator._sequences
