"""Triton kernels of attention over the slots of a KV pool: flash-decoding for ragged batches of trees.

A tile is up to BLOCK_M / GROUP rows of one sequence with all query heads of one KV head: each key is read once for
them. A work item is a tile and a range of its keys (FIELDS); the host cuts long sequences into more items, so that one
32k context beside short ones fills the device. `attend_items` computes an item; `merge_items` joins the items of a tile
that was cut, by their log-sum-exps. Keys are read where they are, through the table of slots: nothing is gathered, and
there is no mask tensor. Of the pending rows of a tree, a row sees those whose bits are set in its words.

With PATHS a row's result has the same bits whatever is computed beside it: each row of a tree is a tile of its own that
reads its ancestors one after the other, as a chain's row does; ranges of keys begin at multiples of a fixed number; and
every tile of keys takes the same instructions, masked ones, in which keys that a row does not see add exactly zero.

Accumulates in float32. Imports no PyTorch, so that a test compiles the kernels for a GPU without loading it.
"""

from __future__ import annotations

import triton
import triton.language as tl

FIELDS = (
    "first",  # the tile's first row in the pass
    "num_rows",
    "begin",  # keys of this item, as indices into the sequence's table
    "end",
    "whole",  # keys before this index are seen by every row of the tile
    "limit",  # keys up to this index are seen by the tile's first row without bits; in a chain each row sees one more
    "context",  # committed keys
    "table",  # start of the sequence's slots
    "words",  # start of the first row's bits over the pending keys, -1 for a chain
    "words_per_row",
    "depths",  # start of the depths of the pending keys, -1 for a chain; with PATHS of the pending keys that are seen
    "partial",  # where the result goes until it is merged, -1 if the tile is one item
)
_NUM_FIELDS = tl.constexpr(len(FIELDS))
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _attend_keys(
    acc, peak, total, q, keys, values, table, bits, depths,
    begin, end, limit, context, oldest, slot_stride, scale, softcap, is_chain, is_row,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PATHS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the keys from `begin` on, BLOCK_N at most and before `end`, to the running softmax."""
    n = begin + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    inside = n < end
    place = n
    if PATHS:
        on_path = inside & (n >= context) & (not is_chain)
        place = tl.where(on_path, context + tl.load(depths + n - context, mask=on_path, other=0), n)
    slot = tl.load(table + place, mask=inside, other=0).to(tl.int64) * slot_stride
    k = tl.load(keys + slot[None, :] + d[:, None], mask=inside[None, :] & (d < D)[:, None], other=0.0).to(q.dtype)
    scores = tl.dot(q, k, input_precision=PRECISION) * scale
    if CAPPED:  # softcap * tanh(score / softcap)
        scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores / softcap)))
    scores *= _LOG2_E
    if PATHS:
        seen = n[None, :] <= limit[:, None]
        if WINDOWED:
            seen = seen & (n[None, :] >= oldest[:, None])
        scores = tl.where(seen & inside[None, :], scores, float("-inf"))
    elif MASKED:
        offset = n - context
        within_bits = inside & (offset >= 0) & (not is_chain)
        word = tl.load(
            bits[:, None] + (offset >> 5)[None, :], mask=is_row[:, None] & within_bits[None, :], other=0
        )  # a chain reads none
        seen = (n[None, :] <= limit[:, None]) | (((word >> (offset & 31)[None, :]) & 1) == 1)
        if WINDOWED:
            depth = tl.load(depths + offset, mask=within_bits, other=0)
            position = tl.where(within_bits, context + depth, n)
            seen = seen & (position[None, :] >= oldest[:, None])
        scores = tl.where(seen & inside[None, :], scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # no key was seen yet
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(peak - base)
    v = tl.load(values + slot[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0).to(q.dtype)
    acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return acc, higher, total * decay + tl.sum(weights, 1)


@triton.jit
def attend_items(
    queries, keys, values, out, lse, partial, partial_lse, items, tables, positions, words, depths,
    query_stride, slot_stride, scale, value_scale, softcap, window,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, WANTS_LSE: tl.constexpr, PATHS: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One item and KV head. `queries` [T, >= heads * D], `keys`, `values` [slots, kv_heads, D], `out` [T, heads * D],
    `lse` [T, heads], `partial` [P, kv_heads, BLOCK_M, D] and `partial_lse` without D (base 2). Keys and values may be
    FP8, of which products are taken in the queries' type; `scale` is that of scores, the keys' scale included."""
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    item = items + tl.program_id(0) * _NUM_FIELDS
    num_rows = tl.load(item + 1)
    if num_rows == 0:  # an item of a rounded-up pass
        return
    first = tl.load(item)
    begin = tl.load(item + 2)
    end = tl.load(item + 3)
    whole = tl.load(item + 4)
    first_limit = tl.load(item + 5)
    context = tl.load(item + 6)
    table = tables + tl.load(item + 7)
    first_bits = tl.load(item + 8)
    words_per_row = tl.load(item + 9)
    first_depth = tl.load(item + 10)
    depths += first_depth
    place = tl.load(item + 11)
    is_chain = first_bits < 0
    if PATHS:
        is_chain = first_depth < 0

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    row = m // GROUP
    is_row = row < num_rows
    head = kv_head * GROUP + m % GROUP
    pass_row = (first + row).to(tl.int64)
    kept = is_row[:, None] & (d < D)[None, :]
    q = tl.load(queries + pass_row[:, None] * query_stride + head[:, None] * D + d[None, :], mask=kept, other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    limit = first_limit + tl.where(is_chain, row, 0)
    bits = words + first_bits + row * words_per_row
    keys += kv_head * D
    values += kv_head * D

    oldest = row
    unmasked = tl.maximum(tl.minimum(end, whole) - begin, 0) // BLOCK_N * BLOCK_N
    if WINDOWED:
        position = tl.load(positions + first + row, mask=is_row, other=1 << 30).to(tl.int32)
        oldest = position - window + 1
        first_key = tl.maximum(begin, tl.min(oldest, 0))  # a key's position is at most its index
        if PATHS:
            begin += (first_key - begin) // BLOCK_N * BLOCK_N  # where tiles of keys begin for every row
        else:
            begin = first_key
        unmasked = begin * 0
    if PATHS:
        unmasked = begin * 0
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    for n in range(begin, begin + unmasked, BLOCK_N):
        acc, peak, total = _attend_keys(
            acc, peak, total, q, keys, values, table, bits, depths,
            n, end, limit, context, oldest, slot_stride, scale, softcap, is_chain, is_row,
            D, BLOCK_N, BLOCK_D, False, WINDOWED, CAPPED, PATHS, PRECISION,
        )  # fmt: skip
    for n in range(begin + unmasked, end, BLOCK_N):
        acc, peak, total = _attend_keys(
            acc, peak, total, q, keys, values, table, bits, depths,
            n, end, limit, context, oldest, slot_stride, scale, softcap, is_chain, is_row,
            D, BLOCK_N, BLOCK_D, True, WINDOWED, CAPPED, PATHS, PRECISION,
        )  # fmt: skip

    result = acc / tl.where(total == 0.0, 1.0, total)[:, None] * value_scale
    sum_of_exp = tl.where(total == 0.0, float("-inf"), peak + tl.log2(tl.where(total == 0.0, 1.0, total)))
    if place < 0:
        at = pass_row * (num_kv_heads * GROUP) + head
        tl.store(out + at[:, None] * D + d[None, :], result.to(out.dtype.element_ty), mask=kept)
        if WANTS_LSE:
            tl.store(lse + at, sum_of_exp * _LN_2, mask=is_row)
    else:
        at = (place.to(tl.int64) * num_kv_heads + kv_head) * BLOCK_M + m
        tl.store(partial + at[:, None] * D + d[None, :], result, mask=kept)
        tl.store(partial_lse + at, sum_of_exp, mask=is_row)


@triton.jit
def merge_items(
    partial, partial_lse, rows, out, lse,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
    WANTS_LSE: tl.constexpr,
):  # fmt: skip
    """One row and head. `rows` [T, 3]: first partial result, their number, and the row's place in its tile. A row
    without any is whole already; one of -1, which pads a rounded-up pass, becomes zero."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1) // GROUP
    first = tl.load(rows + row * 3)
    count = tl.load(rows + row * 3 + 1)
    if count == 0:
        return
    m = tl.load(rows + row * 3 + 2) * GROUP + head % GROUP
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    peak = -float("inf")
    total = 0.0
    for start in range(0, count, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        at = ((first + p).to(tl.int64) * num_kv_heads + head // GROUP) * BLOCK_M + m
        sums = tl.load(partial_lse + at, mask=p < count, other=float("-inf"))
        results = tl.load(
            partial + at[:, None] * D + d[None, :], mask=(p < count)[:, None] & (d < D)[None, :], other=0.0
        )
        higher = tl.maximum(peak, tl.max(sums, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(sums - base)
        decay = tl.exp2(peak - base)
        acc = acc * decay + tl.sum(weights[:, None] * results, 0)
        total = total * decay + tl.sum(weights, 0)
        peak = higher
    divisor = tl.where(total == 0.0, 1.0, total)
    at = row.to(tl.int64) * tl.num_programs(1) + head
    tl.store(out + at * D + d, (acc / divisor).to(out.dtype.element_ty), mask=d < D)
    if WANTS_LSE:
        tl.store(lse + at, tl.where(total == 0.0, float("-inf"), peak + tl.log2(divisor)) * _LN_2)
