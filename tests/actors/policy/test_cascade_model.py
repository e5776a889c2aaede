"""The walltime formulas: published figures, simulated rounds, and the lengths they recommend."""

from __future__ import annotations

import itertools
import random

import pytest

from actors.policy.cascade_model import (
    CascadeCosts,
    LevelCost,
    acceptance_of,
    best_lengths,
    draft_s,
    tokens_per_round,
    tokens_per_s,
)


def test_a_perfect_drafter_has_no_pole():
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


def costs_of(levels):
    """Costs of a chain of levels that are never left out: a level's acceptance is that of the one above it."""
    acceptance = {(i, i + 1): level.acceptance for i, level in enumerate(levels[:-1])}
    acceptance |= {(len(levels) - 1, -1): levels[-1].acceptance}
    passes = {(i, fed): level.pass_s for i, level in enumerate(levels) for fed in (False, True)}
    return passes, acceptance


def test_the_best_lengths_are_the_best_of_all():
    levels = [LevelCost(0.02, 0.7, 0, drafts_at_once=True), LevelCost(0.5, 0.95, 0), LevelCost(2.0, 0.9, 0)]
    passes, acceptance = costs_of(levels)
    left_out = {(0, 2): 0.1, (0, -1): 0.2, (1, -1): 0.3}
    bounds = (4, 4, 8)
    best = best_lengths(CascadeCosts(passes, acceptance | left_out, True), lambda length: 5.0 + length / 10, bounds)

    def speed(lengths):
        used = [place for place, length in enumerate(lengths) if length]
        judges = [*used[1:], -1]
        chain = [
            LevelCost(levels[i].pass_s, (acceptance | left_out)[i, judge], lengths[i], i == 0)
            for i, judge in zip(used, judges, strict=True)
        ]
        return tokens_per_s(chain, 5.0 + chain[-1].num_draft_tokens / 10)

    every = [lengths for lengths in itertools.product(*(range(bound + 1) for bound in bounds)) if any(lengths)]
    assert speed(best) == pytest.approx(max(map(speed, every))) and all(best)
    without = [lengths for lengths in every if not all(lengths)]
    assert speed(best) > 1.02 * max(map(speed, without)), "every level is worth its place"


def best_of(*levels, bounds, verify_s=10.0, left_out=None):
    passes, acceptance = costs_of(levels)
    costs = CascadeCosts(passes, acceptance | (left_out or {}), levels[0].drafts_at_once)
    return best_lengths(costs, lambda _: verify_s, bounds)


def test_a_level_that_does_not_pay_is_left_out():
    slow_base, model = LevelCost(0.9, 0.2, 0), LevelCost(1.0, 0.8, 0)
    assert best_of(slow_base, model, bounds=(4, 8), left_out={(0, -1): 0.2})[0] == 0
    useless = LevelCost(9.0, 0.3, 0)
    assert best_of(LevelCost(0.1, 0.1, 0, True), useless, bounds=(4, 8), left_out={(0, -1): 0.6}) == (4, 0)
    assert best_of(useless, useless, bounds=(4, 8), left_out={(0, -1): 0.2}) == (0, 1), "one level drafts"


def test_what_was_never_seen_is_tried():
    passes = {(level, fed): 1.0 for level in range(2) for fed in (False, True)}
    assert best_lengths(CascadeCosts(passes, {(1, -1): 0.7}, True), lambda _: 10.0, (4, 8)) == (4, 0)


def test_a_pass_over_more_rows_may_cost_more():
    """A lookup that is taken now and then pays for a model whose passes cost the same, and not where they do not."""
    passes, acceptance = costs_of([LevelCost(0.02, 0.3, 0, True), LevelCost(1.0, 0.8, 0)])
    acceptance[0, -1] = 0.0
    cheap = best_lengths(CascadeCosts(passes, acceptance, True), lambda _: 10.0, (4, 8))
    dear = best_lengths(CascadeCosts(passes | {(1, True): 1.4}, acceptance, True), lambda _: 10.0, (4, 8))
    assert cheap[0] > 0 and dear[0] == 0


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
def test_the_rate_behind_counts(rate):
    drafts, length = 1000, 4
    accepted = drafts * (tokens_per_round(rate, length) - 1)
    assert acceptance_of(accepted, drafts * length, drafts) == pytest.approx(rate, abs=1e-6)
