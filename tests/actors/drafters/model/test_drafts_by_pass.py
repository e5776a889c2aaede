"""Drafts that are made pass by pass: those that `propose` makes, at whichever pass each joins."""

from __future__ import annotations

import random
from functools import partial

import pytest

from actors.drafters.config import ModelOptions
from actors.drafters.interface import Context
from actors.drafters.model.ahead_drafter import AheadDrafter
from actors.drafters.model.config import ModelDrafterConfig, Strategy
from actors.drafters.model.drafter import ModelDrafter
from actors.protocol.messages import Commit, SamplingParams, TokenTree
from parallel.runtime.runner import open_model

SHAPES = {
    "chain": ModelDrafterConfig(num_draft_tokens=5),
    "tree": ModelDrafterConfig(strategy=Strategy.tree, num_draft_tokens=9, depth=4, width=3),
    "best": ModelDrafterConfig(strategy=Strategy.best_first, num_draft_tokens=9, depth=4, width=3),
}
BUDGETS = {1: 5, 2: 3, 3: 4}


PLACES = [("branches", "best"), ("sync", "chain"), ("sync", "tree")]
REST = [(pipeline, shape) for pipeline in ("branches", "sync") for shape in SHAPES]
REST = [pytest.param(place, marks=pytest.mark.slow) for place in REST if place not in PLACES]


@pytest.fixture(params=[*PLACES, *REST], ids="-".join)
def open_any(request, open_drafter_of):
    return partial(open_drafter_of, *request.param)


@pytest.fixture(params=["chain", "tree"])
def open_drafter(request, open_drafter_of):
    """Those that work ahead."""
    return partial(open_drafter_of, "branches", request.param)


@pytest.fixture
def open_drafter_of(models, monkeypatch):
    # models made at random are sure of nothing
    monkeypatch.setattr("actors.drafters.draft_ahead.tree.REDRAFT_WORTH", 0.0)
    monkeypatch.setattr("actors.drafters.model.ahead_drafter.AHEAD_WORTH", 0.0)

    def open_(pipeline: str, shape: str, num_slots: int = 2000):
        options = ModelOptions("coupled", 8, (1,), prefill_chunk=4)
        runner = open_model(models["drafter"], num_slots=num_slots)
        if pipeline == "sync":
            return ModelDrafter(runner, SHAPES[shape], options)
        return AheadDrafter(runner, SHAPES[shape], options, pipeline)

    return open_


def opened(drafter, request_id: int, length: int = 11) -> Context:
    choose = random.Random(request_id)
    # what a verdict tells of first choices changes later trees of a drafter that works ahead, if tokens are drawn
    sampling = SamplingParams(seed=3, temperature=0.0 if isinstance(drafter, AheadDrafter) else 1.0)
    context = Context(request_id, 0, [choose.randrange(2, 97) for _ in range(length)], length, sampling)
    drafter.open(context)
    return context


def count_passes(drafter) -> list[int]:
    """Rows of each pass from now on."""
    passes: list[int] = []
    drafter.runner.run_eagerly()  # a chain in one call makes its passes unseen
    forward = drafter.runner.forward

    def counted(spans, token_ids, *args, **options):
        passes.append(len(token_ids))
        return forward(spans, token_ids, *args, **options)

    drafter.runner.forward = counted
    return passes


@pytest.mark.extended
def test_drafts_are_those_of_one_call_at_whichever_pass_each_joins(open_any):
    drafter = open_any()
    wanted, longest = {}, 0
    for number, budget in BUDGETS.items():
        context, passes = opened(drafter, number), count_passes(drafter)
        (draft,) = drafter.propose([context], [budget])
        wanted[number], longest = draft.tree, max(longest, len(passes))
    drafter = open_any()
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
    for number, tree in found.items():
        _follow(drafter, contexts[number], tree)
        (draft,) = drafter.propose([contexts[number]], [BUDGETS[number]])
        assert draft.tree == _drafted_afresh(open_any(), contexts[number], BUDGETS[number])


def _follow(drafter, context: Context, tree: TokenTree) -> None:
    """The target accepts the first path of the draft and goes on with token 7."""
    path = [1]
    while tree.children()[path[-1]]:
        path.append(tree.children()[path[-1]][0])
    tokens = (*[tree.token_ids[node] for node in path], 7)
    drafter.observe(context, Commit(context.request_id, 0, len(context.token_ids), tuple(path), tokens))
    context.extend(tokens)


def _drafted_afresh(drafter, context: Context, budget: int) -> TokenTree:
    drafter.open(context)
    (draft,) = drafter.propose([context], [budget])
    return draft.tree


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


def test_what_has_no_room_gets_no_draft_and_is_not_waited_for(open_any):
    drafter = open_any(num_slots=18)
    contexts = [opened(drafter, 1), opened(drafter, 2)]
    drafter.begin(contexts, [3, 3])
    assert drafter.is_drafting(1) and not drafter.is_drafting(2)
    for _ in range(6):
        drafter.advance(None)
    assert not drafter.is_drafting(1)
    assert [bool(one.tree.num_draft_tokens) for one in drafter.propose(contexts, [3, 3])] == [True, False]


def test_a_request_that_ends_while_its_draft_is_made_leaves_no_rows(open_any):
    drafter = open_any()
    contexts = [opened(drafter, 1), opened(drafter, 2)]
    drafter.begin(contexts, [4, 4])
    drafter.advance(None)
    drafter.release(1)
    drafter.advance(None)
    again = opened(drafter, 1)
    assert drafter.propose([again], [4])[0].tree == _drafted_afresh(open_any(), again, 4)


def test_nothing_is_begun_where_the_policy_drafts_in_turn(open_drafter):
    drafter = open_drafter()
    context = opened(drafter, 1)
    drafter.may_work_ahead = False
    drafter.begin([context], [4])
    assert not drafter.is_drafting(1)
    (draft,) = drafter.propose([context], [4])
    assert draft.tree.num_draft_tokens


def test_drafts_that_were_begun_one_after_the_other_share_the_room_that_is_left(open_drafter):
    """Each had room by itself; what does not fit the pass ends."""
    drafter = open_drafter(num_slots=22)
    contexts = [opened(drafter, 1), opened(drafter, 2), opened(drafter, 3, length=8)]
    for context in contexts:
        drafter.begin([context], [1])
        assert drafter.is_drafting(context.request_id)
    drafter.advance(None)
    assert not any(drafter.is_drafting(context.request_id) for context in contexts)
    drafts = drafter.propose(contexts, [1, 1, 1])
    assert [draft.tree.num_draft_tokens for draft in drafts] == [1, 0, 0]


def test_a_request_without_room_is_not_drafted_for_in_turn(open_drafter):
    """Its first draft; the verdict comes all the same."""
    drafter = open_drafter(num_slots=12)
    context = opened(drafter, 1)
    drafter.may_work_ahead = False
    (draft,) = drafter.propose([context], [4])
    assert not draft.tree.num_draft_tokens
    drafter.observe(context, Commit(1, 0, len(context.token_ids), (), (7,)))
    drafter.release(1)
    assert drafter.runner.pool.num_free == 12


@pytest.mark.parametrize(
    ("strategy", "rule", "joins"),
    [("chain", "coupled", True), ("dynamic", "coupled", False), ("tree", "rejection", False)],
)
def test_trees_that_share_a_budget_and_random_draws_are_made_in_one_call(models, strategy, rule, joins):
    config = ModelDrafterConfig(strategy=Strategy(strategy), num_draft_tokens=4)
    drafter = ModelDrafter(open_model(models["drafter"], num_slots=200), config, ModelOptions(rule, 8, (1,), 4))
    assert (drafter.capabilities.drafts_by_pass is not None) == joins
