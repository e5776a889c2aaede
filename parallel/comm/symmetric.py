"""Sums of small tensors over symmetric memory: a buffer on each GPU of a node that the other GPUs have mapped.

Each rank copies its tensor into its buffer. One kernel then waits for the other ranks, adds what all buffers hold in
the order of the ranks, so that all ranks have the same bits, and waits until the others have read too: one exchange of
signals in place of NCCL's chain of transfers. The kernel is PyTorch's `one_shot_all_reduce`, of which these rules were
read in the sources of 2.11 and 2.13:

- it takes float32 and bfloat16, and a multiple of 16 bytes is loaded at full width;
- its waits have no end, and nothing aborts them: where a rank dies, the others must end their processes;
- signals are zeroed when the buffer is allocated, so that a buffer whose ranks were interrupted is not used again;
- ranks find each other by the number of meetings of their processes, so that a new process cannot meet an older one;
- file descriptors are passed by process id, so that ranks must be processes.

Knows neither roles nor epochs. Never run on two GPUs.
"""

# torch.distributed re-exports its C++ classes without declaring so:
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import json
import logging
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

MOST_BYTES = {4: 1 << 19, 8: 1 << 18}
"""Largest tensor in bytes, by the number of ranks, since each reads the tensors of all: vLLM's bounds for its own
one-shot sum. Larger sums are NCCL's, and all those of more ranks."""
_DTYPES = (torch.float32, torch.bfloat16)
_WIDTH = 16
_met: list[str] = []
"""Names of the meetings that this process has tried."""


class SymmetricBuffer:
    """One rank's buffer, mapped by the `size` ranks that construct it together, each on a device of its own.

    RuntimeError if the devices cannot map each other's memory, or add wrongly.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device, name: str) -> None:
        from torch._C._distributed_c10d import _register_process_group
        from torch.distributed import _symmetric_memory as symmetric
        from torch.distributed.distributed_c10d import GroupName

        self._name = name
        self._ranks = dist.ProcessGroup(store, rank, size)  # PyTorch looks it up by name, and keeps no reference
        self._ranks._set_group_name(GroupName(name))
        _register_process_group(GroupName(name), self._ranks)
        self._most_bytes = next(most for ranks, most in MOST_BYTES.items() if size <= ranks)
        # not by `symmetric.empty`, whose pool gives freed buffers out again with the signals that were left in them
        memory = symmetric._SymmetricMemory
        self._bytes = memory.empty_strided_p2p((self._most_bytes,), (1,), torch.uint8, device)
        self._mapped = memory.rendezvous(self._bytes, name)
        found = self.all_reduce(torch.full((_WIDTH,), rank + 1.0, device=device))
        if found.tolist() != [size * (size + 1) / 2] * _WIDTH:
            raise RuntimeError(f"the ranks' numbers 1 to {size} add up to {found[0]:g}")

    def takes(self, tensor: Tensor) -> bool:
        """Whether this is the shorter way; the same on all ranks, since it depends on size and type alone."""
        return tensor.dtype in _DTYPES and 0 < tensor.nbytes <= self._most_bytes and tensor.nbytes % _WIDTH == 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum, in a new tensor. May be captured in a graph: the buffer stays where it is."""
        staged = self._bytes[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        staged.copy_(tensor)
        return torch.ops.symm_mem.one_shot_all_reduce(staged, "sum", self._name)


def meet(store: dist.Store, rank: int, size: int, device: torch.device, name: str) -> SymmetricBuffer | None:
    """A buffer on every rank, or None on every rank and a warning that says why."""
    places = [json.loads(place) for place in _exchange(store, rank, size, "place", json.dumps(_place(device)))]
    reasons = _exchange(store, rank, size, "obstacle", _obstacle(places, device))
    buffer = None
    if not any(reasons):
        _met.append(name)
        reason = ""
        try:
            buffer = SymmetricBuffer(dist.PrefixStore("symmetric", store), rank, size, device, name)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
        reasons = _exchange(store, rank, size, "result", reason)
    if not any(reasons):
        return buffer
    why = next(f"rank {i}: {reason}" for i, reason in enumerate(reasons) if reason)
    logging.getLogger("specdec.comm").warning("no-symmetric-memory", extra={"facts": {"why": why, "instead": "NCCL"}})
    return None


def _place(device: torch.device) -> tuple[list[str], int, int, int]:
    """Host and namespaces, process and device of this rank, and how many meetings the process has tried."""
    boot, spaces = Path("/proc/sys/kernel/random/boot_id"), [f"/proc/self/ns/{kind}" for kind in ("pid", "mnt")]
    host = [socket.gethostname(), boot.read_text().strip(), *map(os.readlink, spaces)]
    return host, os.getpid(), device.index, len(_met)


def _obstacle(places: list[tuple[list[str], int, int, int]], device: torch.device) -> str:
    """Why the ranks at these places cannot map each other's memory, empty if they may."""
    hosts, processes, devices, meetings = zip(*places, strict=True)
    if len(places) > max(MOST_BYTES):
        return f"more than {max(MOST_BYTES)} ranks"
    if any(host != hosts[0] for host in hosts):
        return "the ranks are on several hosts, or in several containers"
    if len(set(processes)) < len(places):
        return "ranks are threads of one process"
    if len(set(devices)) < len(places):
        return "ranks share a GPU"
    if any(meetings):
        return "a process has met before, and others may be new: restart the engine to have it again"
    far = [other for other in devices if other != device.index and not _reaches(device.index, other)]
    return f"cuda:{device.index} has no access to the memory of cuda:{far[0]}" if far else ""


def _reaches(device: int, other: int) -> bool:
    return torch.cuda.can_device_access_peer(device, other)


def _exchange(store: dist.Store, rank: int, size: int, key: str, value: str) -> list[str]:
    """The values of all ranks."""
    store.set(f"{key}/{rank}", f"={value}")  # a store takes no empty value for one that was set
    return [store.get(f"{key}/{other}").decode()[1:] for other in range(size)]
