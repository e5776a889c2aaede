from __future__ import annotations

import multiprocessing
import os
import threading
from typing import Any

import pytest
import torch

from parallel.comm.group import PeerLost
from parallel.comm.rendezvous import connect_store, host_store, join, nccl_group
from parallel.kv.pass_plan import Span
from parallel.runtime.device import use_device
from parallel.runtime.profiling import PassClock, watch
from parallel.runtime.runner import open_model
from tests.families import FAMILIES
from tests.parallel.conftest import in_threads

pytestmark = pytest.mark.gpu
TOKENS = list(range(30))


def walk(path, **options):
    """Logits of a prefill, a tree and the steps behind it, of two sequences at once."""
    model = open_model(path, num_slots=256, **options)
    for seq_id in "ab":
        model.open(seq_id)
    logits = [model.forward([Span("a", 30), Span("b", 11)], TOKENS + TOKENS[:11]).logits]
    for seq_id, size in (("a", 30), ("b", 11)):
        model.commit(seq_id, range(size))
    for _ in range(3):
        spans = [Span("a", 5, [-1, 0, 0, 1, 2], num_logits=5), Span("b", 1)]
        logits.append(model.forward(spans, [1, 2, 3, 4, 5, 6], taps=(1,)).logits)
        model.commit("a", [0, 2, 4])
        model.commit("b", [0])
    return torch.cat(logits).cpu()


@pytest.mark.parametrize("backend", ["sdpa", "padded", "triton"])
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "OPT"])
def test_cuda_computes_what_the_cpu_does(make_checkpoint, backend, family):
    path = make_checkpoint(family, **FAMILIES[family] | {"initializer_range": 0.2, "init_std": 0.2}).path
    expected = walk(path)
    torch.backends.cuda.matmul.allow_tf32 = False
    logits = walk(path, device="cuda", backend=backend, graphs=False)
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
    low = walk(path, device="cuda", backend=backend, graphs=False, dtype=torch.bfloat16)
    assert (low - expected).std() < 0.1 * expected.std()


def test_parts_of_prompts_by_flash_kernels_are_those_of_the_own_kernel(make_checkpoint, monkeypatch):
    """A row of another sequence is beside them, and a part after a context."""
    monkeypatch.setattr("parallel.model.layers.flash.FLASH_ROWS", 128)
    path = make_checkpoint("Llama", head_dim=64, max_position_embeddings=512).path
    logits = {}
    for flash in (True, False):
        model: Any = open_model(path, device="cuda", num_slots=600, dtype=torch.bfloat16, graphs=False)
        assert model._backend.flash
        model._backend.flash = flash
        model.open(0), model.open(1)
        found = []
        for _ in range(2):
            plan = model.plan([Span(0, 130, num_logits=130), Span(1, 1)])
            assert len(plan.attention.prompts) == flash
            found.append(model.run(plan, [row % 97 for row in range(131)]).logits)
            model.commit(0, range(130)), model.commit(1, [0])
        logits[flash] = torch.cat(found).cpu()
    assert (logits[True] - logits[False]).std() < 0.1 * logits[False].std()


def test_a_graph_is_its_eager_twin(make_checkpoint):
    for family, overrides in FAMILIES.items():
        path = make_checkpoint(family, **overrides).path
        eager = walk(path, device="cuda", graphs=False)
        torch.testing.assert_close(walk(path, device="cuda"), eager, atol=1e-3, rtol=0)


def test_passes_of_one_bucket_share_a_graph(llama):
    model: Any = open_model(llama.path, device="cuda", num_slots=256)
    model.open(0)
    for size in (5, 7, 8, 6):
        model.forward([Span(0, size)], TOKENS[:size])
        model.commit(0, range(size))
    assert len(model._passes._captured) == 1


def test_a_captured_model_can_be_taken_apart(llama):
    """A captured pass shows nothing of its layers; run eagerly it is the same pass."""
    model, clock, seen = open_model(llama.path, device="cuda", num_slots=64), PassClock("cuda"), []
    watch(model.decoder, clock)
    for seq_id in range(3):
        if seq_id == 2:
            model.run_eagerly()
        model.open(seq_id)
        clock.pop_seconds()
        seen.append(model.forward([Span(seq_id, 5)], TOKENS[:5]).logits)
    assert clock.spans["attention"] == clock.spans["mlp"] == model.config.num_layers
    torch.testing.assert_close(seen[2], seen[1], atol=1e-3, rtol=0)


def test_an_nccl_group_of_one():
    store = host_store()
    client = connect_store("127.0.0.1", store.port)
    group = nccl_group(client, 0, 1, torch.device("cuda", 0), timeout_s=30)
    tensor = torch.arange(4.0, device="cuda")
    assert torch.equal(group.all_reduce(tensor.clone()), tensor)
    assert torch.equal(group.all_gather(tensor), tensor)
    assert torch.equal(group.broadcast(tensor.clone()), tensor)
    group.close()


def test_a_graph_of_the_second_device_is_its_eager_twin(llama):
    """Streams and graphs belong to the current device, whatever that of the tensors is."""
    device = f"cuda:{torch.cuda.device_count() - 1}"
    eager = walk(llama.path, device=device, graphs=False)
    torch.testing.assert_close(walk(llama.path, device=device), eager, atol=1e-3, rtol=0)


def on_devices(work):
    """`work(group)` on two devices, each in a thread of its own, in one NCCL group."""
    store = host_store()

    def rank_main(rank):
        use_device(f"cuda:{rank}")
        client = connect_store("127.0.0.1", store.port)
        return work(nccl_group(client, rank, 2, torch.device("cuda", rank), timeout_s=30))

    return in_threads(2, rank_main, wait_s=90)


@pytest.mark.multi_gpu
def test_two_devices_compute_what_one_does_and_their_graphs_do_not_keep_the_group_open(llama):
    def work(group):
        logits = walk(llama.path, group=group, device=f"cuda:{group.rank}")
        group.close()  # graphs captured its collectives
        return logits

    expected = walk(llama.path, device="cuda:0", graphs=False)
    for logits in on_devices(work):
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)


@pytest.mark.multi_gpu
def test_an_interrupted_rank_stops_waiting_for_one_that_never_comes(llama):
    def work(group):
        tensor = torch.ones(4, device=f"cuda:{group.rank}")
        group.all_reduce(tensor)
        if group.rank == 0:
            threading.Timer(2.0, group.interrupt).start()
            group.all_reduce(tensor)  # without the other rank
            torch.cuda.synchronize()
            with pytest.raises(PeerLost):
                group.check()
        return True

    assert on_devices(work) == [True, True]


def in_processes(main, *ranks, wait_s=180):
    """What `main(port, results, *rank)` put into `results`, of the processes that put anything."""
    context, store = multiprocessing.get_context("spawn"), host_store()
    results = context.Queue()
    processes = [context.Process(target=main, args=(store.port, results, *rank), daemon=True) for rank in ranks]
    for process in processes:
        process.start()
    try:
        return [results.get(timeout=wait_s) for _ in range(2)]
    finally:
        for process in processes:
            process.kill()


def sum_and_walk(port, results, rank, device, path):
    """Sums and passes of one of two processes, with symmetric memory if the GPUs have it."""
    use_device(device)
    group = join(connect_store("127.0.0.1", port), "target", 1, rank, 2, device, symmetric=True)
    torch.manual_seed(0)
    terms = [torch.randn(2, rows, 64).to(dtype) for rows in (1, 7, 64, 4096) for dtype in DTYPES]
    sums = [group.all_reduce(term[rank].to(device, copy=True)).float().cpu().numpy() for term in terms]
    expected = [(term[0] + term[1]).float().numpy() for term in terms]
    are_equal = all((one == other).all() for one, other in zip(sums, expected, strict=True))
    logits = [walk(path, group=group, device=device, **how).numpy() for how in ({"graphs": False}, {})]
    results.put((group.is_abortable, are_equal, *logits))
    threading.Event().wait()  # the other process may still read this one's memory


DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.multi_gpu
def test_sums_over_symmetric_memory_are_those_of_one_device(llama):
    if not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("these two GPUs cannot map each other's memory")
    expected = walk(llama.path, device="cuda:0", graphs=False).numpy()
    ranks = [(rank, f"cuda:{rank}", llama.path) for rank in range(2)]
    for is_abortable, are_equal, eager, replayed in in_processes(sum_and_walk, *ranks):
        assert not is_abortable, "the ranks fell back to NCCL; the log says why"
        assert are_equal
        assert abs(eager - expected).max() < 1e-3 and abs(replayed - expected).max() < 1e-3


def wait_in_vain(group, tensor) -> None:
    group.all_reduce(tensor).tolist()
    group.check()


def survive(port, results, rank, device, epoch):
    """Epoch 1: rank 1 dies, rank 0 is recalled while it waits for it. Epoch 2: it has met another rank 1."""
    use_device(device)
    client, ones = connect_store("127.0.0.1", port), torch.ones(4, device=device)
    group = join(client, "target", epoch, rank, 2, device)
    assert group.all_reduce(ones.clone()).tolist() == [2] * 4
    if (rank, epoch) == (1, 1):
        os._exit(1)
    if epoch == 1:
        threading.Timer(2.0, group.interrupt).start()
        with pytest.raises(PeerLost):
            wait_in_vain(group, ones.clone())
        group.close()
        group.adopt(join(client, "target", 2, rank, 2, device))
        assert group.all_reduce(ones.clone()).tolist() == [2] * 4
    results.put(rank)
    threading.Event().wait()


@pytest.mark.multi_gpu
def test_a_rank_survives_the_death_of_a_process_and_meets_its_successor():
    assert sorted(in_processes(survive, (0, "cuda:0", 1), (1, "cuda:1", 1), (1, "cuda:1", 2))) == [0, 1]


def survive_a_replay(port, results, rank, device, epoch, path):
    """As `survive`, where what waits for the dead process is the replay of a graph, and the model is kept."""
    use_device(device)
    client = connect_store("127.0.0.1", port)
    group = join(client, "target", epoch, rank, 2, device)
    model: Any = open_model(path, group=group, device=device, num_slots=64)

    def logits_of(seq_id):
        model.open(seq_id)
        logits = model.forward([Span(seq_id, 5)], TOKENS[:5]).logits.cpu()
        group.check()
        return logits

    seen = logits_of(0)
    if (rank, epoch) == (1, 1):
        client.wait(["seen"])  # the other process has all of the first pass
        os._exit(1)
    client.set("seen", "")
    if epoch == 1:
        assert len(model._passes._captured) == 1, "the next pass is a replay"
        threading.Timer(2.0, group.interrupt).start()
        with pytest.raises(PeerLost):
            logits_of(1)
        group.close()
        group.adopt(join(client, "target", 2, rank, 2, device))
        seen = logits_of(2)
    results.put((rank, seen.numpy()))
    threading.Event().wait()


@pytest.mark.multi_gpu
def test_a_rank_survives_a_death_that_the_replay_of_a_graph_waits_for(llama):
    model = open_model(llama.path, device="cuda:0", num_slots=64, graphs=False)
    model.open(0)
    expected = model.forward([Span(0, 5)], TOKENS[:5]).logits.cpu().numpy()
    ranks = [(0, "cuda:0", 1, llama.path), (1, "cuda:1", 1, llama.path), (1, "cuda:1", 2, llama.path)]
    found = in_processes(survive_a_replay, *ranks)
    assert sorted(rank for rank, _ in found) == [0, 1]
    assert all(abs(logits - expected).max() < 1e-3 for _, logits in found)
