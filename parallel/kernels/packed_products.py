"""Products of rows with a matrix that stays packed, by the kernels in `triton_products.py`: what a quantised checkpoint
saves on disk, it saves in memory and in what a pass reads too. Knows no layers and no checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.kernels.packing import PER_WORD, Packing
from parallel.kernels.triton_launch import INTERPRETS, block_size, launch, runs_on

MOST_ROWS = 256
"""Above this a product writes the numbers out for PyTorch's: then it is limited by arithmetic, and a second copy of the
matrix in the caches costs less than dequantising it for every tile of rows. Not measured."""
_BLOCK_N = 64
_LARGEST_BLOCK_M = 64
_BLOCK_MERGED = 1024
_PROGRAMS_PER_PROCESSOR = {"int4": 4, "int8": 2, "fp8": 2}
"""Smallest numbers, reached by splitting the inputs: the fastest of 1, 2, 4 and 8 on an H100 (`docs/gpu/h100.md`; int8
as FP8, whose tiles are alike)."""
_STAGES = {"int4": 2, "int8": 3, "fp8": 3}
"""Measured in the same way."""
_PROCESSORS = 132
"""Processors of an H100, which stand for those of a device that does not tell their number."""
_CODES = {"int4": torch.int32, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
_SYMMETRIC_ZERO = 8


@dataclass(frozen=True, slots=True)
class Codes:
    """Some rows and columns of a quantised matrix: (values - zeros[:, groups]) * scales[:, groups]."""

    values: Tensor
    """[n, k] in FP8 or int8, or uint8 of 4 bits."""
    scales: Tensor
    """[n or 1, groups]."""
    zeros: Tensor | None
    """[n, groups] uint8; None: 8 for values of 4 bits, else 0."""
    groups: Tensor
    """[k]: the group of each column."""

    def numbers(self) -> Tensor:
        """[n, k] in float32."""
        values, scales = self.values.to(torch.float32), self.scales.float()
        if self.zeros is not None:
            values -= self.zeros.float()[:, self.groups]
        elif self.values.dtype == torch.uint8:
            values -= _SYMMETRIC_ZERO
        return values.mul_(scales if scales.shape[1] == 1 else scales[:, self.groups])


def can_pack(packing: Packing, device: torch.device) -> bool:
    """Whether the kernels take such a matrix on this device; FP8 needs compute capability 8.9."""
    if not packing.has_kernel or not runs_on(device):
        return False
    return packing.kind != "fp8" or device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


class PackedMatrix:
    """A matrix [outputs, inputs] of codes, to multiply rows of a type `dtype` by. `rows` are filled one after the
    other."""

    is_invariant = False

    def __init__(
        self, outputs: int, inputs: int, packing: Packing, scale_type: torch.dtype, device: torch.device | str
    ) -> None:
        assert packing.has_kernel
        assert scale_type.itemsize == packing.scale_bytes
        self.outputs, self.inputs, self.packing = outputs, inputs, packing
        shape = packing.num_groups(inputs), outputs  # neighbouring outputs are read together
        padded = -(-outputs // _BLOCK_N) * _BLOCK_N  # so that the kernels read whole tiles
        codes = torch.zeros(padded, packing.num_words(inputs), dtype=_CODES[packing.kind], device=device)
        self.weights = codes[:outputs]
        self.scales = torch.zeros(shape, dtype=scale_type, device=device)
        self.zeros = torch.zeros(shape, dtype=torch.uint8, device=device) if packing.has_zeros else None
        processors = _PROCESSORS
        if self.weights.is_cuda:
            processors = torch.cuda.get_device_properties(self.weights.device).multi_processor_count
        # by the matrix alone: a row's sums do not depend on how many rows there are
        tiles, num_steps = -(-outputs // _BLOCK_N), packing.num_words(inputs) // packing.span
        parts = min(-(-_PROGRAMS_PER_PROCESSOR[packing.kind] * processors // tiles), max(1, num_steps // 2))
        self.num_steps = -(-num_steps // parts)
        self.num_parts = -(-num_steps // self.num_steps)
        span, group = packing.span, packing.group
        run = packing.per_word
        while group and group % (run * span):
            run //= 2
        self._shape = {"PER_WORD": packing.per_word, "SPAN": span, "GROUP": group, "HAS_ZEROS": packing.has_zeros}
        self._run = run

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, inputs] -> x @ matrix.T + bias, [T, outputs] in the type of x, with sums in float32. If `is_invariant`,
        a row has the same bits whatever T is."""
        from parallel.kernels.triton_products import merge_parts, multiply_packed

        num_rows = len(x)
        if num_rows > MOST_ROWS and not self.is_invariant:
            return torch.nn.functional.linear(x, self.unpacked(x.dtype), bias)
        out = x.new_empty(num_rows, self.outputs)
        is_cut = self.num_parts > 1
        parts = x.new_empty(self.num_parts, *out.shape, dtype=torch.float32) if is_cut else out
        block_m = _LARGEST_BLOCK_M if self.is_invariant else min(_LARGEST_BLOCK_M, block_size(num_rows))
        launch(
            multiply_packed,
            (-(-num_rows // block_m), -(-self.outputs // _BLOCK_N), self.num_parts),
            x.contiguous(),
            self.weights,
            self.scales,
            self.scales if self.zeros is None else self.zeros,
            x if bias is None else bias,
            parts,
            num_rows,
            self.outputs,
            self.inputs,
            self.weights.shape[1],
            self.num_steps,
            **self._shape,
            RUN=self._run,
            BLOCK_N=_BLOCK_N,
            BLOCK_M=block_m,
            HAS_BIAS=bias is not None and not is_cut,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            WIDEN=INTERPRETS and x.dtype == torch.bfloat16,  # the interpreter has no such products
            num_warps=4,
            num_stages=_STAGES[self.packing.kind],
        )
        if is_cut:
            launch(
                merge_parts,
                (-(-out.numel() // _BLOCK_MERGED),),
                parts,
                x if bias is None else bias,
                out,
                out.numel(),
                self.outputs,
                PARTS=self.num_parts,
                HAS_BIAS=bias is not None,
                BLOCK=_BLOCK_MERGED,
            )
        return out

    def rows(self, own: slice) -> PackedRows:
        """These rows, to copy codes to."""
        return PackedRows(self, own)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """The numbers, [outputs, inputs], rounded to `dtype`."""
        from parallel.kernels.triton_products import unpack_matrix

        out = self.scales.new_empty(self.outputs, self.inputs, dtype=dtype)
        launch(
            unpack_matrix,
            (-(-self.outputs // _BLOCK_N), self.weights.shape[1] // self.packing.span),
            self.weights,
            self.scales,
            self.scales if self.zeros is None else self.zeros,
            out,
            self.outputs,
            self.inputs,
            self.weights.shape[1],
            **self._shape,
            BLOCK_N=_BLOCK_N,
        )
        return out

    def clear(self) -> None:
        """Make every number zero."""
        self.scales.zero_()


class PackedRows:
    """Rows of a packed matrix, to copy rows of a checkpoint to."""

    def __init__(self, matrix: PackedMatrix, own: slice) -> None:
        self._matrix = matrix
        self._weights, self._scales = matrix.weights[own], matrix.scales[:, own]
        self._zeros = None if matrix.zeros is None else matrix.zeros[:, own]

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.dtype

    def copy_(self, codes: Codes) -> None:
        """Whose groups are those of the packing, or are divided by them."""
        packing, (num_rows, inputs) = self._matrix.packing, codes.values.shape
        firsts = codes.groups[:: packing.group or inputs]
        _send(codes.scales[:, firsts].expand(num_rows, -1).T, self._scales)
        if self._zeros is not None:
            assert codes.zeros is not None
            _send(codes.zeros[:, firsts].T, self._zeros)
        room = packing.num_words(inputs) * packing.per_word
        values = codes.values.new_zeros(num_rows, room)
        values[:, :inputs] = codes.values
        if packing.kind == "int4":
            shape = num_rows, -1, PER_WORD // 2, 2, packing.span
            low, high = values.view(shape).unbind(3)  # [outputs, stretches, bytes of a word, span]
            words = (low | high << 4).transpose(2, 3).contiguous()
            values = words.view(torch.int32).view(num_rows, -1)
        _send(values, self._weights)

    def normal_(self, *, std: float) -> None:
        """Any numbers of about this size, for measuring."""
        random = torch.randint_like(self._weights.view(torch.int8), -128, 128)
        if self._matrix.packing.kind == "fp8":
            random.bitwise_and_(0b10111111)  # finite, and below 2
        self._weights.view(torch.int8).copy_(random)
        largest = {"int4": 8, "int8": 128, "fp8": 2}[self._matrix.packing.kind]
        self._scales.fill_(2 * std / largest)
        if self._zeros is not None:
            self._zeros.fill_(_SYMMETRIC_ZERO)

    def aminmax(self) -> tuple[Tensor, Tensor]:
        """Not finite where a copied number was not."""
        if self._weights.dtype == torch.float8_e4m3fn and ((self._weights.view(torch.uint8) & 127) == 127).any():
            return torch.full((), torch.nan), torch.full((), torch.nan)
        return torch.aminmax(self._scales.float())

    def numel(self) -> int:
        return self._weights.numel()


def _send(source: Tensor, place: Tensor) -> None:
    """Copies to a GPU from pinned memory: a copy from pageable memory runs at a fraction of the bus."""
    place.copy_(source.contiguous().pin_memory() if place.is_cuda else source)
