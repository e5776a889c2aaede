"""Measures the seconds of passes on this machine, in every shape that the given layouts need.

Two roles are measured together, in turn or at the same time as in their pipeline: waiting threads, cold caches and
sleeping cores are part of the cost of a pass. Derives `PassCosts` and predicts nothing.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median, mode
from typing import Any

import torch

from actors.protocol.messages import SamplingParams
from actors.worker.factory import build_role
from cluster.config.schema import ClusterName, LaunchConfig
from cluster.io.text import read_eos_token_ids
from cluster.placement.ranks import Devices, RankPlacement, lay_out
from cluster.runtime.backend import LOOPBACK, rank_spec
from cluster.tools.planning.costs import DraftCost, PassCosts, RankCores, TargetCost
from cluster.tools.planning.layouts import Layout, Shape
from cluster.tools.planning.ranks import RankSync, RoleWork, run_on_ranks
from cluster.tools.planning.rounds import (
    KnownText,
    ReplayRank,
    ReplayResult,
    ReplayScript,
    TimedPass,
    device_clock,
    replay_drafts,
    replay_verdicts,
)
from cluster.tools.simulation import PassCost
from parallel.comm.group import Group
from parallel.runtime.profiling import PassClock, TimedGroup, watch
from parallel.runtime.runner import ModelRunner

SETTLING = 0.15
"""Fraction of a measurement, at its start, that does not count."""
FEWEST = 3
"""Passes of a number of rows below which that number is left out."""
COLLECTIVES = 80
"""Collectives of each kind, timed one after the other."""
ENOUGH = 20
"""Passes of a number of rows from which on their mean is used."""

Acceptance = Mapping[tuple[int, ...], tuple[float, ...]]
"""Sizes of hyper-layers -> acceptance by distance from the committed text."""


@dataclass(frozen=True, slots=True)
class RolePair:
    """The ranks measured together: of both roles, in turn or overlapping, or of the target alone."""

    target: tuple[RankPlacement, ...]
    draft: tuple[RankPlacement, ...] = ()
    shape: Shape | None = None
    overlaps: bool = False

    @property
    def cores(self) -> RankCores:
        return RankCores(len(self.target[0].cores), len(self.draft[0].cores) if self.draft else 0)

    def describe(self) -> str:
        name = f"target on {len(self.target)}"
        if self.shape is None:
            return name
        return f"{name} {'beside' if self.overlaps else 'and'} drafter {self.shape.describe()}"


@dataclass(frozen=True, slots=True)
class RoleTimings:
    """The passes of one role, the same with every layer timed, and median seconds of a collective."""

    plain: ReplayResult
    watched: ReplayResult
    collectives: dict[str, float]


@dataclass(frozen=True, slots=True)
class PairTimings:
    """The measurements of the lead ranks."""

    pair: RolePair
    target: RoleTimings
    draft: RoleTimings | None = None


def find_devices(config: LaunchConfig) -> Devices:
    """The devices of this machine, within `cluster.num_cpus`."""
    cores = sorted(os.sched_getaffinity(0))[: config.cluster.num_cpus]
    return Devices(tuple(cores), torch.cuda.device_count())


def role_pair(layout: Layout, config: LaunchConfig, devices: Devices) -> RolePair:
    """The ranks to measure for a layout, of a draft model on the target's ranks as if it had ranks on the same devices.
    Raises ValueError where it does not fit."""
    places = lay_out(layout.with_own_ranks().configure(config, 1), devices)
    target, draft = (tuple(place for place in places if place.role == role) for role in ("target", "draft"))
    return RolePair(target, draft, layout.shape, layout.overlaps)


def measure_all(
    pairs: Sequence[RolePair],
    config: LaunchConfig,
    texts: Sequence[KnownText],
    sampling: SamplingParams,
    progress: Callable[[str], None],
) -> tuple[list[PairTimings], dict[str, str]]:
    """The measurements, each once, and the pairs that could not be measured: description -> reason."""
    measured, refused = [], {}
    pairs = list(dict.fromkeys(pairs))
    for number, pair in enumerate(pairs, 1):
        progress(f"measuring {number} of {len(pairs)}: {pair.describe()}")
        try:
            measured.append(measure(pair, config, texts, sampling))
        except ValueError as error:
            refused[pair.describe()] = str(error)
    return measured, refused


def measure(pair: RolePair, config: LaunchConfig, texts: Sequence[KnownText], sampling: SamplingParams) -> PairTimings:
    """Raises ValueError where the shape is impossible: a model that cannot be split so, or does not fit."""
    job = config.job
    script = ReplayScript(tuple(texts), sampling, job.batch, tuple(job.draft_lengths), job.seconds)
    pipeline = "branches" if pair.overlaps else "sync"  # all that draft ahead make the same passes, over other nodes
    layout = Layout(len(pair.target), pipeline, "separate", pair.shape or Shape())
    placed = layout.configure(config, max(script.lengths))
    eos_token_ids = read_eos_token_ids(Path(config.target.path))
    work = partial(_measure_role, script, pair.overlaps, placed, eos_token_ids)
    roles = [RoleWork(places, work) for places in (pair.target, pair.draft) if places]
    as_threads = config.cluster.name == ClusterName.inprocess
    in_turn = bool(pair.draft) and not pair.overlaps
    return PairTimings(pair, *run_on_ranks(roles, as_threads=as_threads, in_turn=in_turn))


def _measure_role(
    script: ReplayScript,
    overlaps: bool,
    config: LaunchConfig,
    eos_token_ids: tuple[int, ...],
    place: RankPlacement,
    group: Group,
    sync: RankSync,
) -> RoleTimings:
    """Replay for the time of passes; again, shorter, with every layer timed, which slows passes down, for the parts of
    that time. Then time the group's collectives by themselves."""
    clock = PassClock(place.device)
    built, _ = build_role(rank_spec(config, place, "", LOOPBACK, eos_token_ids), TimedGroup(group, clock))
    role: Any = built
    if place.role == "target":
        runner, replay = role.runner, replay_verdicts
    else:
        longest = max(script.lengths)
        script = replace(script, lengths=(longest,))
        runner, replay = role.drafter.runner, partial(replay_drafts, work_steps=longest + 1 if overlaps else 0)
    rank = ReplayRank(group, place.device, place.role)
    first, second = sync.phases if sync.in_turn else (None, None)
    sync.wait()
    plain = replay(role, script, replace(rank, turns=first))
    sync.wait()
    runner.run_eagerly()
    watch(runner.decoder, clock)
    watched = replay(role, replace(script, seconds=script.seconds / 4), replace(rank, turns=second, clock=clock))
    collectives: dict[str, float] = {}
    for name in ("target", "draft"):
        sync.wait()
        if name == place.role:
            collectives = time_collectives(group, runner, mode(one.rows for one in plain.passes))
    return RoleTimings(plain, watched, collectives)


@torch.inference_mode()
def time_collectives(group: Group, runner: ModelRunner, rows: int) -> dict[str, float]:
    """Median seconds of one collective over the hidden states of a pass, ranks in step; empty for one rank."""
    if group.size == 1:
        return {}
    decoder = runner.decoder
    hidden = torch.zeros(rows, decoder.config.hidden_size, dtype=decoder.dtype, device=decoder.device)
    calls = {"all_gather": lambda: group.all_gather(hidden, 0), "all_reduce": lambda: group.all_reduce(hidden)}
    now, found = device_clock(str(decoder.device)), {}
    for name, call in calls.items():
        times = []
        for _ in range(COLLECTIVES):
            started = now()
            call()
            times.append(now() - started)
        found[name] = median(times[COLLECTIVES // 4 :])
    return found


def derive_costs(measured: Sequence[PairTimings], num_devices: int, hop_s: float, acceptance: Acceptance) -> PassCosts:
    """Seconds by rows; `acceptance` by hyper-layers, () for exact drafting."""
    target, drafter = [], []
    for timings in measured:
        pair, cores = timings.pair, timings.pair.cores
        passes = pass_cost(timings.target.plain.passes)
        target.append(TargetCost(len(pair.target), passes, cores.target, pair.overlaps, pair.shape))
        if pair.shape is None or timings.draft is None:
            continue
        passes, exact, own = timings.draft.plain.passes, None, ()
        if pair.shape.parallel == "layer":
            exact = pass_cost([each for each in passes if not each.fuzzy])
            passes = [each for each in passes if each.fuzzy]
            own = acceptance[pair.shape.partition]
        cost = DraftCost(
            pair.shape,
            pass_cost(passes),
            exact,
            acceptance=own,
            cores=cores.draft,
            beside=pair.overlaps,
            target_ranks=len(pair.target),
        )
        drafter.append(cost)
    return PassCosts(num_devices, tuple(target), tuple(drafter), link_s=hop_s, acceptance=acceptance[()])


def parts_of(measured: Sequence[PairTimings]) -> list[dict[str, Any]]:
    """Milliseconds of a mean pass, its parts, one attention block, one MLP and one collective, by pair and role."""
    return [
        {
            "role": role,
            "subject": each.pair.describe(),
            "cores": cores,
            "pass_ms": 1e3 * fmean(one.seconds for one in timings.plain.passes),
            "watched_ms": 1e3 * fmean(one.seconds for one in timings.watched.passes),
            "parts_ms": {kind: 1e3 * s / len(timings.watched.passes) for kind, s in timings.watched.parts.items()},
            "block_ms": {kind: 1e3 * timings.watched.parts[kind] / n for kind, n in timings.watched.blocks.items()},
            "collective_ms": {name: 1e3 * seconds for name, seconds in timings.collectives.items()},
        }
        for each in measured
        for role, timings, cores in (
            ("target", each.target, each.pair.cores.target),
            ("draft", each.draft, each.pair.cores.draft),
        )
        if timings is not None
    ]


def pass_cost(passes: Sequence[TimedPass]) -> PassCost:
    """Mean seconds by rows: slow passes are part of a round. With few passes of a number of rows, one slow pass would
    decide the mean: these use medians, scaled by the ratio of means to medians over all such passes."""
    by_rows: dict[int, list[float]] = defaultdict(list)
    for one in passes[int(len(passes) * SETTLING) :]:
        by_rows[one.rows].append(one.seconds)
    fewest = min(FEWEST, max(map(len, by_rows.values())))
    by_rows = {rows: times for rows, times in by_rows.items() if len(times) >= fewest}
    few = [times for times in by_rows.values() if len(times) < ENOUGH]
    slower = sum(map(sum, few)) / sum(median(times) * len(times) for times in few) if few else 1.0
    mean = {rows: slower * median(t) if len(t) < ENOUGH else fmean(t) for rows, t in by_rows.items()}
    return PassCost.table(mean)
