"""Nested draft models: each gives the logits of a model that has these layers alone, whatever ran before."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from parallel.kernels.choice import Race
from parallel.kv.pass_plan import Span
from parallel.model.layer_plan import LayerPlan
from parallel.runtime.nested_runner import MEMORY, NestedRunner
from parallel.runtime.runner import open_model

TEXT = torch.randint(0, 97, (24,), generator=torch.Generator().manual_seed(1)).tolist()


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


def fed(runner, name="a", length=24):
    """Logits [T, V] and the layers that gave them: of a sequence whose text is fed as by drafts of one token each."""
    runner.open(name)
    rows, depths = [], []
    while len(rows) < length:
        depths.append(runner.depth_of(name))
        suffix = TEXT[runner.cached_len(name) : len(rows) + 1]
        rows.append(runner.forward([Span(name, len(suffix))], suffix).logits[0])
        runner.commit(name, range(len(suffix)))
        dropped = runner.drop_fuzzy(name)
        assert dropped == (runner.depth_of(name) > depths[-1])
    return torch.stack(rows), depths


def test_one_prefix_drafts_from_the_start(checkpoint):
    logits, _ = fed(opened(checkpoint, [2]))
    torch.testing.assert_close(logits, expected(checkpoint, 2), atol=1e-4, rtol=0)
    assert not torch.allclose(logits, expected(checkpoint, 4), atol=1e-2)


def chosen_depths(checkpoint, depths, bar):
    """The layers of every draft by the rule: a mean that forgets of each confidence, taken where the model ran."""
    sure = {depth: expected(checkpoint, depth).softmax(-1).amax(-1).tolist() for depth in depths}
    depth, means, chosen = depths[-1], {}, []
    for row in range(len(TEXT)):
        chosen.append(depth)
        latest = {one: sure[one][row] for one in depths if one <= depth}
        means = {one: MEMORY * means.get(one, now) + (1 - MEMORY) * now for one, now in latest.items()}
        clear = [one for one in means if means[one] >= bar]
        depth = min(clear) if clear else min([one for one in depths if one > depth], default=depth)
    return chosen


@pytest.mark.parametrize("share", [0.35, 0.4, 0.45])
def test_the_fewest_layers_that_are_sure_are_chosen_for_every_draft(checkpoint, share):
    """And each draft is that of a model with these layers alone, also after fewer: their rows were fed again."""
    bar = float(expected(checkpoint, 1).softmax(-1).amax(-1).quantile(share))
    logits, depths = fed(opened(checkpoint, [3, 1], bar))
    assert depths == chosen_depths(checkpoint, [1, 3, 4], bar)
    changes = list(pairwise(depths))
    assert any(a < b for a, b in changes) and any(a > b for a, b in changes), "both ways"
    alone = {depth: expected(checkpoint, depth) for depth in set(depths)}
    torch.testing.assert_close(logits, torch.stack([alone[d][i] for i, d in enumerate(depths)]), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("bar", "chosen"), [(0.0, 1), (0.9999, 4)])
def test_a_bar_that_all_or_none_clear_is_settled_by_the_first_draft(checkpoint, bar, chosen):
    runner = opened(checkpoint, [3, 1, 2], bar)
    assert fed(runner)[1] == [4] + [chosen] * (len(TEXT) - 1)
    runner.close("a")
    runner.open("a")
    assert runner.depth_of("a") == 4, "the choice is of a request"


def test_only_the_first_pass_of_a_draft_is_asked(checkpoint):
    """Its row follows committed text; the others would need the heads of all models."""
    runner = opened(checkpoint, [1, 2], 0.0)
    runner.open("a")
    runner.forward([Span("a", 3, num_logits=0)], TEXT[:3])
    runner.commit("a", range(3))
    assert not runner.drop_fuzzy("a") and runner.depth_of("a") == 4, "a prompt's rows without logits tell nothing"
    runner.forward([Span("a", 1)], TEXT[3:4], fuzzy=True)
    runner.commit("a", [0])
    assert not runner.drop_fuzzy("a") and runner.depth_of("a") == 4
    runner.forward([Span("a", 1)], TEXT[4:5])
    runner.commit("a", [0])
    assert not runner.drop_fuzzy("a") and runner.depth_of("a") == 1


def test_rows_that_a_cut_took_back_are_fed_again(checkpoint):
    """More layers read them, from where fewer had written on, and not from before the cut."""
    runner = opened(checkpoint, [1, 2], 0.0)
    fed(runner, length=8)
    assert runner.depth_of("a") == 1 and runner.cached_len("a") == 8
    runner.truncate("a", 5)
    runner._least = 1.1
    depths = []
    while runner.depth_of("a") < 4:
        row = runner.cached_len("a")
        runner.forward([Span("a", 1)], TEXT[row : row + 1])
        runner.commit("a", [0])
        assert runner.drop_fuzzy("a") and runner.cached_len("a") == 1, "all but the first draft ran one layer"
        depths.append(runner.depth_of("a"))
    assert depths == [2, 4]
    logits = runner.forward([Span("a", 7, num_logits=7)], TEXT[1:8]).logits
    torch.testing.assert_close(logits, expected(checkpoint, 4)[1:8], atol=1e-4, rtol=0)


def test_sequences_of_one_pass_run_their_own_layers(checkpoint):
    runner = opened(checkpoint, [1, 2])
    fed(runner, "old")
    runner.open("new")
    assert (runner.depth_of("old"), runner.depth_of("new")) == (1, 4)
    both = runner.forward([Span("new", 3, num_logits=2), Span("old", 2)], [*TEXT[:3], 5, 6])
    assert both.hidden.shape[0] == 5
    alone = opened(checkpoint, [1])
    alone.open("old")
    last = alone.forward([Span("old", len(TEXT) + 2)], [*TEXT, 5, 6]).logits
    torch.testing.assert_close(both.logits[:2], expected(checkpoint, 4)[1:3], atol=1e-4, rtol=0)
    torch.testing.assert_close(both.logits[2:], last, atol=1e-4, rtol=0)


class Likeliest:
    """Five steps of the likeliest token."""

    def __len__(self):
        return 5

    def choose(self, logits, step):
        return logits.argmax(-1)

    def race(self):
        return Race()


@pytest.mark.parametrize(("depths", "layers"), [([2], 2), ([3, 1], 4)])
def test_a_chain_runs_the_layers_of_its_draft(checkpoint, depths, layers):
    """Two layers, or at first all four, which may be one call."""
    runner = opened(checkpoint, depths)
    for _ in range(3):
        runner.open("a")
        chain = runner.extend([Span("a", len(TEXT))], TEXT, Likeliest())[:, 0].tolist()
        assert runner.depth_of("a") == layers
        fed = [*TEXT, *chain]
        runner.close("a")
        model = open_model(checkpoint.path, num_slots=64)
        model.open("x")
        plan = model.plan([Span("x", len(fed), num_logits=5 + 1)])
        plan.layers = LayerPlan.prefix(layers)
        assert model.run(plan, fed).logits.argmax(-1).tolist()[:-1] == chain
