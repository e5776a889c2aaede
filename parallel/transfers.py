"""Numbers between the host and a device: to it by a copy that nothing waits for, from it by one that the host waits on.

A copy from ordinary host memory makes the host wait for all that the device was given before, since the driver must not
leave that memory to be changed meanwhile: `torch.tensor(numbers, device=...)`, `.to(device)` of a host tensor, and an
index that is a list do so. What goes to a device during a pass therefore goes through pinned memory, which PyTorch
keeps until the copy is done. Knows no models.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes. Triton compiles a variant of a kernel for arguments at multiples of 16, another for those elsewhere."""
_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.float32): torch.float32,
    np.dtype(bool): torch.bool,
}


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy all arrays to the device in one transfer; there they are aligned views of one buffer."""
    if device.type == "cpu":
        return [torch.from_numpy(np.array(array)) for array in arrays]
    stops = np.cumsum([-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]).tolist()
    starts = [0, *stops[:-1]]
    packed = torch.zeros(stops[-1], dtype=torch.uint8, pin_memory=device.type != "meta")  # which computes nothing
    host = packed.numpy()
    for array, start in zip(arrays, starts, strict=True):
        host[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    moved = packed.to(device, non_blocking=True)
    views = []
    for array, start in zip(arrays, starts, strict=True):
        views.append(moved[start : start + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape))
    return views


def upload(
    values: Tensor | np.ndarray | Sequence[int] | Sequence[float], device: torch.device, dtype: type = np.int64
) -> Tensor:
    """One array of numbers on the device; a tensor that is there is returned as it is."""
    if isinstance(values, Tensor) and values.device.type == device.type:
        return values
    if device.type == "cpu":
        return torch.from_numpy(np.array(values, dtype=dtype))
    (tensor,) = to_device([np.asarray(values, dtype=dtype)], device)
    return tensor


def to_host(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """The numbers of tensors [n, any] of one device, of 53 bits at most, in one transfer: the host waits once."""
    if tensors[0].is_cpu:
        return [tensor.numpy() for tensor in tensors]
    packed = torch.cat([tensor.to(torch.float64) for tensor in tensors], 1).cpu().numpy()
    parts = np.split(packed, np.cumsum([tensor.shape[1] for tensor in tensors])[:-1], axis=1)
    kinds = {dtype: kind for kind, dtype in _DTYPES.items()}
    return [part.astype(kinds[tensor.dtype]) for part, tensor in zip(parts, tensors, strict=True)]
