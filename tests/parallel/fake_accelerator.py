"""A device of the test's own: its tensors compute on the CPU, but are not CPU tensors.

As on a GPU, an operation on tensors of both raises, results are on the device of their arguments, and reading a value
makes the host wait: `syncs` has the lines of our code that did. So does a copy of host memory that is not pinned, or
that is not asked to run on: those lines are in `blocking_uploads`. `launches` counts by name what would be kernels and
copies there. Active inside a `with` block, in its thread.
"""

from __future__ import annotations

import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "toy"
"""PyTorch has one spare type of devices, PrivateUse1, which a process can name once."""
_COPIES = {"_to_copy", "copy_", "_foreach_copy_", "to"}
_READS = {"_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "bincount"}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
_COPIES_NUMBERS = {"where", *_INDEXED}
"""A number on the host is an argument of other kernels; these copy it to the device, and wait."""
VIEWS = {
    "alias",
    "as_strided",
    "detach",
    "empty",
    "empty_like",
    "expand",
    "lift_fresh",
    "new_empty",
    "permute",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "t",
    "transpose",
    "unbind",
    "unsqueeze",
    "view",
    "_unsafe_view",
}
"""What launches nothing."""
_SOURCES = tuple(str(Path(__file__).parents[2] / package) for package in ("actors", "parallel"))


@cache
def toy_device() -> torch.device:
    """The device, which the first call makes known to PyTorch. Skips the test where there is a GPU: a process has one
    accelerator, whose pinned memory the tests beside this one need."""
    if torch.cuda.is_available():
        pytest.skip("counts on a device of its own, which would take the GPU's place in this process")
    if torch._C._get_privateuse1_backend_name() != NAME:
        _setup_privateuseone_for_python_backend(NAME)
    return torch.device(NAME, 0)


class DeviceTensor(torch.Tensor):
    """A tensor on the device; `on_cpu` has its numbers."""

    on_cpu: torch.Tensor

    @staticmethod
    def __new__(cls, on_cpu: torch.Tensor):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            on_cpu.shape,
            strides=on_cpu.stride(),
            storage_offset=on_cpu.storage_offset(),
            dtype=on_cpu.dtype,
            device=toy_device(),
        )
        made.on_cpu = on_cpu
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func}: a device tensor outside of its accelerator's block")

    def tolist(self):
        return self.to("cpu").tolist()

    def numpy(self, **_):
        raise TypeError("can't convert a device tensor to numpy: copy it to host memory first")

    def __repr__(self, **_):
        return f"DeviceTensor({self.on_cpu!r})"


class MixedDevices(RuntimeError):
    """An operation on tensors of the host and of the device."""


class _Literals(TorchFunctionMode):
    """`torch.tensor` of numbers, and an index that is a list, make a tensor below PyTorch's dispatcher: make it on the
    host, then copy it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "cpu").type == NAME:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if func is torch.Tensor.__getitem__ and isinstance(args[0], DeviceTensor) and isinstance(args[1], list):
            args = args[0], torch.tensor(args[1]).to(args[0].device)
        return func(*args, **kwargs)


class FakeAccelerator(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.syncs: list[str] = []
        self.blocking_uploads: list[str] = []
        self.launches: Counter[str] = Counter()
        self.device = toy_device()
        self._pinned: dict[int, torch.Tensor] = {}  # by address; kept, so that no other memory gets it
        self._literals = _Literals()

    @property
    def num_syncs(self) -> int:
        return len(self.syncs)

    def forget(self) -> None:
        """What waited until now, as for a model to be set up."""
        self.syncs.clear()
        self.blocking_uploads.clear()
        self.launches.clear()

    def __enter__(self):
        self._literals.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._literals.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name, is_mutable = _facts(func)
        leaves = leaves_of((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        ours = [leaf for leaf in given if isinstance(leaf, DeviceTensor)]
        asked = [leaf for leaf in leaves if isinstance(leaf, torch.device)]  # by name or by place
        target = asked[0] if asked else None
        to_device = bool(ours) if target is None else target.type == NAME
        if (ours or to_device) and name not in VIEWS:
            self.launches[name] += 1
        if name in _COPIES:
            self._count(name, args, kwargs, ours, to_device=to_device)
        elif ours:
            self._refuse_mixture(func, given, ours)
            if name in _COPIES_NUMBERS and len(ours) < len(given):
                self.blocking_uploads.append(_line())
        reads_mask = name in _INDEXED and any(index is not None and index.dtype == torch.bool for index in args[1])
        if ours and (name in _READS or reads_mask):
            self.syncs.append(_line())
        is_pinned = kwargs.pop("pin_memory", None)
        result = func(*_mapped(_unwrap, args), **_mapped(_unwrap, kwargs))
        if is_pinned:
            self._pinned[result.untyped_storage().data_ptr()] = result
        if is_mutable:  # returns what it was given
            same = {id(_unwrap(leaf)): leaf for leaf in given}
            return _mapped(lambda leaf: same.get(id(leaf), leaf), result)
        if name == "copy_" or not to_device:
            return result
        with torch.inference_mode(False):  # views of weights, which are no inference tensors, must be none either
            return _mapped(lambda leaf: DeviceTensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, result)

    def _count(self, name, args, kwargs, ours, *, to_device) -> None:
        into, source = args[:2] if name == "copy_" else (None, args[0])
        is_upload = isinstance(into, DeviceTensor) if into is not None else to_device
        if isinstance(source, DeviceTensor):
            if not is_upload:
                self.syncs.append(_line())
        elif is_upload and (ours or into is None):
            runs_on = kwargs.get("non_blocking", args[2] if name == "copy_" and len(args) > 2 else False)
            if not runs_on or source.untyped_storage().data_ptr() not in self._pinned:
                self.blocking_uploads.append(_line())

    def _refuse_mixture(self, func, given, ours) -> None:
        for leaf in given:
            if not isinstance(leaf, DeviceTensor) and leaf.dim():  # a number may be on the host
                shapes = [f"{tuple(one.shape)} on {one.device}" for one in given]
                raise MixedDevices(f"{func}: {', '.join(shapes)}")


@cache
def _facts(func) -> tuple[str, bool]:
    """Its name, and whether it writes to an argument."""
    return func._schema.name.partition("::")[2], func._schema.is_mutable


def leaves_of(values) -> list[Any]:
    """What tuples, lists and values of dictionaries hold; arguments and results of operations hold nothing else."""
    found, left = [], [values]
    while left:
        match left.pop():
            case dict() as some:
                left.extend(some.values())
            case tuple() | list() as some:
                left.extend(some)
            case leaf:
                found.append(leaf)
    return found[::-1]


def _mapped(call, value):
    match value:
        case dict():
            return {key: _mapped(call, one) for key, one in value.items()}
        case tuple() | list() if type(value) in (tuple, list):
            return type(value)([_mapped(call, one) for one in value])
    return call(value)


def _unwrap(leaf):
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    return leaf.on_cpu if isinstance(leaf, DeviceTensor) else leaf


def _line() -> str:
    """The line of the engine's code that is at work, or of a test."""
    frame = found = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_SOURCES):
        frame = frame.f_back
    found = frame or found
    return f"{found.f_code.co_filename}:{found.f_lineno}"
