"""What a prediction simulates and reports, with costs and figures of which no two are equal."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from actors.drafters.model.config import ModelDrafterConfig
from cluster.tools.planning import prediction
from cluster.tools.planning.costs import DraftCost, PassCosts, RankCores, TargetCost
from cluster.tools.planning.layouts import Layout, Shape
from cluster.tools.planning.prediction import Prediction, Workload, predict, predict_all
from cluster.tools.planning.transcript import RecordedToken, Transcript
from cluster.tools.simulation import Language, PassCost


class Simulated:
    """Notes the scenarios and gives figures of which no two are equal; a longer draft is faster, up to four tokens."""

    def __init__(self) -> None:
        self.scenarios: list[Any] = []
        self.counters = {"num_spec_rounds": 4, "spec_round_s": 0.5}

    def __call__(self, scenario: Any) -> Any:
        self.scenarios.append(scenario)
        return SimpleNamespace(
            tokens_per_s=100.0 - abs(scenario.drafter.num_draft_tokens - 4),
            round_ms=2.0,
            mean_acceptance_length=3.0,
            tokens_per_pass=4.0,
            branch_hit_rate=0.5,
            target_busy=0.6,
            draft_busy=0.7,
            binding="draft",
            counters=self.counters,
        )


@pytest.fixture
def simulated(monkeypatch):
    found = Simulated()
    monkeypatch.setattr(prediction, "simulate", found)
    return found


DISTINCT = PassCosts(
    8,
    (
        TargetCost(2, PassCost.flat(1e-3), cores=3, beside=True),
        TargetCost(2, PassCost.flat(2e-3), cores=4, beside=True),
        TargetCost(2, PassCost.flat(3e-3), cores=3, beside=False),
    ),
    (
        DraftCost(Shape(), PassCost.flat(4e-3), PassCost.flat(5e-3), (0.6, 0.3), cores=5, beside=True),
        DraftCost(Shape(), PassCost.flat(6e-3), cores=6, beside=True),
        DraftCost(Shape(), PassCost.flat(7e-3), cores=5, beside=False),
    ),
    link_s=0.25,
    coordinator_s=0.5,
    acceptance=(0.75, 0.5),
    runners_up=(0.125, 0.0625),
)
AHEAD = Layout(2, "branches", "separate", Shape())
DRAFTER = ModelDrafterConfig(fan_out=3)


@pytest.mark.parametrize(
    ("cores", "layout", "target_s", "draft_s"),
    [
        (RankCores(3, 5), AHEAD, 1e-3, 4e-3),
        (RankCores(4, 5), AHEAD, 2e-3, 4e-3),
        (RankCores(3, 6), AHEAD, 1e-3, 6e-3),
        (RankCores(3, 5), replace(AHEAD, pipeline="sync"), 3e-3, 7e-3),
    ],
)
def test_a_scenario_has_the_costs_of_its_layout(simulated, cores, layout, target_s, draft_s):
    predict(layout, 5, DISTINCT, Workload(DRAFTER, 6), cores)
    (scenario,) = simulated.scenarios
    assert (scenario.pipeline, scenario.num_requests, scenario.max_tokens) == (
        layout.pipeline,
        6,
        prediction.NUM_TOKENS,
    )
    assert scenario.drafter == replace(DRAFTER, num_draft_tokens=5)
    assert (scenario.verify(9), scenario.draft(9)) == (target_s, draft_s)
    assert scenario.exact == (PassCost.flat(5e-3) if draft_s == 4e-3 else None)
    links = scenario.target_link_s, scenario.draft_link_s, scenario.coordinator_s
    assert links == (0.25, 0.25, 0.5)
    acceptance = (0.6, 0.3) if draft_s == 4e-3 else (0.75, 0.5)
    assert scenario.language == Language(acceptance, (0.125, 0.0625))


def test_a_prediction_has_the_figures_of_its_simulation(simulated):
    found = predict(AHEAD, 5, DISTINCT, Workload(DRAFTER), RankCores(3, 5))
    assert found == Prediction(AHEAD, 5, 99.0, 125.0, 3.0, 0.5, 0.6, 0.7, "draft")
    simulated.counters = {"num_spec_rounds": 0, "spec_round_s": 0.0}
    plain = predict(Layout(2, "plain", "separate"), 5, DISTINCT, Workload(DRAFTER), RankCores(3, 5))
    assert plain == Prediction(Layout(2, "plain", "separate"), 0, 99.0, 2.0, 3.0, 0.5, 0.6, 0.7, "draft")
    assert simulated.scenarios[-1].language == Language((0.75, 0.5), (0.125, 0.0625))


def test_recorded_text_keeps_the_share_that_the_shape_accepts_of_the_exact_drafts(simulated):
    text = Transcript((RecordedToken(7, (7, 8), (-0.1, -2.0)),))
    for cores, kept in ((5, (0.8, 0.6)), (6, (1.0,))):
        predict(AHEAD, 5, DISTINCT, Workload(DRAFTER, 1, text), RankCores(3, cores))
        approximately: Any = pytest.approx(kept)
        assert simulated.scenarios[-1].language == replace(text, kept=approximately)


def test_layouts_are_sorted_by_the_speed_of_their_best_lengths(simulated):
    plain, unknown = Layout(2, "plain", "separate"), replace(AHEAD, target_ranks=9)
    layouts = [(plain, RankCores(3, 5)), (unknown, RankCores(3, 5)), (AHEAD, RankCores(3, 5))]
    found = predict_all(layouts, [2, 3, 9], DISTINCT, Workload(DRAFTER))
    assert [(one.layout, one.num_draft_tokens, one.tokens_per_s) for one in found] == [
        (AHEAD, 3, 99.0),
        (plain, 0, 97.0),
    ]
    assert [one.drafter.num_draft_tokens for one in simulated.scenarios] == [1, 2, 3, 9], "plain decoding is run once"
