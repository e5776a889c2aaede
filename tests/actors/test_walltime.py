"""The walltime formulas: published figures, simulated rounds, and the lengths they recommend."""

from __future__ import annotations

import itertools
import random

import pytest

from actors.pipelines.walltime import (
    LevelCost,
    acceptance_of,
    best_lengths,
    draft_s,
    improvement_chain,
    improvement_horizontal,
    improvement_vertical,
    tokens_per_round,
    tokens_per_s,
    vertical_tokens,
)


@pytest.mark.parametrize(
    "values, tokens", [((0.8, 0.4, 3, 5), 3.591), ((0.7, 0.3, 2, 8), 2.436), ((0.9, 0.6, 4, 4), 6.448)]
)
def test_tokens_of_a_vertical_round(values, tokens):
    assert vertical_tokens(*values) == pytest.approx(tokens, abs=5e-4)


@pytest.mark.parametrize(
    "acceptance, cost, chain, vertical, horizontal",
    [
        (0.7, 0.05, (2.35, 6), (2.48, 4, 2), (2.40, 5, 2)),
        (0.7, 0.2, (1.58, 3), (1.76, 2, 3), (1.70, 2, 4)),
        (0.8, 0.1, (2.47, 6), (2.75, 5, 2), (2.54, 5, 3)),
        (0.8, 0.3, (1.55, 3), (1.82, 3, 3), (1.69, 2, 4)),
        (0.9, 0.1, (3.43, 10), (4.01, 8, 3), (3.50, 9, 3)),
        (0.9, 0.3, (1.87, 5), (2.33, 4, 4), (1.98, 4, 4)),
    ],
)
def test_best_settings_of_a_free_lookup_under_a_draft_model(acceptance, cost, chain, vertical, horizontal):
    """The lookup is taken by the draft model with 0.35, by the target with 0.30, and costs 0.002."""
    wide = range(1, 13)
    best = max((improvement_chain(acceptance, g, cost), g) for g in wide)
    assert best == (pytest.approx(chain[0], abs=0.006), chain[1])
    found = {(n, k): improvement_vertical(acceptance, 0.35, n, k, cost, 0.002) for n in wide for k in wide}
    assert max(found.values()) == pytest.approx(vertical[0], abs=0.006) == found[vertical[1:]]
    found = {(n, k): improvement_horizontal(acceptance, 0.30, n, k, cost, 0.002) for n in wide for k in wide}
    assert max(found.values()) == pytest.approx(horizontal[0], abs=0.006) == found[horizontal[1:]]


def test_a_perfect_drafter_has_no_pole():
    assert vertical_tokens(1.0, 0.5, 2, 2) == pytest.approx(1 + 2 * 1.75)
    assert tokens_per_round(1.0, 4) == 5


def simulated_draft_s(levels, level, length, rng):
    """One draft, token by token, by the rule the drafters follow."""
    if level == 0:
        return levels[0].pass_s * (1 if levels[0].drafts_at_once else length) if length else 0.0
    seconds, missing, below = 0.0, length, levels[level - 1]
    while missing:
        asked = min(below.num_draft_tokens, missing - 1)
        seconds += levels[level].pass_s + simulated_draft_s(levels, level - 1, asked, rng)
        accepted = next((i for i in range(asked) if rng.random() >= below.acceptance), asked)
        missing -= accepted + 1
    return seconds


def test_the_cost_of_a_draft_is_what_simulated_drafts_take():
    levels = [LevelCost(0.1, 0.4, 3, drafts_at_once=True), LevelCost(1.0, 0.6, 3), LevelCost(4.0, 0.8, 6)]
    rng = random.Random(0)
    mean = sum(simulated_draft_s(levels, 2, 6, rng) for _ in range(20_000)) / 20_000
    assert draft_s(levels, 6) == pytest.approx(mean, rel=0.01)


def test_the_best_lengths_are_better_than_their_neighbours():
    levels = [LevelCost(0.02, 0.4, 0, drafts_at_once=True), LevelCost(1.0, 0.8, 0)]
    best = best_lengths(levels, 5.0, (8, 12))

    def speed(lengths):
        pair = [LevelCost(one.pass_s, one.acceptance, k, one.drafts_at_once) for one, k in zip(levels, lengths)]
        return tokens_per_s(pair, 5.0)

    for step in itertools.product((-1, 0, 1), repeat=2):
        other = tuple(length + by for length, by in zip(best, step))
        if min(other) >= 1:
            assert speed(best) >= speed(other)
    assert speed(best) > 1.1 * tokens_per_s([LevelCost(1.0, 0.8, best[1])], 5.0), "the lookup is worth its place"


def test_a_level_that_does_not_pay_is_not_asked():
    slow_base = LevelCost(0.9, 0.2, 0)
    assert best_lengths([slow_base, LevelCost(1.0, 0.8, 0)], 5.0, (4, 8))[0] == 0
    hopeless = [LevelCost(0.1, 0.1, 0, True), LevelCost(9.0, 0.3, 0)]
    assert best_lengths(hopeless, 10.0, (4, 8))[1] == 1


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
def test_the_rate_behind_counts(rate):
    drafts, length = 1000, 4
    accepted = drafts * (tokens_per_round(rate, length) - 1)
    assert acceptance_of(accepted, drafts * length, drafts) == pytest.approx(rate, abs=1e-6)
