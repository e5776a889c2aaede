"""Who is measured when: every repeat times a setting and plain decoding in the same engine right after each other.

Settings take turns within a repeat, and the sides of a setting swap places from repeat to repeat, so that a machine
that warms up or slows down favours nobody. It derives no figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.config.jobs import BenchConfig
from cluster.config.schema import LaunchConfig
from cluster.engine import Engine, EngineError
from cluster.io.console import Bar
from cluster.io.prompts import Prompt
from cluster.observability.results import Run
from cluster.run_prompts import serve_prompts
from cluster.tools.bench.engines import EnginePool
from cluster.tools.bench.machine import resident_bytes
from cluster.tools.bench.peers import PEERS, Peer
from cluster.tools.bench.plan import Setting
from cluster.tools.bench.prompts import Task, make_task
from cluster.tools.bench.sides import PLAIN, SPECULATIVE, Trial


@dataclass(slots=True)
class Outcome:
    """A setting's task, the engine it runs on, its trials so far, and the memory held after the latest."""

    task: Task
    engine: Engine
    trials: list[Trial] = field(default_factory=list)
    resident_bytes: dict[str, int] = field(default_factory=dict)


class Trials:
    """Fills `outcomes`; whatever ends `run` early, the trials that were finished are there. Prompts are by workload."""

    def __init__(self, config: LaunchConfig, prompts: Mapping[str, Sequence[Prompt]]) -> None:
        self.outcomes: list[Outcome] = []
        self.peers: dict[str, Peer] = {}
        self._config = config
        self._prompts = prompts

    def run(self, settings: Sequence[Setting], pool: EnginePool, bar: Bar) -> None:
        """Raises EngineError if a request failed, KeyboardInterrupt, ValueError for a task that does not fit."""
        job: BenchConfig = self._config.job
        for block in pool.blocks(settings):
            outcomes = [self._prepare(setting, pool, bar) for setting in block]
            self.outcomes += outcomes
            bar.say("warming up")
            for _ in range(job.warmup):
                self._repeat([(outcome, outcome.task.warm_up()) for outcome in outcomes], bar)
            bar.say("measuring")
            for repeat in range(job.repeats):
                trials = self._repeat([(outcome, outcome.task) for outcome in outcomes], bar, turned=repeat % 2 == 1)
                for outcome, trial in zip(outcomes, trials, strict=True):
                    outcome.trials.append(trial)

    def _prepare(self, setting: Setting, pool: EnginePool, bar: Bar) -> Outcome:
        engine = pool.engine(setting)
        for name in self._config.job.peers:
            if name not in self.peers:
                bar.say(f"loading {name}")
                self.peers[name] = PEERS[name](engine)
        return Outcome(make_task(setting, self._config, self._prompts[setting.workload], engine), engine)

    def _repeat(self, tasks: Sequence[tuple[Outcome, Task]], bar: Bar, *, turned: bool = False) -> list[Trial]:
        """One trial of every task. What a peer does alike for several of them, it does once."""
        known: dict[object, Run] = {}
        trials = []
        for outcome, task in tasks:
            sides = (SPECULATIVE, PLAIN) if turned else (PLAIN, SPECULATIVE)
            trial = {side: _serve(outcome.engine, task, speculate=side == SPECULATIVE) for side in sides}
            outcome.resident_bytes = resident_bytes(outcome.engine.ready)
            for peer in self.peers.values():
                for side, key in peer.sides(task).items():
                    if key not in known:
                        known[key] = peer.complete(side, task)
                    trial[side] = known[key]
            trials.append(trial)
            bar.advance()
        return trials


def _serve(engine: Engine, task: Task, *, speculate: bool) -> Run:
    run = serve_prompts(engine, task.prompts, task.sampling, speculate=speculate, concurrency=task.setting.batch)
    if run.interrupted:
        raise KeyboardInterrupt
    if run.failed:
        raise EngineError(f"prompt {run.failed[0].index + 1}: {run.failed[0].error}")
    return run
