"""Muon in float32 and bfloat16."""

from __future__ import annotations

import pytest
import torch

from parallel.training import muon
from parallel.training.muon import Muon, orthogonalised

STEPS = ((3.4445, -4.7750, 2.0315), 5, 1e-7)


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (8, 8)])
def test_orthogonalising_brings_singular_values_near_one_and_keeps_directions(shape: tuple[int, int]):
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    left, values, right = torch.linalg.svd(orthogonalised(matrix, *STEPS), full_matrices=False)
    assert values.min() > 0.5 and values.max() < 1.3
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    assert (left @ right - u @ v).norm() < 0.35 * (u @ v).norm()


@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_steps_are_those_of_pytorchs_muon(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    """In bfloat16 to the bit, in float32 up to what bfloat16 rounds; a matrix without a gradient stays."""
    torch.manual_seed(0)
    start, gradients = torch.randn(shape), [torch.randn(shape) for _ in range(3)]

    def moved(dtype: torch.dtype | None) -> torch.Tensor:
        matrix, still = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
        monkeypatch.setattr(muon, "fast_dtype", lambda device: dtype)
        theirs = torch.optim.Muon([matrix, still], lr=0.1, adjust_lr_fn="match_rms_adamw")
        optimizer = Muon([matrix, still], lr=0.1) if dtype else theirs
        for gradient in gradients:
            matrix.grad = gradient.clone()
            optimizer.step()
        assert torch.equal(still, start) and list(optimizer.state) == [matrix]
        return matrix.detach()

    expected = moved(None)
    assert torch.equal(moved(torch.bfloat16), expected)
    close = moved(torch.float32)
    assert not torch.equal(close, expected)
    assert (close - expected).norm() < 0.05 * (expected - start).norm()


def test_a_cpu_without_bfloat16_iterates_in_float32(monkeypatch: pytest.MonkeyPatch):
    types = list[torch.dtype]()

    def noting(matrix: torch.Tensor, *_: object) -> torch.Tensor:
        types.append(matrix.dtype)
        return matrix

    monkeypatch.setattr(muon, "orthogonalised", noting)
    matrix = torch.nn.Parameter(torch.ones(4, 4))
    matrix.grad = torch.ones(4, 4)
    for has_bfloat16 in (False, True):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda has=has_bfloat16: has)
        Muon([matrix], lr=0.1).step()
    assert types == [torch.float32, torch.bfloat16]
