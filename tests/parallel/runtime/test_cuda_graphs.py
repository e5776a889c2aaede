"""Captured passes on the CPU, with stand-ins for CUDA's graphs and for NCCL (`cuda_twin.py`)."""

from __future__ import annotations

import random
import threading
from contextlib import nullcontext

import pytest
import torch

from parallel.comm.group import NcclGroup, PeerLost
from parallel.kv.pass_plan import Span
from parallel.runtime.cuda_graphs import MOST_GRAPHS, MOST_OTHERS, _capturing
from parallel.runtime.graph_list import GraphList, graph_shapes
from parallel.runtime.profiling import PassClock, TimedGroup, watch
from parallel.runtime.runner import captured_facts, open_model
from tests.families import FAMILIES
from tests.parallel.cuda_twin import CudaTwin, NcclTwin, NotWhileCapturing, capture_passes

TOKENS = list(range(30))
WAIT_S = 20.0


@pytest.fixture
def twin(monkeypatch) -> CudaTwin:
    return CudaTwin().install(monkeypatch)


def walk(model):
    """Logits and a tap of a prefill, trees and the steps behind them, of two sequences at once."""
    found = []
    for seq_id in "ab":
        model.open(seq_id)
    outputs = [model.forward([Span("a", 30), Span("b", 11)], TOKENS + TOKENS[:11], taps=(1,))]
    for seq_id, size in (("a", 30), ("b", 11)):
        model.commit(seq_id, range(size))
    for step in range(4):
        spans = [Span("a", 5, [-1, 0, 0, 1, 2], num_logits=5), Span("b", 1)]
        outputs.append(model.forward(spans, [1 + step, 2, 3, 4, 5, 6], taps=(1,)))
        model.commit("a", [0, 2, 4])
        model.commit("b", [0])
    for output in outputs:
        found += [output.logits, output.hidden, *output.features]
    return found


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2", "OPT", "Mixtral", "Qwen3Moe"])
def test_a_replay_is_the_eager_pass_to_the_bit(make_checkpoint, twin, family, monkeypatch):
    """Other rows of a mixture use other experts."""
    monkeypatch.setattr("parallel.model.layers.weight.groups_on", lambda device, dtype: True)
    path = make_checkpoint(family, **FAMILIES[family] | {"initializer_range": 0.2, "init_std": 0.2}).path
    captured, eager = (open_model(path, num_slots=128, backend="padded") for _ in range(2))
    passes = capture_passes(captured)
    capture_passes(eager)
    eager.run_eagerly()  # passes of the same buckets
    for ours, theirs in zip(walk(captured), walk(eager), strict=True):
        assert torch.equal(ours, theirs)
    assert twin.num_replays == 5 > twin.num_captures == len(passes)


def on_nccl(path, twin, wrap=lambda group: group):
    """A tensor-parallel rank whose collectives change nothing, and the process group behind it."""
    nccl = NcclTwin(twin)
    group = NcclGroup(nccl)
    model = open_model(path, wrap(group), num_slots=64, backend="padded")
    return model, capture_passes(model), group, nccl


def decode(model, times=1):
    for _ in range(times):
        model.open(0)
        model.forward([Span(0, 5)], TOKENS[:5])
        model.close(0)


def test_a_group_closes_although_its_collectives_were_captured(llama, twin):
    """`ncclCommAbort` waits for the last graph; a stop and a lost peer both close the group."""
    model, passes, group, nccl = on_nccl(llama.path, twin)
    decode(model)
    assert len(twin.live) == 1 and next(iter(twin.live)).captured_groups == {nccl}
    closing = threading.Thread(target=group.close, daemon=True)
    closing.start()
    closing.join(WAIT_S)
    assert not closing.is_alive(), "abort waits for graphs that nothing destroys"
    assert nccl.aborted and not twin.live and not len(passes)


def test_a_closed_group_replays_nothing_and_its_successor_captures_anew(llama, twin):
    model, _, group, _ = on_nccl(llama.path, twin)
    decode(model, 2)
    assert (twin.num_captures, twin.num_replays) == (1, 2)
    group.interrupt()
    model.open(1)
    with pytest.raises(PeerLost):
        model.forward([Span(1, 5)], TOKENS[:5])
    group.adopt(NcclGroup(successor := NcclTwin(twin)))
    decode(model)
    assert twin.num_captures == 2 and next(iter(twin.live)).captured_groups == {successor}


def test_ranks_that_read_their_own_logits_have_another_graph(llama, twin):
    """The head is part of the pass, so what it gathers is part of the key."""
    model, _, group, _ = on_nccl(llama.path, twin)
    head, widths = model.decoder.lm_head, []
    for own in (True, False, True):
        model.open(0)
        with head.ungathered() if own else nullcontext():
            widths.append(model.forward([Span(0, 5)], TOKENS[:5]).logits.shape)
        model.close(0)
    assert widths == [(1, head.num_real), (1, model.config.vocab_size), (1, head.num_real)]
    assert (twin.num_captures, twin.num_replays) == (2, 3)
    group.close()


def test_a_group_that_closes_during_a_capture_leaves_no_graph(llama, twin, monkeypatch):
    model, passes, group, nccl = on_nccl(llama.path, twin)
    forward, reached, done = model.decoder.forward, threading.Event(), threading.Event()

    def closed_meanwhile(*arguments):
        result = forward(*arguments)
        if twin.is_capturing():
            reached.set()
            nccl.aborting.wait(WAIT_S)
        return result

    monkeypatch.setattr(model.decoder, "forward", closed_meanwhile)

    def close():
        reached.wait(WAIT_S)
        group.close()
        done.set()

    threading.Thread(target=close, daemon=True).start()
    with pytest.raises(PeerLost):
        decode(model)
    assert done.wait(WAIT_S) and nccl.aborted and not len(passes)


def test_a_day_of_requests_has_few_kinds_of_passes(llama, twin):
    """Kinds of the padded backend: powers of two of sequences, rows, pending rows and keys. Plans are made, not run."""
    model = open_model(llama.path, num_slots=4096, backend="padded")
    capture_passes(model)
    draw, kinds, lengths, num_passes = random.Random(0), set(), {}, 0
    for request in range(300):
        lengths[request] = draw.choice([20, 100, 400, 1000])
        model.open(request)
        model.pool.reserve(request, lengths[request])
        model.pool.commit(request, range(lengths[request]))
        while len(lengths) > draw.randint(0, 8) or sum(lengths.values()) > 2500:
            spans = [
                Span(one, draw.randint(1, 6)) for one in draw.sample(sorted(lengths), draw.randint(1, len(lengths)))
            ]
            plan = model.plan(spans)
            assert plan.attention.bucketed
            kinds.add(tuple(tensor.shape for tensor in plan.attention.tensors()))
            num_passes += 1
            for span in spans:
                model.commit(span.seq_id, [0])
                lengths[span.seq_id] += 1
            if draw.random() < 0.5:
                done = draw.choice(sorted(lengths))
                del lengths[done]
                model.close(done)
    assert num_passes > 500 and len(kinds) <= 4 * 4 * 5, "batches of 1 to 8, rows of 1 to 8, keys of 64 to 1024"


def test_graphs_are_few_and_the_one_used_longest_ago_goes(llama, twin):
    model = open_model(llama.path, num_slots=128, backend="padded")
    passes = capture_passes(model)
    passes._most = 2
    for size in (1, 2, 1, 4, 1, 2):  # 4 takes the place of 2, and 2 that of 4
        model.open(0)
        model.forward([Span(0, size)], TOKENS[:size])
        model.close(0)
    assert len(passes) == len(twin.live) == 2 and twin.num_captures == 4


def test_a_long_list_stays_whole(llama, twin):
    """As that for drafts of 64 nodes and 64 sequences, which has more graphs than are kept otherwise."""
    model = open_model(llama.path, num_slots=64, backend="padded")
    passes = capture_passes(model)
    passes._most = 3
    captured_facts(model, GraphList(graph_shapes(4, 4, 2048)))
    assert len(passes) == len(twin.live) == twin.num_captures == 10
    both = 2 * len(graph_shapes(64, 65, 2048))  # with the logits of all rows, and of the last ones
    assert both > MOST_GRAPHS > MOST_OTHERS


def test_the_list_is_captured_at_the_start_and_later_passes_find_it(llama, twin):
    model = open_model(llama.path, num_slots=64, backend="padded")
    passes = capture_passes(model)
    shapes = graph_shapes(4, 4, 2048)
    facts = captured_facts(model, GraphList([(16, 8, 128), *shapes]))  # the first has more rows than the pool
    assert facts["graphs"] == "4x4 2x4 4x2 1x4 2x2 4x1 4x2/4 1x2 2x1 1x1" and len(passes) == twin.num_captures == 10
    assert model.pool.num_free == 64
    for count, rows in ((3, 3), (1, 2), (4, 1)):
        for seq_id in range(count):
            model.open(seq_id)
        model.forward([Span(seq_id, rows, num_logits=rows) for seq_id in range(count)], TOKENS[: count * rows])
        for seq_id in range(count):
            model.close(seq_id)
    assert twin.num_captures == 10, "no request waits for a capture"
    assert captured_facts(open_model(llama.path, num_slots=64), GraphList(shapes)) == {}


def test_a_watched_pass_can_be_captured_and_taken_apart(llama, twin):
    """What `job=plan` and measured passes do on CUDA; the twin's clock advances by a millisecond at every event."""
    clock = PassClock("cuda")
    model, _, group, _ = on_nccl(llama.path, twin, lambda group: TimedGroup(group, clock))
    watch(model.decoder, clock)
    decode(model, 2)
    assert twin.num_replays == 2, "captured, watched as it is"
    clock.pop_seconds()
    with model.eagerly():
        decode(model)
    assert clock.spans["mlp"] == model.config.num_layers and (len(twin.live), twin.num_replays) == (1, 2)
    clock.pop_seconds()
    model.run_eagerly()
    assert not twin.live, "graphs that are not used any more take memory"
    syncs = twin.num_syncs
    decode(model)
    assert twin.num_syncs == syncs, "the host waits for no part of a pass"
    spans = dict(clock.spans)
    seconds = clock.pop_seconds()
    layers = model.config.num_layers
    assert spans["attention"] == spans["mlp"] == layers and spans["communication"] > 2 * layers
    assert seconds["communication"] == pytest.approx(spans["communication"] / 1e3)
    group.close()


def test_a_capture_waits_for_no_other_thread_of_the_device(llama, twin):
    """One that has a kernel there which waits for a rank that waits for this capture: ranks of two roles as threads.
    Another thread may read its numbers meanwhile, but may not wait for the device, whose streams include this one."""
    model = open_model(llama.path, num_slots=64, backend="padded")
    capture_passes(model)
    refused = []

    def wait_elsewhere(*_):
        def wait() -> None:
            try:
                torch.cuda.Event().synchronize()
                torch.cuda.synchronize()
            except NotWhileCapturing as error:
                refused.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()

    normalize = model.decoder.normalize
    decode(model)
    assert twin.num_syncs == 0, "nothing waits for the whole device"
    model.decoder.normalize = lambda hidden: (wait_elsewhere() if twin.is_capturing() else None, normalize(hidden))[1]
    model.open(1)
    model.forward([Span(1, 2)], TOKENS[:2])
    assert twin.num_captures == 2 and len(refused) == 1 and twin.num_syncs == 1


def test_roles_on_one_device_capture_in_turn(llama, twin, monkeypatch):
    """They are threads with cluster=inprocess; the begin of a capture waits for the device, whose streams must not be
    capturing."""
    model = open_model(llama.path, num_slots=64, backend="padded")
    capture_passes(model)
    normalize, free = model.decoder.normalize, []

    def observed(hidden):
        free.append((twin.is_capturing(), _capturing[0].locked()))
        return normalize(hidden)

    monkeypatch.setattr(model.decoder, "normalize", observed)
    decode(model)
    assert free == [(False, False), (True, True)] and not _capturing[0].locked()


def test_the_twin_refuses_what_cuda_refuses(twin):
    for wait in (lambda: torch.ones(2).sum().item(), lambda: torch.ones(2).nonzero(), lambda: torch.tensor([1.0])):
        with pytest.raises(NotWhileCapturing), torch.cuda.graph(torch.cuda.CUDAGraph()):
            wait()
    with pytest.raises(NotWhileCapturing), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.cuda.synchronize()
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(3)
    with torch.cuda.graph(graph):
        doubled = (x * 2).view(3)[1:] + 1
    x.fill_(4)
    graph.replay()
    assert doubled.tolist() == [9, 9]
