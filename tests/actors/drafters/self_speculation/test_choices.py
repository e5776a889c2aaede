"""Rules that choose layers from hidden states, on layers that are plain functions."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
import torch.nn.functional as F

from actors.drafters.self_speculation.clasp import closest_skips
from actors.drafters.self_speculation.fly import idle_attentions
from actors.drafters.self_speculation.sublayers import Sublayers, best_speed, names_of_skipped
from parallel.model.layer_plan import LayerPlan

NUM_LAYERS, SIZE = 8, 24


def random_layers(seed, silent=()):
    """Residual layers x + f(x); those of `silent` add nothing."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(SIZE, SIZE, generator=generator) * 0.3 for _ in range(NUM_LAYERS)]
    start = torch.randn(SIZE, generator=generator)

    def run(layer, rows):
        return rows if layer in silent else rows + torch.tanh(rows @ weights[layer])

    return run, start


def cosine_without(run, start, skipped):
    exact = stream = start[None]
    for layer in range(NUM_LAYERS):
        exact = run(layer, exact)
        stream = stream if layer in skipped else run(layer, stream)
    return float(F.cosine_similarity(exact, stream)[0])


def test_without_skips_the_mask_is_empty_and_the_cosine_one():
    assert closest_skips(*random_layers(0), NUM_LAYERS, 0) == ((), pytest.approx(1.0))


def test_all_layers_can_be_skipped():
    assert closest_skips(*random_layers(0), NUM_LAYERS, NUM_LAYERS)[0] == tuple(range(NUM_LAYERS))


@pytest.mark.parametrize("seed", range(3))
def test_layers_that_add_nothing_are_skipped(seed):
    skipped, cosine = closest_skips(*random_layers(seed, silent=(2, 5, 6)), NUM_LAYERS, 3)
    assert skipped == (2, 5, 6) and cosine == pytest.approx(1.0)


def test_the_program_is_near_the_best_of_all_masks():
    """The oracle tries every mask. One state a cell is kept, so the best mask may be missed, but not by much."""
    ranks, num_best = [], 0
    for seed in range(12):
        run, start = random_layers(seed)
        skipped, cosine = closest_skips(run, start, NUM_LAYERS, 3)
        assert len(set(skipped)) == 3 and cosine == pytest.approx(cosine_without(run, start, skipped), abs=1e-5)
        every = sorted((cosine_without(run, start, mask) for mask in combinations(range(NUM_LAYERS), 3)), reverse=True)
        assert cosine <= every[0] + 1e-5
        ranks.append(sum(other > cosine + 1e-5 for other in every))
        num_best += ranks[-1] == 0
    assert sum(ranks) / len(ranks) < 10 and num_best >= 3, ranks  # of 56 masks


def test_attentions_that_turn_nothing_are_skipped_by_the_rules():
    assert idle_attentions([0.999, 0.5, 0.99, 0.7, 0.98, 0.999], 0.9) == (2, 4), "never the first and the last"
    assert idle_attentions([1.0] * 6, 0.9) == (1, 2, 3), "half of the layers in a row at most"
    assert idle_attentions([0.99, 0.95, 0.99, 0.97, 0.96, 0.98, 1.0, 0.99, 1.0, 1.0], 0.955) == (
        2,
        3,
        5,
        6,
        7,
        8,
    ), "the largest cosines first, until a run is too long"
    assert idle_attentions([0.5] * 6, 0.9) == ()


def test_masks_are_plans_and_plans_are_named():
    sublayers = Sublayers.inner(5)
    assert sublayers.places == ((1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1))
    plan = sublayers.plan((True, False, False, True, True, True))
    assert plan == LayerPlan((0, 2, 4), (0, 1, 4))
    assert names_of_skipped(5, plan) == ["1a", "2m", "3a", "3m"]
    assert len(Sublayers.inner(2).places) == 4, "of few layers any may be skipped"


def test_the_speed_of_an_exit_is_the_best_over_the_lengths():
    assert best_speed(0.0, 0.3, 8) == (pytest.approx(1 / 1.3), 1)
    speed, length = best_speed(0.9, 0.2, 8)
    assert speed == pytest.approx(max(sum(0.9**i for i in range(k + 1)) / (1 + 0.2 * k) for k in range(1, 9)))
    assert length > best_speed(0.6, 0.2, 8)[1]
