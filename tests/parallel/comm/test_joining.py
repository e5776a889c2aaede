"""How ranks join their groups: what reaches torch and NCCL, seen without a GPU, and stores that are gone."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel.comm import rendezvous, symmetric
from parallel.comm.group import SINGLE, NcclGroup, PeerLost
from parallel.comm.rendezvous import connect_store, interface_of, join, nccl_group, store_in_file, store_in_memory


class Options:
    _timeout = None

    def __init__(self):
        self.config = SimpleNamespace(blocking=None)


class Nccl:
    """Stands in place of `ProcessGroupNCCL`."""

    def __init__(self, store, rank, size, options):
        self.made_of = store, rank, size, options._timeout
        self.blocking = options.config.blocking
        self.calls = []

    def rank(self):
        return self.made_of[1]

    def size(self):
        return self.made_of[2]

    def _set_sequence_number_for_group(self):
        self.calls.append("numbered")

    def eager_connect_single_device(self, device):
        self.calls.append(device)

    has_peers = True

    def allreduce(self, tensors):
        self.calls.append("first sum")
        return SimpleNamespace(is_completed=lambda: self.has_peers)

    def abort(self):
        ABORTED.append(self)


ABORTED = []


@pytest.fixture
def on_gpus(monkeypatch):
    """The devices that were set, and the meetings over symmetric memory."""
    seen: Any = {"set": [], "met": []}
    monkeypatch.setattr(Nccl, "Options", Options, raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", seen["set"].append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(symmetric, "meet", lambda *place: seen["met"].append(place) or "buffer")
    on_host = functools.partial(torch.zeros, device="cpu")
    monkeypatch.setattr(torch, "zeros", lambda size, device: on_host(size))
    for name in (*rendezvous._NCCL_SETTINGS, "TORCH_NCCL_NONBLOCKING_TIMEOUT", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return seen


@pytest.mark.parametrize(("asked", "index"), [("cuda:2", 2), ("cuda", 5)])
@pytest.mark.parametrize("symmetric", [None, "target-3"])
def test_a_group_of_gpus_connects_at_once_on_its_device(on_gpus, asked, index, symmetric):
    device = torch.device("cuda", index)
    group = nccl_group("store", 1, 4, torch.device(asked), 7.0, symmetric)
    assert isinstance(group, NcclGroup) and (group.rank, group.size) == (1, 4)
    assert group._backend.made_of == ("store", 1, 4, timedelta(seconds=7))
    assert group._backend.calls == ["numbered", device, "first sum"] and group._backend.blocking == 0
    assert on_gpus["set"] == [device]
    assert on_gpus["met"] == ([] if symmetric is None else [("store", 1, 4, device, "target-3")])
    assert group.is_abortable == (symmetric is None)


def test_a_meeting_of_gpus_without_a_peer_ends(on_gpus, monkeypatch):
    """The peer is missing in NCCL itself, whose calls return meanwhile, and in the kernel of the first sum."""
    monkeypatch.setattr(Nccl, "has_peers", False)
    ABORTED.clear()
    with pytest.raises(PeerLost, match="could not meet all 2 ranks in 0.05 s"):
        join(store_in_memory().store, "target", 3, 0, 2, torch.device("cuda:0"), meeting_s=0.05)
    assert len(ABORTED) == 1 and ABORTED[0].blocking == 0
    assert int(os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"]) == 1


def test_processes_do_not_end_with_their_collectives(on_gpus, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    nccl_group("store", 0, 2, torch.device("cuda:0"), 7.0)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1", "the user's own setting stands"


@pytest.mark.parametrize(("symmetric", "name"), [(False, None), (True, "draft-4")])
def test_ranks_on_gpus_meet_under_their_names(monkeypatch, symmetric, name):
    made = []
    monkeypatch.setattr(rendezvous, "nccl_group", lambda *place, meeting_s: made.append((*place, meeting_s)) or "group")
    monkeypatch.setattr(rendezvous, "interface_of", {"10.0.0.7": "eth3"}.get)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    store = dist.HashStore()
    assert join(store, "draft", 4, 1, 2, "cuda:0", 9.0, "10.0.0.7", symmetric=symmetric) == "group"
    ((meeting, *place),) = made
    assert place == [1, 2, torch.device("cuda:0"), 9.0, name, 9.0] and os.environ["NCCL_SOCKET_IFNAME"] == "=eth3"
    meeting.set("key", "value")
    assert store.get("e4/draft/key") == b"value"
    join(store, "draft", 4, 1, 2, "cuda:0", 9.0, "10.0.0.8")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=eth3", "of an unknown interface nothing is said"


def test_cpu_ranks_meet_within_their_limit(monkeypatch):
    made = []
    monkeypatch.setattr(rendezvous, "_gloo_group", lambda *place: made.append(place[1:]) or "group")
    join(dist.HashStore(), "draft", 4, 1, 2)
    join(dist.HashStore(), "draft", 4, 1, 2, timeout_s=9.0)
    join(dist.HashStore(), "draft", 4, 1, 2, timeout_s=9.0, host="h", meeting_s=3.0)
    assert made == [(1, 2, 60.0, "127.0.0.1", 60.0), (1, 2, 9.0, "127.0.0.1", 9.0), (1, 2, 9.0, "h", 3.0)]


def test_a_group_of_one_needs_no_store():
    assert join(None, "draft", 1, 0, 1, "cuda:0") is SINGLE
    with pytest.raises(AssertionError):
        join(None, "draft", 1, 0, 2)


def test_a_meeting_that_fails_names_the_group(monkeypatch):
    def fail(*_):
        raise RuntimeError("no route")

    monkeypatch.setattr(rendezvous, "_gloo_group", fail)
    line = r"^group 'draft' of epoch 4: rank 1 could not meet all 2 ranks in 2.5 s \(no route\)$"
    with pytest.raises(PeerLost, match=line):
        join(dist.HashStore(), "draft", 4, 1, 2, meeting_s=2.5)


def test_stores_of_one_machine_are_found_where_they_are(tmp_path):
    memory, file = store_in_memory(), store_in_file(tmp_path)
    assert memory.place[0] == "memory" and connect_store(*memory.place) is memory.store
    assert store_in_memory().place[1] > memory.place[1]
    connect_store(*file.place).set("a", "b")
    assert connect_store(*file.place).get("a") == b"b" and file.place[0].startswith(f"{tmp_path}/store-")
    place = memory.place
    del memory
    for gone in (place, ("/nowhere/store", 0)):
        with pytest.raises(PeerLost, match=f"the store in {gone[0]} is gone"):
            connect_store(*gone)


def test_an_address_of_no_interface_has_none():
    assert interface_of("127.0.0.1") and interface_of("203.0.113.9") == ""


def test_a_group_of_one_is_never_lost():
    SINGLE.check()
    SINGLE.interrupt()
    SINGLE.adopt(SINGLE)
    SINGLE.hold(None)
    assert (SINGLE.rank, SINGLE.size, SINGLE.is_abortable, SINGLE.generation) == (0, 1, True, 0)
    x = torch.ones(2)
    assert SINGLE.all_reduce(x) is x and SINGLE.all_gather(x) is x and SINGLE.broadcast(x) is x
