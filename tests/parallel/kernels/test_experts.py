"""The kernel of mixtures of experts against its formula in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from parallel.kernels.experts import Mixture
from parallel.kernels.library import library
from parallel.kernels.products import Panels

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")

HIDDEN, EXPERTS = 48, 6
ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
ACTIVATIONS = {"silu": F.silu, "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh")}


class Drawn:
    """Experts of random matrices; the kernel has those from `first` to `end`."""

    def __init__(self, inner, dtype, *, function="silu", first=0, end=EXPERTS, **rule) -> None:
        torch.manual_seed(inner)
        self.gate_up = (0.3 * torch.randn(EXPERTS, 2 * inner, HIDDEN)).to(dtype)
        self.down = (0.3 * torch.randn(EXPERTS, HIDDEN, inner)).to(dtype)
        self.rule = {"per_token": 2, "normalizes": False} | rule
        self.function, self.own = function, range(first, end)
        gate_up, down = ([Panels(part[i], rows=dtype) for i in self.own] for part in (self.gate_up, self.down))
        self.kernel = Mixture(gate_up, down, function, first=first, num_scores=EXPERTS, **self.rule)

    def expected(self, x, scores) -> torch.Tensor:
        """Of equal scores the first ones are chosen."""
        weights, chosen = scores.double().softmax(-1).sort(stable=True, dim=-1, descending=True)
        weights, chosen = (part[:, : self.rule["per_token"]] for part in (weights, chosen))
        if self.rule["normalizes"]:
            weights = weights / weights.sum(-1, keepdim=True)
        total = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
        for row, (shares, experts) in enumerate(zip(weights, chosen.tolist(), strict=True)):
            for share, expert in zip(shares, experts, strict=True):
                if expert in self.own:
                    gate, up = (self.gate_up[expert].double() @ x[row].double()).chunk(2)
                    total[row] += share * (self.down[expert].double() @ (ACTIVATIONS[self.function](gate) * up))
        return total


def rows_of(num_rows, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(num_rows)
    return torch.randn(num_rows, HIDDEN).to(dtype), (2 * torch.randn(num_rows, EXPERTS)).to(dtype)


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("num_rows", [1, 9, 70])
@pytest.mark.parametrize(
    ("inner", "rule"),
    [
        (32, {}),
        (20, {"normalizes": True, "per_token": 3}),  # gates fill no whole panels
        (32, {"function": "gelu_pytorch_tanh"}),
        (32, {"per_token": 1}),
        (32, {"per_token": EXPERTS, "normalizes": True}),
        (20, {"first": 2, "end": 5}),  # the others are another rank's
    ],
)
def test_rows_have_what_their_experts_give(inner, rule, num_rows, dtype):
    one, (x, scores) = Drawn(inner, dtype, **rule), rows_of(num_rows, dtype)
    found, expected = one.kernel.mix(x, scores), one.expected(x, scores)
    torch.testing.assert_close(found.double(), expected, atol=ERROR[dtype] * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("inner", [20, 32])
def test_a_row_is_the_same_to_the_bit_alone_and_in_company(inner, dtype):
    one, (x, scores) = Drawn(inner, dtype), rows_of(40, dtype)
    together = one.kernel.mix(x, scores)
    alone = [one.kernel.mix(x[row : row + 1], scores[row : row + 1]) for row in range(40)]
    assert torch.equal(torch.cat(alone), together)


def test_of_equal_scores_the_first_are_chosen_and_large_ones_overflow_nothing():
    one, (x, _) = Drawn(32, torch.float32), rows_of(2, torch.float32)
    scores = torch.tensor([[5.0] * EXPERTS, [1e4, -1e4, 1e4, 0, 0, 0]])
    like = torch.tensor([[2.0, 2.0, 0, 0, 0, 0], [9, 0, 9, 0, 0, 0]])
    wanted = Drawn(32, torch.float32, normalizes=True).expected(x, like) * torch.tensor([[2 / EXPERTS], [1.0]])
    torch.testing.assert_close(one.kernel.mix(x, scores).double(), wanted, atol=1e-4, rtol=1e-5)
