"""Nested draft models: each gives the logits of a model that has these layers alone, whatever ran before."""

from __future__ import annotations

import pytest
import torch

from parallel.kv.pass_plan import Span
from parallel.model.layer_plan import LayerPlan
from parallel.runtime.nested_runner import ROWS_TO_CHOOSE, NestedRunner
from parallel.runtime.runner import open_model

TEXT = torch.randint(0, 97, (ROWS_TO_CHOOSE + 8,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint):
    return make_checkpoint("Llama", num_hidden_layers=4)


def opened(checkpoint, depths, confidence=0.0):
    model = open_model(checkpoint.path, num_slots=128)
    return NestedRunner(model.decoder, model.pool, depths, confidence)


def expected(checkpoint, num_layers):
    """Logits [T, V] of the model with its first layers only."""
    model = open_model(checkpoint.path, num_slots=64)
    model.open("x")
    plan = model.plan([Span("x", len(TEXT), num_logits=len(TEXT))])
    plan.layers = LayerPlan.prefix(num_layers)
    return model.run(plan, TEXT).logits


def fed(runner, names=("a",)):
    """Logits [T, V] of every sequence, whose text is fed token by token and committed."""
    for name in names:
        runner.open(name)
    rows = []
    for token in TEXT:
        rows.append(runner.forward([Span(name, 1) for name in names], [token] * len(names)).logits)
        for name in names:
            runner.commit(name, [0])
    return torch.stack(rows, 1)


def test_one_prefix_drafts_from_the_start(checkpoint):
    logits = fed(opened(checkpoint, [2]))[0]
    torch.testing.assert_close(logits, expected(checkpoint, 2), atol=1e-4, rtol=0)
    assert not torch.allclose(logits, expected(checkpoint, 4), atol=1e-2)


def test_a_sequence_goes_over_to_the_fewest_layers_that_are_sure(checkpoint):
    """Before it runs all of them; after it its rows, which all layers wrote, serve the fewer."""
    whole = expected(checkpoint, 4)
    sure = {depth: expected(checkpoint, depth)[:ROWS_TO_CHOOSE].softmax(-1).amax(-1).mean() for depth in (1, 2, 3)}
    for bar, chosen in ((0.0, 1), (float(min(sure.values())) + 1e-4, 0), (0.9999, 4)):
        runner = opened(checkpoint, [3, 1, 2], bar)
        logits, depth = fed(runner)[0], runner.depth_of("a")
        assert depth == (chosen or min(one for one, mean in sure.items() if mean >= bar))
        torch.testing.assert_close(logits[:ROWS_TO_CHOOSE], whole[:ROWS_TO_CHOOSE], atol=1e-4, rtol=0)
        nested = expected(checkpoint, depth)[ROWS_TO_CHOOSE:]
        torch.testing.assert_close(logits[ROWS_TO_CHOOSE:], nested, atol=1e-4, rtol=0)
        runner.close("a")
        runner.open("a")
        assert runner.depth_of("a") == 4, "the choice is of a request"


def test_sequences_of_one_pass_run_their_own_layers(checkpoint):
    runner = opened(checkpoint, [1, 2])
    runner.open("old")
    for token in TEXT:
        runner.forward([Span("old", 1)], [token])
        runner.commit("old", [0])
    runner.open("new")
    assert (runner.depth_of("old"), runner.depth_of("new")) == (1, 4)
    both = runner.forward([Span("new", 3, num_logits=2), Span("old", 2)], [*TEXT[:3], 5, 6])
    assert both.hidden.shape[0] == 5
    alone = opened(checkpoint, [1])
    alone.open("old")
    last = alone.forward([Span("old", len(TEXT) + 2)], [*TEXT, 5, 6]).logits
    torch.testing.assert_close(both.logits[:2], expected(checkpoint, 4)[1:3], atol=1e-4, rtol=0)
    torch.testing.assert_close(both.logits[2:], last, atol=1e-4, rtol=0)
