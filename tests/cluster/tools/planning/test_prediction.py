"""Predictions against closed forms and against the published systems of the simulator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from actors.drafters.model.config import DraftRows, ModelDrafterConfig
from cluster.tools.planning.cost_file import read_costs
from cluster.tools.planning.costs import DraftCost, PassCosts, TargetCost
from cluster.tools.planning.layouts import Layout, Shape
from cluster.tools.planning.prediction import Workload, predict, predict_all
from cluster.tools.planning.transcript import RecordedToken, Transcript
from cluster.tools.simulation import PassCost

EXAMPLES = Path(__file__).parents[4] / "docs" / "plans"
COSTS = PassCosts(
    2, (TargetCost(1, PassCost.flat(10e-3)),), (DraftCost(Shape(), PassCost.flat(1e-3)),), acceptance=(0.8,)
)
SYNC = Layout(1, "sync", "separate", Shape())
CHAIN = Workload(ModelDrafterConfig())


def expected_tokens(acceptance: float, length: int) -> float:
    return (1 - acceptance ** (length + 1)) / (1 - acceptance)


def test_synchronous_chains_follow_the_closed_form():
    found = predict(SYNC, 4, replace(COSTS, link_s=0.1e-3), CHAIN)
    assert found.round_ms == pytest.approx(10 + 4 * 1 + 4 * 0.1, rel=0.01)
    assert found.tokens_per_round == pytest.approx(expected_tokens(0.8, 4), rel=0.02)
    assert found.tokens_per_s == pytest.approx(1e3 * found.tokens_per_round / found.round_ms, rel=0.01)
    assert found.overrides == SYNC.overrides(4)


def test_a_text_before_the_output_takes_its_time():
    """Of a draft model with streaming rows that of its window alone."""
    target, draft = PassCost.of_ms(10, context_ms=0.5), PassCost.of_ms(1, context_ms=0.2)
    costs = replace(COSTS, target=(TargetCost(1, target),), drafter=(DraftCost(Shape(), draft),))
    streaming = ModelDrafterConfig(rows=DraftRows.streaming, sinks=4, window=96)
    for drafter, read_by_drafts in ((ModelDrafterConfig(), 30_000), (streaming, 106)):
        found = predict(SYNC, 4, costs, Workload(drafter, context=30_000))
        assert found.round_ms == pytest.approx(10 + 15 + 4 * (1 + 0.2 * read_by_drafts / 1e3), rel=0.02)


@pytest.mark.extended
def test_the_best_draft_length_is_chosen():
    (best,) = predict_all([(SYNC, None)], [1, 4, 8], replace(COSTS, acceptance=(0.5,)), CHAIN)
    speed = {length: expected_tokens(0.5, length) / (10 + length) for length in (1, 4, 8)}
    assert best.num_draft_tokens == max(speed, key=speed.get) == 4


def test_unknown_costs_are_left_out():
    assert predict(Layout(2, "plain", "separate"), 1, COSTS, CHAIN) is None
    assert predict(Layout(1, "sync", "colocated", Shape("tensor", 2)), 4, COSTS, CHAIN) is None
    assert predict_all([(Layout(2, "plain", "separate"), None)], [1], COSTS, CHAIN) == []


def test_a_shape_may_have_an_acceptance_of_its_own():
    worse = DraftCost(Shape("layer", 2, 2), PassCost.flat(1e-3), acceptance=(0.8, 0.4))
    costs = replace(COSTS, drafter=(*COSTS.drafter, worse))
    found = predict(Layout(1, "sync", "colocated", worse.shape), 3, costs, CHAIN)
    assert found.tokens_per_round == pytest.approx(1 + 0.8 + 0.8 * 0.4 + 0.8 * 0.4**2, rel=0.03)


@pytest.mark.extended
def test_recorded_text_is_played_back():
    """Two right, one wrong, in turn: three drafted tokens make every round accept two."""
    text = tuple(RecordedToken(7, (7, 8) if i % 3 else (8, 7), (-0.1, -2.0)) for i in range(600))
    found = predict(SYNC, 3, COSTS, Workload(ModelDrafterConfig(), 1, Transcript(text)))
    assert found.tokens_per_round == pytest.approx(3.0, rel=0.01)
    worse = replace(Transcript(text), kept=(1.0, 0.0))
    halved = predict(SYNC, 3, COSTS, Workload(ModelDrafterConfig(), 1, worse))
    assert 1.0 < halved.tokens_per_round < 2.0, "no draft token after the first is accepted"


@pytest.mark.slow
def test_the_published_layout_of_swiftspec_comes_out_best():
    costs = read_costs(EXAMPLES / "swiftspec-70b.yaml")
    drafter = ModelDrafterConfig(fan_out=8, ahead_width=16)
    layouts = [Layout(4, "tree", "separate", Shape("tensor", 2)), Layout(8, "sync", "colocated", Shape("tensor", 2))]
    ahead, sync = predict_all([(layout, None) for layout in layouts], [4, 6, 8], costs, Workload(drafter))
    assert ahead.layout is layouts[0] and ahead.tokens_per_s == pytest.approx(348, rel=0.05)
    assert ahead.tokens_per_s / sync.tokens_per_s == pytest.approx(1.5, abs=0.1)
