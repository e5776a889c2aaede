"""Triton kernels of what a layer does to each row between its matrix products: RMS norms, with or without the sum in
front of them, the gate of an MLP, and the way of a new row's queries, keys and values into attention.

Computes in float32 and rounds where PyTorch's operators would, so that both give the same numbers but for the order of
sums. Imports no PyTorch, as `triton_attention.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normalize_rows(
    x, added, weight, total, out, size, eps, ADDS: tl.constexpr, PLUS_ONE: tl.constexpr, BLOCK: tl.constexpr
):
    """One row [size]: `total` = x + added if ADDS; `out` = rms-normalised times weight, or 1 + weight."""
    row = tl.program_id(0).to(tl.int64) * size
    j = tl.arange(0, BLOCK)
    inside = j < size
    values = tl.load(x + row + j, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(added + row + j, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row + j, rounded, mask=inside)
        values = rounded.to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, 0) / size + eps)
    factors = tl.load(weight + j, mask=inside, other=0.0).to(tl.float32)
    if PLUS_ONE:
        values += values * factors
    else:
        values = values.to(out.dtype.element_ty).to(tl.float32) * factors
    tl.store(out + row + j, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_rows(x, out, size, BLOCK: tl.constexpr):
    """Part of a row [2 * size]: silu of the first half times the second."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = j < size
    gate = tl.load(x + row * 2 * size + j, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * size + size + j, mask=inside, other=0.0).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + j, (gate * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _as_stored(x, scale, FP8: tl.constexpr):
    """Returns x as it is, or divided by `scale` and rounded to what e4m3 can hold, ties to even: multiples of 2**-9
    below 2**-6, else 3 bits behind the leading one, at most 448. The interpreter's own cast rounds wrongly.
    """
    if FP8:
        x = tl.clamp(x.to(tl.float32) / scale, -448.0, 448.0)
        bits = x.to(tl.int32, bitcast=True)
        coarse = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, coarse)  # whose neighbours are 2**-9 away
    return x


@triton.jit
def store_heads(
    projected, cos, sin, q_norm, k_norm, keys, values, slots, stride, slot_stride, eps, key_scale, value_scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    NORMS: tl.constexpr, PLUS_ONE: tl.constexpr, ROTATES: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One head of one row of `projected` [T, heads + 2 kv_heads, 2 * HALF]: a query or a key is normalised and rotated,
    a query stays where it is, a key or a value goes to the row's slot, as FP8 if the pool is."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if not (NORMS or ROTATES):
        head += NUM_HEADS  # queries stay as they are
    j = tl.arange(0, BLOCK)
    inside = j < HALF
    source = projected + row * stride + head * (2 * HALF) + j
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + HALF, mask=inside, other=0.0)
    kind = projected.dtype.element_ty
    if head >= NUM_HEADS + NUM_KV_HEADS:
        kv_head = head - NUM_HEADS - NUM_KV_HEADS
        slot = values + tl.load(slots + row) * slot_stride + kv_head * (2 * HALF) + j
        stored = values.dtype.element_ty
        tl.store(slot, _as_stored(first, value_scale, FP8).to(stored), mask=inside)
        tl.store(slot + HALF, _as_stored(second, value_scale, FP8).to(stored), mask=inside)
        return
    if NORMS:
        low = first.to(tl.float32)
        high = second.to(tl.float32)
        scale = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / (2 * HALF) + eps)
        low *= scale
        high *= scale
        is_query = head < NUM_HEADS
        low_factor = tl.load(q_norm + j, mask=inside & is_query, other=0.0).to(tl.float32)
        high_factor = tl.load(q_norm + HALF + j, mask=inside & is_query, other=0.0).to(tl.float32)
        low_factor += tl.load(k_norm + j, mask=inside & (head >= NUM_HEADS), other=0.0).to(tl.float32)
        high_factor += tl.load(k_norm + HALF + j, mask=inside & (head >= NUM_HEADS), other=0.0).to(tl.float32)
        if PLUS_ONE:
            low += low * low_factor
            high += high * high_factor
        else:
            low = low.to(kind).to(tl.float32) * low_factor
            high = high.to(kind).to(tl.float32) * high_factor
        first = low.to(kind)
        second = high.to(kind)
    if ROTATES:
        turn = row * (2 * HALF) + j
        low = first.to(tl.float32)
        high = second.to(tl.float32)
        low_cos = tl.load(cos + turn, mask=inside, other=0.0).to(tl.float32)
        high_cos = tl.load(cos + turn + HALF, mask=inside, other=0.0).to(tl.float32)
        low_sin = tl.load(sin + turn, mask=inside, other=0.0).to(tl.float32)
        high_sin = tl.load(sin + turn + HALF, mask=inside, other=0.0).to(tl.float32)
        first = ((low * low_cos).to(kind).to(tl.float32) + high * low_sin).to(kind)
        second = ((high * high_cos).to(kind).to(tl.float32) + low * high_sin).to(kind)
    if head < NUM_HEADS:
        tl.store(source, first, mask=inside)
        tl.store(source + HALF, second, mask=inside)
    else:
        slot = keys + tl.load(slots + row) * slot_stride + (head - NUM_HEADS) * (2 * HALF) + j
        stored = keys.dtype.element_ty
        tl.store(slot, _as_stored(first, key_scale, FP8).to(stored), mask=inside)
        tl.store(slot + HALF, _as_stored(second, key_scale, FP8).to(stored), mask=inside)
