"""`docs/measurements/verify_budget.py`: recorded chains are those of drafting token by token, and what rules choose."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from cluster import pocket
from cluster.tools.simulation import PassCost
from docs.measurements.verify_budget import (
    LONGEST,
    Costs,
    Recorded,
    after,
    before,
    best_beginnings,
    chances_of,
    decoded,
    decoded_by_policy,
    drafted,
    draws,
    fixed,
    while_it_pays,
    written,
)
from parallel.kv.pass_plan import Span
from parallel.runtime.runner import open_model

pytestmark = pytest.mark.extended

STEEP = Costs({1: 15.0, 16: 15.0, 116: 45.0}, {1: 0.3})


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    """Texts in which a token with a lead of two nats is right in 19 cases of 20, and one with half a nat in three."""
    choose = np.random.default_rng(0)
    sure = choose.random((40, 97 + LONGEST)) < 0.6
    right = choose.random(sure.shape) < np.where(sure, 0.95, 0.3)
    window = np.lib.stride_tricks.sliding_window_view
    leads = np.where(window(sure, LONGEST, 1)[:, :97], 2.0, 0.5)
    return Recorded(window(right, LONGEST, 1)[:, :97].cumprod(-1).sum(-1), leads)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_chains_are_those_of_drafting_token_by_token(temperature):
    (text,) = written([[5, 900, 17, 33, 901]], temperature, LONGEST + 4)
    tokens, leads = drafted(text, 5, temperature, 0, open_model(pocket.DRAFTER, num_slots=400))
    assert tokens.shape == leads.shape == (5, LONGEST)
    runner = open_model(pocket.DRAFTER, num_slots=400)
    for i in (0, 4):
        chain = text[: 5 + i]
        for place in range(3):
            runner.open(i)
            with torch.inference_mode():
                logits = runner.forward([Span(i, len(chain))], chain).logits
            runner.close(i)
            token, lead = draws(logits, temperature, 0, [len(chain)])
            assert int(token) == int(tokens[i, place])
            assert float(lead) == pytest.approx(float(leads[i, place]), abs=1e-3)
            chain = [*chain, int(token)]


def test_the_best_beginnings_are_the_best_of_all_choices():
    choose = np.random.default_rng(1)
    verify_s = PassCost.of_ms({1: 10.0, 4: 10.0, 5: 13.0, 9: 25.0})
    for speed in (100.0, 300.0, 900.0):
        chances = choose.random((3, 3)).cumprod(1)
        found, worth = best_beginnings(chances, speed, verify_s)
        values = {
            lengths: sum(chances[i, :k].sum() for i, k in enumerate(lengths)) - speed * verify_s(3 + sum(lengths))
            for lengths in product(range(4), repeat=3)
        }
        assert worth == pytest.approx(max(values.values())) == pytest.approx(values[tuple(found.tolist())])


@pytest.mark.extended
def test_where_the_drafter_knows_where_it_is_unsure_choosing_after_drafting_is_faster(recorded):
    plain, best = (max(decoded(recorded, 16, STEEP, fixed(k)) for k in ks) for ks in ((0,), (1, 2, 3, 4)))
    drawn, _ = chances_of(recorded, 3, drawn=True)
    hoped, steps = chances_of(recorded, 3, drawn=False)
    known = (recorded.num_right[..., None] > np.arange(LONGEST)).astype(float)
    shared, chosen, paying, known_best = (
        decoded(recorded, 16, STEEP, rule, best)
        for rule in (before(hoped), after(drawn, 6), while_it_pays(drawn, steps), after(known, 6))
    )
    assert plain < best < 1.02 * min(chosen, paying) and shared < 1.03 * best
    assert max(chosen, paying) > 1.04 * best and known_best > chosen


def test_the_policy_comes_close_to_the_best_fixed_length(recorded):
    """Three texts in five are hard from place to place, so that no text is: its lengths differ by chance alone."""
    plain, best = (max(decoded(recorded, 16, STEEP, fixed(k)) for k in ks) for ks in ((0,), (1, 2, 3, 4)))
    assert best > 1.2 * plain and decoded_by_policy(recorded, 16, STEEP) > 0.95 * best


def test_the_simulator_drafts_what_was_recorded(recorded):
    text = recorded.text(3, (7, 7, 7, 7))
    for position in range(4, 60):
        for distance in range(3):
            tokens, log_probs = text.children(position, distance, 2)
            assert sorted(tokens) == [position, position + 1] and text.token(position) == position
            assert log_probs[0] - log_probs[1] == pytest.approx(2.0) or log_probs[0] - log_probs[1] == pytest.approx(
                0.5
            )
    first = [text.children(4 + i, i, 1)[0][0] == 4 + i for i in range(LONGEST)]
    assert first == sorted(first, reverse=True), "behind a wrong token the chain is wrong"
