"""Toy models for the verification tests: random conditional laws, one per context."""

from __future__ import annotations

import numpy as np
import pytest

from tests.actors.verification.rule_enumeration import ConditionalDistribution


def random_law(vocab_size: int, seed: int, style: str = "dense") -> ConditionalDistribution:
    """Conditional rows drawn once per context; `sparse` puts zeros into them, `one-hot` leaves a single token."""
    rows: dict[tuple[int, ...], np.ndarray] = {}

    def distribution(context: tuple[int, ...]) -> np.ndarray:
        if context not in rows:
            rng = np.random.default_rng([seed, *context])
            row = rng.dirichlet(np.ones(vocab_size))
            if style == "sparse":
                row[rng.permutation(vocab_size)[: rng.integers(1, vocab_size)]] = 0.0
            elif style == "one-hot":
                row = np.eye(vocab_size)[rng.integers(vocab_size)]
            rows[context] = row / row.sum()
        return rows[context]

    return distribution


@pytest.fixture(name="random_law")
def _random_law():
    return random_law
