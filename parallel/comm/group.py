"""A group of ranks: the three collectives that layers use, and sends between two ranks.

A group of one is the identity of the collectives, not a special case.

Each group wraps a process-group object; torch's default group is never used. Knows neither how a group is formed
(`rendezvous.py`) nor what its ranks compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

if TYPE_CHECKING:
    from parallel.comm.symmetric import SymmetricBuffer

Number = TypeVar("Number", int, float)
Backend = Any
"""A `ProcessGroupGloo` or `ProcessGroupNCCL`, whose methods torch's type stubs leave out."""


class PeerLost(RuntimeError):
    """A rank of the group died or did not answer in time; the group cannot be used any more."""


class Sending(Protocol):
    """A tensor on its way to another rank; it must not be changed, nor this object be dropped, before `wait`."""

    def wait(self) -> None:
        """Wait until the tensor has left: at once if its receiver has it."""


class Captured(Protocol):
    """CUDA graphs of passes."""

    def drop(self) -> None:
        """Destroy the graphs; from any thread, also while one of them runs."""


class Group:
    """A rank's view of a set of ranks; this class is the group of one."""

    rank = 0
    size = 1
    is_abortable = True
    """Whether `interrupt` ends every wait for a peer. If not, a rank leaves the group by ending its process."""
    sums_in_order = False
    """Whether `all_reduce` adds the ranks' numbers in the order of the ranks, wherever they lie in the tensor."""
    generation = 0
    """Counts adoptions: a CUDA graph captured in an older generation uses closed connections."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, in place or in a new tensor; `tensor` is lost."""
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:  # noqa: ARG002  of the other groups
        """Concatenate the ranks' tensors, all of one shape, in rank order."""
        return tensor

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:  # noqa: ARG002  of the other groups
        """Overwrite `tensor` with that of rank `src`, in place."""
        return tensor

    def agree(self, numbers: Sequence[Number], device: torch.device | str) -> list[Number]:
        """The numbers of rank 0 on every rank, all of them whole or none: clocks, sums and records of ranks may differ,
        and what follows from them must not. They go through `device`, that of the group, but for a group of one."""
        if self.size == 1:
            return [*numbers]
        is_whole = all(isinstance(number, int) for number in numbers)
        dtype = torch.int64 if is_whole else torch.float64
        return self.broadcast(torch.tensor(numbers, dtype=dtype, device=device)).tolist()

    def send(self, tensor: Tensor, dst: int) -> Sending:
        """Begin to send a tensor to rank `dst`, which receives those of one sender in order."""
        raise PeerLost(f"a group of one has no rank {dst} to send {tuple(tensor.shape)} to")

    def receive(self, tensor: Tensor, src: int) -> Tensor:
        """Overwrite `tensor` with the next one from rank `src`, which must have this size and type."""
        raise PeerLost(f"a group of one has no rank {src} to receive {tuple(tensor.shape)} from")

    def adopt(self, successor: Group) -> None:
        """Continue with the connections of the next epoch's group, so that layers can keep this object."""

    def close(self) -> None:
        """Close the connections; a peer that waits for this rank gets an error at once."""

    def interrupt(self) -> None:
        """End waits that an absent peer would make endless, from another thread than the one that uses the group."""

    def check(self) -> None:
        """PeerLost if the group was closed: results of a pass that used it mean nothing."""

    def hold(self, captured: Captured) -> None:
        """Graphs that captured collectives of this group, to be dropped before its connections close."""


SINGLE = Group()


class _ConnectedGroup(Group):
    """Ranks that a process group of torch connects; it is dropped by `close` and replaced by `adopt`."""

    def __init__(self, backend: Backend) -> None:
        self._backend: Backend | None = backend
        self.rank = backend.rank()
        self.size = backend.size()
        self._captured: WeakSet[Captured] = WeakSet()

    def adopt(self, successor: Group) -> None:
        assert isinstance(successor, type(self))
        self._backend = successor._backend
        self.generation += 1

    def _connected(self) -> Backend:
        if self._backend is None:
            raise PeerLost("this rank has closed the group")
        return self._backend

    def check(self) -> None:
        self._connected()

    def hold(self, captured: Captured) -> None:
        self._captured.add(captured)


class GlooGroup(_ConnectedGroup):
    """CPU ranks. Collectives are stars around rank 0 over point-to-point transfers. For a pass's small tensors their
    latency is a fraction of that of gloo's ring, and sums in rank order give the same bits in every run."""

    def __init__(self, backend: Backend, timeout_s: float) -> None:
        super().__init__(backend)
        self._timeout = timedelta(seconds=timeout_s)
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

    def send(self, tensor: Tensor, dst: int) -> Sending:
        assert tensor.is_contiguous(), "a send needs a contiguous tensor"
        with _peer_errors():
            return _GlooSending(self._connected().send([tensor], dst, 0), tensor, self._timeout)

    def receive(self, tensor: Tensor, src: int) -> Tensor:
        assert tensor.is_contiguous(), "a receive needs a contiguous tensor"
        self._transfer(receives=[(tensor, src)])
        return tensor

    def close(self) -> None:
        """Dropping the last reference closes the sockets; gloo's `abort` would leave peers blocked."""
        self._backend = None

    def _transfer(self, sends: Iterable[tuple[Tensor, int]] = (), receives: Iterable[tuple[Tensor, int]] = ()) -> None:
        backend = self._connected()
        with _peer_errors():
            # post all before waiting for the first, and keep references: gloo cancels a work whose object is dropped
            works = [backend.recv([tensor], rank, 0) for tensor, rank in receives]
            works += [backend.send([tensor], rank, 0) for tensor, rank in sends]
            for work in works:
                work.wait(self._timeout)


@dataclass(slots=True, eq=False)
class _GlooSending:
    """Keeps the tensor and gloo's work, which gloo cancels once its object is dropped."""

    work: Backend
    tensor: Tensor
    timeout: timedelta

    def wait(self) -> None:
        with _peer_errors():
            self.work.wait(self.timeout)


@contextmanager
def _peer_errors() -> Iterator[None]:
    """What torch raises when a peer is gone, as `PeerLost`."""
    try:
        yield
    except PeerLost:
        raise
    except RuntimeError as error:
        raise PeerLost(str(error).strip().splitlines()[0]) from error


class NcclGroup(_ConnectedGroup):
    """CUDA ranks, one device each; collectives are enqueued on the current stream and may be captured in a graph.

    Small sums are those of `symmetric`, where there is one."""

    def __init__(self, backend: Backend, symmetric: SymmetricBuffer | None = None) -> None:
        super().__init__(backend)
        self._symmetric = symmetric

    @property
    def is_abortable(self) -> bool:
        return self._symmetric is None

    def adopt(self, successor: Group) -> None:
        assert isinstance(successor, NcclGroup)
        super().adopt(successor)
        self._symmetric = successor._symmetric

    def all_reduce(self, tensor: Tensor) -> Tensor:
        backend = self._connected()
        if self.sums_in_order and self.size > 2:  # two numbers have one sum
            return self._sum_in_order(tensor)
        if self._symmetric is not None and self._symmetric.takes(tensor):
            return self._symmetric.all_reduce(tensor)
        backend.allreduce([tensor]).wait()
        return tensor

    def _sum_in_order(self, tensor: Tensor) -> Tensor:
        """NCCL's sum begins at another rank in each piece of the tensor, and pieces depend on its size."""
        total, *terms = self._gathered(tensor).unbind(0)
        for term in terms:
            total = total + term
        return total

    def _gathered(self, tensor: Tensor) -> Tensor:
        parts = tensor.new_empty(self.size, *tensor.shape)
        self._connected()._allgather_base(parts, tensor.contiguous()).wait()
        return parts

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self._gathered(tensor).unbind(0), dim)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = src
        self._connected().broadcast([tensor], options).wait()
        return tensor

    def send(self, tensor: Tensor, dst: int) -> Sending:
        """The tensor is kept by the process group until it has left."""
        return self._connected().send([tensor], dst, 0)

    def receive(self, tensor: Tensor, src: int) -> Tensor:
        self._connected().recv([tensor], src, 0).wait()
        return tensor

    def close(self) -> None:
        """Abort rather than destroy: destroying would wait for ranks that may be dead.

        In this order: no collective begins any more, also in a capture; the graphs go, since `ncclCommAbort` waits
        until all are destroyed that captured a collective; the abort ends kernels that wait for a peer.
        """
        backend, self._backend = self._backend, None
        if backend is not None:
            for captured in list(self._captured):
                captured.drop()
            backend.abort()

    def interrupt(self) -> None:
        """A kernel that waits for a dead peer never ends by itself, and the host waits for the kernel."""
        self.close()
