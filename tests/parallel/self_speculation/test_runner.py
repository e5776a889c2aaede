from __future__ import annotations

import pytest
import torch

from parallel.kv.pass_plan import Span
from parallel.model.layer_plan import LayerPlan
from parallel.runtime.runner import open_model
from parallel.self_speculation.runner import SelfDraftRunner
from tests.parallel.backends import BACKENDS

TEXT = torch.randint(0, 97, (12,), generator=torch.Generator().manual_seed(1)).tolist()
PLANS = {"exit": LayerPlan.prefix(2), "skip": LayerPlan.skipping(4, attention=[1], mlp=[2])}


def opened(path, plan, num_slots=64, **options):
    """A target that has read all of TEXT but its last token, and its drafts."""
    target = open_model(path, num_slots=num_slots, **options)
    target.open("a")
    target.forward([Span("a", len(TEXT) - 1)], TEXT[:-1])
    target.commit("a", range(len(TEXT) - 1))
    return target, SelfDraftRunner(target, plan)


@pytest.fixture
def checkpoint(make_checkpoint):
    return make_checkpoint("Llama", num_hidden_layers=4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_of_an_exit_are_those_of_the_shallow_model(checkpoint, backend):
    """Rows of the text below the exit are exact, so the shallow model could have computed them."""
    _, draft = opened(checkpoint.path, PLANS["exit"], backend=backend)
    shallow = open_model(checkpoint.path, num_slots=64, backend=backend)
    chains = [TEXT[-1], 5, 9], [TEXT[-1], 5, 7], [TEXT[-1], 3]
    expected = []
    for chain in chains:
        shallow.open("x")
        layout = shallow.plan([Span("x", len(TEXT) - 1 + len(chain), num_logits=1)])
        layout.layers = PLANS["exit"]
        expected.append(shallow.run(layout, TEXT[:-1] + chain).logits[0])
        shallow.close("x")
    assert draft.cached_len("a") == len(TEXT) - 1
    draft.forward([Span("a", 1)], TEXT[-1:])
    draft.forward([Span("a", 2, [0, 0], 2)], [5, 3])
    leaves = draft.forward([Span("a", 2, [1, 1], 2)], [9, 7]).logits
    again, _ = opened(checkpoint.path, PLANS["exit"], backend=backend)
    sibling = SelfDraftRunner(again, PLANS["exit"]).forward([Span("a", 2)], [TEXT[-1], 3]).logits
    for ours, theirs in zip([*leaves, sibling[0]], expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", PLANS)
def test_drafting_leaves_the_target_as_it_was(checkpoint, name):
    target, draft = opened(checkpoint.path, PLANS[name])
    slots, num_free = target.pool.slots("a").copy(), target.pool.num_free
    rows = [part[:, slots].clone() for part in (target.pool.keys, target.pool.values)]
    first = draft.forward([Span("a", 1)], TEXT[-1:]).logits
    draft.forward([Span("a", 3, [0, 0, 1], 3)], [1, 2, 3])
    target.pool.check()
    assert target.pool.num_free == num_free - 4
    draft.release_rows()
    target.pool.check()
    assert target.pool.num_free == num_free
    assert torch.equal(draft.forward([Span("a", 1)], TEXT[-1:]).logits, first), "a draft begins anew"
    for end in (lambda: draft.truncate("a", 0), lambda: draft.close("a")):
        draft.forward([Span("a", 1)], TEXT[-1:])
        end()
        assert target.pool.num_free == num_free
    assert target.pool.slots("a").tolist() == slots.tolist()
    for before, after in zip(rows, (target.pool.keys, target.pool.values), strict=True):
        assert torch.equal(before, after[:, slots])


def test_layers_are_chosen_from_draft_to_draft(checkpoint):
    target, draft = opened(checkpoint.path, PLANS["exit"])
    logits = {}
    for name in ("exit", "skip", "exit"):
        draft.layers = PLANS[name]
        found = draft.forward([Span("a", 1)], TEXT[-1:]).logits
        draft.release_rows()
        assert torch.equal(logits.setdefault(name, found), found)
    assert not torch.equal(logits["exit"], logits["skip"])
    draft.layers = LayerPlan.whole(4)
    assert torch.equal(
        draft.forward([Span("a", 1)], TEXT[-1:]).logits, target.forward([Span("a", 1)], TEXT[-1:]).logits
    )


@pytest.mark.parametrize("name", PLANS)
def test_two_ranks_draft_what_one_does(checkpoint, on_ranks, name):
    def logits(group=None):
        options = {} if group is None else {"group": group}
        _, draft = opened(checkpoint.path, PLANS[name], **options)
        root = draft.forward([Span("a", 1)], TEXT[-1:]).logits
        return torch.cat([root, draft.forward([Span("a", 3, [0, 0, 1], 3)], [1, 2, 3]).logits])

    alone = logits()
    ranks = on_ranks(2, logits)
    assert torch.equal(*ranks)
    torch.testing.assert_close(ranks[0], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", PLANS)
def test_a_draft_may_keep_rows_and_take_them_back(checkpoint, name):
    """As a level of a cascade does, which reviews a draft piece by piece."""
    target, draft = opened(checkpoint.path, PLANS[name])
    draft.forward([Span("a", 4, [-1, 0, 1, 1])], [TEXT[-1], 1, 2, 3])
    draft.commit("a", [0, 1, 3])
    target.pool.check()
    assert (draft.cached_len("a"), target.cached_len("a")) == (len(TEXT) + 2, len(TEXT) - 1)
    after = draft.forward([Span("a", 1)], [5]).logits
    draft.truncate("a", len(TEXT))
    assert draft.cached_len("a") == len(TEXT)
    again = draft.forward([Span("a", 3)], [1, 3, 5]).logits
    torch.testing.assert_close(again, after)
    draft.release_rows()
    draft.commit("a", [0])
    assert draft.cached_len("a") == len(TEXT) - 1
    target.pool.check()
