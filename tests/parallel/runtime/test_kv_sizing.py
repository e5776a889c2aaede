from __future__ import annotations

import pytest
import torch

from parallel.comm.group import SINGLE
from parallel.runtime.kv_sizing import choose_dtype, fit_slots
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


def test_what_does_not_fit_is_named(llama, monkeypatch):
    monkeypatch.setattr("parallel.runtime.kv_sizing.free_bytes", lambda device: 1000)
    with pytest.raises(ValueError, match="do not fit the 0.00 GiB free on cpu; use more ranks"):
        fit_slots(str(llama.path), SINGLE, "cpu", "auto", max_num_seqs=1)
    with pytest.raises(ValueError, match="dtype=int8: unknown; use auto"):
        choose_dtype("int8", "cpu")
