"""Products of rows with a matrix on a device, by a kernel in `triton_products.py`, for rows whose numbers must not
depend on how many there are: PyTorch's choose tiles and the order of a sum by the number of rows. Knows no layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel.kernels.triton_launch import INTERPRETS, launch

_BLOCK_M = 64
_BLOCK_N = 64
_BLOCK_K = 64
_BLOCK_MERGED = 1024
_PROGRAMS = 264
"""Programs at least, by splitting the inputs of matrices with few outputs: two for each processor of an H100. Not the
device's own number, so that GPUs of different sizes split alike. Not measured."""
_LEAST_STEPS = 4


def multiply_fixed(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, inputs], matrix [outputs, inputs] of one type -> x @ matrix.T + bias, [T, outputs], with sums in float32.
    A row has the same bits whatever T is."""
    from parallel.kernels.triton_products import merge_parts, multiply_plain

    num_rows, (outputs, inputs) = len(x), matrix.shape
    out = x.new_empty(num_rows, outputs)
    tiles, num_steps = -(-outputs // _BLOCK_N), -(-inputs // _BLOCK_K)
    parts = min(-(-_PROGRAMS // tiles), max(1, num_steps // _LEAST_STEPS))
    steps_of_part = -(-num_steps // parts)
    parts = -(-num_steps // steps_of_part)
    is_cut = parts > 1
    sums = x.new_empty(parts, num_rows, outputs, dtype=torch.float32) if is_cut else out
    launch(
        multiply_plain,
        (-(-num_rows // _BLOCK_M), tiles, parts),
        x.contiguous(),
        matrix,
        x if bias is None else bias,
        sums,
        num_rows,
        outputs,
        inputs,
        steps_of_part,
        BLOCK_K=_BLOCK_K,
        BLOCK_N=_BLOCK_N,
        BLOCK_M=_BLOCK_M,
        HAS_BIAS=bias is not None and not is_cut,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        WIDEN=INTERPRETS and x.dtype == torch.bfloat16,  # the interpreter has no such products
        num_warps=4,
        num_stages=3 if x.dtype.itemsize == 2 else 2,
    )
    if is_cut:
        launch(
            merge_parts,
            (-(-out.numel() // _BLOCK_MERGED),),
            sums,
            x if bias is None else bias,
            out,
            out.numel(),
            outputs,
            PARTS=parts,
            HAS_BIAS=bias is not None,
            BLOCK=_BLOCK_MERGED,
        )
    return out
