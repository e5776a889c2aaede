"""Triton kernels of the Gumbel noise and of the race that it decides: the same integers as `noise.py`, in one launch.

`noise.py` is their definition, and what runs without a GPU; tests compare the two under Triton's interpreter. On a GPU
its thirty operations over rows of the vocabulary would each be a launch and a pass over memory; here the noise of the
race never leaves registers. Imported only where scores lie on a GPU. Knows neither requests nor trees.
"""

# ruff: noqa: ANN001, ANN202, PLR0124  types of kernels are Triton's; only NaN differs from itself
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _scrambled(words):
    """One round of lowbias32."""
    words ^= words >> 16
    words *= 0x7FEB352D
    words ^= words >> 15
    words *= 0x846CA68B
    words ^= words >> 16
    return words


@triton.jit
def _noise(keys, row, tokens):
    """Standard Gumbel noise of (key of the row, token); log1p(-u) is u * log(1 - u) / u, where the division undoes the
    rounding of 1 - u (Kahan), because Triton has no log1p."""
    high = tl.load(keys + 2 * row).to(tl.uint32, bitcast=True)
    low = tl.load(keys + 2 * row + 1).to(tl.uint32, bitcast=True)
    bits = _scrambled(_scrambled(tokens.to(tl.uint32) ^ high) ^ low)
    u = tl.minimum((bits.to(tl.float32) + 0.5) * (2.0**-32), 1.0 - 2.0**-24)
    rest = 1.0 - u
    lost = 1.0 - rest  # exact: what `rest` has of u
    exponential = tl.where(lost == 0.0, u, -tl.log(rest) * tl.div_rn(u, tl.where(lost == 0.0, 1.0, lost)))
    return -tl.log(exponential)


@triton.jit
def _fill_noise(keys, token_ids, row_stride, out, size, BLOCK: tl.constexpr):
    row, place = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    tokens = tl.load(token_ids + row * row_stride + place, mask=inside, other=0)
    tl.store(out + row.to(tl.int64) * size + place, _noise(keys, row, tokens), mask=inside)


@triton.jit
def _race_blocks(scores, row_stride, keys, sampled, first, best, winners, vocab_size, num_blocks, BLOCK: tl.constexpr):
    """The winner of each block of a row, the lowest token among ties; a block with a NaN has the value NaN."""
    row, block = tl.program_id(0), tl.program_id(1)
    place = block * BLOCK + tl.arange(0, BLOCK)
    inside = place < vocab_size
    raced = tl.load(scores + row.to(tl.int64) * row_stride + place, mask=inside, other=-float("inf"))
    if tl.load(sampled + row) != 0:
        raced += _noise(keys, row, first + place)
    value, index = tl.max(raced, 0, return_indices=True)
    is_broken = tl.max((raced != raced).to(tl.int32), 0) != 0
    tl.store(best + row * num_blocks + block, tl.where(is_broken, float("nan"), value))
    tl.store(winners + row * num_blocks + block, first + block * BLOCK + index)


@triton.jit
def _race_winners(best, winners, values, tokens, num_blocks, of_none, WIDTH: tl.constexpr):
    """The winner of each row among those of its blocks."""
    row, block = tl.program_id(0), tl.arange(0, WIDTH)
    raced = tl.load(best + row * num_blocks + block, mask=block < num_blocks, other=-float("inf"))
    value, index = tl.max(raced, 0, return_indices=True)
    is_broken = tl.max((raced != raced).to(tl.int32), 0) != 0
    token = tl.load(winners + row * num_blocks + tl.minimum(index, num_blocks - 1))
    has_none = is_broken | (tl.abs(value) == float("inf"))
    tl.store(values + row, tl.where(is_broken, float("nan"), value))
    tl.store(tokens + row, tl.where(has_none, of_none, token).to(tl.int64))


def _kernel(function: Any) -> Any:
    """The kernel without the types of its arguments, which are others on the host."""
    return function


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """`noise.gumbel` for keys int32 [n, 2] (high half, low half) and tokens int64 [m] or [n, m]: one launch."""
    shared = token_ids.dim() == 1
    token_ids = token_ids.contiguous()
    out = torch.empty(len(keys), token_ids.shape[-1], device=keys.device)
    if out.numel():
        grid = len(keys), -(-out.shape[1] // _BLOCK)
        _kernel(_fill_noise)[grid](keys, token_ids, 0 if shared else out.shape[1], out, out.shape[1], BLOCK=_BLOCK)
    return out


def race(scores: Tensor, keys: Tensor, sampled: Tensor, first: int, of_none: int) -> tuple[Tensor, Tensor]:
    """The largest [n] of scores [n, V] plus the noise of the rows `sampled` [n], and its token int64 [n]; `of_none`
    where it is infinite, or NaN because the row has one. Column i is token `first + i`. Two launches."""
    num_rows, vocab_size = scores.shape
    num_blocks = -(-vocab_size // _BLOCK)
    best = torch.empty(num_rows, num_blocks, device=scores.device)
    winners = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=scores.device)
    values = torch.empty(num_rows, device=scores.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    if num_rows:
        scores = scores if scores.stride(1) == 1 else scores.contiguous()
        inputs, outputs = (scores, scores.stride(0), keys, sampled, first), (best, winners)
        _kernel(_race_blocks)[num_rows, num_blocks](*inputs, *outputs, vocab_size, num_blocks, BLOCK=_BLOCK)
        width = 1 << (num_blocks - 1).bit_length()
        _kernel(_race_winners)[num_rows,](*outputs, values, tokens, num_blocks, of_none, WIDTH=width)
    return values, tokens
