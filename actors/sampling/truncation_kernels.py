"""A Triton kernel of top-k, top-p and min-p: one launch for all rows, without sorting.

`logits._least_kept` is the definition, and what runs without a GPU; tests compare the two under Triton's interpreter.
What a row keeps are the numbers from a threshold on, and the thresholds are found by search: above the least kept
number lie fewer than k tokens, or less than a share p of the mass. A program reads its row once per step of a search,
of which there are at most 16, since each compares with three numbers and there are 2^32; a row of a large vocabulary
stays in the GPU's cache. Masses are sums of float32 exponentials, in an order that no other row changes. Imported only
where scores lie on a GPU. Knows neither requests nor trees.
"""

# ruff: noqa: ANN001, ANN201, ANN202  types of kernels are Triton's
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _ordered(number):
    """float32 -> int64 in the same order."""
    bits = number.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _number(place):
    """The inverse of `_ordered`."""
    bits = place.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _least_with_less_above(row, size, lowest, largest, limit, WEIGHS: tl.constexpr, BLOCK: tl.constexpr):
    """The least number from `lowest` to `largest` above which the row has less than `limit` tokens, or mass."""
    first, last = _ordered(lowest), _ordered(largest)
    while first < last:
        a = first + (last - first) // 4
        b = first + (last - first) // 2
        c = first + 3 * (last - first) // 4
        above_a = tl.zeros([BLOCK], tl.float32)
        above_b = tl.zeros([BLOCK], tl.float32)
        above_c = tl.zeros([BLOCK], tl.float32)
        for start in range(0, size, BLOCK):
            place = start + tl.arange(0, BLOCK)
            x = tl.load(row + place, mask=place < size, other=-float("inf"))
            weight = tl.exp(x - largest) if WEIGHS else tl.full([BLOCK], 1.0, tl.float32)
            above_a += tl.where(x > _number(a), weight, 0.0)
            above_b += tl.where(x > _number(b), weight, 0.0)
            above_c += tl.where(x > _number(c), weight, 0.0)
        at_a = tl.sum(above_a.to(tl.float64), 0) < limit
        at_b = tl.sum(above_b.to(tl.float64), 0) < limit
        at_c = tl.sum(above_c.to(tl.float64), 0) < limit
        first = tl.where(at_a, first, tl.where(at_b, a + 1, tl.where(at_c, b + 1, c + 1)))
        last = tl.where(at_a, a, tl.where(at_b, b, tl.where(at_c, c, last)))
    return _number(first)


@triton.jit
def truncate_rows(scores, stride, top_ks, top_ps, shares, out, size, BLOCK: tl.constexpr):
    """Numbers that a row does not keep become -inf. Of a row that keeps all, top-k is `size`, top-p infinite and the
    logarithm of min-p -inf; a NaN stays."""
    index = tl.program_id(0)
    top_k, top_p, share = tl.load(top_ks + index), tl.load(top_ps + index), tl.load(shares + index)
    row = scores + index.to(tl.int64) * stride
    highest = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        highest = tl.maximum(highest, tl.load(row + place, mask=place < size, other=-float("inf")))
    largest = tl.max(highest, 0)

    is_cut = top_k < size
    lowest = tl.where(is_cut, -float("inf"), largest)  # no search
    kth = _least_with_less_above(row, size, lowest, largest, top_k.to(tl.float64), False, BLOCK)
    kth = tl.where(is_cut, kth, -float("inf"))
    least = largest + share
    floor = tl.maximum(kth, least)

    mass, num_reaching = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        x = tl.load(row + place, mask=place < size, other=-float("inf"))
        mass += tl.where(x >= floor, tl.exp(x - largest), 0.0)
        num_reaching += ((x >= kth) & (place < size)).to(tl.int32)
    total = tl.sum(mass.to(tl.float64), 0)
    num_tied = tl.sum(num_reaching, 0) - top_k  # ties of the last of k: kept, but their mass is not among that of k
    total -= tl.where(is_cut & (kth >= least), num_tied * tl.exp(kth - largest), 0.0)

    lowest = tl.where(top_p < 1.0, floor, largest)
    threshold = _least_with_less_above(row, size, lowest, largest, top_p * total, True, BLOCK)
    threshold = tl.where(top_p < 1.0, threshold, floor)
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        x = tl.load(row + place, mask=place < size, other=-float("inf"))
        kept = tl.where(x < threshold, -float("inf"), x)
        tl.store(out + index.to(tl.int64) * size + place, kept, mask=place < size)


def truncate(scores: Tensor, top_ks: Tensor, top_ps: Tensor, shares: Tensor) -> Tensor:
    """float32 scores [n, V] after top-k (int32 [n], V: all), top-p (float64 [n], infinite: all) and min-p (the float32
    logarithm [n], -inf: all). One launch."""
    num_rows, vocab_size = scores.shape
    out = torch.empty(num_rows, vocab_size, device=scores.device)
    if num_rows:
        scores = scores if scores.stride(1) == 1 else scores.contiguous()
        limits = top_ks, top_ps, shares
        kernel: Any = truncate_rows  # without the types of its arguments, which are others on the host
        kernel[num_rows,](scores, scores.stride(0), *limits, out, vocab_size, BLOCK=_BLOCK, num_warps=16)
    return out
