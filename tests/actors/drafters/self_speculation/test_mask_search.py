"""The search for masks on objectives whose optimum is known."""

from __future__ import annotations

import random
from itertools import product
from statistics import NormalDist

import numpy as np
import pytest
import torch

from actors.drafters.self_speculation import mask_search
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


@pytest.mark.slow
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


def covariance(masks, others, scale):
    return np.exp(-(np.array(masks)[:, None] != np.array(others)[None]).sum(-1) / scale)


def improvements(known, values, candidates):
    """Expected improvements by the formulas, of the process whose scale and noise make the standardised values
    likeliest."""
    y = (np.array(values) - np.mean(values)) / np.std(values, ddof=1)
    longest = max(sum(a != b for a, b in zip(x, z, strict=True)) for x in known for z in known)
    options = []
    for share in (0.05, 0.1, 0.2, 0.4, 0.8):
        for noise in (0.001, 0.01, 0.1, 0.5):
            k = covariance(known, known, share * longest) + noise * np.eye(len(y))
            likelihood = -y @ np.linalg.solve(k, y) / 2 - np.linalg.slogdet(k)[1] / 2
            options.append((likelihood, share * longest, noise))
    _, scale, noise = max(options)
    k, across = covariance(known, known, scale) + noise * np.eye(len(y)), covariance(candidates, known, scale)
    mean = across @ np.linalg.solve(k, y)
    deviation = np.sqrt(1 - np.einsum("ij,ji->i", across, np.linalg.solve(k, across.T)))
    normal, ahead = NormalDist(), mean - y.max()
    gains = [a * normal.cdf(a / d) + d * normal.pdf(a / d) for a, d in zip(ahead, deviation, strict=True)]
    return gains, (round(scale / longest, 2), noise)


@pytest.mark.extended
def test_expected_improvements_are_those_of_the_likeliest_process():
    """The values are smooth, rough and noisy, so that every scale and noise is the likeliest somewhere."""
    draw, found = random.Random(0), set()
    for number in range(60):
        size = draw.choice([4, 8, 12])
        known = list({tuple(draw.random() < 0.5 for _ in range(size)) for _ in range(draw.choice([4, 12, 40]))})
        smooth, noise = draw.choice([0.0, 1.0]), draw.choice([0.0, 0.3, 1.0, 2.0])
        values = [smooth * sum(mask) + noise * draw.gauss(0, 1) + 1e-3 * number for mask in known]
        candidates = list({tuple(draw.random() < 0.5 for _ in range(size)) for _ in range(5)} - set(known))
        if not candidates or len({*values}) == 1:
            continue
        expected, chosen = improvements(known, values, candidates)
        found.add(chosen)
        assert expected_improvement(known, values, candidates).tolist() == pytest.approx(expected, abs=1e-8)
    assert {share for share, _ in found} >= {0.05, 0.8} and len({noise for _, noise in found}) >= 3, found


def test_one_value_says_nothing_of_the_others():
    one, near, far = (True, False, False, False), (True, True, False, False), (False, True, True, True)
    gains = expected_improvement([one], [3.0], [near, far])
    assert gains.tolist() == pytest.approx([0.39894, 0.39894], abs=1e-4), "the mean of what is positive of a normal"


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, range(13, 21)),
        ({"num_random": 3}, range(4, 21)),
        ({"num_random": 2, "model_every": 3}, (5, 8, 11, 14, 17, 20)),
    ],
)
def test_the_process_is_asked_after_the_random_masks_and_then_in_turn(monkeypatch, options, asked):
    calls = []
    real = mask_search.expected_improvement
    search = MaskSearch(MaskSpace(9), **options)
    assert search.best == search.space.spread() == search.propose()
    monkeypatch.setattr(mask_search, "expected_improvement", lambda *a: calls.append(search.num_evaluated) or real(*a))
    for number in range(20 + 1):
        mask = search.propose()
        assert mask not in search.values
        search.record(mask, float(number))
    assert calls == [*asked]


def test_the_newest_masks_and_the_neighbours_of_the_best_are_weighed(monkeypatch):
    weighed = {}

    def improvement(known, values, candidates):
        weighed.update(known=known, values=values, candidates=set(candidates))
        return torch.tensor([float(mask == max(candidates)) for mask in candidates])

    monkeypatch.setattr(mask_search, "expected_improvement", improvement)
    search, draw = MaskSearch(MaskSpace(14), num_random=1), random.Random(3)
    masks = list({search.space.at_random(draw): None for _ in range(230)})
    for number, mask in enumerate(masks):
        search.record(mask, float((7 * number) % 229))
    search.record(masks[50], 500.0)
    assert search.propose() == max(weighed["candidates"])
    newest = [*[mask for mask in masks if mask != masks[50]][-191:], masks[50]]
    assert weighed["known"] == newest and weighed["values"] == [search.values[mask] for mask in newest]
    best = sorted(search.values, key=search.values.__getitem__)[-4:]
    near = {mask for one in best for mask in search.space.neighbours(one)} - search.values.keys()
    assert best[-1] == masks[50] and near <= weighed["candidates"] and not weighed["candidates"] & search.values.keys()
    assert 200 < len(weighed["candidates"]) <= 256 + 4 * 14


def test_neighbours_differ_in_one_bit_or_have_one_moved():
    mask = (True, False, False, True)
    assert set(MaskSpace(4).neighbours(mask)) == {
        *(
            (False, False, False, True),
            (True, True, False, True),
            (True, False, True, True),
            (True, False, False, False),
        )
    }
    assert set(MaskSpace(4, 2).neighbours(mask)) == {
        *(
            (False, True, False, True),
            (False, False, True, True),
            (True, True, False, False),
            (True, False, True, False),
        )
    }
    assert MaskSpace(5).spread() == (False, False, True, False, True)
