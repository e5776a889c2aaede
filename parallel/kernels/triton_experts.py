"""Triton kernels of a mixture of experts: the choice of experts, the order of rows by expert, the sum of what experts
give; and the products of few rows, which read the matrices of the chosen experts where they are.

An entry is a row and one of its experts: entry e belongs to row e // K. Entries of experts that another rank holds,
before `first` or from `first` + `num_experts` on, are left out. Sums are in float32; numbers between two products are
rounded as PyTorch's operators round them. Imports no PyTorch, as `triton_attention.py`.
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def route_rows(
    scores, chosen, weights, num_experts,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """One row of `scores` [T, experts]: the K most probable experts, the first of equal ones, to `chosen` [T, K], and
    their probabilities, of all experts or with NORMALIZE of the K, to `weights` [T, K]."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    inside = j < num_experts
    values = tl.load(scores + row * num_experts + j, mask=inside, other=float("-inf")).to(tl.float32)
    values = tl.exp(values - tl.max(values, 0))
    values = tl.where(inside, values / tl.sum(values, 0), -1.0)
    k = tl.arange(0, BLOCK_K)
    best = tl.zeros([BLOCK_K], dtype=tl.float32)
    experts = tl.zeros([BLOCK_K], dtype=tl.int32)
    for i in tl.static_range(K):
        highest = tl.max(values, 0)
        expert = tl.min(tl.where(values == highest, j, BLOCK), 0)
        best = tl.where(k == i, highest, best)
        experts = tl.where(k == i, expert, experts)
        values = tl.where(j == expert, -1.0, values)
    if NORMALIZE:
        best = best / tl.sum(best, 0)
    tl.store(chosen + row * K + k, experts, mask=k < K)
    tl.store(weights + row * K + k, best.to(weights.dtype.element_ty), mask=k < K)


@triton.jit(do_not_specialize=["num_entries", "num_blocks"])
def sort_entries(
    chosen, places, rows, ends, num_entries, num_blocks, first, num_experts,
    K: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Where each entry of `chosen` [N] comes in the order of experts: `places` [N], `rows` [N] by place, and the
    `ends` [num_experts] of the places of each expert. The first `num_blocks` programs take BLOCK entries, the others
    BLOCK experts. Every program looks at all entries, which is for some thousands of them faster than a sort."""
    program = tl.program_id(0)
    is_of_entries = program < num_blocks
    one = (program - tl.where(is_of_entries, 0, num_blocks)) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(chosen + one, mask=is_of_entries & (one < num_entries), other=0) - first
    expert = tl.where((expert >= 0) & (expert < num_experts), expert, num_experts)
    expert = tl.where(is_of_entries, expert, one)
    last = tl.where(is_of_entries, one, num_entries)  # entries of the same expert count before this one
    before = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, num_entries, CHUNK):
        other = start + tl.arange(0, CHUNK)
        theirs = tl.load(chosen + other, mask=other < num_entries, other=0) - first
        theirs = tl.where((theirs >= 0) & (theirs < num_experts), theirs, num_experts)
        comes = (theirs[None, :] < expert[:, None]) | (
            (theirs[None, :] == expert[:, None]) & (other[None, :] < last[:, None])
        )
        before += tl.sum((comes & (other < num_entries)[None, :]).to(tl.int32), 1)
    if is_of_entries:
        tl.store(places + one, before, mask=one < num_entries)
        tl.store(rows + before, one // K, mask=one < num_entries)
    else:
        tl.store(ends + one, before, mask=one < num_experts)


@triton.jit
def feed_entries(
    x, chosen, gate_up, made, hidden, size, first, num_experts,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_N numbers of one entry's `made` [N, size]: silu of the first half of its expert's product times the second.
    `x` [T, hidden], `gate_up` [experts, 2 * size, hidden]."""
    entry = tl.program_id(0)
    expert = tl.load(chosen + entry) - first
    if (expert < 0) | (expert >= num_experts):
        return
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, BLOCK_K)
    is_output = n < size
    row = x + (entry // K).to(tl.int64) * hidden
    lines = gate_up + (expert.to(tl.int64) * 2 * size + n)[:, None] * hidden
    gate = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for start in range(0, hidden, BLOCK_K):
        k = start + j
        mask = is_output[:, None] & (k < hidden)[None, :]
        numbers = tl.load(row + k, mask=k < hidden, other=0.0).to(tl.float32)[None, :]
        gate += tl.load(lines + k[None, :], mask=mask, other=0.0).to(tl.float32) * numbers
        up += tl.load(lines + size * hidden + k[None, :], mask=mask, other=0.0).to(tl.float32) * numbers
    kind = made.dtype.element_ty
    opened = tl.sum(gate, 1).to(kind).to(tl.float32)
    opened = (opened / (1.0 + tl.exp(-opened))).to(kind).to(tl.float32)
    result = opened * tl.sum(up, 1).to(kind).to(tl.float32)
    tl.store(made + entry.to(tl.int64) * size + n, result.to(kind), mask=is_output)


@triton.jit
def give_entries(
    made, chosen, down, given, hidden, size, first, num_experts, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """BLOCK_N numbers of one entry's `given` [N, hidden]: its expert's product with `made` [N, size]. `down` [experts,
    hidden, size]."""
    entry = tl.program_id(0)
    expert = tl.load(chosen + entry) - first
    if (expert < 0) | (expert >= num_experts):
        return
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, BLOCK_K)
    is_output = n < hidden
    lines = down + (expert.to(tl.int64) * hidden + n)[:, None] * size
    total = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for start in range(0, size, BLOCK_K):
        k = start + j
        mask = is_output[:, None] & (k < size)[None, :]
        numbers = tl.load(made + entry.to(tl.int64) * size + k, mask=k < size, other=0.0).to(tl.float32)[None, :]
        total += tl.load(lines + k[None, :], mask=mask, other=0.0).to(tl.float32) * numbers
    tl.store(given + entry.to(tl.int64) * hidden + n, tl.sum(total, 1).to(given.dtype.element_ty), mask=is_output)


@triton.jit
def sum_entries(
    given, chosen, weights, places, out, hidden, first, num_experts,
    K: tl.constexpr, BLOCK: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """Part of one row of `out` [T, hidden]: the sum of what its experts give, times `weights` [T, K]. What an entry is
    `given` [N, hidden] lies at its place if SORTED."""
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for i in tl.static_range(K):
        entry = row * K + i
        expert = tl.load(chosen + entry) - first
        is_ours = (expert >= 0) & (expert < num_experts)
        place = entry
        if SORTED:
            place = tl.load(places + entry)
        numbers = tl.load(given + place.to(tl.int64) * hidden + n, mask=is_ours & (n < hidden), other=0.0)
        total += numbers.to(tl.float32) * tl.load(weights + entry).to(tl.float32)
    tl.store(out + row.to(tl.int64) * hidden + n, total.to(out.dtype.element_ty), mask=n < hidden)
