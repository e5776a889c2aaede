from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel.comm.group import Group
from parallel.kv.pass_plan import Span
from parallel.kv.pool import FP8, KVPool
from parallel.model.families.registry import read_config
from parallel.runtime.graph_list import GraphList
from parallel.runtime.model_bytes import kv_bytes_per_slot, weight_bytes
from parallel.runtime.runner import captured_facts, open_model
from tests.families import FAMILIES
from tests.matrices import in_turn
from tests.parallel.backends import BACKENDS, EVERY_BACKEND, FP8_BACKENDS


def tokens(num_tokens: int, seed: int) -> list[int]:
    return torch.randint(0, 97, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


CONTEXTS = {"a": tokens(9, 0), "b": tokens(31, 1), "c": [], "d": tokens(2, 2)}
SPANS = [
    (Span("a", 4, [-1, 0, 0, 2], num_logits=4), tokens(4, 3)),
    (Span("b", 1), tokens(1, 4)),
    (Span("c", 12, num_logits=0), tokens(12, 5)),
    (Span("d", 3, num_logits=2), tokens(3, 6)),
]


def open_runner(path, backend, **options):
    """ "bucketed" is what padded attention does under CUDA graphs."""
    if backend != "bucketed":
        return open_model(path, num_slots=128, backend=backend, **options)
    model = open_model(path, num_slots=128, backend="padded", **options)
    model._backend._bucketed = True
    return model


def ragged(path, backend, *, together, fragmented=False, **options):
    """Logits of SPANS behind CONTEXTS, in one pass or one by one, the sequences' slots in runs or in pieces."""
    model = open_runner(path, backend, **options)
    for seq_id, context in CONTEXTS.items():
        model.open(seq_id)
        if context and fragmented:
            model.forward([Span(seq_id, 2 * len(context), [-1, *range(2 * len(context) - 1)])], context * 2)
            model.truncate(seq_id, 0)
        for token in context if fragmented else ():
            model.forward([Span(seq_id, 2, [-1, -1], num_logits=0)], [0, token])
            model.commit(seq_id, [1])
        if context and not fragmented:
            model.forward([Span(seq_id, len(context))], context)
            model.commit(seq_id, range(len(context)))
    if fragmented:
        assert model.pool.run("b") is None
    if not together:
        return torch.cat([model.forward([span], token_ids).logits for span, token_ids in SPANS])
    return model.forward([span for span, _ in SPANS], [token for _, token_ids in SPANS for token in token_ids]).logits


@pytest.mark.extended
@pytest.mark.parametrize("backend", [*EVERY_BACKEND, "bucketed"])
@pytest.mark.parametrize("fragmented", [False, True])
def test_a_ragged_batch_is_its_sequences_one_by_one(llama, backend, fragmented):
    together = ragged(llama.path, backend, together=True, fragmented=fragmented)
    assert together.shape == (7, 97)
    one_by_one = ragged(llama.path, "sdpa", together=False)
    torch.testing.assert_close(together, one_by_one, atol=1e-4, rtol=0)


@pytest.mark.parametrize("backend", [*FP8_BACKENDS, "bucketed"])
def test_fp8_rows_are_rounded_in_the_pass_that_writes_them(llama, backend, monkeypatch):
    """A row of a draft reads its ancestors as later passes will, or verifying would not be plain decoding."""
    fp8 = [ragged(llama.path, backend, together=True, fragmented=pieces, kv_dtype=FP8) for pieces in (False, True)]
    plain, write = ragged(llama.path, "sdpa", together=False), KVPool.write

    def rounded(pool, layer, slots, *rows):
        write(pool, layer, slots, *(part.to(FP8).float() for part in rows))

    monkeypatch.setattr(KVPool, "write", rounded)
    expected = ragged(llama.path, "sdpa", together=False)
    for logits in fp8:
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert (expected - plain).abs().max() > 1e-2, "rounding shows"


def test_checkpoints_bring_their_scales(make_checkpoint, tmp_path):
    """As compressed-tensors writes them; stretched layers have those of the last one."""
    path = shutil.copytree(make_checkpoint("Llama").path, tmp_path / "scaled")
    file, at = path / "model.safetensors", "model.layers.{}.self_attn.{}_scale"
    scales = {at.format(0, "k"): torch.tensor([0.25]), at.format(0, "v"): torch.tensor(3.0, dtype=torch.bfloat16)}
    scales[at.format(1, "v")] = torch.tensor(2.0)
    save_file(load_file(file) | scales, file, {"format": "pt"})
    runners = [open_model(path, num_slots=16, stretch=1, kv_dtype=kv_dtype) for kv_dtype in (FP8, None)]
    assert runners[0].pool.scales == [(0.25, 3.0), (1.0, 2.0), (1.0, 2.0)]
    for runner in runners:
        runner.open(0)
        runner.forward([Span(0, 5)], tokens(5, 0))
    for stored, exact in zip(*(runner.pool.read(0, torch.arange(5)) for runner in runners), strict=True):
        torch.testing.assert_close(stored, exact, atol=3 * 2**-10, rtol=2**-4)
    save_file(load_file(file) | {at.format(0, "v"): torch.zeros(2)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"layers.0.self_attn.v_scale of shape \[2\] is no scale"):
        open_model(path, num_slots=16, kv_dtype=FP8)


def test_a_long_span_beside_short_ones(llama):
    """Padded attention gives a prefill chunk a rectangle of its own and must put the rows back in order."""
    outputs = {}
    for backend in BACKENDS:
        model = open_runner(llama.path, backend)
        for seq_id in "xyz":
            model.open(seq_id)
        spans = [Span("x", 2, num_logits=2), Span("y", 90, num_logits=3), Span("z", 5, num_logits=5)]
        outputs[backend] = model.forward(spans, tokens(97, 8))
    for backend in BACKENDS[1:]:
        torch.testing.assert_close(outputs[backend].logits, outputs["sdpa"].logits, atol=1e-4, rtol=0)
        torch.testing.assert_close(outputs[backend].hidden, outputs["sdpa"].hidden, atol=1e-4, rtol=0)


def test_bucketed_passes_are_the_same_passes(llama):
    """What CUDA graphs replay: sizes rounded up, rows of no sequence behind the pass's own, tensors copied."""
    model = open_runner(llama.path, "bucketed")
    shapes, owned = set(), [model.pool.scratch_slot]
    for seq_id, size in ((0, 5), (1, 7), (2, 8)):
        model.open(seq_id)
        plan = model.plan([Span(seq_id, size)])
        assert len(plan.positions) == 8 and plan.num_rows == size
        shapes.add(tuple(tensor.shape for tensor in plan.attention.tensors()))
        copy = plan.attention.like()
        logits = model.run(plan, tokens(size, 9)).logits
        torch.testing.assert_close(logits, llama.logits(tokens(size, 9))[-1:], atol=1e-4, rtol=0)
        plan.attention, plan.places = copy, copy.positions
        assert torch.equal(model.run(plan, tokens(size, 9)).logits, logits)
        owned += model.pool.slots(seq_id).tolist()
    assert len(shapes) == 1, "passes of one bucket must share a graph"
    others = sorted(set(range(model.pool.num_slots)) - set(owned))
    assert not model.pool.keys[:, others].any(), "padding wrote outside the scratch slot"


def test_plans_may_be_built_ahead(llama):
    model = open_model(llama.path, num_slots=64)
    model.open(0)
    plans = [model.plan([Span(0, 1)]) for _ in range(6)]
    token, chain = torch.tensor([3]), [3]
    for plan in plans:
        token = model.run(plan, token).logits.argmax(-1)
        chain.append(int(token))
    greedy = llama.logits(chain).argmax(-1).tolist()
    assert chain[1:] == greedy[:6]


def test_a_pass_without_logits(llama, on_ranks):
    def work(group):
        model = open_model(llama.path, group, num_slots=64)
        model.open(0)
        return model.forward([Span(0, 5, num_logits=0)], tokens(5, 0), taps=(1,))

    for output in on_ranks(2, work):
        assert output.logits.shape == (0, 97) and output.hidden.shape == (5, 32) and len(output.features) == 1


def test_a_pass_too_large_is_refused_before_anything_changes(llama):
    model = open_model(llama.path, num_slots=8)
    for seq_id in (0, 1):
        model.open(seq_id)
    assert not model.can_reserve(9)
    with pytest.raises(AssertionError, match="can_reserve"):
        model.plan([Span(0, 5), Span(1, 4)])
    assert model.pool.num_free == 8 and model.pool.pending_len(0) == 0


def test_an_unknown_backend_is_named(llama):
    with pytest.raises(ValueError, match="attention backend 'flash' is not known"):
        open_model(llama.path, backend="flash")


CONFIGURED = [
    ("Llama", {"attention_bias": True, "mlp_bias": True}),
    ("Llama", {"tie_word_embeddings": True}),
    ("OPT", FAMILIES["OPT"] | {"enable_bias": False}),
    *FAMILIES.items(),
]
STORED = [
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.int8),
    (torch.bfloat16, "w8a8"),
]


@pytest.mark.parametrize(("row", "size", "dtype", "weights"), list(in_turn(range(len(CONFIGURED)), [1, 2, 4], STORED)))
def test_bytes_are_those_allocated(make_checkpoint, row, size, dtype, weights):
    family, overrides = CONFIGURED[row]
    group = Group()  # nothing is sent while a model is opened; rank 0 is the one with the row biases
    group.size = size
    path = make_checkpoint(family, **overrides).path
    config = read_config(path)
    model = open_model(path, group, dtype=dtype, num_slots=10, weights=weights)
    stored = None if weights is None else str(weights).removeprefix("torch.")
    assert weight_bytes(config, size, dtype.itemsize, weights=stored) == model.decoder.nbytes()
    pool_bytes = model.pool.keys.nbytes + model.pool.values.nbytes
    assert kv_bytes_per_slot(config, size, dtype.itemsize) * 11 == pool_bytes  # with the scratch slot


def test_passes_that_are_not_captured_are_run_before_the_first_text(llama, monkeypatch):
    model = open_model(llama.path, num_slots=128)
    shapes, forward = [], model.forward
    monkeypatch.setattr(
        model, "forward", lambda spans, *rest: shapes.append(spans[0].num_tokens) or forward(spans, *rest)
    )
    assert captured_facts(model, GraphList()) == {}
    assert shapes == [64, 1, 1, 1, 1, 1] and model.can_reserve(128), "and their rows are free again"
    small = open_model(llama.path, num_slots=73)
    monkeypatch.setattr(small, "forward", None)
    assert captured_facts(small, GraphList()) == {}, "a pool that is too small is not used"
