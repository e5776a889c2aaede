"""Times of draft passes, on a model so small that only the bookkeeping is tested."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from cluster.tools.planning.ranks import RoleWork
from docs.measurements.passes import measuring
from docs.measurements.passes.measuring import PassTask, Sharing, measure_passes
from parallel.model.families.registry import read_config

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
SINGLE, TENSOR, LAYER = Sharing(), Sharing(2), Sharing(2, 2, "tensor")


@pytest.fixture(scope="module")
def times():
    sharings = (SINGLE, TENSOR, LAYER, Sharing(1, 2))
    task = PassTask(read_config(SHAPE), sharings, num_rows=(1, 3), context=8, repeats=1, weights=torch.int8)
    with pytest.MonkeyPatch.context() as patch:  # ranks as processes: tests/cluster/tools/planning/test_rounds.py
        patch.setattr(measuring, "run_on_ranks", partial(on_threads, measuring.run_on_ranks))
        return measure_passes(task)


def on_threads(run: Callable[..., list[Any]], roles: list[RoleWork], *, as_threads: bool) -> list[Any]:
    """What they return where ranks were asked for as processes."""
    assert not as_threads
    return run(roles, as_threads=True)


@pytest.mark.extended
def test_every_sharing_is_measured_in_every_kind_of_pass(times):
    assert [(time.sharing, time.num_rows, time.fuzzy) for time in times] == [
        *[(sharing, rows, False) for sharing in (SINGLE, TENSOR) for rows in (1, 3)],
        *[(sharing, rows, fuzzy) for sharing in (LAYER, Sharing(1, 2)) for rows in (1, 3) for fuzzy in (False, True)],
    ]


@pytest.mark.extended
def test_the_parts_of_a_pass_add_up_to_it(times):
    for time in times:
        assert set(time.split) == {"attention", "mlp", "communication", "rest"}
        assert sum(time.split.values()) == pytest.approx(time.seconds)  # of one pass: of several, these are medians
        assert (time.communication_share > 0) == (time.sharing.ranks > 1)


def test_a_pass_on_one_rank_is_held_against_a_plain_read(times):
    """2 matrices of 97 tokens, of which the embedding is not read, and 6 layers: int8 with a float for each output."""
    attention, mlp = 32 * (32 + 2 * 16 + 32), 3 * 32 * 64
    outputs = 32 + 2 * 16 + 32 + 2 * 64 + 32
    layers = 6 * (attention + mlp + 4 * outputs + 4 * 2 * 32)
    kv_rows = 8 * 6 * 2 * 16 * 4
    for time in times:
        if time.sharing != SINGLE:
            assert time.bytes_read is None and time.bandwidth_share is None
            continue
        assert time.bytes_read is not None and time.bandwidth is not None and time.bandwidth > 0
        head = 97 * 32 + 2 * 4 * 97 + 4 * 32  # with the floats of both, and the last norm
        assert time.bytes_read == layers + kv_rows + head
        assert time.bandwidth_share == pytest.approx(time.bytes_read / time.seconds / time.bandwidth)


def test_names_say_what_was_measured():
    names = [sharing.name for sharing in (SINGLE, TENSOR, LAYER)]
    assert names == ["single", "tensor x2", "layer x2, 2 side by side, tensor MLPs"]
