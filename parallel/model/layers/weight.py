"""What a layer is made of: weights, how they are stored, and how rows are multiplied by them.

Layers are plain objects, not `torch.nn.Module`s: for a pass of one row the hooks and attribute look-ups of a module
cost as much as its kernels (a fifth of a small model's pass). Knows no ranks and no models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.kernels.products import LARGEST_CODE, Panels, has_products, look_up_rows, multiply_rounded
from parallel.kernels.steps import recording
from parallel.model.layers.activation import gated

if TYPE_CHECKING:
    from parallel.kernels.packed_products import PackedMatrix, PackedRows
    from parallel.kernels.packing import Packing

Stored = torch.dtype | Literal["packed", "w8a8"]
"""Form in which matrices are kept: a type of numbers; "packed": as codes where the checkpoint has them; "w8a8": as
int8, for rows that are rounded to int8 too."""
EVERY = slice(None)
_GROUPING_CAPABILITY = (9, 0)
"""Compute capability from which on PyTorch 2.11 multiplies groups of bfloat16 rows by a kernel."""


class TensorOptions(TypedDict):
    """Device on which a layer's tensors are allocated, and their type."""

    dtype: torch.dtype
    device: torch.device | str


class Layer:
    """Weights and how to apply them, for inference only."""

    is_invariant = False
    """Whether a row's results have the same bits whatever rows are computed beside it."""

    def keep_rows_apart(self) -> None:
        """Compute this layer invariantly from now on; call it for every layer of `walk`, after loading."""
        self.is_invariant = True

    def walk(self) -> Iterator[Layer]:
        """This layer and all layers within."""
        yield self
        for value in vars(self).values():
            for part in value if isinstance(value, list) else (value,):
                if isinstance(part, Layer):
                    yield from part.walk()

    def nbytes(self) -> int:
        """Bytes of all weights, shared ones counted once; constants do not count."""
        tensors = {id(value): value for part in self.walk() for value in vars(part).values()}
        return sum(value.nbytes for value in tensors.values() if isinstance(value, Tensor) and value.dim())


class QuantizedRows:
    """Rows of an int8 weight, to copy rows of a checkpoint to: each is rounded to multiples of its largest / 127.

    `columns` are the inputs that this rank holds. The factor is that of the whole row, so that the numbers, and with
    them the tokens, do not depend on the number of ranks.
    """

    def __init__(self, codes: Tensor, scales: Tensor, columns: slice) -> None:
        self._codes = codes
        self._scales = scales
        self._columns = columns

    @property
    def dtype(self) -> torch.dtype:
        return self._codes.dtype

    def copy_(self, rows: Tensor) -> None:
        rows = rows.float()
        torch.div(rows.abs().amax(1), LARGEST_CODE, out=self._scales)
        rows = rows[:, self._columns] / self._scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        self._codes.copy_(rows.round_())

    def normal_(self, *, std: float) -> None:
        """Any numbers of about this size, for measuring."""
        self._codes.random_(-LARGEST_CODE, LARGEST_CODE + 1)
        self._scales.fill_(2 * std / LARGEST_CODE)

    def aminmax(self) -> tuple[Tensor, Tensor]:
        """Not finite where a copied number was not."""
        return torch.aminmax(self._scales) if len(self._scales) else (torch.zeros(()), torch.zeros(()))

    def numel(self) -> int:
        return self._codes.numel()


@dataclass(frozen=True, slots=True)
class OpenRows:
    """Rows `own` of a weight whose checkpoint has still to say how they are kept."""

    weight: Weight
    own: slice


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a checkpoint tensor that this rank needs: `tensor[index]` is copied to `destination`; of its rows
    only `picked`, in that order, where they are given."""

    name: str
    index: tuple[slice, ...]
    destination: Tensor | QuantizedRows | PackedRows | OpenRows
    picked: tuple[int, ...] | None = None
    takes_codes: bool = False
    """The destination holds codes, as `PackedRows` does, not numbers."""

    def place(self) -> Tensor | QuantizedRows | PackedRows:
        """The destination, which is settled."""
        assert not isinstance(self.destination, OpenRows)
        return self.destination


class Weight(Layer):
    """A matrix [outputs, inputs] to multiply rows of type `dtype` by.

    `plain` holds it as the checkpoint does until `pack`, which on a CPU, where there is a compiler, puts it into the
    order of the kernel in `parallel/kernels/products.py` and leaves `plain` empty: nothing is kept twice. Elsewhere
    PyTorch multiplies by `plain`. `store_as` chooses a smaller type than `dtype` for what is kept; a weight that is
    stored as "packed" gets its room by `settle`, as codes for `parallel/kernels/packed_products.py` or plainly.
    """

    def __init__(self, outputs: int, inputs: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        self.outputs = outputs
        self.inputs = inputs
        self.dtype = dtype
        self.plain = torch.empty(outputs, inputs, dtype=dtype, device=device)
        self.scales: Tensor | None = None
        self.zeros: Tensor | None = None
        self.packed: Tensor | None = None
        self._panels: Panels | None = None
        self._codes: PackedMatrix | None = None
        self._is_open = False
        self.rounds_rows = False
        """Whether rows are rounded to int8, each by its largest number, before they are multiplied."""
        self.product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear
        """What multiplies rows by `plain` and adds a bias, where no kernel of the project does."""

    def store_as(self, stored: Stored) -> None:
        """Keep the weights as bfloat16, as int8 with a factor for every output, or packed; call it before loading. With
        "w8a8" they are int8."""
        device = self.plain.device
        if stored == "packed":
            self._is_open = True
            self.plain = torch.empty(0, dtype=self.dtype, device=device)
            return
        if stored == "w8a8":
            self.rounds_rows, stored = True, torch.int8
        self.plain = torch.zeros(self.plain.shape, dtype=stored, device=device)
        if stored == torch.int8:
            self.scales = torch.zeros(self.outputs, device=device)

    def settle(self, packing: Packing | None, scale_type: torch.dtype = torch.float32) -> None:
        """Make room for a weight stored as "packed": for codes, or for numbers of type `dtype`."""
        device, self._is_open = self.plain.device, False
        if packing is None:
            self.plain = torch.empty(self.outputs, self.inputs, dtype=self.dtype, device=device)
            return
        from parallel.kernels.packed_products import PackedMatrix

        matrix = self._codes = PackedMatrix(self.outputs, self.inputs, packing, scale_type, device)
        self.packed, self.scales, self.zeros = matrix.weights, matrix.scales, matrix.zeros

    def shard(self, name: str, rows: slice, columns: slice = EVERY, *, own: slice = EVERY) -> Shard:
        """Those rows and columns of a checkpoint's tensor, which are this weight's rows `own`."""
        if self._is_open:
            return Shard(name, (rows, columns), OpenRows(self, own))
        if self._codes is not None:
            return Shard(name, (rows, columns), self._codes.rows(own), takes_codes=True)
        if self.scales is None:
            return Shard(name, (rows, columns), self.plain[own])
        return Shard(name, (rows, EVERY), QuantizedRows(self.plain[own], self.scales[own], columns))

    def settled(self, shard: Shard) -> Shard:
        """The shard of rows that were open."""
        assert isinstance(shard.destination, OpenRows)
        return self.shard(shard.name, *shard.index, own=shard.destination.own)

    def pack(self) -> None:
        """Change to the order of the kernel, if it can run; call it after loading, and after loading again."""
        if self._panels is not None:
            if self.plain.numel():
                self._panels.assign(self.plain)
                self.plain = self.plain.new_empty(0)
            return
        on_cpu = self._codes is None and self.plain.device.type == "cpu"
        if on_cpu and self.dtype in (torch.float32, torch.bfloat16) and has_products():
            self._panels = Panels(self.plain, self.scales, self.dtype, rounds=self.rounds_rows)
            self.packed = self._panels.weights
            self.plain = self.plain.new_empty(0)

    def reopen(self) -> None:
        """Make room for other contents, which `pack` then puts where the present ones are; these serve until then."""
        if self._panels is not None:
            self.plain = torch.zeros(self.outputs, self.inputs, dtype=self._panels.weights.dtype)

    @property
    def panels(self) -> Panels | None:
        """The matrix in the order of the kernel, where that multiplies."""
        return self._panels

    @property
    def holds_codes(self) -> bool:
        """Whether it is kept as the codes of a quantised checkpoint."""
        return self._codes is not None

    @property
    def can_group(self) -> bool:
        """Whether PyTorch multiplies groups of rows by many such matrices at once, without the host."""
        is_plain = self._codes is None and self.scales is None and self.plain.dtype == self.dtype
        return is_plain and groups_on(self.plain.device, self.dtype) and not (self.inputs % 8 or self.outputs % 8)

    def clear(self) -> None:
        """Zero it, before it is packed or when it was loaded as codes."""
        if self._codes is not None:
            self._codes.clear()
        else:
            self.plain.zero_()

    @torch.inference_mode()
    def assign(self, matrix: Tensor) -> None:
        """Replace the contents in place, before or after `pack`, rounded as a checkpoint's are; of an unsplit weight
        that is not kept as codes.

        Captured passes read the new contents too.
        """
        assert self._codes is None, "codes of a checkpoint are not rounded again"
        plain = self.plain if self.packed is None else torch.empty(matrix.shape, dtype=self.packed.dtype)
        if self.scales is None:
            plain.copy_(matrix)
        else:
            QuantizedRows(plain, self.scales, EVERY).copy_(matrix)
        if self._panels is not None:
            self._panels.assign(plain)

    def keep_rows_apart(self) -> None:
        from parallel.kernels.fixed_products import multiply_fixed

        super().keep_rows_apart()
        self.product = multiply_fixed
        if self._codes is not None:
            self._codes.is_invariant = True

    def multiply(self, x: Tensor, bias: Tensor | None = None, largest: Tensor | None = None) -> Tensor:
        """x [T, inputs] -> [T, outputs]; `largest` float32 [T, 1] of rows that x has only parts of, if it
        `rounds_rows`."""
        if self._panels is not None:
            return self._panels.multiply(x, bias, largest=largest)
        if self._codes is not None:
            return self._codes.multiply(x, bias)
        if self.rounds_rows and self.scales is not None:
            return multiply_rounded(x, self.plain, self.scales, bias, largest)
        return self.product(x, self._widened(self.plain, self.scales), bias)

    def scores(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, inputs] -> [T, outputs]: logits, in float32 where the kernel can leave its sums unrounded."""
        return self.multiply(x, bias) if self._panels is None else self._panels.multiply(x, bias, wide=True)

    def multiply_gated(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, inputs] -> silu of the first half of the outputs times the second half, [T, outputs / 2]."""
        if self._panels is not None and self._panels.gates:
            return self._panels.multiply(x, bias, gated=True)
        return gated("silu", self.multiply(x, bias), apart=self.is_invariant)

    def look_up(self, ids: Tensor) -> Tensor:
        """ids [T] -> those rows of the matrix, [T, inputs]."""
        if self._panels is not None:
            return self._panels.rows(ids)
        if recording() is not None and self._codes is None:
            return look_up_rows(self.plain, self.scales, ids, self.dtype)
        return self._widened(F.embedding(ids, self.plain), None if self.scales is None else self.scales[ids])

    def _widened(self, rows: Tensor, scales: Tensor | None) -> Tensor:
        if scales is None:
            return rows.to(self.dtype)  # without effect where that is how they are stored
        return (rows * scales[:, None]).to(self.dtype)


def groups_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `grouped_mm` has a kernel there; elsewhere PyTorch reads on the host where groups end."""
    has_kernel = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _GROUPING_CAPABILITY
    return has_kernel and dtype == torch.bfloat16


def join_weights(weights: Sequence[Weight]) -> Tensor:
    """Make weights of one shape, kept as PyTorch multiplies by them, the parts of one tensor, which is returned:
    [weights, outputs, inputs]."""
    joined = torch.stack([weight.plain for weight in weights])
    for weight, part in zip(weights, joined, strict=True):
        weight.plain = part
    return joined
