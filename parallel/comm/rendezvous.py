"""Makes process groups as objects, per epoch, from a store that outlives them.

Whoever coordinates hosts the store; every rank connects a client of its own and joins the groups it belongs to. After
a death the survivors close theirs and join the next epoch under the same names. No default group, no environment
variables, no ranks from globals; ranks may be processes or threads of one process.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from parallel.comm.group import SINGLE, GlooGroup, Group, NcclGroup, PeerLost


def host_store(host: str = "127.0.0.1", port: int = 0) -> dist.TCPStore:
    """Serve a store; it lives as long as the returned object, whose `port` says where."""
    return dist.TCPStore(host, port, None, is_master=True, wait_for_workers=False)


def connect_store(host: str, port: int, timeout_s: float = 60.0) -> dist.TCPStore:
    """A client of a hosted store. One per rank: a client that waits for a key serves nobody else meanwhile.

    PeerLost if the host does not answer: PyTorch asks for up to twice `timeout_s`.
    """
    try:
        return dist.TCPStore(host, port, None, is_master=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise PeerLost(f"the store at {host}:{port} does not answer ({str(error).partition(chr(10))[0]})") from error


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
) -> Group:
    """Meet the other ranks of group `name` in `epoch`; blocks until all of them are here.

    `timeout_s` bounds every later wait for a peer and, unless `meeting_s` is given, the meeting. `host` is the address
    of this machine under which CPU peers reach it, by default the loopback. A group of one needs no store.
    """
    if size == 1:
        return SINGLE
    device = torch.device(device)
    meeting = dist.PrefixStore(f"e{epoch}/{name}", store)
    meeting_s = timeout_s if meeting_s is None else meeting_s
    meeting.set_timeout(timedelta(seconds=meeting_s))
    try:
        if device.type == "cuda":
            return nccl_group(meeting, rank, size, device, timeout_s)
        return _gloo_group(meeting, rank, size, timeout_s, host or "127.0.0.1", meeting_s)
    except RuntimeError as error:
        raise PeerLost(
            f"group {name!r} of epoch {epoch}: rank {rank} could not meet all {size} ranks in {meeting_s:g} s ({error})"
        ) from error


def _gloo_group(store: dist.Store, rank: int, size: int, timeout_s: float, host: str, meeting_s: float) -> Group:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=meeting_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._threads = 1
    return GlooGroup(dist.ProcessGroupGloo(store, rank, size, options), timeout_s)


def nccl_group(store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float) -> Group:
    """The communicator is made here and not by the first collective, which may run inside a graph capture."""
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    torch.cuda.set_device(device)
    backend = dist.ProcessGroupNCCL(store, rank, size, options)
    backend._set_sequence_number_for_group()
    backend.eager_connect_single_device(device)
    return NcclGroup(backend)
