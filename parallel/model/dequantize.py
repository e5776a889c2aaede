"""The numbers of a quantised matrix: rows and columns of it in float32, from the tensors that hold them.

Only what a rank asks for is read and unpacked. Knows tensors; knows no files, ranks or layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from parallel.model.quantization import PER_WORD, Quantization, Shape

_NIBBLE = 15
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ puts each of 8 neighbouring outputs in its word."""
_SYMMETRIC_ZERO = 8


def read_matrix(
    quantization: Quantization,
    name: str,
    stored: Collection[str],
    shape: Shape,
    index: tuple[slice, slice],
    get: Callable[[str], Any],
) -> Tensor:
    """`matrix[index]` in float32; `stored` are the tensors that hold it, `get` gives each as something to index."""
    module = name.removesuffix(".weight")
    (first, last, _), (start, stop, _) = (
        part.indices(size) for part, size in zip(index, shape, strict=True)
    )  # outputs, inputs
    if quantization.method == "scaled":
        (scale_name,) = (one for one in stored if one != name)
        scales = get(scale_name)[...]
        if not scales.is_floating_point():
            raise ValueError(
                f"tensor {scale_name} holds {scales.dtype}, not numbers; use a checkpoint with float scales"
            )
        values = get(name)[first:last, start:stop].to(torch.float32)
        return values.mul_(_scales(scales.float(), quantization.block, shape, (first, last), (start, stop)))
    order = next((one for one in stored if one.endswith("g_idx")), None)
    group = quantization.group or shape[1]
    groups = torch.arange(start, stop) // group if order is None else get(order)[start:stop].to(torch.int64)
    if quantization.method == "packed":
        words = get(f"{module}.weight_packed")[first:last, start // PER_WORD : -(-stop // PER_WORD)]
        codes = _unpack(words)[:, start % PER_WORD :][:, : stop - start]
        return (codes - _SYMMETRIC_ZERO) * get(f"{module}.weight_scale")[first:last].float()[:, groups]
    words_out = slice(first // PER_WORD, -(-last // PER_WORD))
    order_of_word = _AWQ_NIBBLES if quantization.method == "awq" else tuple(range(PER_WORD))
    own = slice(first % PER_WORD, first % PER_WORD + last - first)
    zeros = _unpack(get(f"{module}.qzeros")[:, words_out], order_of_word)[:, own]
    zeros = (zeros + quantization.zero_offset) & _NIBBLE
    if quantization.method == "awq":
        codes = _unpack(get(f"{module}.qweight")[start:stop, words_out], order_of_word)[:, own]
    else:
        words = get(f"{module}.qweight")[start // PER_WORD : -(-stop // PER_WORD), first:last]
        codes = _unpack(words.T.contiguous()).T[start % PER_WORD :][: stop - start]
    scales = get(f"{module}.scales")[:, first:last].float()
    return ((codes - zeros[groups]) * scales[groups]).T.contiguous()


def _scales(
    scales: Tensor, block: tuple[int, int], shape: Shape, rows: tuple[int, int], columns: tuple[int, int]
) -> Tensor:
    """The scales of some rows and columns: one for all, one for every row, or one for every block."""
    if scales.numel() == 1:
        return scales.reshape(1, 1)
    if scales.numel() == shape[0] and scales.shape[0] == shape[0]:
        return scales.reshape(-1, 1)[slice(*rows)]
    return scales[torch.arange(*rows) // block[0]][:, torch.arange(*columns) // block[1]]


def _unpack(words: Tensor, order: tuple[int, ...] = tuple(range(PER_WORD))) -> Tensor:
    """int32 [n, m] -> their int4 numbers, unsigned, int32 [n, 8 m]; `order` is the place of each in its word."""
    shifts = torch.tensor([4 * place for place in order], dtype=torch.int32)
    return (words[:, :, None] >> shifts).bitwise_and_(_NIBBLE).flatten(1)
