"""An entry of the report says whose figures it has, and remarks say what limits them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from actors.drafters.config import NoDrafterConfig
from actors.options import PipelineConfig
from actors.protocol.membership import Ready
from cluster.config.jobs import BenchConfig
from cluster.observability.report import layout, memory_bound_speedup
from cluster.placement.ranks import RankPlacement
from cluster.tools.bench import entries as module
from cluster.tools.bench.entries import entry_of, remarks_on
from cluster.tools.bench.figures import drafting_figures, summarise
from cluster.tools.bench.plan import Setting
from cluster.tools.bench.tasks import BenchTask
from cluster.tools.bench.trials import SettingTrials
from tests.cluster.tools.bench.test_figures import TRIALS

READY = {"target-0": Ready("target", 0, {"weight_bytes": 5, "pass_bytes": 4, "kv_bytes": 6, "device": "cpu"})}
PLACES = [RankPlacement("target", 0, 1, "cpu", (0, 1), 2, 1.0)]


def measured(temperature=0.0, held: Any = None) -> SettingTrials:
    setting = Setting(NoDrafterConfig(), PipelineConfig(), temperature, 1, 0)
    engine: Any = SimpleNamespace(places=PLACES, ready=READY)
    plain: Any = SimpleNamespace(places=[replace(PLACES[0], num_threads=3)])
    task: Any = BenchTask(setting, ("one", "two"), None, 3)  # type: ignore[arg-type]  # they are counted only
    return SettingTrials(task, engine, plain, TRIALS, held or {"target-0": 7})


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_an_entry_has_the_figures_of_its_trials_and_what_they_ran_on(temperature):
    made = measured(temperature)
    setting = made.task.setting
    drafting, first = drafting_figures(setting, TRIALS)
    assert entry_of("its name", made, 5) == {
        "name": "its name",
        "setting": setting.labels(),
        **summarise(TRIALS, greedy=temperature == 0.0),
        **drafting,
        "mbsu": memory_bound_speedup(TRIALS[-1]["speculative"].counters, READY),
        "first_prediction": first,
        "num_skipped_prompts": 3,
        "num_threads": {"target": 2, "plain": 3, "peers": 3},
        "baseline": "an engine of its own, 3 threads",
        "resident_bytes": {"target-0": 7},
        **layout(PLACES, READY),
    }


def test_remarks_are_said_once_and_only_where_they_hold(tiny_launch, monkeypatch):
    config = tiny_launch(BenchConfig(prompts="x"))
    monkeypatch.setattr(module, "choices", lambda entries: ["chosen"])
    monkeypatch.setattr(module, "notes", lambda configured: ["same", f"at {configured.sampling.temperature}"])
    both = [measured(0.0), measured(0.7)]
    made = [entry_of("a", one, 2) for one in both]
    assert remarks_on(config, both, made) == [
        "same",
        "at 0.0",
        "at 0.7",
        "plain decoding was timed in an engine of its own, 3 threads",
        "chosen",
    ]
    held = replace(both[1].task, prompts=both[1].task.prompts[:1])
    both[1].task, both[1].resident_bytes = held, {"draft-0+target-0": 9}
    made = [entry_of("a", one, 2) for one in both]
    skipped, memory = remarks_on(config, both, made)[-3:-1]
    assert skipped == "1 prompts were left out: they leave no room for sampling.max_tokens"
    assert memory.startswith("memory is that of all processes of this run")
