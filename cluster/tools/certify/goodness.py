"""Goodness of fit of counts to a distribution, and the smallest bias that the test would have found. Knows no model.

Sources: the G-test (Sokal and Rohlf, Biometry); Holm's step-down correction (1979). Power is that of the asymptotic
noncentral chi-square; that a bias of total variation d has a chi-square divergence of at least 4 d^2, whatever its
shape, is the inequality of Cauchy and Schwarz.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

LEAST_EXPECTED = 10.0
"""Tokens expected less often than this are counted together."""
_BISECTIONS = 80


@dataclass(frozen=True, slots=True)
class GoodnessOfFit:
    """One comparison. `distance` is the observed total variation over the cells."""

    name: str
    num_draws: int
    num_cells: int
    distance: float
    p_value: float


def fit_distribution(name: str, counts: np.ndarray, distribution: np.ndarray) -> GoodnessOfFit:
    """G-test of counts [V] against a distribution [V]; a count where the probability is 0 gives p-value 0."""
    num_draws = int(counts.sum())
    expected = distribution * num_draws
    own = expected >= LEAST_EXPECTED
    observed_cells = [*counts[own], counts[~own].sum()]
    expected_cells = [*expected[own], expected[~own].sum()]
    if len(expected_cells) > 1 and expected_cells[-1] < LEAST_EXPECTED:  # join the smallest of the others
        smallest = int(np.argmin(expected_cells[:-1]))
        expected_cells[smallest] += expected_cells.pop()
        observed_cells[smallest] += observed_cells.pop()
    observed, predicted = np.array(observed_cells, dtype=float), np.array(expected_cells)
    occurred = observed > 0
    statistic = 2.0 * float((observed[occurred] * np.log(observed[occurred] / predicted[occurred])).sum())
    impossible = bool(counts[distribution == 0].sum())
    return GoodnessOfFit(
        name,
        num_draws,
        len(observed),
        float(np.abs(observed - predicted).sum() / 2 / num_draws),
        0.0 if impossible else tail(len(observed) - 1, statistic),
    )


def fit_share(name: str, count: int, num_draws: int, share: float) -> GoodnessOfFit:
    """The same for one event of probability `share`."""
    return fit_distribution(name, np.array([count, num_draws - count]), np.array([share, 1.0 - share]))


def tail(degrees: int, statistic: float) -> float:
    """P(chi-square > statistic)."""
    if degrees == 0:
        return 1.0
    halves = torch.tensor([degrees / 2, max(0.0, statistic) / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def rejected(fits: Sequence[GoodnessOfFit], significance: float) -> list[GoodnessOfFit]:
    """Comparisons that do not fit; one false alarm among all has at most probability `significance` (Holm)."""
    ranked = sorted(fits, key=lambda fit: fit.p_value)
    for rank, fit in enumerate(ranked):
        if fit.p_value > significance / (len(ranked) - rank):
            return ranked[:rank]
    return ranked


def detectable_distance(num_draws: int, num_cells: int, significance: float, power: float) -> float:
    """Any bias of at least this total variation over the cells is found with probability `power`."""
    degrees = num_cells - 1
    if degrees == 0:
        return 1.0
    critical = _solve(lambda x: tail(degrees, x) - significance, 10.0 * degrees + 200.0)
    needed = _solve(lambda shift: power - _shifted_tail(degrees, shift, critical), 10.0 * critical + 200.0)
    return min(1.0, math.sqrt(needed / (4.0 * num_draws)))


def _shifted_tail(degrees: int, shift: float, critical: float) -> float:
    """P(noncentral chi-square > critical): a Poisson mixture of central ones."""
    terms = torch.arange(int(shift / 2 + 12 * math.sqrt(shift / 2 + 1) + 60), dtype=torch.float64)
    half = torch.tensor(shift / 2, dtype=torch.float64)
    weights = torch.exp(terms * torch.log(half.clamp(min=1e-300)) - half - torch.lgamma(terms + 1))
    tails = torch.special.gammaincc(degrees / 2 + terms, torch.full_like(terms, critical / 2))
    return float((weights * tails).sum())


def _solve(falling: Callable[[float], float], high: float) -> float:
    """Where a decreasing function crosses zero, between 0 and `high`."""
    low = 0.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if falling(middle) > 0:
            low = middle
        else:
            high = middle
    return high
