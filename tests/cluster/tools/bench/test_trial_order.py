"""The order of measurements: warm-ups, repeats, sides and peers, with every call of engines and peers noted."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.drafters.config import Placement
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.drafters.speculator.config import SpeculatorDrafterConfig
from actors.options import PipelineConfig
from actors.protocol.messages import SamplingParams
from cluster.config.jobs import BenchConfig
from cluster.config.schema import ClusterConfig, ClusterName
from cluster.engine import EngineError
from cluster.io.prompts import Prompt
from cluster.observability.results import Run, Served
from cluster.tools.bench import trials
from cluster.tools.bench.plan import Setting
from cluster.tools.bench.tasks import BenchTask
from cluster.tools.bench.trials import EnginePool, TrialRunner, may_share

SETTINGS = [Setting(NgramDrafterConfig(), PipelineConfig(), 0.0, batch, 0, "w") for batch in (1, 2)]
GREEDY = SamplingParams(temperature=0.0)


class Bench:
    """A runner whose engines and peer note what they are asked; every run takes as many seconds as calls came first."""

    def __init__(self, tiny_launch, monkeypatch) -> None:
        self.calls: list[Any] = []
        self.salts: list[str] = []
        self.said: list[str] = []
        self.num_steps = 0
        self.engines = {batch: SimpleNamespace(ready=f"ranks of {batch}", places=[batch]) for batch in (1, 2)}
        self.plain: dict[int, Any] = {}
        self.fails: Any = lambda number: False
        self._launch = tiny_launch
        monkeypatch.setattr(trials, "serve_prompts", self._serve)
        monkeypatch.setattr(trials, "make_task", self._task)
        monkeypatch.setattr(trials, "resident_bytes", lambda ready: {ready: len(self.calls)})
        monkeypatch.setattr(trials, "open_peer", self._open)
        monkeypatch.setattr(trials.PeerSetup, "of_engine", lambda engine: engine.ready)

    def run(self, **job: Any) -> TrialRunner:
        bar: Any = SimpleNamespace(say=self.said.append, advance=self._advance)
        pool: Any = SimpleNamespace(
            blocks=lambda all_: [all_],
            engine=lambda one: self.engines[one.batch],
            plain=lambda one: self.plain.get(one.batch),
        )
        prompts: Any = {"w": ["a", "b", "c"], "v": ["z"]}
        with TrialRunner(self._launch(BenchConfig(prompts="x", **job)), prompts) as self.runner:
            self.runner.run(SETTINGS, pool, bar)
        return self.runner

    def _advance(self) -> None:
        self.num_steps += 1

    def _serve(self, engine, prompts, sampling, *, speculate, concurrency, cache_salt) -> Run:
        assert engine is self.engines[concurrency] and sampling is GREEDY
        self.salts.append(cache_salt)
        self.calls.append(("speculative" if speculate else "plain", concurrency, len(prompts)))
        failed = [Served(4, Prompt("x"), error="lost")] if self.fails(len(self.calls)) else []
        return Run(failed, float(len(self.calls)))

    def _task(self, setting, config, prompts, engine, plain_places) -> BenchTask:
        assert plain_places == self.plain.get(setting.batch, engine).places
        assert prompts == ["a", "b", "c"] and engine is self.engines[setting.batch] and config.job.prompts == "x"
        return BenchTask(setting, tuple(prompts), GREEDY, 1)

    def _open(self, name: str, setup: Any) -> Any:
        """A peer with one side, whose run both settings have in common if they have as many prompts."""

        def complete(side, task):
            self.calls.append((side, len(task.prompts)))
            return Run([], float(len(self.calls)))

        self.calls.append(("opened", setup))
        peer = SimpleNamespace(sides=lambda task: {name: len(task.prompts)}, complete=complete)
        peer.describe, peer.close = lambda: {"arithmetic": name}, lambda: self.calls.append(("closed",))
        return {name: peer}


@pytest.fixture
def bench(tiny_launch, monkeypatch) -> Bench:
    return Bench(tiny_launch, monkeypatch)


def test_sides_swap_from_repeat_to_repeat_and_settings_take_turns(bench):
    runner = bench.run(warmup=1, repeats=3)
    ahead = [("plain", 1, 1), ("speculative", 1, 1), ("plain", 2, 2), ("speculative", 2, 2)]
    even = [("plain", 1, 3), ("speculative", 1, 3), ("plain", 2, 3), ("speculative", 2, 3)]
    odd = [even[1], even[0], even[3], even[2]]
    assert bench.calls == [*ahead, *even, *odd, *even]
    assert bench.num_steps == 8 and bench.said == ["warming up", "measuring"]
    found = [[(one["plain"].wall_s, one["speculative"].wall_s) for one in each.trials] for each in runner.measured]
    assert found == [[(5, 6), (10, 9), (13, 14)], [(7, 8), (12, 11), (15, 16)]]
    assert [each.resident_bytes for each in runner.measured] == [{"ranks of 1": 14}, {"ranks of 2": 16}], "the latest"
    assert [each.engine.ready for each in runner.measured] == ["ranks of 1", "ranks of 2"]
    assert all(bench.salts) and len({*bench.salts}) == len(bench.calls) == 16, "no run finds what another one left"


def test_plain_decoding_runs_in_an_engine_of_its_own_where_there_is_one(bench):
    def serve(prompts, sampling, concurrency, salt) -> Run:
        bench.salts.append(salt)
        bench.calls.append(("alone", concurrency, len(prompts)))
        return Run([], float(len(bench.calls)))

    bench.plain[2] = SimpleNamespace(places=["all"], serve=serve)
    bench.run(warmup=0, repeats=2)
    even = [("plain", 1, 3), ("speculative", 1, 3), ("alone", 2, 3), ("speculative", 2, 3)]
    assert bench.calls == [*even, even[1], even[0], even[3], even[2]]
    assert all(bench.salts) and len({*bench.salts}) == 8, "no run finds rows or answers of another"


def test_a_peer_is_opened_once_and_does_once_what_settings_have_in_common(bench):
    runner = bench.run(warmup=0, repeats=2, peers=["other"])
    of_peer = [call for call in bench.calls if call[0] in ("other", "opened", "closed")]
    assert of_peer == [("opened", "ranks of 1"), ("other", 3), ("other", 3), ("closed",)], "once in each repeat"
    assert runner.described == {"other": {"arithmetic": "other"}}
    assert bench.said == ["loading other", "warming up", "measuring"]
    one, two = runner.measured
    assert all(a["other"] is b["other"] for a, b in zip(one.trials, two.trials, strict=True))
    assert all(set(trial) == {"plain", "speculative", "other"} for trial in one.trials)


def test_peers_with_equal_keys_are_each_timed(bench):
    runner = bench.run(warmup=0, repeats=1, peers=["other", "another"])
    assert [call for call in bench.calls if call[0] in ("other", "another")] == [("other", 3), ("another", 3)]
    (trial,) = runner.measured[0].trials
    assert trial["other"] is not trial["another"]


def test_a_failed_request_ends_the_bench_and_keeps_the_finished_repeats(bench):
    bench.fails = lambda number: number == 7
    with pytest.raises(EngineError, match="^prompt 5: lost$"):
        bench.run(warmup=0, repeats=3)
    assert [len(each.trials) for each in bench.runner.measured] == [1, 1]


@pytest.fixture
def opened(monkeypatch):
    """What engines were opened and closed, in order."""
    log: list[Any] = []

    class Scripted:
        def __init__(self, config, *, progress, log_dir):
            self.key = config.drafter.num_draft_tokens
            log.append(("opened", self.key, progress, log_dir))

        def close(self):
            log.append(("closed", self.key))

    monkeypatch.setattr(trials, "Engine", Scripted)
    return log


LENGTHS = [Setting(NgramDrafterConfig(num_draft_tokens=n), PipelineConfig(), 0.0, 1, 0) for n in (2, 3, 2)]


def test_engines_that_can_share_the_machine_stay_open(tiny_launch, opened, tmp_path):
    config = tiny_launch(BenchConfig(prompts="x"))
    with EnginePool(config, print, tmp_path) as pool:
        assert pool.blocks(LENGTHS) == [LENGTHS]
        first, second, again = map(pool.engine, LENGTHS)
        assert first is again and first is not second
        assert opened == [("opened", 2, print, None), ("opened", 3, print, None)], "they write no logs of their own"
    assert opened[2:] == [("closed", 3), ("closed", 2)]


def test_engines_that_cannot_are_open_one_at_a_time(tiny_launch, opened, tmp_path):
    config = tiny_launch(BenchConfig(prompts="x"), cluster=ClusterConfig(ClusterName.local))
    with EnginePool(config, print, tmp_path) as pool:
        assert pool.blocks(LENGTHS) == [[LENGTHS[0], LENGTHS[2]], [LENGTHS[1]]]
        for setting in (LENGTHS[0], LENGTHS[2], LENGTHS[1]):
            pool.engine(setting)
    log = [("opened", 2, print, tmp_path), ("closed", 2), ("opened", 3, print, tmp_path), ("closed", 3)]
    assert opened == log


def test_one_engine_decodes_plainly_for_all_settings_with_a_drafter_on_the_same_cpu(tiny_launch, opened, monkeypatch):
    """It stays open when the others close, because it has no part in their Ray."""
    places = {2: ["drafted"], 3: ["alone"]}
    monkeypatch.setattr(trials, "needs_own_engine", lambda config, found: found == ["drafted"])
    monkeypatch.setattr(trials.Engine, "places", property(lambda engine: places[engine.key]), raising=False)
    started = []

    class Plain:
        def __init__(self, config) -> None:
            started.append(config.verify)

        def close(self) -> None:
            started.append("closed")

    monkeypatch.setattr(trials, "PlainEngine", Plain)
    config = tiny_launch(BenchConfig(prompts="x"), cluster=ClusterConfig(ClusterName.local))
    with EnginePool(config, lambda _: None) as pool:
        first, second, again = map(pool.plain, LENGTHS)
        assert first is again is not None and second is None
    assert started == [config.verify, "closed"]


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda", "auto"])
@pytest.mark.parametrize("place", ["target", "model", "speculator"])
def test_engines_on_a_gpu_share_nothing(tiny_launch, monkeypatch, place, device, has_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    alone = SpeculatorDrafterConfig(placement=Placement.separate, device="cpu")
    drafter = alone if place == "speculator" else ModelDrafterConfig(placement=Placement.separate, device="cpu")
    config = tiny_launch(BenchConfig(prompts="x"), drafter=drafter)
    assert may_share(config)
    section = config.target if place == "target" else config.drafter
    changed = replace(config, **{"target" if place == "target" else "drafter": replace(section, device=device)})
    assert may_share(changed) is (device == "cpu" or (device == "auto" and not has_gpu))
