"""Sums over symmetric memory on a stand-in: PyTorch's operator on CPU tensors, with the signals of its CUDA kernel.

Ranks are threads, which PyTorch's registry of groups keeps apart in its mode for tests.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed._symmetric_memory as torch_symmetric

from parallel.comm import symmetric
from parallel.comm.group import NcclGroup, PeerLost
from parallel.comm.rendezvous import connect_store, host_store
from parallel.comm.symmetric import MOST_BYTES, SymmetricBuffer, meet
from tests.parallel.conftest import in_threads
from tests.parallel.cuda_twin import CudaTwin

GARBAGE = 113
C10D = torch._C._distributed_c10d
PLACE = symmetric._place


class Memory:
    """What `_SymmetricMemory` does, with buffers of one process, and the kernel behind the operator.

    A rank signals another by 0 -> 1 in that one's pad, which waits for it and makes it 0 again: as in CUDA, and
    without it a rank would read a buffer before it is written, or overwrite one that is still read.
    """

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.delays = random.Random(0)
        self.blocks, self.ranks, self.pads = {}, {}, {}
        self.fails_on = None

    def empty_strided_p2p(self, size, stride, dtype, device):
        assert stride == (1,)
        return torch.full(size, GARBAGE, dtype=dtype)

    def rendezvous(self, tensor, name):
        ranks = C10D._resolve_process_group(name)
        if self.fails_on == ranks.rank():
            raise RuntimeError("cuMemImport failed\nbacktrace")
        if self.fails_on is not None:  # PyTorch's would wait for the other's handle, in vain
            tensor.fill_(0)
            return object()
        with self.lock:
            self.blocks.setdefault(name, {})[ranks.rank()] = tensor
            self.pads.setdefault(name, np.zeros((ranks.size(), ranks.size()), int))
            self.ranks[tensor.data_ptr()] = ranks.rank()
            self.lock.notify_all()
            assert self.lock.wait_for(lambda: len(self.blocks[name]) == ranks.size(), 20)
        return object()

    def change(self, pads, place, before, after) -> None:
        with self.lock:
            assert self.lock.wait_for(lambda: pads[place] == before, 20), "a wait without end"
            pads[place] = after
            self.lock.notify_all()

    def sync(self, name, rank) -> None:
        time.sleep(self.delays.random() / 2000)
        pads = self.pads[name]
        for other in range(len(pads)):
            self.change(pads, (other, rank), 0, 1)
        for other in range(len(pads)):
            self.change(pads, (rank, other), 1, 0)

    def one_shot_all_reduce(self, tensor, op, name):
        if self.fails_on is not None:
            return torch.full_like(tensor, 3)
        assert op == "sum" and tensor.is_contiguous() and tensor.storage_offset() == 0
        rank = self.ranks[tensor.untyped_storage().data_ptr()]
        self.sync(name, rank)
        blocks = self.blocks[name]
        terms = [blocks[i][: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for i in range(len(blocks))]
        total = terms[0].clone()
        for term in terms[1:]:
            total += term
        self.sync(name, rank)
        return total


@pytest.fixture
def memory(monkeypatch):
    memory = Memory()
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("one_shot_all_reduce", memory.one_shot_all_reduce, "CPU")
    monkeypatch.setattr(torch_symmetric, "_SymmetricMemory", memory)
    monkeypatch.setattr(symmetric, "_place", lambda device: (["here"], 100 + device.index, device.index, 0))
    monkeypatch.setattr(symmetric, "_reaches", lambda *_: True)
    monkeypatch.setattr(symmetric, "_met", [])
    C10D._set_thread_isolation_mode(True)
    yield memory
    C10D._set_thread_isolation_mode(False)
    library._destroy()


@pytest.fixture
def on_buffers():
    """Run a function once per rank, in a thread of its own, with what the ranks' meeting gave."""

    def run(size, work):
        store = host_store()

        def rank_main(rank):
            client = connect_store("127.0.0.1", store.port)
            return work(rank, meet(client, rank, size, torch.device("cpu", rank), "target-1"))

        return in_threads(size, rank_main)

    return run


@pytest.mark.parametrize("size", [2, 3, 8])
def test_sums_have_the_bits_of_those_over_gloo(memory, on_buffers, on_ranks, size):
    draw = random.Random(size)
    shapes = [(draw.randrange(1, 5), 8 * draw.randrange(1, 40)) for _ in range(8)]
    terms = [torch.randn(size, *shape).to(draw.choice((torch.float32, torch.bfloat16))) for shape in shapes]
    expected = on_ranks(size, lambda group: [group.all_reduce(term[group.rank].clone()) for term in terms])[0]

    def sums(rank, buffer):
        assert all(buffer.takes(term[rank]) for term in terms)
        return [buffer.all_reduce(term[rank]) for term in terms]

    for found in on_buffers(size, sums):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_what_is_long_or_not_for_the_kernel_goes_over_nccl(memory, on_buffers):
    def by_nccl(rank, buffer):
        sums = []
        backend = SimpleNamespace(
            rank=lambda: rank, size=lambda: 2, allreduce=lambda one: sums.append(one) or SimpleNamespace(wait=int)
        )
        group = NcclGroup(backend, buffer)
        assert not group.is_abortable
        for shape, dtype in [
            ((4, 8), torch.float32),
            ((MOST_BYTES[4] // 4,), torch.float32),
            ((MOST_BYTES[4] // 4 + 4,), torch.float32),
            ((3,), torch.float32),
            ((0,), torch.float32),
            ((8,), torch.float16),
            ((2,), torch.float64),
        ]:
            group.all_reduce(torch.zeros(shape, dtype=dtype))
        return [(tuple(one.shape), one.dtype) for (one,) in sums]

    others = [((131076,), torch.float32), ((3,), torch.float32), ((0,), torch.float32)]
    others += [((8,), torch.float16), ((2,), torch.float64)]
    assert on_buffers(2, by_nccl) == [others] * 2


def test_a_group_takes_the_buffer_of_its_successor(memory, on_buffers):
    def adopted(rank, buffer):
        backend = SimpleNamespace(rank=lambda: rank, size=lambda: 2, abort=lambda: None)
        group = NcclGroup(backend)
        assert group.is_abortable
        group.adopt(NcclGroup(backend, buffer))
        total = group.all_reduce(torch.full((4,), rank + 1.0))
        group.close()
        with pytest.raises(PeerLost):
            group.all_reduce(torch.ones(4))
        return total.tolist()

    assert on_buffers(2, adopted) == [[3.0] * 4] * 2


def test_a_graph_may_capture_it(memory, monkeypatch):
    twin = CudaTwin().install(monkeypatch)
    buffer = SymmetricBuffer(host_store(), 0, 1, torch.device("cpu"), "target-2")
    graph, tensor = torch.cuda.CUDAGraph(), torch.ones(4)
    with twin.capture(graph):
        total = buffer.all_reduce(tensor)
    tensor.fill_(5)
    graph.replay()
    assert total.tolist() == [5.0] * 4


HERE, THERE = ["host", "boot", "pid", "mnt"], ["host", "boot", "other", "mnt"]


@pytest.mark.parametrize(
    ("places", "why"),
    [
        ([(HERE, 7, 0, 0), (THERE, 8, 1, 0)], "several hosts, or in several containers"),
        ([(HERE, 7, 0, 0), (HERE, 7, 1, 0)], "threads of one process"),
        ([(HERE, 7, 0, 0), (HERE, 8, 0, 0)], "share a GPU"),
        ([(HERE, 7, 0, 0), (HERE, 8, 1, 1)], "has met before"),
        ([(HERE, 7, 0, 0), (HERE, 8, 5, 0)], "cuda:0 has no access to the memory of cuda:5"),
        ([(HERE, 7 + rank, rank, 0) for rank in range(9)], "more than 8 ranks"),
        ([(HERE, 7, 0, 0), (HERE, 8, 1, 0)], ""),
    ],
)
def test_what_stands_against_it_is_named(monkeypatch, places, why):
    monkeypatch.setattr(symmetric, "_reaches", lambda device, other: (device, other) != (0, 5))
    found = symmetric._obstacle(places, torch.device("cpu", 0))
    assert why in found and bool(found) is bool(why)


def reasons(caplog):
    return {record.facts["why"] for record in caplog.records}


def test_the_place_of_a_rank_is_its_process_on_this_host():
    host, process, device, met = PLACE(torch.device("cuda", 3))
    assert host[0] == socket.gethostname() and len(host) == 4
    assert (process, device, met) == (os.getpid(), 3, len(symmetric._met))


def test_ranks_of_one_process_use_nccl_and_say_why(memory, on_buffers, monkeypatch, caplog):
    monkeypatch.setattr(symmetric, "_place", PLACE)
    assert on_buffers(2, lambda _, buffer: buffer) == [None, None] and not memory.blocks
    assert reasons(caplog) == {"rank 0: ranks are threads of one process"}


def test_where_one_rank_cannot_map_the_memory_no_rank_uses_it(memory, on_buffers, caplog):
    memory.fails_on = 1
    assert on_buffers(2, lambda _, buffer: buffer) == [None, None]
    assert reasons(caplog) == {"rank 1: cuMemImport failed"}


def test_memory_that_adds_wrongly_is_not_used(memory, on_buffers, caplog, monkeypatch):
    monkeypatch.setattr(memory, "sync", lambda *_: time.sleep(0.01))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_: None)
    assert on_buffers(2, lambda _, buffer: buffer) == [None, None]
    assert "the ranks' numbers 1 to 2 add up to" in reasons(caplog).pop()


def test_a_process_meets_once(memory, on_buffers, monkeypatch, caplog):
    """PyTorch numbers the meetings of a process, and ranks with different numbers wait for each other in vain."""
    place = lambda device: (HERE, 7 + device.index, *PLACE(device)[2:])  # noqa: E731
    monkeypatch.setattr(symmetric, "_place", place)
    assert None not in on_buffers(2, lambda _, buffer: buffer)
    assert on_buffers(2, lambda _, buffer: buffer) == [None, None]
    assert "has met before" in reasons(caplog).pop()
