"""Forms process groups, one set per epoch, over a store that outlives them.

The coordinator's process hosts the store; every rank connects its own client and joins its groups. After a rank died
the others close their groups and join those of the next epoch under the same names. No default group, no environment
variables, no global ranks: ranks may be processes or threads of one process.

PyTorch's TCPStore answers every process that reaches it, so it serves several machines only: threads of one process
meet in its memory, and processes of one machine in a file that their user alone can open.
"""

# torch.distributed re-exports its C++ classes without declaring so:
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import itertools
import math
import os
import socket
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from weakref import WeakValueDictionary

import psutil
import torch
import torch.distributed as dist

from parallel.comm.group import SINGLE, Backend, GlooGroup, Group, NcclGroup, PeerLost

LOOPBACK = "127.0.0.1"
_MEMORY = "memory"
_NUMBERS = itertools.count(1)
_IN_MEMORY: WeakValueDictionary[int, HostedStore] = WeakValueDictionary()


class HostedStore:
    """A store that ranks find at `place`, by `connect_store`, as long as this object is kept."""

    def __init__(self, place: tuple[str, int], store: dist.Store | None = None) -> None:
        self.place = place
        self.store = store


def store_in_memory() -> HostedStore:
    """A store for threads of this process."""
    hosted = HostedStore((_MEMORY, next(_NUMBERS)), dist.HashStore())
    _IN_MEMORY[hosted.place[1]] = hosted
    return hosted


def store_in_file(folder: Path) -> HostedStore:
    """A store for processes of this user on this machine. The file is in a folder of mode 0700 in `folder`, and left
    there."""
    path = Path(tempfile.mkdtemp(prefix="store-", dir=folder)) / "store"
    path.touch()
    return HostedStore((str(path), 0))


def store_on_network(host: str) -> HostedStore:
    """A store for all processes that reach this address."""
    store = host_store(host)
    return HostedStore((host, store.port), store)


def host_store(host: str = LOOPBACK) -> dist.TCPStore:
    """Serve a store at this address, at the returned object's `port`; it is closed with that object.

    The socket is made here, because PyTorch's own listens on every interface.
    """
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(host, port, None, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def connect_store(host: str, port: int, timeout_s: float = 60.0) -> dist.Store:
    """A client of the hosted store at this place. One per rank: a client that waits for a key blocks its other users.

    PeerLost if it is gone or the host does not answer; PyTorch tries for up to twice `timeout_s`.
    """
    if host == _MEMORY or host.startswith("/"):
        return _connect_here(host, port)
    try:
        return dist.TCPStore(host, port, None, is_master=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise PeerLost(f"the store at {host}:{port} does not answer ({str(error).partition(chr(10))[0]})") from error


def _connect_here(path: str, number: int) -> dist.Store:
    hosted = _IN_MEMORY.get(number)
    if path == _MEMORY and hosted is not None and hosted.store is not None:
        return hosted.store
    if path == _MEMORY or not os.path.exists(path):
        raise PeerLost(f"the store in {path} is gone")
    return dist.FileStore(path, -1)  # not deleted by the last client that leaves: there is another epoch


def join(
    store: dist.Store | None,
    name: str,
    epoch: int,
    rank: int,
    size: int,
    device: torch.device | str = "cpu",
    timeout_s: float = 60.0,
    host: str | None = None,
    meeting_s: float | None = None,
    *,
    symmetric: bool = False,
) -> Group:
    """Join group `name` of `epoch`; blocks until all its ranks have joined, PeerLost after `meeting_s`.

    `timeout_s` bounds every later wait for a peer and is the default of `meeting_s`. `host` is the address at which
    peers reach this machine, by default the loopback; no other is listened on. `symmetric`: sums go over symmetric
    memory where GPUs have it. A group of one needs no store.
    """
    if size == 1:
        return SINGLE
    assert store is not None, "a group of several ranks needs a store"
    device = torch.device(device)
    meeting = dist.PrefixStore(f"e{epoch}/{name}", store)
    meeting_s = timeout_s if meeting_s is None else meeting_s
    meeting.set_timeout(timedelta(seconds=meeting_s))
    try:
        if device.type == "cuda":
            if interface := interface_of(host or LOOPBACK):
                os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
            by_memory = f"{name}-{epoch}" if symmetric else None
            return nccl_group(meeting, rank, size, device, timeout_s, by_memory, meeting_s=meeting_s)
        return _gloo_group(meeting, rank, size, timeout_s, host or LOOPBACK, meeting_s)
    except RuntimeError as error:
        raise PeerLost(
            f"group {name!r} of epoch {epoch}: rank {rank} could not meet all {size} ranks in {meeting_s:g} s ({error})"
        ) from error


def interface_of(address: str) -> str:
    """Name of this machine's network interface with the address, or empty: it may be translated on the way."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, found in interfaces if address in {one.address for one in found}), "")


def _gloo_group(store: dist.Store, rank: int, size: int, timeout_s: float, host: str, meeting_s: float) -> Group:
    """Ends with a sum: gloo returns once this rank has called its peers, which may still be about to answer, and a rank
    that closed its connections then would make their meeting fail."""
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]  missing in the stubs
    options._timeout = timedelta(seconds=meeting_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._threads = 1
    backend = dist.ProcessGroupGloo(store, rank, size, options)
    GlooGroup(backend, meeting_s).all_reduce(torch.zeros(1))
    return GlooGroup(backend, timeout_s)


def _take_first_sum(backend: Backend, device: torch.device, meeting_s: float) -> None:
    """Waits until all ranks have connected, by the clock of the host: the kernel of a sum waits for its peers for
    ever. Aborts the group and raises PeerLost if they have not."""
    ends_at = time.monotonic() + meeting_s
    work = backend.allreduce([torch.zeros(1, device=device)])
    while not work.is_completed():
        if time.monotonic() > ends_at:
            backend.abort()
            raise PeerLost(f"a peer has not connected in {meeting_s:g} s")
        time.sleep(_POLL_S)


_POLL_S = 1e-3
_NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""Read by each process group. Their defaults end the process when a collective times out or its watchdog is stuck; here
the coordinator finds out that a rank died, and the survivors abort their groups and keep their weights."""


def nccl_group(
    store: dist.Store,
    rank: int,
    size: int,
    device: torch.device,
    timeout_s: float,
    symmetric: str | None = None,
    *,
    meeting_s: float = 60.0,
) -> Group:
    """Connects at once, because the first collective may run inside a graph capture; PeerLost after about `meeting_s`.

    `symmetric` names a meeting over symmetric memory, if there is to be one. NCCL's calls return while it connects, so
    that a peer which died is waited for no longer than that; a call that blocks would wait for ever (NVIDIA/nccl#289).
    """
    for name, value in (_NCCL_SETTINGS | {"TORCH_NCCL_NONBLOCKING_TIMEOUT": str(math.ceil(meeting_s))}).items():
        os.environ.setdefault(name, value)
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.config.blocking = 0
    torch.cuda.set_device(device)
    backend = dist.ProcessGroupNCCL(store, rank, size, options)
    backend._set_sequence_number_for_group()
    backend.eager_connect_single_device(device)
    _take_first_sum(backend, device, meeting_s)
    if not symmetric:
        return NcclGroup(backend)
    from parallel.comm.symmetric import meet

    return NcclGroup(backend, meet(store, rank, size, device, symmetric))
