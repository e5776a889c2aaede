"""Triton's kernels of mixtures against PyTorch's operators in float64, one row and one expert at a time."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from parallel.kernels import mixtures
from parallel.kernels.triton_launch import INTERPRETS
from tests.matrices import in_turn

HIDDEN, SIZE = 40, 24
MANY_ROWS = {("few", 9): 0, ("few", 70): 0, ("sorted", 9): 0}
"""Rows that a kernel is not for, which take its interpreter up to 15 s, and those between one tile and two."""


def experts_of(num_experts, dtype):
    draw = torch.Generator().manual_seed(0)
    shapes = (num_experts, 2 * SIZE, HIDDEN), (num_experts, HIDDEN, SIZE)
    return [torch.randn(shape, generator=draw).mul(0.3).to(dtype) for shape in shapes]


def expected(x, scores, per_token, normalize, gate_up, down, own):
    """Rows in float64, by the experts in `own`."""
    out = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for row, probabilities in enumerate(scores.double().softmax(-1)):
        chosen = probabilities.argsort(descending=True, stable=True)[:per_token].tolist()
        total = probabilities[chosen].sum() if normalize else 1.0
        for expert in set(chosen) & set(own):
            gate, up = (gate_up[expert].double() @ x[row].double()).chunk(2)
            out[row] += probabilities[expert] / total * (down[expert].double() @ (F.silu(gate) * up))
    return out


# rows of experts that another rank holds are not written, and the interpreter says what NumPy makes of such numbers
@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize(
    ("mix", "num_rows", "per_token", "num_experts", "normalize"),
    list(in_turn(product(["few", "sorted"], [1, 3, 9, 70]), [(2, 4), (3, 17), (2, 5)], [True, False], times=MANY_ROWS)),
)
def test_rows_are_mixed_of_the_most_probable_experts(device, mix, num_rows, per_token, num_experts, normalize):
    """One rank mixes them, or two that hold a part of the experts each."""
    mix = {"few": mixtures.mix_few, "sorted": mixtures.mix_sorted}[mix]
    dtype = torch.float32 if INTERPRETS or mix is mixtures.mix_few else torch.bfloat16
    allowed = 1e-4 if dtype == torch.float32 else 5e-2
    draw = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, HIDDEN, generator=draw).to(dtype)
    scores = torch.randn(num_rows, num_experts, generator=draw).mul(2).to(dtype)
    gate_up, down = experts_of(num_experts, dtype)
    on_device = [tensor.to(device) for tensor in (x, gate_up, down)]
    choice = mixtures.choose(scores.to(device), per_token, normalize=normalize)
    halves = [range(num_experts // 2), range(num_experts // 2, num_experts)]
    for own in halves[1:] if INTERPRETS and num_rows == 70 else [range(num_experts), *halves]:
        matrices = [tensor[own.start : own.stop].contiguous() for tensor in on_device[1:]]
        found = mix(on_device[0], choice, *matrices, own.start).cpu().double()
        wanted = expected(x, scores, per_token, normalize, gate_up, down, own)
        torch.testing.assert_close(found, wanted, atol=allowed, rtol=allowed)


def test_of_equal_experts_the_first_are_chosen(device):
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, 2.0]])
    choice = mixtures.choose(scores.to(device), 4, normalize=False)
    assert choice.chosen.tolist() == [[1, 2, 4, 3]]
    torch.testing.assert_close(choice.weights.cpu(), scores.softmax(-1)[:, [1, 2, 4, 3]])


@pytest.mark.parametrize("first", [0, 3])
def test_entries_are_sorted_by_expert_and_keep_their_order(device, first):
    chosen = torch.randint(0, 9, (90, 3), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    places, rows, ends = (part.cpu() for part in mixtures.by_expert(chosen.to(device), first, 5))
    own = chosen.flatten() - first
    own = torch.where((own >= 0) & (own < 5), own, 5)
    order = own.argsort(stable=True)
    assert torch.equal(order[places], torch.arange(len(own)))
    assert torch.equal(rows, order.int() // 3)
    assert ends.tolist() == [int((own <= expert).sum()) for expert in range(5)]
