"""Every option of a scenario and of its language changes the run, and the figures of a run agree with one another."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest

from actors.drafters.model.config import ModelDrafterConfig
from cluster.tools.simulation import Disturbances, Language, PassCost, Scenario, SimulationResult, power_law, simulate

LANGUAGE = Language((0.75, 0.5), power_law(0.8))
BASE = Scenario(
    "branches",
    PassCost(((1, 10e-3), (32, 13e-3))),
    PassCost(((1, 2e-3), (32, 3e-3))),
    ModelDrafterConfig(num_draft_tokens=4, fan_out=4, ahead_width=12),
    LANGUAGE,
    num_requests=2,
    max_tokens=80,
    target_link_s=2e-4,
    draft_link_s=3e-4,
    coordinator_s=1e-4,
)
CHANGES: dict[str, Any] = {
    "pipeline": "sync",
    "verify": PassCost.flat(10e-3),
    "draft": PassCost.flat(2e-3),
    "drafter": replace(BASE.drafter, fan_out=1),
    "language": replace(LANGUAGE, seed=1),
    "num_requests": 3,
    "max_tokens": 90,
    "prompt_len": 300,
    "target_link_s": 4e-4,
    "draft_link_s": 6e-4,
    "interference": 0.5,
    "coordinator_s": 2e-4,
    "exact": PassCost.flat(4e-3),
    "adaptive": True,
    "disturbances": Disturbances(slowest=0.5),
    "local_acceptance": 0.4,
}
LANGUAGES: dict[str, Any] = {
    "acceptance": (0.75, 0.25),
    "runners_up": (0.1,),
    "unevenness": 0.75,
    "vocab_size": 50,
    "seed": 3,
}


@cache
def base() -> SimulationResult:
    return simulate(BASE)


def test_every_option_is_tried():
    of_scenario = {field.name for field in fields(Scenario)} - {"min_draft_tokens"}
    assert set(CHANGES) == of_scenario, "the shortest draft is an option of the adaptive policy"
    assert set(LANGUAGES) == {field.name for field in fields(Language)}


@pytest.mark.extended
@pytest.mark.parametrize("name", CHANGES)
def test_an_option_of_a_scenario_changes_the_run(name):
    changed = simulate(replace(BASE, **{name: CHANGES[name]}))
    assert (changed.tokens_per_s, changed.spans) != (base().tokens_per_s, base().spans)


@pytest.mark.extended
@pytest.mark.parametrize("name", LANGUAGES)
def test_an_option_of_a_language_changes_the_run(name):
    assert simulate(replace(BASE, language=replace(LANGUAGE, **{name: LANGUAGES[name]}))) != base()


def test_what_takes_longer_makes_the_run_slower():
    for name in ("target_link_s", "coordinator_s", "interference"):
        assert simulate(replace(BASE, **{name: CHANGES[name]})).tokens_per_s < base().tokens_per_s, name


@pytest.mark.parametrize("pipeline", ["plain", "sync", "branches", "tree", "pingpong"])
def test_the_figures_of_a_run_agree(pipeline):
    result = simulate(replace(BASE, pipeline=pipeline))
    counters, shares = result.counters, result.critical
    assert shares.target + shares.draft + shares.exchange == pytest.approx(1.0)
    assert (result.target_busy, result.draft_busy) == (shares.target, shares.draft_busy)
    window_s = counters["num_rounds"] * result.round_ms / 1e3
    assert result.tokens_per_s == pytest.approx(counters["num_tokens"] / window_s)
    num_verdicts = counters["num_tokens"] / result.tokens_per_pass
    assert num_verdicts == pytest.approx(round(num_verdicts)) and counters["num_spec_steps"] <= round(num_verdicts)
    assert result.binding == max(("target", "draft", "exchange"), key=lambda lane: getattr(shares, lane))
    if pipeline == "plain":
        assert (result.mean_acceptance_length, result.branch_hit_rate, result.tokens_per_pass) == (None, None, 1.0)
        return
    mean = 1 + counters["num_accepted_tokens"] / counters["num_spec_steps"]
    assert result.mean_acceptance_length == pytest.approx(mean) and 1 < mean < 5
    pairs = zip(counters["num_accepted_per_pos"], counters["num_drafted_per_pos"], strict=True)
    assert result.per_position_acceptance == tuple(accepted / drafted for accepted, drafted in pairs)
    assert list(result.per_position_acceptance) == sorted(result.per_position_acceptance, reverse=True)
