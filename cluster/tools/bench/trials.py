"""The order of measurements: every repeat times a setting and plain decoding, one after the other.

Settings take turns within a repeat, and the sides of a setting swap places from repeat to repeat, so that a machine
that warms up or slows down affects all sides alike. An idle engine waits on a socket and costs memory alone, so engines
on a CPU may all stay open and be measured in turn; GPUs, and the cores that Ray reserves, belong to one engine at a
time. A run finds nothing that earlier ones left: no rows of its prompts, and no answers to draft from. It derives no
figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.baseline import PlainEngine, describe, needs_own_engine
from cluster.config.jobs import BenchConfig
from cluster.config.schema import ClusterName, LaunchConfig
from cluster.engine import Engine
from cluster.io.console import Bar
from cluster.io.prompts import Prompt
from cluster.observability.results import Run
from cluster.placement.ranks import models_of
from cluster.run_prompts import all_completed, serve_prompts
from cluster.runtime.backend import settle_threads
from cluster.tools.bench.machine import resident_bytes
from cluster.tools.bench.peers.interface import PeerApart, PeerSetup
from cluster.tools.bench.peers.registry import open_peer
from cluster.tools.bench.plan import Setting
from cluster.tools.bench.tasks import PLAIN, SPECULATIVE, BenchTask, Trial, make_task


def may_share(config: LaunchConfig) -> bool:
    """Whether several engines of this configuration can be open at a time."""
    settle_threads(config)  # PyTorch loads now
    import torch

    models = [model for role in config.drafter.roles() for model in models_of(config, role)]
    devices = {config.target.device, *(model.device for model in models)}
    on_gpu = "cuda" in devices or ("auto" in devices and torch.cuda.is_available())
    return config.cluster.name == ClusterName.inprocess and not on_gpu


class EnginePool:
    """Opens an engine at its first use; `with` closes all. Only roles in processes of their own write logs."""

    def __init__(self, config: LaunchConfig, progress: Callable[[str], None], log_dir: Path | None = None) -> None:
        self._config = config
        self._progress = progress
        self._side_by_side = may_share(config)
        self._log_dir = None if config.cluster.name == ClusterName.inprocess else log_dir
        self._open: dict[str, Engine] = {}
        self._plain: dict[str, PlainEngine] = {}

    def blocks(self, settings: Sequence[Setting]) -> list[Sequence[Setting]]:
        """Settings whose trials may be interleaved: all of them, or engine by engine."""
        if self._side_by_side:
            return [settings]
        by_engine: dict[str, list[Setting]] = {}
        for setting in settings:
            by_engine.setdefault(setting.engine_key, []).append(setting)
        return list(by_engine.values())

    def engine(self, setting: Setting) -> Engine:
        key = setting.engine_key
        if key not in self._open:
            if not self._side_by_side:
                self.close()
            configured = setting.configure(self._config)
            self._open[key] = Engine(configured, progress=self._progress, log_dir=self._log_dir)
        return self._open[key]

    def plain(self, setting: Setting) -> PlainEngine | None:
        """The engine that decodes plainly for this setting; None: its own one does that as fast."""
        configured, places = setting.configure(self._config), self.engine(setting).places
        if not needs_own_engine(configured, places):
            return None
        key = str(configured.verify)  # nothing else that settings differ in reaches plain decoding's engine
        if key not in self._plain:
            self._progress("starting plain decoding by itself")
            self._plain[key] = PlainEngine(configured)
        return self._plain[key]

    def close(self) -> None:
        """End the engines with drafters, which may not stay open beside the next one."""
        while self._open:
            self._open.popitem()[1].close()

    def __enter__(self) -> EnginePool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
        while self._plain:
            self._plain.popitem()[1].close()


@dataclass(slots=True)
class SettingTrials:
    """A setting's task, the engine it runs on, its trials so far, and the memory held after the latest.

    `plain` decodes plainly where that engine would be slower at it than one of its own.
    """

    task: BenchTask
    engine: Engine
    plain: PlainEngine | None = None
    trials: list[Trial] = field(default_factory=list)
    resident_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def baseline(self) -> str:
        """What plain decoding runs on."""
        return describe((self.plain or self.engine).places, own_engine=self.plain is not None)

    def serve(self, side: str, task: BenchTask, salt: str) -> Run:
        """`salt` is another one for every run. Raises EngineError if a request failed, KeyboardInterrupt."""
        prompts, sampling, batch = task.prompts, task.sampling, task.setting.batch
        if side == PLAIN and self.plain is not None:
            run = self.plain.serve(prompts, sampling, batch, salt)
        else:
            how: dict[str, Any] = {"speculate": side == SPECULATIVE, "concurrency": batch, "cache_salt": salt}
            run = serve_prompts(self.engine, prompts, sampling, **how)
        all_completed(run)
        return run


class TrialRunner:
    """Fills `measured`; when `run` ends early, the finished trials are there. Prompts are by workload.

    `described` is what each peer says of itself. `with` ends the peers.
    """

    def __init__(self, config: LaunchConfig, prompts: Mapping[str, Sequence[Prompt]]) -> None:
        self.measured: list[SettingTrials] = []
        self.peers: dict[str, PeerApart] = {}
        self.described: dict[str, dict[str, object]] = {}
        self._config = config
        self._prompts = prompts
        self._num_runs = 0

    def __enter__(self) -> TrialRunner:
        return self

    def __exit__(self, *exception: object) -> None:
        while self.peers:
            self.peers.popitem()[1].close()

    def run(self, settings: Sequence[Setting], pool: EnginePool, bar: Bar) -> None:
        """Raises EngineError if a request failed, KeyboardInterrupt, ValueError for a task that does not fit."""
        job: BenchConfig = self._config.job
        for block in pool.blocks(settings):
            measured = [self._prepare(setting, pool, bar) for setting in block]
            self.measured += measured
            bar.say("warming up")
            for _ in range(job.warmup):
                self._repeat([(each, each.task.warm_up()) for each in measured], bar)
            self.described = {name: peer.describe() for name, peer in self.peers.items()}
            bar.say("measuring")
            for repeat in range(job.repeats):
                trials = self._repeat([(each, each.task) for each in measured], bar, swapped=repeat % 2 == 1)
                for each, trial in zip(measured, trials, strict=True):
                    each.trials.append(trial)

    def _prepare(self, setting: Setting, pool: EnginePool, bar: Bar) -> SettingTrials:
        engine, plain = pool.engine(setting), pool.plain(setting)
        for name in self._config.job.peers:
            if name not in self.peers:
                bar.say(f"loading {name}")
                self.peers |= open_peer(name, PeerSetup.of_engine(engine))
        places = (plain or engine).places
        return SettingTrials(
            make_task(setting, self._config, self._prompts[setting.workload], engine, places), engine, plain
        )

    def _repeat(
        self, tasks: Sequence[tuple[SettingTrials, BenchTask]], bar: Bar, *, swapped: bool = False
    ) -> list[Trial]:
        """One trial of every task. A peer's run that several tasks have in common is done once."""
        known: dict[object, Run] = {}
        trials = []
        for each, task in tasks:
            trial: Trial = {}
            for side in (SPECULATIVE, PLAIN) if swapped else (PLAIN, SPECULATIVE):
                self._num_runs += 1
                trial[side] = each.serve(side, task, f"run {self._num_runs}")
            each.resident_bytes = resident_bytes(each.engine.ready)
            for peer in self.peers.values():
                for side, key in peer.sides(task).items():
                    if (side, key) not in known:  # the keys of different peers may be equal
                        known[side, key] = peer.complete(side, task)
                    trial[side] = known[side, key]
            trials.append(trial)
            bar.advance()
        return trials
