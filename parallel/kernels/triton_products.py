"""Triton kernels of products with a matrix of int4, int8 or FP8 codes, which become numbers in registers; and with one
of plain numbers in a fixed order of sums.

For the few rows of decoding and verification the time of a product is that of reading the matrix: `multiply_packed`
reads each code once for up to 64 rows. Outputs take the place of rows in the product of a tile, because there are
enough of them to fill a tensor core. Of matrices with few outputs several programs sum parts of the inputs, and
`merge_parts` adds these in a fixed order. `unpack_matrix` writes the numbers out, for the many rows of prompts.

Codes are exact in every type of numbers, and scales multiply sums in float32: nothing is rounded but the result.
Imports no PyTorch, as `triton_attention.py`. The order of codes: `packing.py`.
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

_FLOAT_BITS = tl.constexpr(0x4B000000)
"""2^23 as float32: bits added to it are an integer added to it, which takes no conversion."""
_FLOAT_BASE = tl.constexpr(8388608.0)
_SYMMETRIC_ZERO = tl.constexpr(8.0)


@triton.jit(do_not_specialize=["num_rows", "num_steps"])  # else Triton compiles variants for 1 and multiples of 16
def multiply_packed(
    x, codes, scales, zeros, bias, out, num_rows, outputs, inputs, num_words, num_steps,
    PER_WORD: tl.constexpr, SPAN: tl.constexpr, RUN: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows and BLOCK_N outputs over `num_steps` words of every output, times SPAN. `x` [T, inputs], `codes`
    [outputs, num_words], `scales` and `zeros` [groups, outputs], `out` [parts, T, outputs]. RUN times SPAN inputs have
    one scale; GROUP is 0 where all inputs have."""
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.arange(0, SPAN)
    is_output = n < outputs
    is_row = m < num_rows
    lines = codes + n.to(tl.int64)[:, None] * num_words + j[None, :]
    columns = x + m.to(tl.int64)[None, :] * inputs + j[:, None]
    first = tl.program_id(2) * num_steps
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    zero = tl.full([BLOCK_N], _SYMMETRIC_ZERO, dtype=tl.float32)
    if HAS_ZEROS and GROUP == 0:
        zero = tl.load(zeros + n, mask=is_output, other=0).to(tl.float32)
    for step in range(first, tl.minimum(first + num_steps, num_words // SPAN)):
        words = tl.load(lines + step * SPAN)  # whole tiles of it lie there
        for run in tl.static_range(PER_WORD // RUN):
            k = (step * PER_WORD + run * RUN) * SPAN
            if GROUP > 0:
                at = tl.minimum(k, inputs - 1) // GROUP * outputs + n  # after the last input the rows are zero
                if HAS_ZEROS:
                    zero = tl.load(zeros + at, mask=is_output, other=0).to(tl.float32)
                scale = tl.load(scales + at, mask=is_output, other=0.0).to(tl.float32)
                part = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
            else:
                part = acc
            for i in tl.static_range(RUN):
                rows = tl.load(
                    columns + (k + i * SPAN), mask=is_row[None, :] & (k + i * SPAN + j < inputs)[:, None], other=0.0
                )
                if WIDEN:
                    rows = rows.to(tl.float32)
                if PER_WORD > 1:
                    bits = ((words >> (4 * (run * RUN + i))) & 15) | _FLOAT_BITS
                    numbers = bits.to(tl.float32, bitcast=True) - (zero[:, None] + _FLOAT_BASE)
                else:
                    numbers = words
                part = tl.dot(numbers.to(rows.dtype), rows, part, input_precision=PRECISION)
            if GROUP > 0:
                acc += part * scale[:, None]
            else:
                acc = part
    if GROUP == 0:
        acc = acc * tl.load(scales + n, mask=is_output, other=0.0).to(tl.float32)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[:, None]
    out += tl.program_id(2).to(tl.int64) * num_rows * outputs
    at = m.to(tl.int64)[None, :] * outputs + n[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_steps"])
def multiply_plain(
    x, matrix, bias, out, num_rows, outputs, inputs, num_steps,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows and BLOCK_N outputs over `num_steps` times BLOCK_K inputs. `x` [T, inputs], `matrix` [outputs,
    inputs], `out` [parts, T, outputs]. Of a row's sums nothing depends on T."""
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_K)
    is_output = n < outputs
    is_row = m < num_rows
    lines = matrix + n.to(tl.int64)[:, None] * inputs + j[None, :]
    columns = x + m.to(tl.int64)[None, :] * inputs + j[:, None]
    first = tl.program_id(2) * num_steps
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for step in range(first, tl.minimum(first + num_steps, (inputs + BLOCK_K - 1) // BLOCK_K)):
        k = step * BLOCK_K
        inside = k + j < inputs
        numbers = tl.load(lines + k, mask=is_output[:, None] & inside[None, :], other=0.0)
        rows = tl.load(columns + k, mask=is_row[None, :] & inside[:, None], other=0.0)
        if WIDEN:
            numbers = numbers.to(tl.float32)
            rows = rows.to(tl.float32)
        acc = tl.dot(numbers, rows, acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[:, None]
    out += tl.program_id(2).to(tl.int64) * num_rows * outputs
    at = m.to(tl.int64)[None, :] * outputs + n[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])


@triton.jit
def merge_parts(partial, bias, out, size, outputs, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """`out` [size] = the sum of `partial` [PARTS, size], plus the bias of each output."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(partial + part * size + at, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + at % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def unpack_matrix(
    codes, scales, zeros, out, outputs, inputs, num_words,
    PER_WORD: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, HAS_ZEROS: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of SPAN words each: `out` [outputs, inputs], the numbers."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, SPAN)
    is_output = n < outputs
    step = tl.program_id(1)
    line = n.to(tl.int64)[:, None]
    words = tl.load(codes + line * num_words + step * SPAN + j[None, :])
    for i in tl.static_range(PER_WORD):
        k = (step * PER_WORD + i) * SPAN
        at = n
        if GROUP > 0:
            at += tl.minimum(k, inputs - 1) // GROUP * outputs
        scale = tl.load(scales + at, mask=is_output, other=0.0).to(tl.float32)
        if PER_WORD > 1:
            zero = tl.full([BLOCK_N], _SYMMETRIC_ZERO, dtype=tl.float32)
            if HAS_ZEROS:
                zero = tl.load(zeros + at, mask=is_output, other=0).to(tl.float32)
            numbers = ((words >> (4 * i)) & 15).to(tl.float32) - zero[:, None]
        else:
            numbers = words.to(tl.float32)
        numbers = (numbers * scale[:, None]).to(out.dtype.element_ty)
        tl.store(out + line * inputs + k + j[None, :], numbers, mask=is_output[:, None] & (k + j < inputs)[None, :])
