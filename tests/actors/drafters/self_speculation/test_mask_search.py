"""The search for masks on objectives whose optimum is known."""

from __future__ import annotations

import random
from itertools import product

import pytest

from actors.drafters.self_speculation.mask_search import MaskSearch, MaskSpace, expected_improvement


def test_a_space_has_the_masks_that_it_says():
    draw = random.Random(0)
    fixed, open_ = MaskSpace(6, 2), MaskSpace(4)
    assert fixed.spread() == (False, False, True, False, False, True)
    assert {fixed.at_random(draw) for _ in range(400)} == {
        mask for mask in product((False, True), repeat=6) if sum(mask) == 2
    }
    every = {open_.at_random(draw) for _ in range(2000)}
    assert len(every) == 15 and (True,) * 4 not in every, "something always runs"
    near = set(fixed.neighbours(fixed.spread()))
    assert len(near) == 8 and all(sum(mask) == 2 for mask in near)
    assert (True,) * 4 not in set(open_.neighbours((True, True, True, False)))


def planted(seed, size):
    """A value of masks: every bit has a worth and some pairs interact; noise-free."""
    draw = random.Random(seed)
    worth = [draw.gauss(0, 1) for _ in range(size)]
    pairs = [(*draw.sample(range(size), 2), draw.gauss(0, 0.7)) for _ in range(size)]

    def value(mask):
        return sum(w for w, bit in zip(worth, mask, strict=True) if bit) + sum(
            w for i, j, w in pairs if mask[i] and mask[j]
        )

    return value


def found_by(value, size, evaluations, seed, **options):
    search = MaskSearch(MaskSpace(size), seed=seed, **options)
    for _ in range(evaluations):
        mask = search.propose()
        search.record(mask, value(mask))
    assert search.best_value == value(search.best)
    return search.best_value


def test_the_process_finds_the_optimum_of_a_planted_objective():
    """A hundredth of the space is evaluated; drawing at random finds the optimum in none of these."""
    size, evaluations = 12, 60
    optimal = by_chance = 0
    for seed in range(4):
        value = planted(seed, size)
        best = max(value(mask) for mask in product((False, True), repeat=size) if not all(mask))
        optimal += found_by(value, size, evaluations, seed) > best - 1e-9
        by_chance += found_by(value, size, evaluations, seed, num_random=evaluations) > best - 1e-9
    assert optimal >= 3 > by_chance


def test_a_fixed_number_of_sublayers_stays_fixed():
    value, search = planted(7, 10), MaskSearch(MaskSpace(10, 4), seed=1, num_random=8, model_every=3)
    for _ in range(60):
        mask = search.propose()
        assert sum(mask) == 4
        search.record(mask, value(mask))
    best = max(value(mask) for mask in product((False, True), repeat=10) if sum(mask) == 4)
    assert search.best_value == pytest.approx(best)


def test_two_ranks_that_see_the_same_values_search_alike():
    value, one, other = planted(3, 8), MaskSearch(MaskSpace(8), seed=5), MaskSearch(MaskSpace(8), seed=5)
    for _ in range(25):
        mask = one.propose()
        assert mask == other.propose()
        one.record(mask, value(mask))
        other.record(mask, value(mask))


def test_more_is_expected_near_good_masks_than_near_bad_ones_and_nothing_where_all_is_known():
    low, high, size = [], [], 8
    for i in range(size):
        low.append(tuple(j in (i, 0) for j in range(size)))
        high.append(tuple(j not in (i, 0) for j in range(size)))
    near_low, near_high = tuple(j in (0, 1, 2) for j in range(size)), tuple(j not in (0, 1, 2) for j in range(size))
    known, values = low + high, [0.0, 0.1] * (size // 2) + [1.0, 1.1] * (size // 2)
    gains = expected_improvement(known, values, [near_low, near_high, low[0]])
    assert gains[1] > 2 * gains[0] and gains[1] > gains[2] >= 0


def test_an_exhausted_space_is_searched_on():
    search = MaskSearch(MaskSpace(2), num_random=2)
    for _ in range(12):
        mask = search.propose()
        search.record(mask, float(mask[0]))
    assert search.best[0]
