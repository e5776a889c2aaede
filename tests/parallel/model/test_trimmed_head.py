"""A head that has only some rows: the same logits in their columns, on fewer bytes, however the model is shared."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from parallel.kv.pass_plan import Span
from parallel.model.config import HeadRows
from parallel.model.partition import LayerLayout, default_partition
from parallel.runtime.model_bytes import weight_bytes
from parallel.runtime.runner import open_model
from tests.families import FAMILIES

TOKENS = [3, 8, 20, 41, 5]
HEAD = HeadRows(rows=(5, 60, 2, 41, 90, 7, 33), columns=(0, 100, 2, 41, 98, 7, 3), width=120)


def logits_of(path, group=None, **options):
    runner = open_model(path, num_slots=32, **({} if group is None else {"group": group}), **options)
    runner.open("s")
    logits = runner.forward([Span("s", len(TOKENS), num_logits=2)], TOKENS).logits
    layout = options.get("layout")
    config, stored = replace(runner.config, head=options.get("head")), options.get("weights")
    name = None if stored is None else str(stored).removeprefix("torch.")
    ranks, rank = (group.size, group.rank) if group is not None else (1, 0)
    if rank == 0:  # the one with the biases of split rows
        assert weight_bytes(config, ranks, 4, layout, rank, weights=name) == runner.decoder.nbytes()
    return logits


@pytest.mark.parametrize("weights", [None, torch.int8])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2"])  # an own head; one tied to the embedding; a soft cap
def test_the_logits_of_its_rows_are_those_of_the_whole_head(make_checkpoint, family, weights):
    path = make_checkpoint(family, **FAMILIES[family]).path
    whole, some = logits_of(path, weights=weights), logits_of(path, weights=weights, head=HEAD)
    assert some.shape == (2, HEAD.width)
    torch.testing.assert_close(some[:, list(HEAD.columns)], whole[:, list(HEAD.rows)], atol=1e-5, rtol=1e-5)
    outside = torch.ones(HEAD.width, dtype=torch.bool)
    outside[list(HEAD.columns)] = False
    assert bool((some[:, outside] == -torch.inf).all())


@pytest.mark.parametrize("shared", ["tensor", "layer"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_ranks_share_the_rows(make_checkpoint, on_ranks, family, shared):
    path = make_checkpoint(family, **FAMILIES[family] | {"num_hidden_layers": 4}).path
    layout = LayerLayout(default_partition(4, 2), 2, "replicated", "owner") if shared == "layer" else None
    alone = logits_of(path, head=HEAD)
    for logits in on_ranks(2, lambda group: logits_of(path, group, head=HEAD, layout=layout)):
        torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)
