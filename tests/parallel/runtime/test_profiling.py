from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from parallel.kv.pass_plan import Span
from parallel.kv.pool import KVPool
from parallel.model.decoder import Decoder
from parallel.model.families.registry import read_config
from parallel.model.layer_parallel import LayerParallelDecoder
from parallel.model.partition import LayerLayout, default_partition
from parallel.runtime.layer_parallel_runner import LayerParallelRunner
from parallel.runtime.profiling import PassClock, TimedGroup, faster_mlp, fill_at_random, watch
from parallel.runtime.runner import ModelRunner, open_model


def test_spans_within_spans_add_up_to_the_whole(monkeypatch):
    readings = iter([100, 101, 103, 107, 115, 131])
    monkeypatch.setattr("parallel.runtime.profiling.time", SimpleNamespace(perf_counter=lambda: next(readings)))
    clock = PassClock()
    clock.enter("outer")
    clock.enter("inner")
    clock.leave()
    clock.enter("inner")
    clock.leave()
    clock.leave()
    assert clock.pop_seconds() == {"inner": 2 + 8, "outer": 1 + 4 + 16} and clock.pop_seconds() == {}


@pytest.mark.parametrize("kind", ["tensor", "layer"])
def test_a_watched_pass_is_the_same_pass_with_its_seconds_by_kind(llama, make_checkpoint, on_ranks, kind):
    path = make_checkpoint("Llama", num_hidden_layers=8, initializer_range=0.15).path
    config = read_config(path)

    def measured(group):
        clock = PassClock()
        if kind == "tensor":
            runner = open_model(path, TimedGroup(group, clock), num_slots=32)
        else:
            layout = LayerLayout(default_partition(8, 2), 2)
            decoder = LayerParallelDecoder(config, TimedGroup(group, clock), layout=layout)
            fill_at_random(decoder)
            runner = LayerParallelRunner(decoder, KVPool(8, 32, config.num_kv_heads, config.head_dim))
        logits = []
        for watched in (False, True):
            if watched:
                watch(runner.decoder, clock)
                clock.pop_seconds()
            runner.open(watched)
            logits.append(runner.forward([Span(watched, 3)], [1, 2, 3], fuzzy=True).logits)
        assert torch.equal(*logits)
        return clock.pop_seconds()

    for seconds in on_ranks(2, measured):
        assert set(seconds) == {"attention", "mlp", "communication", "rest"} and min(seconds.values()) > 0


def test_a_decoder_filled_at_random_runs(llama):
    config = read_config(llama.path)
    decoder = Decoder(config)
    fill_at_random(decoder)
    runner = ModelRunner(decoder, KVPool(2, 8, config.num_kv_heads, config.head_dim))
    runner.open(0)
    assert runner.forward([Span(0, 2)], [1, 2]).logits.isfinite().all()


def test_all_ranks_choose_the_same_way_to_run_the_mlps(llama, on_ranks):
    config = read_config(llama.path)
    chosen = on_ranks(2, lambda group: faster_mlp(config, group, "cpu", torch.float32, 1))
    assert chosen[0] == chosen[1] and chosen[0] in ("replicated", "tensor")
    assert faster_mlp(config, type("Five", (), {"size": 5})(), "cpu", torch.float32, 1) == "replicated"
