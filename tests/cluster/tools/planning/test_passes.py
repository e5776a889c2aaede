"""Times of draft passes, on a model so small that only the bookkeeping is tested."""

from __future__ import annotations

import pytest
import torch

from cluster.tools.planning.passes import PassTask, Sharing, measure_passes
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
    task = PassTask(read_config(SHAPE), sharings, num_rows=(1, 3), context=8, repeats=3, weights=torch.int8)
    return measure_passes(task)


def test_every_sharing_is_measured_in_every_kind_of_pass(times):
    assert [(time.sharing, time.num_rows, time.fuzzy) for time in times] == [
        *[(sharing, rows, False) for sharing in (SINGLE, TENSOR) for rows in (1, 3)],
        *[(sharing, rows, fuzzy) for sharing in (LAYER, Sharing(1, 2)) for rows in (1, 3) for fuzzy in (False, True)],
    ]


def test_the_parts_of_a_pass_add_up_to_it(times):
    for time in times:
        assert set(time.split) == {"attention", "mlp", "communication", "rest"}
        assert 0.1 * time.seconds < sum(time.split.values()) < 10 * time.seconds  # medians of parts on a busy machine
        assert (time.communication_share > 0) == (time.sharing.ranks > 1)


def test_names_say_what_was_measured():
    names = [sharing.name for sharing in (SINGLE, TENSOR, LAYER)]
    assert names == ["single", "tensor x2", "layer x2, 2 side by side, tensor MLPs"]
