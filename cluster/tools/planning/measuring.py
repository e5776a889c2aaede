"""Measures what passes cost on this machine, in every shape that the layouts under consideration need.

Two roles are measured together, in turn or at the same time as their pipeline has it: waiting threads, cold caches and
cores that fall asleep are part of what a pass costs. Derives `Costs` and predicts nothing.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median, mode

import torch

from actors.protocol.messages import SamplingParams
from actors.worker.factory import build_role
from actors.worker.spec import RankSpec
from cluster.config.jobs import PlanConfig
from cluster.config.schema import LaunchConfig
from cluster.io.text import read_eos_token_ids
from cluster.placement.ranks import Devices, RankPlacement, lay_out
from cluster.tools.planning.costs import Costs, DraftCost, TargetCost
from cluster.tools.planning.layouts import Layout, Shape
from cluster.tools.planning.prediction import Cores
from cluster.tools.planning.ranks import Crew, Meeting, run_crews
from cluster.tools.planning.rounds import Played, Script, Stage, Text, TimedPass, clock_of, play_drafts, play_verdicts
from cluster.tools.simulation import PassCost
from parallel.comm.group import Group
from parallel.runtime.profiling import PassClock, TimedGroup, watch
from parallel.runtime.runner import ModelRunner

AHEAD = "branches"
"""Stands for all pipelines that draft ahead: the same passes, over other nodes."""
SETTLING = 0.15
"""Part of a measurement at its start that does not count."""
FEWEST = 3
"""Passes of a number of rows without which nothing is said about it."""
COLLECTIVES = 80
"""Of each kind, timed one after the other."""
ENOUGH = 20
"""Passes of a number of rows whose mean says something."""

Acceptance = Mapping[tuple[int, ...], tuple[float, ...]]
"""Hyper-layers by their sizes -> acceptance by distance from the committed text."""


@dataclass(frozen=True, slots=True)
class Subject:
    """One measurement: both roles, in turn or overlapping, or the target by itself."""

    target: tuple[RankPlacement, ...]
    draft: tuple[RankPlacement, ...] = ()
    shape: Shape | None = None
    overlaps: bool = False

    def describe(self) -> str:
        name = f"target on {len(self.target)}"
        if self.shape is None:
            return name
        return f"{name} {'beside' if self.overlaps else 'and'} drafter {self.shape.describe()}"


@dataclass(frozen=True, slots=True)
class Findings:
    """Of one role: its passes as they are, the same with every layer on the clock, and seconds of a collective."""

    played: Played
    watched: Played
    collectives: dict[str, float]


@dataclass(frozen=True, slots=True)
class Measured:
    """What the leads brought back."""

    subject: Subject
    target: Findings
    draft: Findings | None = None


def find_devices(config: LaunchConfig) -> Devices:
    """Of this machine, as far as the configuration lets them be used."""
    cores = sorted(os.sched_getaffinity(0))[: config.cluster.num_cpus]
    return Devices(tuple(cores), torch.cuda.device_count())


def uses_gpus(config: LaunchConfig, devices: Devices) -> bool:
    return devices.num_gpus > 0 and config.target.device != "cpu"


def cores_of(layout: Layout, config: LaunchConfig, devices: Devices) -> Cores:
    """ValueError where the layout does not fit."""
    places = lay_out(layout.configure(config, 1), devices)
    cores = {place.role: len(place.cores) for place in places}
    return Cores(cores["target"], cores.get("draft", 0))


def subjects(layouts: Iterable[Layout], config: LaunchConfig, devices: Devices) -> list[Subject]:
    """What must be measured to predict these layouts, each once."""
    return list(dict.fromkeys(_subject(layout, config, devices) for layout in layouts))


def _subject(layout: Layout, config: LaunchConfig, devices: Devices) -> Subject:
    places = lay_out(layout.configure(config, 1), devices)
    target, draft = (tuple(place for place in places if place.role == role) for role in ("target", "draft"))
    return Subject(target, draft, layout.shape, layout.overlaps)


class Measurer:
    """Measures subjects of one configuration along the same texts."""

    def __init__(self, config: LaunchConfig, texts: Sequence[Text], sampling: SamplingParams) -> None:
        job: PlanConfig = config.job
        self._config = config
        self._eos_token_ids = read_eos_token_ids(Path(config.target.path))
        self._script = Script(tuple(texts), sampling, job.batch, tuple(job.draft_lengths), job.seconds)

    def measure(self, subject: Subject) -> Measured:
        """Raises ValueError where the shape cannot be: a model that cannot be split so, or does not fit."""
        longest = max(self._script.lengths)
        pipeline = AHEAD if subject.overlaps else "sync"
        layout = Layout(len(subject.target), pipeline, "separate", subject.shape or Shape())
        config = layout.configure(self._config, longest)
        crews = [Crew(config, subject.target, partial(measure_target, self._script))]
        if subject.draft:
            script = replace(self._script, lengths=(longest,))
            steps = longest + 1 if subject.overlaps else 0
            crews.append(Crew(config, subject.draft, partial(measure_drafter, script, steps)))
        in_turn = bool(subject.draft) and not subject.overlaps
        return Measured(subject, *run_crews(crews, self._eos_token_ids, in_turn=in_turn))


def measure_target(script: Script, spec: RankSpec, group: Group, meeting: Meeting) -> Findings:
    clock = PassClock(spec.device)
    role, _ = build_role(spec, TimedGroup(group, clock))
    return _play_twice(partial(play_verdicts, role), script, role.runner, clock, spec, group, meeting)


def measure_drafter(script: Script, work_steps: int, spec: RankSpec, group: Group, meeting: Meeting) -> Findings:
    clock = PassClock(spec.device)
    role, _ = build_role(spec, TimedGroup(group, clock))
    play = partial(play_drafts, role, work_steps=work_steps)
    return _play_twice(play, script, role.drafter.runner, clock, spec, group, meeting)


def _play_twice(
    play: Callable[[Script, Stage], Played],
    script: Script,
    runner: ModelRunner,
    clock: PassClock,
    spec: RankSpec,
    group: Group,
    meeting: Meeting,
) -> Findings:
    """The second time shorter, and with every layer on the clock, which slows it down: the first says how long passes
    take, the second how their time divides. Then what the group's collectives take, with nothing between them."""
    meeting.start()
    played = play(script, _stage(0, spec, group, meeting))
    meeting.start()
    runner.run_eagerly()
    watch(runner.decoder, clock)
    watched = play(replace(script, seconds=script.seconds / 4), replace(_stage(1, spec, group, meeting), clock=clock))
    collectives: dict[str, float] = {}
    for role in ("target", "draft"):
        meeting.start()
        if role == spec.role:
            rows = mode(one.rows for one in played.passes)
            collectives = time_collectives(group, runner, rows)
    return Findings(played, watched, collectives)


def _stage(act: int, spec: RankSpec, group: Group, meeting: Meeting) -> Stage:
    if not meeting.in_turn:
        return Stage(group, spec.device)
    turns = meeting.acts[act]
    return Stage(group, spec.device, partial(turns.take, spec.role), partial(turns.give, spec.role))


@torch.inference_mode()
def time_collectives(group: Group, runner: ModelRunner, rows: int) -> dict[str, float]:
    """Median seconds of one collective over the hidden states of a pass, ranks in step; empty for one rank."""
    if group.size == 1:
        return {}
    decoder = runner.decoder
    hidden = torch.zeros(rows, decoder.config.hidden_size, dtype=decoder.dtype, device=decoder.device)
    calls = {"all_gather": lambda: group.all_gather(hidden, 0), "all_reduce": lambda: group.all_reduce(hidden)}
    now, found = clock_of(str(decoder.device)), {}
    for name, call in calls.items():
        times = []
        for _ in range(COLLECTIVES):
            started = now()
            call()
            times.append(now() - started)
        found[name] = median(times[COLLECTIVES // 4 :])
    return found


def derive_costs(measured: Sequence[Measured], num_devices: int, hop_s: float, acceptance: Acceptance) -> Costs:
    """Seconds by rows; `acceptance` by hyper-layers, none being exact drafting."""
    target, drafter = [], []
    for one in measured:
        subject = one.subject
        cores = len(subject.target[0].cores)
        passes = pass_cost(one.target.played.passes)
        target.append(TargetCost(len(subject.target), passes, cores, subject.overlaps, subject.shape))
        if one.draft is not None:
            drafter.append(_draft_cost(one, acceptance))
    return Costs(num_devices, tuple(target), tuple(drafter), hop_s, 0.0, acceptance[()])


def _draft_cost(one: Measured, acceptance: Acceptance) -> DraftCost:
    subject, passes = one.subject, one.draft.played.passes
    exact, own = None, ()
    if subject.shape.parallel == "layer":
        exact = pass_cost([each for each in passes if not each.fuzzy])
        passes = [each for each in passes if each.fuzzy]
        own = acceptance[subject.shape.partition]
    place = (len(subject.draft[0].cores), subject.overlaps, len(subject.target))
    return DraftCost(subject.shape, pass_cost(passes), exact, own, *place)


def parts_of(measured: Sequence[Measured]) -> list[dict[str, object]]:
    """How the time of a mean pass divides, by subject; one block of attention, one MLP; one collective by itself."""
    return [
        {
            "role": role,
            "subject": one.subject.describe(),
            "cores": len(places[0].cores),
            "pass_ms": 1e3 * fmean(each.seconds for each in findings.played.passes),
            "watched_ms": 1e3 * fmean(each.seconds for each in findings.watched.passes),
            "parts_ms": {kind: 1e3 * s / len(findings.watched.passes) for kind, s in findings.watched.parts.items()},
            "block_ms": {k: 1e3 * findings.watched.parts[k] / n for k, n in findings.watched.blocks.items()},
            "collective_ms": {name: 1e3 * seconds for name, seconds in findings.collectives.items()},
        }
        for one in measured
        for role, findings, places in (
            ("target", one.target, one.subject.target),
            ("draft", one.draft, one.subject.draft),
        )
        if findings is not None
    ]


def pass_cost(passes: Sequence[TimedPass]) -> PassCost:
    """Means by rows, for a round takes as long as its passes do, slow ones included. Where passes of so many rows are
    few, one slow one would decide: there the median, and what slow ones cost is spread over all such passes."""
    by_rows: dict[int, list[float]] = defaultdict(list)
    for one in passes[int(len(passes) * SETTLING) :]:
        by_rows[one.rows].append(one.seconds)
    fewest = min(FEWEST, max(map(len, by_rows.values())))
    by_rows = {rows: times for rows, times in by_rows.items() if len(times) >= fewest}
    few = {rows: times for rows, times in by_rows.items() if len(times) < ENOUGH}
    slower = sum(map(sum, few.values())) / sum(median(times) * len(times) for times in few.values()) if few else 1.0
    return PassCost.table(
        {rows: slower * median(times) if rows in few else fmean(times) for rows, times in by_rows.items()}
    )


def measure_all(
    layouts: Sequence[Layout], measurer: Measurer, config: LaunchConfig, devices: Devices, say: Callable[[str], None]
) -> tuple[list[Measured], dict[str, str]]:
    """The measurements, and what could not be measured and why."""
    found, refused = [], {}
    todo = subjects(layouts, config, devices)
    for number, subject in enumerate(todo, 1):
        say(f"measuring {number} of {len(todo)}: {subject.describe()}")
        try:
            found.append(measurer.measure(subject))
        except ValueError as error:
            refused[subject.describe()] = str(error)
    return found, refused
