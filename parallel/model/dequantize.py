"""Rows and columns of a quantised matrix as codes, scales and zero points, from the tensors that hold them.

Only what a rank asks for is read and unpacked. Knows tensors; knows no files, ranks or layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from parallel.kernels.packed_products import Codes, can_pack
from parallel.kernels.packing import PER_WORD, Packing
from parallel.model.quantization import Quantization, Shape

_NIBBLE = 15
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in its word of each of 8 neighbouring outputs in AWQ."""
_EIGHT_BITS: dict[str, Literal["int8", "fp8"]] = {"F8_E4M3": "fp8", "I8": "int8"}
_SCALE_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """Some columns (inputs) of checkpoint matrix `name` [outputs, inputs], and the tensors that hold it."""

    name: str
    stored: Collection[str]
    shape: Shape
    columns: slice

    def scales(self) -> str:
        """The tensor of its scales."""
        (found,) = (one for one in self.stored if one != self.name and "scale" in one.rpartition(".")[2])
        return found

    def order(self) -> str | None:
        """The tensor with the group of every input, where there is one."""
        return next((one for one in self.stored if one.endswith("g_idx")), None)


def read_codes(quantization: Quantization, part: MatrixPart, rows: slice, get: Callable[[str], Any]) -> Codes:
    """Rows of the part; `get` gives each tensor as something to index."""
    module, shape = part.name.removesuffix(".weight"), part.shape
    (first, last, _), (start, stop, _) = rows.indices(shape[0]), part.columns.indices(shape[1])
    if quantization.method == "scaled":
        scales = get(part.scales())[...]
        if not scales.is_floating_point():
            raise ValueError(
                f"tensor {part.scales()} holds {scales.dtype}, not numbers; use a checkpoint with float scales"
            )
        scales, width = _scales(scales, quantization.block, shape, (first, last))
        groups = torch.arange(start, stop) // width
        return Codes(get(part.name)[first:last, start:stop], scales, None, groups)
    groups = torch.arange(start, stop) // (quantization.group or shape[1])
    if order := part.order():
        groups = get(order)[start:stop].to(torch.int64)
    if quantization.method == "packed":
        words = get(f"{module}.weight_packed")[first:last, start // PER_WORD : -(-stop // PER_WORD)]
        codes = _unpack(words)[:, start % PER_WORD :][:, : stop - start]
        return Codes(codes, get(part.scales())[first:last], None, groups)
    words_out = slice(first // PER_WORD, -(-last // PER_WORD))
    order_of_word = _AWQ_NIBBLES if quantization.method == "awq" else None
    own = slice(first % PER_WORD, first % PER_WORD + last - first)
    zeros = _unpack(get(f"{module}.qzeros")[:, words_out], order_of_word)[:, own]
    zeros = (zeros + quantization.zero_offset) & _NIBBLE
    if quantization.method == "awq":
        codes = _unpack(get(f"{module}.qweight")[start:stop, words_out], order_of_word)[:, own].T
    else:
        words = get(f"{module}.qweight")[start // PER_WORD : -(-stop // PER_WORD), first:last]
        codes = _unpack(words.T)[:, start % PER_WORD :][:, : stop - start]
    return Codes(codes, get(part.scales())[:, first:last].T, zeros.T, groups)


def packing_on(
    device: torch.device, quantization: Quantization, parts: Sequence[MatrixPart], get: Callable[[str], Any]
) -> tuple[Packing, torch.dtype] | None:
    """Returns what `common_packing` does, but None also where no kernel of this device multiplies by it."""
    found = common_packing(quantization, parts, get)
    return found if found is not None and can_pack(found[0], device) else None


def common_packing(
    quantization: Quantization, parts: Sequence[MatrixPart], get: Callable[[str], Any]
) -> tuple[Packing, torch.dtype] | None:
    """How parts of the same inputs can be kept as one matrix of codes, and the type of its scales; None if they are of
    several kinds, or if their inputs are in an order of their own."""
    group, kinds, types = 0, set[Literal["int4", "int8", "fp8"] | None](), set[str]()
    for part in parts:
        start, stop, _ = part.columns.indices(part.shape[1])
        scales, own = get(part.scales()), quantization.group
        types.add(scales.get_dtype())
        if quantization.method == "scaled":
            kinds.add(_EIGHT_BITS.get(get(part.name).get_dtype()))
            own = quantization.block[1] if _is_of_blocks(scales.get_shape(), part.shape) else 0
        else:
            kinds.add("int4")
            order = part.order()
            plain = torch.arange(start, stop) // (own or part.shape[1])
            if order and not torch.equal(get(order)[start:stop].to(torch.int64), plain):
                return None
        if own:
            group = math.gcd(group, own, start)  # a share that begins within a group has parts of groups
    kind = kinds.pop()
    if kinds or kind is None:
        return None
    scale_type = _SCALE_TYPES.get(types.pop(), torch.float32) if len(types) == 1 else torch.float32
    has_zeros = quantization.method in ("awq", "gptq")
    return Packing(kind, group, has_zeros, scale_type.itemsize), scale_type


def _is_of_blocks(scales: Sequence[int], shape: Shape) -> bool:
    """Whether scales of this shape are of blocks, not of all or of every row."""
    return math.prod(scales) != 1 and (math.prod(scales) != shape[0] or scales[0] != shape[0])


def _scales(scales: Tensor, block: tuple[int, int], shape: Shape, rows: tuple[int, int]) -> tuple[Tensor, int]:
    """The scales of some rows [n or 1, groups], and the inputs of a group: one for all, for every row or block."""
    if scales.numel() == 1:
        return scales.reshape(1, 1), shape[1]
    if not _is_of_blocks(scales.shape, shape):
        return scales.reshape(-1, 1)[slice(*rows)], shape[1]
    return scales[torch.arange(*rows) // block[0]], block[1]


def _unpack(words: Tensor, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 [n, m] -> their int4 numbers, uint8 [n, 8 m]; `order` is the place of each in its word."""
    pairs = words.contiguous().view(torch.uint8)  # the lowest bits first
    codes = torch.stack((pairs & _NIBBLE, pairs >> 4), -1).flatten(1)
    return codes if order is None else codes.unflatten(1, (-1, PER_WORD))[:, :, list(order)].flatten(1)
