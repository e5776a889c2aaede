"""A group of ranks and the three operations layers need of it. A group of one is the identity, not a special case.

The distributed groups wrap a process group that is an object of its own: nothing here touches torch's default group.
Knows nothing of how a group comes to be (`rendezvous.py`) and nothing of what its members compute.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroupGloo, ProcessGroupNCCL


class PeerLost(RuntimeError):
    """A rank of the group is gone, or did not answer in time; the group is of no further use."""


class Group:
    """A rank's view of a set of ranks; this class is the group of one."""

    rank = 0
    size = 1
    generation = 0
    """Counts adoptions: what was recorded over the connections of an older one is void."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Concatenate the ranks' tensors, which have one shape, in rank order."""
        return tensor

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Overwrite `tensor` with rank `src`'s, in place."""
        return tensor

    def adopt(self, successor: Group) -> None:
        """Go on with the connections of the next epoch's group: layers that hold this one need not be told."""

    def close(self) -> None:
        """Drop the connections; a peer that waits for this rank gets an error at once."""


SINGLE = Group()


class GlooGroup(Group):
    """CPU ranks. Collectives are stars around rank 0 over point-to-point transfers: a fraction of the latency of
    gloo's own ring for a pass's small tensors, and summed in rank order, so every run gives the same bits."""

    def __init__(self, backend: ProcessGroupGloo, timeout_s: float) -> None:
        self._backend = backend
        self._timeout = timedelta(seconds=timeout_s)
        self.rank = backend.rank()
        self.size = backend.size()
        self._others = range(1, self.size)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        assert tensor.is_contiguous(), "an in-place collective needs a contiguous tensor"
        if self.rank == 0:
            terms = [torch.empty_like(tensor) for _ in self._others]
            self._transfer(receives=zip(terms, self._others, strict=True))
            for term in terms:
                tensor += term
            self._transfer(sends=((tensor, rank) for rank in self._others))
        else:
            self._transfer(sends=[(tensor, 0)])
            self._transfer(receives=[(tensor, 0)])
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        tensor = tensor.contiguous()
        parts = tensor.new_empty(self.size, *tensor.shape)
        if self.rank == 0:
            parts[0] = tensor
            self._transfer(receives=((parts[rank], rank) for rank in self._others))
            self._transfer(sends=((parts, rank) for rank in self._others))
        else:
            self._transfer(sends=[(tensor, 0)])
            self._transfer(receives=[(parts, 0)])
        return torch.cat(parts.unbind(0), dim)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        assert tensor.is_contiguous(), "an in-place collective needs a contiguous tensor"
        if self.rank == src:
            self._transfer(sends=((tensor, rank) for rank in range(self.size) if rank != src))
        else:
            self._transfer(receives=[(tensor, src)])
        return tensor

    def adopt(self, successor: GlooGroup) -> None:
        self._backend = successor._backend

    def close(self) -> None:
        """The last reference closes the sockets: gloo's own `abort` leaves peers blocked."""
        self._backend = None

    def _transfer(self, sends: Iterable[tuple[Tensor, int]] = (), receives: Iterable[tuple[Tensor, int]] = ()) -> None:
        backend = self._backend
        if backend is None:
            raise PeerLost("this rank has closed the group")
        try:
            # all are posted before the first is awaited, and held until done: a dropped one would be cancelled
            works = [backend.recv([tensor], rank, 0) for tensor, rank in receives]
            works += [backend.send([tensor], rank, 0) for tensor, rank in sends]
            for work in works:
                work.wait(self._timeout)
        except RuntimeError as error:
            raise PeerLost(str(error).strip().splitlines()[0]) from error


class NcclGroup(Group):
    """CUDA ranks, one device each; collectives are enqueued on the current stream and may be captured in a graph."""

    def __init__(self, backend: ProcessGroupNCCL) -> None:
        self._backend = backend
        self.rank = backend.rank()
        self.size = backend.size()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._backend.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        parts = tensor.new_empty(self.size, *tensor.shape)
        self._backend._allgather_base(parts, tensor.contiguous()).wait()
        return torch.cat(parts.unbind(0), dim)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        options = torch.distributed.BroadcastOptions()
        options.rootRank = src
        self._backend.broadcast([tensor], options).wait()
        return tensor

    def adopt(self, successor: NcclGroup) -> None:
        self._backend = successor._backend
        self.generation += 1

    def close(self) -> None:
        """Abort rather than destroy: destroying would wait for ranks that may be dead."""
        if self._backend is not None:
            self._backend.abort()
            self._backend = None
