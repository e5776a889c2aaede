from __future__ import annotations

import copy

import pytest
import torch

from parallel.comm.group import SINGLE
from parallel.kernels.products import has_products
from parallel.kv.pass_plan import Span
from parallel.runtime.kv_sizing import choose_dtype, choose_weights, fit_slots
from parallel.runtime.runner import open_model


def test_the_pool_is_what_was_asked_or_what_the_sequences_need(llama):
    fit = fit_slots(str(llama.path), SINGLE, "cpu", "auto", max_num_seqs=3)
    assert fit.num_slots == 3 * 128 and fit.max_model_len == 128 and fit.dtype == torch.float32
    assert fit_slots(str(llama.path), SINGLE, "cpu", "auto", max_num_seqs=3, max_model_len=50).num_slots == 150
    assert fit_slots(str(llama.path), SINGLE, "cpu", "bfloat16", max_num_seqs=3, num_slots=7).num_slots == 7


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bytes_foretold_are_those_allocated(llama, dtype):
    fit = fit_slots(str(llama.path), SINGLE, "cpu", dtype, max_num_seqs=1, stretch=2)
    model = open_model(llama.path, dtype=fit.dtype, num_slots=fit.num_slots, stretch=2)
    assert fit.weight_bytes == model.decoder.nbytes()
    rows = model.pool.keys[:, : fit.num_slots].numel() * 2
    assert fit.kv_bytes == rows * fit.dtype.itemsize


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


def test_what_does_not_fit_is_named(llama, monkeypatch):
    monkeypatch.setattr("parallel.runtime.kv_sizing.free_bytes", lambda device: 1000)
    with pytest.raises(ValueError, match="do not fit the 0.00 GiB free on cpu; use more ranks"):
        fit_slots(str(llama.path), SINGLE, "cpu", "auto", max_num_seqs=1)
    with pytest.raises(ValueError, match="dtype=int8: unknown; use auto"):
        choose_dtype("int8", "cpu")


def test_what_a_checkpoint_stores_in_bfloat16_is_kept_so_and_changes_no_bit(llama, tmp_path):
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
        assert not has_products() or torch.equal(logits[0], logits[-1])


def test_smaller_weights_are_for_float32_on_cpu():
    assert choose_weights("auto", "bfloat16", "cpu") == torch.bfloat16
    assert choose_weights("int8", "auto", "cpu") == torch.int8
    for device, dtype in (("cuda:0", "auto"), ("cpu", "bfloat16")):
        with pytest.raises(ValueError, match="weights=int8: needs a CPU and dtype=float32"):
            choose_weights("int8", dtype, device)
