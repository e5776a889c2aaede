"""Production coins: strict at both ends, proportional, and new for every step and node."""

from __future__ import annotations

import numpy as np
import pytest

from actors.sampling.noise import NoiseStream, noise_key, uniform
from actors.verification import random_source
from actors.verification.random_source import HashRandomSource

ENDS = (0.0, 1.0 - 2.0**-53)


@pytest.mark.parametrize("end", ENDS)
def test_certainty_and_impossibility_at_the_ends_of_the_uniform(monkeypatch, end):
    monkeypatch.setattr(random_source, "uniform", lambda key: end)
    assert not HashRandomSource(0, 0).accept(0.0, 1)
    assert HashRandomSource(0, 0).accept(1.0, 1)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("weights", [[0.0, 0.3, 0.0, 0.1, 0.0], [1e-300, 0.0], [0.0, 5.0], [0.1] * 7 + [0.0]])
def test_a_token_without_weight_is_never_sampled(monkeypatch, end, weights):
    monkeypatch.setattr(random_source, "uniform", lambda key: end)
    assert weights[HashRandomSource(0, 0).sample(np.array(weights), 0)] > 0


def test_acceptance_has_its_probability():
    n = 20_000
    accepted = sum(HashRandomSource(seed, 5).accept(0.3, 2) for seed in range(n))
    assert abs(accepted - 0.3 * n) < 5 * (0.21 * n) ** 0.5


def test_samples_are_proportional_to_unnormalised_weights():
    n, weights = 20_000, np.array([0.2, 0.0, 1.4, 0.4])
    counts = np.bincount([HashRandomSource(seed, 5).sample(weights, 2) for seed in range(n)], minlength=4)
    expected = n * weights / weights.sum()
    assert counts[1] == 0
    assert ((counts - expected)[[0, 2, 3]] ** 2 / expected[[0, 2, 3]]).sum() < 2 + 5 * 2


def test_every_seed_step_node_and_stream_has_its_own_number():
    weights = np.ones(1 << 20)
    samples = [
        HashRandomSource(*key[:2]).sample(weights, key[2]) for key in ((1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4))
    ]
    assert len(set(samples)) == 4
    assert samples[0] == HashRandomSource(1, 2).sample(weights, 3)
    below = samples[0] / len(weights)  # the acceptance number of the same node lies elsewhere
    assert HashRandomSource(1, 2).accept(below, 3) == HashRandomSource(1, 2).accept(below + 2e-6, 3)


def test_no_seed_has_the_numbers_of_another_purpose():
    """Seeds as small as the numbers of the streams, in whose place a swapped argument would put them."""
    sources = [HashRandomSource(seed, step) for seed in range(6) for step in range(6)]
    marks = {source.mark(node) for source in sources for node in range(6)}
    others = {
        uniform(noise_key(seed, stream, step, node))
        for seed in range(6)
        for stream in (NoiseStream.COUPLED, NoiseStream.DRAFT, NoiseStream.ACCEPT)
        for step in range(6)
        for node in range(6)
    }
    assert len(marks) == 6**3 and len(others) == 3 * 6**3 and not marks & others
