"""Thousands of rounds leave nothing behind: memory, KV slots, file descriptors and the coordinator's own records."""

from __future__ import annotations

import gc
import os
import sys
import types
from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import actors.worker.factory
from actors.coordinator.state_machine import Coordinator
from actors.coordinator.stats import CoordinatorStats
from actors.drafters.model.config import ModelDrafterConfig
from actors.options import PipelineConfig, PipelineName, SchedulerConfig
from actors.policy.costs import LoadCosts
from actors.protocol.messages import SamplingParams
from actors.roles.draft import DraftRole
from actors.roles.target import TargetRole
from cluster.config.jobs import GenerateConfig
from cluster.engine import Engine
from parallel.kv.pool import KVPool

PIPELINES = ("sync", "pearl", "branches", "tree", "pingpong")
REQUESTS = 4
TOKENS = 40


@pytest.fixture
def roles(monkeypatch) -> list[object]:
    """What the ranks of such engines play."""
    made: list[object] = []
    right = actors.worker.factory.build_role

    def build(*arguments):
        role, facts = right(*arguments)
        made.append(role)
        return role, facts

    monkeypatch.setattr(actors.worker.factory, "build_role", build)
    return made


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


LEAVES = (
    CoordinatorStats,
    LoadCosts,
    type,
    types.ModuleType,
    types.FunctionType,
    str,
    bytes,
    torch.Tensor,
    torch.nn.Module,
    np.ndarray,
)
"""Where the walk ends: tensors, and what the stats count in one window."""


def held_by(owner: object) -> int:
    """Entries in all containers that a coordinator or a role reaches."""
    found, pending, seen = 0, [owner], set()
    while pending:
        one = pending.pop()
        if id(one) in seen or isinstance(one, LEAVES):
            continue
        seen.add(id(one))
        if isinstance(one, (dict, list, set, tuple, deque)):
            found += len(one)
            pending += [*one.keys(), *one.values()] if isinstance(one, dict) else list(one)
        else:
            pending += [getattr(one, name) for name in getattr(one, "__slots__", ()) if hasattr(one, name)]
            pending += vars(one).values() if hasattr(one, "__dict__") else ()
    return found


def pool_of(role: TargetRole | DraftRole) -> KVPool:
    return (role.runner if isinstance(role, TargetRole) else role.drafter.runner).pool


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


@dataclass(frozen=True, slots=True)
class Look:
    """What an engine that is idle holds."""

    descriptors: int
    memory: int
    blocks: int
    held: tuple[int, ...]

    @staticmethod
    def at(engine: Engine, owners: list[object]) -> Look:
        for _ in range(2):  # what has ended is released with a later round
            engine.submit([5, 7, 9], SamplingParams(max_tokens=8, ignore_eos=True)).result()
        gc.collect()
        return Look(num_descriptors(), resident_bytes(), sys.getallocatedblocks(), tuple(map(held_by, owners)))


@pytest.mark.extended
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("pipeline", "adaptive", "rounds"),
    [("tree", True, 360)]
    + [pytest.param(name, adaptive, 1_800, marks=pytest.mark.slow) for name in PIPELINES for adaptive in (False, True)]
    + [pytest.param("branches", False, 10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
)
def test_rounds_leave_nothing_behind(
    tiny_launch, half_agreeing_drafter, one_free_thread, coordinators, roles, pipeline, adaptive, rounds
):
    """Six windows behind a first one: the least of the later three is no more than the earlier three had.

    What lives at a moment varies by thousands of objects, with what works ahead; the least does not. Kinds of load that
    occur for the first time add an estimate each.
    """
    drafter = ModelDrafterConfig(path=str(half_agreeing_drafter), num_draft_tokens=4, device="cpu")
    config = replace(
        tiny_launch(GenerateConfig(), drafter=drafter),
        pipeline=PipelineConfig(PipelineName(pipeline), adaptive),
        scheduler=SchedulerConfig(prefix_cache=False),  # rows of texts pile up until their slots are needed
    )
    with Engine(config) as engine:
        owners = [*coordinators, *roles]
        assert len(owners) == 3
        serve(engine, rounds // 6, seed=0)
        looks, done = [], []
        for window in range(6):
            done.append(serve(engine, rounds // 6, seed=1000 * (window + 1)))
            looks.append(Look.at(engine, owners))
            assert all(len(role.contexts) <= REQUESTS for role in roles), "a request was never released"
        early, late, between = looks[:3], looks[3:], sum(done[:3])
        assert min(look.descriptors for look in late) <= max(look.descriptors for look in early)
        kinds = 6 * 6  # each that occurs for the first time adds six numbers to the drafter's estimates
        for i in range(len(owners)):
            assert min(look.held[i] for look in late) <= max(look.held[i] for look in early) + kinds, owners[i]
        grown = min(look.blocks for look in late) - min(look.blocks for look in early)
        learning = 3_000 if rounds < 1_000 else 200  # what adapts fills its windows in the first rounds
        assert grown < learning + between // 4, "objects: less than one in four rounds"
        settling = 24 << 20 if rounds < 5_000 else 8 << 20  # allocators take some thousand rounds for 10 to 20 MiB
        assert min(look.memory for look in late) - min(look.memory for look in early) < settling
        assert coordinators[0].num_requests == 0 and not coordinators[0]._sequences
    for role in roles:
        pool_of(role).check()
        assert pool_of(role).can_reserve(pool_of(role).num_slots), "a KV slot leaked"
