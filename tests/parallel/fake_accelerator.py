"""A device of the test's own: its tensors compute on the CPU, but are not CPU tensors.

As on a GPU, an operation on tensors of both raises, results are on the device of their arguments, and reading a value
makes the host wait: `num_syncs` counts that. What is made or copied from host memory is counted in `num_uploads`.
Active inside a `with` block, in its thread.
"""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "toy"
"""PyTorch has one spare type of devices, PrivateUse1, which a process can name once."""
_COPIES = {"_to_copy", "copy_", "_foreach_copy_", "to"}
_READS = {"_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2"}


def toy_device() -> torch.device:
    """The device, which the first call makes known to PyTorch."""
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
        self.num_syncs = self.num_uploads = 0
        self.device = toy_device()
        self._literals = _Literals()

    def __enter__(self):
        self._literals.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._literals.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func._schema.name.partition("::")[2]
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        ours = [leaf for leaf in given if isinstance(leaf, DeviceTensor)]
        asked = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.device)]  # by name or by place
        target = asked[0] if asked else None
        to_device = bool(ours) if target is None else target.type == NAME
        if name in _COPIES:
            self._count(name, args, ours, to_device=to_device)
        elif ours:
            self._refuse_mixture(func, given, ours)
        if name in _READS and ours:
            self.num_syncs += 1
        kwargs.pop("pin_memory", None)
        result = func(*tree_map(_unwrap, args), **tree_map(_unwrap, kwargs))
        if func._schema.is_mutable:  # returns what it was given
            same = {id(_unwrap(leaf)): leaf for leaf in given}
            return tree_map(lambda leaf: same.get(id(leaf), leaf), result)
        if name == "copy_" or not to_device:
            return result
        if target is not None and not ours and name not in _COPIES:
            self.num_uploads += bool(given)
        with torch.inference_mode(False):  # views of weights, which are no inference tensors, must be none either
            return tree_map(lambda leaf: DeviceTensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, result)

    def _count(self, name, args, ours, *, to_device) -> None:
        if name == "copy_":
            into, source = args[0], args[1]
            if isinstance(source, DeviceTensor) and not isinstance(into, DeviceTensor):
                self.num_syncs += 1
            elif isinstance(into, DeviceTensor) and not isinstance(source, DeviceTensor):
                self.num_uploads += 1
        elif ours and not to_device:
            self.num_syncs += 1
        elif to_device and not ours:
            self.num_uploads += 1

    def _refuse_mixture(self, func, given, ours) -> None:
        for leaf in given:
            if not isinstance(leaf, DeviceTensor) and leaf.dim():  # a number may be on the host
                shapes = [f"{tuple(one.shape)} on {one.device}" for one in given]
                raise MixedDevices(f"{func}: {', '.join(shapes)}")


def _unwrap(leaf):
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    return leaf.on_cpu if isinstance(leaf, DeviceTensor) else leaf
