"""Drafts that are made pass by pass: those that `propose` makes, at whichever pass each joins."""

from __future__ import annotations

import random

import pytest

from actors.drafters.config import ModelOptions
from actors.drafters.interface import Context
from actors.drafters.model.ahead_drafter import AheadDrafter
from actors.drafters.model.config import ModelDrafterConfig, Strategy
from actors.protocol.messages import SamplingParams
from parallel.runtime.runner import open_model

SHAPES = {
    "chain": ModelDrafterConfig(num_draft_tokens=5),
    "tree": ModelDrafterConfig(strategy=Strategy.tree, num_draft_tokens=9, depth=4, width=3),
}
BUDGETS = {1: 5, 2: 3, 3: 4}


@pytest.fixture(params=["chain", "tree"])
def open_drafter(request, models, monkeypatch):
    # models made at random are sure of nothing
    monkeypatch.setattr("actors.drafters.draft_ahead.tree.REDRAFT_WORTH", 0.0)
    monkeypatch.setattr("actors.drafters.model.ahead_drafter.AHEAD_WORTH", 0.0)

    def open_(num_slots: int = 2000):
        options = ModelOptions("coupled", 8, (1,), prefill_chunk=4)
        runner = open_model(models["drafter"], num_slots=num_slots)
        return AheadDrafter(runner, SHAPES[request.param], options, "branches")

    return open_


def opened(drafter, request_id: int, length: int = 11) -> Context:
    choose = random.Random(request_id)
    context = Context(request_id, 0, [choose.randrange(2, 97) for _ in range(length)], length, SamplingParams(seed=3))
    drafter.open(context)
    return context


def count_passes(drafter) -> list[int]:
    """Rows of each pass from now on."""
    passes: list[int] = []
    forward = drafter.runner.forward

    def counted(spans, token_ids, *args, **options):
        passes.append(len(token_ids))
        return forward(spans, token_ids, *args, **options)

    drafter.runner.forward = counted
    return passes


def test_drafts_are_those_of_one_call_at_whichever_pass_each_joins(open_drafter):
    drafter = open_drafter()
    wanted, longest = {}, 0
    for number, budget in BUDGETS.items():
        context, passes = opened(drafter, number), count_passes(drafter)
        (draft,) = drafter.propose([context], [budget])
        wanted[number], longest = draft.tree, max(longest, len(passes))
    drafter = open_drafter()
    found, contexts, passes = {}, {}, count_passes(drafter)
    for number, budget in BUDGETS.items():  # each joins one pass after the one before
        contexts[number] = opened(drafter, number)
        drafter.begin([contexts[number]], [budget])
        assert drafter.is_drafting(number)
        drafter.advance(None)
    while any(drafter.is_drafting(number) for number in BUDGETS):
        drafter.advance(None)
    texts = 2 * len(BUDGETS)  # passes over the parts of the texts before the last
    assert len(passes) <= longest + len(BUDGETS) + texts, "of all requests in the same passes"
    for number, budget in BUDGETS.items():
        (draft,) = drafter.propose([contexts[number]], [budget])
        found[number] = draft.tree
    assert found == wanted and all(tree.num_draft_tokens for tree in found.values())


def test_a_step_of_draft_ahead_is_part_of_a_pass_that_drafts(open_drafter):
    drafter = open_drafter()
    first, second = opened(drafter, 1), opened(drafter, 2)
    drafter.propose([first], [4])
    assert drafter.wants_work
    drafter.begin([second], [3])
    num_nodes = len(drafter._states[1].tree.nodes)
    assert not drafter.advance(None).num_rows
    assert len(drafter._states[1].tree.nodes) == num_nodes
    step = drafter.advance(2)
    assert step.num_rows and step.refreshed, "its time is not that of draft-ahead alone"
    assert len(drafter._states[1].tree.nodes) > num_nodes


def test_what_has_no_room_gets_no_draft_and_is_not_waited_for(open_drafter):
    drafter = open_drafter(num_slots=14)
    contexts = [opened(drafter, 1), opened(drafter, 2)]
    drafter.begin(contexts, [3, 3])
    assert drafter.is_drafting(1) and not drafter.is_drafting(2)
    for _ in range(6):
        drafter.advance(None)
    assert not drafter.is_drafting(1)


def test_nothing_is_begun_where_the_policy_drafts_in_turn(open_drafter):
    drafter = open_drafter()
    context = opened(drafter, 1)
    drafter.may_work_ahead = False
    drafter.begin([context], [4])
    assert not drafter.is_drafting(1)
    (draft,) = drafter.propose([context], [4])
    assert draft.tree.num_draft_tokens
