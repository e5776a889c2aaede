"""Losses against their definitions, written out on a small vocabulary."""

from __future__ import annotations

import math

import pytest
import torch

from parallel.training.interface import depth_metrics
from parallel.training.losses import (
    acceptance,
    cross_entropy,
    d_pace_weights,
    divergences,
    exponential_weights,
    masked_mean,
)

P = torch.tensor([0.5, 0.3, 0.2])
Q = torch.tensor([0.2, 0.3, 0.5])
M = 0.25 * P + 0.75 * Q


def kl(first: torch.Tensor, second: torch.Tensor) -> float:
    return sum(a * math.log(a / b) for a, b in zip(first.tolist(), second.tolist(), strict=True))


EXPECTED = {
    "fkl": kl(P, Q),
    "rkl": kl(Q, P),
    "jsd": 0.25 * kl(P, M) + 0.75 * kl(Q, M),
    "tvd": 0.3,
    "lk": math.exp(-2.1) * kl(P, Q) + (1 - math.exp(-2.1)) * 0.3,
    "lk_log": -math.log(0.7),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_divergence_is_its_definition_and_teaches_only_the_drafter(name: str):
    p, q = P.log()[None].requires_grad_(), (Q.log()[None] + 3.0).requires_grad_()  # logits are free up to a constant
    value = divergences(beta=0.25)[name](p, q)
    assert value.tolist() == [pytest.approx(EXPECTED[name], rel=1e-5)]
    value.sum().backward()
    assert p.grad is None
    assert q.grad is not None and q.grad.abs().max() > 1e-3
    assert float(divergences()[name](p, p.detach())) == pytest.approx(0.0, abs=1e-6)


def test_every_divergence_is_tested():
    assert set(divergences()) == set(EXPECTED)


def test_acceptance_of_known_laws():
    assert acceptance(P.log(), Q.log(), temperature=1.0).item() == pytest.approx(0.7)
    squares = [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38]  # the law at temperature 1/2
    assert acceptance(P.log(), torch.zeros(3), temperature=0.5).item() == pytest.approx(1 / 3 + squares[1] + squares[2])
    assert acceptance(P.log(), Q.log()).item() == 0.0
    assert acceptance(P.log(), (P * P).log()).item() == 1.0
    assert cross_entropy(P.log()[None], torch.tensor([1])).tolist() == [pytest.approx(-math.log(0.3))]


def test_position_weights():
    assert exponential_weights(3, 0.5).tolist() == [1.0, 0.5, 0.25]
    weights = d_pace_weights(torch.tensor([[1.0, 0.0, 1.0]]), torch.tensor([[True, True, True]]))
    assert weights.tolist() == [[2.0, 1.0, 0.5]]  # c = 1, 1/2, 1/2
    cut = d_pace_weights(torch.tensor([[1.0, 0.0, 1.0]]), torch.tensor([[True, True, False]]))
    assert cut.tolist() == [[1.5, 0.5, 0.0]]


def test_masked_mean_ignores_what_is_masked():
    values, mask = torch.tensor([1.0, 3.0, 100.0]), torch.tensor([True, True, False])
    assert float(masked_mean(values, mask)) == 2.0
    assert float(masked_mean(values, ~(mask | True))) == 0.0


def test_expected_length_from_acceptance_by_depth():
    rates = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    metrics = depth_metrics(rates, torch.tensor([[True] * 3, [True] * 3, [True, True, False]]))
    assert [float(metrics[f"accept_{k}"]) for k in (1, 2, 3)] == pytest.approx([2 / 3, 1 / 2, 0.0])
    assert float(metrics["length"]) == pytest.approx(1 + (2 + 1) / 2)  # the third anchor has a depth without a label
