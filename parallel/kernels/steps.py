"""Calls of the kernels of this package: made at once, or recorded to be made later, all from one call into C++.

While a `Recorder` is active in a thread, the kernels that know how are not called there: their arguments become steps,
and the tensors for their results come from the recorder. `Steps.run` makes the calls, for any number of rows up to
that of the recording. What a recording may not contain is an operation of PyTorch, whose result no step would compute:
it raises `NotRecordable`. Knows no layers.
"""

from __future__ import annotations

import struct
import threading
import weakref
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from ctypes import Structure, addressof, c_int64, c_void_p
from functools import cache
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from parallel.kernels.library import function

_ORDER = (
    *("multiply_rows", "normalize_rms", "normalize_layer", "add_rows", "attend_rows"),
    *("gather_rows", "take_rows", "map_rows", "read_rows", "join_rows", "mix_rows", "weigh_rows"),
    *("choose_rows", "look_up_rows"),
)
"""The kernels that can be recorded, by their numbers in `steps.cpp`."""
_MOST_ARGUMENTS = 12
_active = threading.local()


class _Step(Structure):
    _fields_ = [("kernel", c_int64), ("given", c_int64), ("arguments", c_int64 * _MOST_ARGUMENTS)]


class NotRecordable(Exception):
    """What is being recorded has an operation that is no step."""


class Kernel:
    """One of the kernels; `rows` is the place of its argument that is a number of rows, None if it has none.

    Raises LookupError where there are no kernels.
    """

    def __init__(self, name: str, *argument_types: type, rows: int | None = None) -> None:
        found = function(name, *argument_types)
        if found is None:
            raise LookupError(name)
        self._function: Callable[..., Any] = found
        self._number = _ORDER.index(name)
        self._rows = rows

    def __call__(self, *arguments: float | None) -> None:
        recorder = recording()
        if recorder is None:
            self._function(*arguments)
        else:
            recorder.add(self._number, arguments, self._rows)


def recording() -> Recorder | None:
    """What records this thread's calls."""
    return getattr(_active, "recorder", None)


def room(num_rows: int, size: int, dtype: torch.dtype) -> Tensor:
    """A tensor [num_rows, size] for the result of a kernel, not initialised."""
    recorder = recording()
    return torch.empty(num_rows, size, dtype=dtype) if recorder is None else recorder.room(num_rows, size, dtype)


@cache
def _take() -> Kernel:
    return Kernel("take_rows", *[c_void_p] * 3, *[c_int64] * 4, rows=3)


def take_rows(table: Tensor, ids: Tensor, *, shift: int = 0, last: int = (1 << 63) - 1) -> Tensor:
    """The rows `ids` [T] + `shift` of a contiguous table, the row `last` for those behind it: [T, numbers of a row].

    A run of steps may be given a table with other rows than the recording's.
    """
    size = table.numel() // len(table)
    out = room(len(ids), size, table.dtype)
    _take()(table.data_ptr(), ids.data_ptr(), out.data_ptr(), len(ids), size * table.dtype.itemsize, shift, last)
    return out


@cache
def _join() -> Kernel:
    return Kernel("join_rows", *[c_void_p] * 3, *[c_int64] * 3, rows=3)


def join_rows(x: Tensor, other: Tensor) -> Tensor:
    """Rows x [T, n] and `other` [T, m] side by side, [T, n + m], by the kernel where it is being recorded."""
    if recording() is None:
        return torch.cat((x, other), -1)
    assert x.dtype == other.dtype, f"{x.dtype} beside {other.dtype}"
    x, other = x.contiguous(), other.contiguous()
    out, size = room(len(x), x.shape[1] + other.shape[1], x.dtype), x.dtype.itemsize
    _join()(x.data_ptr(), other.data_ptr(), out.data_ptr(), len(x), x.shape[1] * size, other.shape[1] * size)
    return out


class Arena:
    """Memory for the results of recorded calls. What belongs to a tensor that is gone is given out again, so that steps
    overwrite what no later step reads; and what belonged to one recording may belong to another."""

    def __init__(self) -> None:
        self._blocks: defaultdict[int, list[tuple[Tensor, weakref.ref[Tensor]]]] = defaultdict(list)

    def give(self, num_rows: int, size: int, dtype: torch.dtype) -> Tensor:
        """A tensor [num_rows, size] that overlaps no other one that is still there."""
        blocks = self._blocks[num_rows * size * dtype.itemsize]
        place = next((place for place, (_, user) in enumerate(blocks) if user() is None), len(blocks))
        block = torch.empty(num_rows, size, dtype=dtype) if place == len(blocks) else blocks[place][0]
        given = block.view(-1).view(dtype).view(num_rows, size)
        blocks[place : place + 1] = [(block, weakref.ref(given))]
        return given


_READS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "is_cpu", "requires_grad")),
    *(Tensor.__len__, Tensor.numel, Tensor.data_ptr),
}
"""What reads no number of a tensor and makes none."""


class Recorder(TorchFunctionMode):
    """A context in which this thread's kernels are recorded over tensors of `num_rows` rows.

    `given` are the addresses of what each run gives anew, by their order; before them comes the number of rows.
    """

    def __init__(self, arena: Arena, num_rows: int, given: Sequence[int]) -> None:
        super().__init__()
        self._arena = arena
        self._num_rows = num_rows
        self._given = {address: place for place, address in enumerate(given, 1)}
        self._steps: list[_Step] = []

    def __enter__(self) -> Self:
        assert recording() is None, "a recording has no other one inside"
        _active.recorder = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _active.recorder = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuses every function of PyTorch that would compute something."""
        if func in _READS:
            return func(*args)
        if func is Tensor.contiguous and args[0].is_contiguous():
            return args[0]
        raise NotRecordable(str(func))

    def room(self, num_rows: int, size: int, dtype: torch.dtype) -> Tensor:
        """A tensor for a result, which has the rows of the recording."""
        if num_rows != self._num_rows:
            raise NotRecordable(f"{num_rows} rows of a pass of {self._num_rows}")
        with torch._C.DisableTorchFunction():
            return self._arena.give(num_rows, size, dtype)

    def add(self, kernel: int, arguments: Sequence[float | None], rows: int | None) -> None:
        """The next call."""
        step = _Step(kernel=kernel)
        for place, argument in enumerate(arguments):
            value = _bits(argument)
            if place == rows:
                if value != self._num_rows:
                    raise NotRecordable(f"{value} rows of a pass of {self._num_rows}")
                value, step.given = 0, step.given | 1 << place
            elif value in self._given:
                value, step.given = self._given[value], step.given | 1 << place
            step.arguments[place] = value
        self._steps.append(step)

    def steps(self, results: Sequence[Tensor]) -> Steps:
        """What was recorded. These results are given by each run too, behind the others: memory of rows of their size,
        for what else was made in the same place too."""
        places = {tensor.data_ptr(): place for place, tensor in enumerate(results, 1 + len(self._given))}
        for step in self._steps:
            for place, value in enumerate(step.arguments):
                if value in places and not step.given >> place & 1:
                    step.arguments[place], step.given = places[value], step.given | 1 << place
        return Steps(self._steps, self._arena)


class Steps:
    """Recorded calls. Others keep the tensors that were there before the recording, at their addresses."""

    def __init__(self, steps: Sequence[_Step], arena: Arena) -> None:
        run = function("run_steps", c_void_p, c_int64, c_void_p, c_int64, c_int64)
        assert run is not None
        self._run = run
        self._steps = (_Step * len(steps))(*steps)
        self._address = addressof(self._steps)
        self._arena = arena

    def __len__(self) -> int:
        return len(self._steps)

    def run(self, *times: Sequence[int]) -> None:
        """Make the calls one or several times, each over the first rows of their tensors: their number, then the
        addresses that are given."""
        width = len(times[0])
        numbers = array("q", times[0] if len(times) == 1 else chain.from_iterable(times))
        assert len(numbers) == width * len(times)
        self._run(self._address, len(self._steps), numbers.buffer_info()[0], width, len(times))


def _bits(argument: float | None) -> int:
    """How the C++ source reads an argument from 64 bits."""
    if isinstance(argument, float):
        return int.from_bytes(struct.pack("<f", argument), "little")
    return int(argument or 0)
