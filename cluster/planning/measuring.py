"""Measures what passes cost on this machine, in every shape that the layouts under consideration need.

A role alone is measured as it works in turn with the other, whose weights pass through the caches between its rounds;
roles that overlap are measured at the same time. Derives `Costs` and predicts nothing.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch

from actors.messages import SamplingParams
from actors.roles import RankSpec, build_role
from cluster.config import LaunchConfig
from cluster.placement import Devices, RankPlacement, lay_out
from cluster.planning.config import PlanConfig
from cluster.planning.costs import Costs, DraftCost, TargetCost
from cluster.planning.layouts import Layout, Shape
from cluster.planning.prediction import Cores
from cluster.planning.ranks import Crew, Meeting, meet, run_crews
from cluster.planning.rounds import Played, Script, Text, TimedPass, play_drafts, play_verdicts
from cluster.simulation import PassCost
from cluster.text import read_eos_token_ids
from parallel.mesh import Group
from parallel.runner import ModelRunner
from parallel.timing import PassClock, TimedGroup, watch

AHEAD = "branches"
"""Stands for all pipelines that draft ahead: the same passes, over other nodes."""
SETTLING = 0.15
"""Part of a measurement at its start that does not count."""
FEWEST = 3
"""Passes of a number of rows without which nothing is said about it."""


@dataclass(frozen=True, slots=True)
class Subject:
    """One measurement: a role by itself, or both at the same time."""

    target: tuple[RankPlacement, ...] = ()
    draft: tuple[RankPlacement, ...] = ()
    shape: Shape | None = None

    @property
    def overlaps(self) -> bool:
        return bool(self.target and self.draft)

    def describe(self) -> str:
        names = [f"target on {len(self.target)}"] * bool(self.target)
        names += [f"drafter {self.shape.describe()}"] if self.shape else []
        return " beside ".join(names)


@dataclass(frozen=True, slots=True)
class Measured:
    """What the leads brought back."""

    subject: Subject
    target: Played | None
    draft: Played | None


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
    return list(dict.fromkeys(one for layout in layouts for one in _subjects(layout, config, devices)))


def _subjects(layout: Layout, config: LaunchConfig, devices: Devices) -> Iterator[Subject]:
    places = lay_out(layout.configure(config, 1), devices)
    target = tuple(replace(place, share=1.0) for place in places if place.role == "target")
    draft = tuple(replace(place, share=1.0) for place in places if place.role == "draft")
    if layout.overlaps:
        yield Subject(target, draft, layout.shape)
        return
    yield Subject(target=tuple(_anywhere(target)))
    if layout.shape is not None:
        yield Subject(draft=tuple(_anywhere(draft)), shape=layout.shape)


def _anywhere(places: Sequence[RankPlacement]) -> Iterator[RankPlacement]:
    """The same ranks from the first device on: where they sit does not matter to a role by itself."""
    taken = 0
    for place in places:
        if place.cores:
            yield replace(place, cores=tuple(range(taken, taken + len(place.cores))))
            taken += len(place.cores)
        else:
            yield place


class Measurer:
    """Measures subjects of one configuration along the same texts."""

    def __init__(self, config: LaunchConfig, texts: Sequence[Text], sampling: SamplingParams) -> None:
        job: PlanConfig = config.job
        self._config = config
        self._eos_token_ids = read_eos_token_ids(Path(config.target.path))
        self._script = Script(tuple(texts), sampling, job.batch, tuple(job.draft_lengths), job.seconds)

    def measure(self, subject: Subject) -> Measured:
        """Raises ValueError where the shape cannot be: a model that cannot be split so, or does not fit."""
        crews, longest = [], max(self._script.lengths)
        shape = subject.shape or Shape()
        pipeline = AHEAD if subject.overlaps else "sync"
        layout = Layout(max(1, len(subject.target)), pipeline, "separate", shape)
        config = layout.configure(self._config, longest)
        flushed = {"target": _bytes_read(config.drafter.path), "draft": _bytes_read(config.target.path)}
        if subject.overlaps or any(place.device != "cpu" for place in (*subject.target, *subject.draft)):
            flushed = {"target": 0, "draft": 0}  # each reads its own memory
        if subject.target:
            script = replace(self._script, flushed_bytes=flushed["target"])
            crews.append(Crew(config, subject.target, partial(measure_target, script)))
        if subject.draft:
            script = replace(self._script, lengths=(longest,), flushed_bytes=flushed["draft"])
            steps = longest + 1 if subject.overlaps else 0
            crews.append(Crew(config, subject.draft, partial(measure_drafter, script, steps)))
        results = iter(run_crews(crews, self._eos_token_ids))
        return Measured(
            subject, next(results) if subject.target else None, next(results) if subject.draft else None
        )


def measure_target(script: Script, spec: RankSpec, group: Group, meeting: Meeting) -> Played:
    clock = PassClock(spec.device)
    role, _ = build_role(spec, TimedGroup(group, clock))
    meet(meeting)
    played = play_verdicts(role, script, group, spec.device)
    return _in_parts(played, role.runner, clock, lambda short: play_verdicts(role, short, group, spec.device), script)


def measure_drafter(script: Script, work_steps: int, spec: RankSpec, group: Group, meeting: Meeting) -> Played:
    clock = PassClock(spec.device)
    role, _ = build_role(spec, TimedGroup(group, clock))
    meet(meeting)
    played = play_drafts(role, script, group, spec.device, work_steps)
    play = partial(play_drafts, role, group=group, device=spec.device, work_steps=work_steps)
    return _in_parts(played, role.drafter.runner, clock, play, script)


def _in_parts(
    played: Played, runner: ModelRunner, clock: PassClock, play: Callable[[Script], Played], script: Script
) -> Played:
    """Once more and shorter, with every layer on the clock, which slows it down: `played` says how long passes take,
    this how their time divides. Captured passes cannot be taken apart."""
    if runner.decoder.device.type == "cuda":
        return played
    watch(runner.decoder, clock)
    clock.take()
    watched = play(replace(script, seconds=script.seconds / 2))
    played.parts_ms = {kind: 1e3 * seconds / len(watched.passes) for kind, seconds in clock.take().items()}
    return played


def derive_costs(
    measured: Sequence[Measured], num_devices: int, hop_s: float, acceptance: Mapping[int, tuple[float, ...]]
) -> Costs:
    """Medians by rows; `acceptance` by layers side by side, 1 of them being exact drafting."""
    target, drafter = [], []
    for one in measured:
        subject = one.subject
        if one.target is not None:
            cores = len(subject.target[0].cores)
            target.append(TargetCost(len(subject.target), _cost(one.target.passes), cores, subject.overlaps))
        if one.draft is not None:
            passes, exact, own = one.draft.passes, None, ()
            if subject.shape.parallel == "layer":
                exact = _cost([each for each in passes if not each.fuzzy])
                passes = [each for each in passes if each.fuzzy]
                own = acceptance[subject.shape.layer_group]
            cores = len(subject.draft[0].cores)
            drafter.append(DraftCost(subject.shape, _cost(passes), exact, own, cores, subject.overlaps))
    return Costs(num_devices, tuple(target), tuple(drafter), hop_s, 0.0, acceptance[1])


def parts_of(measured: Sequence[Measured]) -> list[dict[str, object]]:
    """How the time of a mean pass divides, by subject."""
    return [
        {
            "role": role,
            "subject": one.subject.describe(),
            "cores": len(places[0].cores),
            "pass_ms": 1e3 * sum(each.seconds for each in played.passes) / len(played.passes),
            "parts_ms": played.parts_ms,
        }
        for one in measured
        for role, played, places in (
            ("target", one.target, one.subject.target),
            ("draft", one.draft, one.subject.draft),
        )
        if played is not None and played.parts_ms
    ]


def _cost(passes: Sequence[TimedPass]) -> PassCost:
    by_rows: dict[int, list[float]] = defaultdict(list)
    for one in passes[int(len(passes) * SETTLING) :]:
        by_rows[one.rows].append(one.seconds)
    fewest = min(FEWEST, max(map(len, by_rows.values())))
    return PassCost.table({rows: median(times) for rows, times in by_rows.items() if len(times) >= fewest})


def _bytes_read(checkpoint: str) -> int:
    """What a pass of that model reads, about: its weights in float32."""
    return sum(file.stat().st_size for file in Path(checkpoint).glob("*.safetensors"))


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
