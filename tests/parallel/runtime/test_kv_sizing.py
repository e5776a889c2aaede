from __future__ import annotations

import copy
import json
import shutil
from typing import Any

import pytest
import torch

from parallel.comm.group import SINGLE
from parallel.kernels.products import has_products, has_tiles
from parallel.kernels.triton_launch import has_triton
from parallel.kv.pass_plan import Span
from parallel.kv.slot_mirror import BYTES_PER_SLOT
from parallel.model.families.registry import read_config
from parallel.model.layers import split_kv
from parallel.model.layers.split_kv import most_partial_bytes
from parallel.runtime.graph_list import GraphList, graph_bytes, graph_shapes
from parallel.runtime.kv_sizing import DeviceShare, choose_dtype, choose_weights, fit_slots
from parallel.runtime.model_bytes import weights_name
from parallel.runtime.runner import open_model


def test_the_pool_is_what_was_asked_or_what_the_sequences_need(llama):
    fit = fit_slots(str(llama.path), SINGLE, "cpu", "auto", max_num_seqs=3)
    assert fit.num_slots == 3 * 128 and fit.max_model_len == 128 and fit.dtype == torch.float32
    assert fit_slots(str(llama.path), SINGLE, "cpu", "auto", max_num_seqs=3, max_model_len=50).num_slots == 150
    assert fit_slots(str(llama.path), SINGLE, "cpu", "bfloat16", max_num_seqs=3, num_slots=7).num_slots == 7
    for slots, expected in ((40, 40), (10**6, 150)):
        beside = dict(max_num_seqs=3, max_model_len=50, agreed_slots=slots)
        assert fit_slots(str(llama.path), SINGLE, "cpu", "auto", **beside).num_slots == expected


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "fp8")])
def test_the_bytes_counted_are_those_allocated(llama, dtype, kv_dtype):
    fit = fit_slots(str(llama.path), SINGLE, "cpu", dtype, max_num_seqs=1, stretch=2, kv_dtype=kv_dtype)
    model = open_model(llama.path, dtype=fit.dtype, num_slots=fit.num_slots, stretch=2, kv_dtype=fit.kv_dtype)
    assert fit.weight_bytes == model.decoder.nbytes()
    assert fit.kv_bytes == sum(rows[:, : fit.num_slots].nbytes for rows in (model.pool.keys, model.pool.values))


def test_fp8_rows_are_twice_as_many(llama, monkeypatch):
    monkeypatch.setattr("parallel.runtime.kv_sizing.free_bytes", lambda device: 10**7)
    fits = [
        fit_slots(str(llama.path), SINGLE, "cpu", "bfloat16", max_num_seqs=10**6, kv_dtype=kv_dtype)
        for kv_dtype in ("auto", "fp8")
    ]
    assert fits[1].num_slots // 2 == fits[0].num_slots and fits[1].facts()["kv_dtype"] == "float8_e4m3fn"


@pytest.mark.skipif(not has_triton(), reason="needs triton (pip install triton)")
def test_slot_tables_and_parts_of_attention_are_counted(llama, monkeypatch, device):
    """They take room beside the pool on CUDA."""
    model = open_model(llama.path, num_slots=500, backend="triton", device=device, graphs=False)
    backend, pool = model._backend, model.pool
    assert backend.mirror.tables.nbytes == BYTES_PER_SLOT * (pool.num_slots + 1)
    config, rows = model.config, [90, 3, 1, 1]
    for seq_id, context in enumerate((0, 100, 200, 10)):
        model.open(seq_id)
        pool.reserve(seq_id, context)
        pool.commit(seq_id, range(context))
    plan = model.plan([Span(seq_id, count) for seq_id, count in enumerate(rows)])
    assert plan.attention.num_partials, "nothing was cut: the test shows nothing"
    plan.attention.prepare()
    taken = sum(part.nbytes for part in plan.attention._partial)
    shape = config.num_heads, config.num_kv_heads, config.head_dim
    most = most_partial_bytes(*shape, sum(rows), len(rows), device)
    assert 0 < taken <= most
    monkeypatch.setattr("parallel.runtime.kv_sizing.free_bytes", lambda device: 10**8)

    def fit(num_rows):
        asked = dict(max_num_seqs=len(rows), num_slots=1, max_num_batched_tokens=num_rows)
        return fit_slots(str(llama.path), SINGLE, "cuda:0", "float32", **asked)

    held = fit(95).weight_bytes + fit(95).kv_bytes + BYTES_PER_SLOT
    monkeypatch.setattr("parallel.runtime.kv_sizing.free_bytes", lambda device: held + most)
    fit(95)
    monkeypatch.setattr("parallel.runtime.kv_sizing.free_bytes", lambda device: held + most - 1)
    with pytest.raises(ValueError, match="do not fit"):
        fit(95)


@pytest.mark.skipif(not has_triton(), reason="needs triton (pip install triton)")
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_the_parts_of_invariant_passes_are_counted(llama, monkeypatch, device, num_rows):
    """Keys are cut into more ranges, and of trees each row is cut by itself."""
    monkeypatch.setattr(split_kv, "FIXED_KEYS", 32)
    model = open_model(llama.path, num_slots=900, backend="triton", invariant=True, device=device, graphs=False)
    model._backend._bucketed, contexts = True, (150, 170, 31)
    for seq_id, context in enumerate(contexts):
        model.open(seq_id)
        model.pool.reserve(seq_id, context)
        model.pool.commit(seq_id, range(context))
    plan = model.plan([Span(seq_id, num_rows, [-1] * num_rows) for seq_id in range(len(contexts))])
    plan.attention.prepare()
    taken = sum(part.nbytes for part in plan.attention._partial)
    config, sizes = model.config, (len(contexts) * num_rows, len(contexts), device)
    shape = config.num_heads, config.num_kv_heads, config.head_dim
    longest = max(contexts) + num_rows
    most = most_partial_bytes(*shape, *sizes, longest=longest, tree_rows=len(plan.positions))
    assert 0 < taken <= most
    monkeypatch.setattr("parallel.runtime.kv_sizing.free_bytes", lambda device: 5 * 10**7)

    def pool_bytes(*, invariant):
        options: Any = dict(max_model_len=longest, max_num_seqs=1000, max_num_batched_tokens=1)
        return fit_slots(str(llama.path), SINGLE, "cuda:0", "auto", invariant=invariant, **options).kv_bytes

    assert pool_bytes(invariant=True) < pool_bytes(invariant=False)


def test_rows_of_trees_are_counted_where_each_is_cut_by_itself(llama, monkeypatch):
    monkeypatch.setattr(split_kv, "FIXED_KEYS", 8)
    monkeypatch.setattr("parallel.runtime.kv_sizing.graph_bytes", lambda *_: 0)
    monkeypatch.setattr("parallel.runtime.kv_sizing.free_bytes", lambda device: 3 * 10**6)

    def pool_bytes(*, invariant, most_rows):
        graphs = GraphList(graph_shapes(2, most_rows, 64))
        options: Any = dict(max_num_seqs=2, max_num_batched_tokens=1, graphs=graphs, invariant=invariant)
        return fit_slots(str(llama.path), SINGLE, "cuda:0", "auto", **options).kv_bytes

    all_slots = pool_bytes(invariant=True, most_rows=1)
    assert pool_bytes(invariant=False, most_rows=1) == pool_bytes(invariant=False, most_rows=32) == all_slots
    with pytest.raises(ValueError, match="do not fit"):
        pool_bytes(invariant=True, most_rows=32)


def test_ranks_agree_on_the_pool(llama, on_ranks, monkeypatch):
    free = iter([10**7, 10**6])
    monkeypatch.setattr("parallel.runtime.kv_sizing.free_bytes", lambda device: next(free))
    fits = on_ranks(2, lambda group: fit_slots(str(llama.path), group, "cpu", "auto", max_num_seqs=10**6))
    assert fits[0].num_slots == fits[1].num_slots < 10**6


def test_the_logits_of_prompts_take_room_from_the_pool(llama, monkeypatch):
    monkeypatch.setattr("parallel.runtime.kv_sizing.free_bytes", lambda device: 10**7)

    def pool_bytes(num_logit_rows):
        asked = dict(max_num_seqs=10**6, num_logit_rows=num_logit_rows)
        return fit_slots(str(llama.path), SINGLE, "cpu", "auto", **asked).kv_bytes

    taken, logits = pool_bytes(0) - pool_bytes(1000), 1000 * llama.model.config.vocab_size * 8
    assert taken == pytest.approx(0.25 * logits, rel=0.02), "of the memory left, the pool takes a quarter on a CPU"


def test_ranks_on_one_gpu_fit_in_it_in_whatever_order_they_allocate(llama, make_checkpoint, monkeypatch):
    """Both may look at its free memory before either has allocated anything."""
    whole = 10**7
    monkeypatch.setattr("parallel.runtime.kv_sizing.free_bytes", lambda device: whole)
    monkeypatch.setattr("parallel.runtime.kv_sizing.total_bytes", lambda device: whole)
    paths = [str(llama.path), str(make_checkpoint("Llama", num_hidden_layers=5).path)]

    def fits(**options):
        return [fit_slots(path, SINGLE, "cuda:0", "auto", max_num_seqs=10**6, **options) for path in paths]

    def held(fit):
        return fit.weight_bytes + fit.kv_bytes + fit.num_slots * BYTES_PER_SLOT

    weights = [fit.weight_bytes for fit in fits()]
    assert sum(map(held, fits())) > 1.5 * whole
    shared = [
        fit_slots(path, SINGLE, "cuda:0", "auto", max_num_seqs=10**6, sharing=DeviceShare(beside, part))
        for path, beside, part in zip(paths, reversed(weights), (0.3, 0.7), strict=True)
    ]
    assert 0.8 * whole < sum(map(held, shared)) <= whole
    with pytest.raises(ValueError, match="do not fit"):
        fit_slots(paths[0], SINGLE, "cuda:0", "auto", max_num_seqs=1, sharing=DeviceShare(whole, 0.5))


def test_graphs_take_room_from_the_pool_on_cuda(llama, monkeypatch):
    monkeypatch.setattr("parallel.runtime.kv_sizing.free_bytes", lambda device: 10**8)

    def pool_bytes(device, graphs):
        fit = fit_slots(str(llama.path), SINGLE, device, "bfloat16", max_num_seqs=10**6, graphs=graphs)
        return fit.kv_bytes + (device != "cpu") * fit.num_slots * BYTES_PER_SLOT

    shapes = GraphList(graph_shapes(8, 4, 2048))
    taken = pool_bytes("cuda:0", GraphList()) - pool_bytes("cuda:0", shapes)
    config = read_config(llama.path)
    assert taken == pytest.approx(0.85 * graph_bytes(config, 2, shapes), rel=0.01)
    assert pool_bytes("cpu", GraphList()) == pool_bytes("cpu", shapes)


def test_what_does_not_fit_is_named(llama, monkeypatch):
    monkeypatch.setattr("parallel.runtime.kv_sizing.free_bytes", lambda device: 1000)
    with pytest.raises(ValueError, match="do not fit the 0.00 GiB free on cpu; use more ranks"):
        fit_slots(str(llama.path), SINGLE, "cpu", "auto", max_num_seqs=1)
    beside = "^.* and a drafter on its ranks, which drafter.placement=separate would give its own: .* do not fit"
    with pytest.raises(ValueError, match=beside):
        fit_slots(str(llama.path), SINGLE, "cpu", "auto", max_num_seqs=1, beside=(0, 8))
    with pytest.raises(ValueError, match="dtype=int8: unknown; use auto"):
        choose_dtype("int8", "cpu")


def test_what_a_checkpoint_stores_in_bfloat16_is_kept_so_and_changes_nothing(llama, tmp_path):
    copy.deepcopy(llama.model).to(torch.bfloat16).save_pretrained(tmp_path)
    sizes = {str(path): fit_slots(str(path), SINGLE, "cpu", "auto", max_num_seqs=1) for path in (llama.path, tmp_path)}
    assert [fit.weights for fit in sizes.values()] == [
        torch.float32,
        torch.bfloat16 if has_products() else torch.float32,
    ]
    logits = []
    for weights in (torch.float32, torch.bfloat16):
        model = open_model(tmp_path, num_slots=8, weights=weights)
        model.open(0)
        logits.append(model.forward([Span(0, 5, num_logits=5)], [3, 1, 4, 1, 5]).logits)
    if has_products() and not has_tiles():
        assert torch.equal(*logits)
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)


def test_smaller_weights_are_for_float32_on_cpu():
    assert choose_weights("auto", "bfloat16", "cpu") == torch.bfloat16
    assert choose_weights("int8", "auto", "cpu") == torch.int8
    assert choose_weights("w8a8", "auto", "cpu") == choose_weights("w8a8", "bfloat16", "cpu") == "w8a8"
    for device, dtype in (("cuda:0", "auto"), ("cpu", "bfloat16")):
        with pytest.raises(ValueError, match="weights=int8: needs a CPU and dtype=float32"):
            choose_weights("int8", dtype, device)


def test_weights_stay_packed_on_cuda_where_the_checkpoint_is_quantised(llama, tmp_path):
    quantised = shutil.copytree(llama.path, tmp_path / "quantised")
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    for path, expected in ((quantised, "packed"), (llama.path, "bfloat16")):
        assert weights_name("auto", "bfloat16", "cuda:0", str(path)) == expected
        assert weights_name("bfloat16", "bfloat16", "cuda:0", str(path)) == "bfloat16"
    assert weights_name("auto", "bfloat16", "cuda:0", str(quantised), has_kernels=False) == "bfloat16"
    with pytest.raises(ValueError, match="weights=packed: the checkpoint is not quantised"):
        weights_name("packed", "bfloat16", "cuda:0", str(llama.path))
    with pytest.raises(ValueError, match="weights=packed: needs a CUDA device, Triton"):
        weights_name("packed", "float32", "cpu", str(quantised), has_kernels=False)
