"""The layer-parallel draft model: which of its rows are exact after any verdict, when it calibrates, and its tokens."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import actors.drafters.model.ahead_drafter
from actors.drafters.config import ModelOptions
from actors.drafters.interface import Context
from actors.drafters.model.ahead_drafter import AheadDrafter
from actors.drafters.model.calibration import CalibrationSchedule
from actors.drafters.model.config import CalibrationPolicy, ModelDrafterConfig, Strategy
from actors.drafters.model.drafter import ModelDrafter
from actors.drafters.model.loading import open_draft_model
from actors.options import Parallel, SchedulerConfig
from actors.protocol.draft_tree import DraftTree
from actors.protocol.messages import Commit, SamplingParams
from parallel.comm.group import SINGLE
from parallel.runtime.runner import Span, open_model
from tests.matrices import in_turn

OPTIONS = ModelOptions("coupled", law_size=8, eos_token_ids=(1,), prefill_chunk=512)
CHAIN = ModelDrafterConfig(num_draft_tokens=5, parallel=Parallel.layer, layer_group=4)
TREE = replace(CHAIN, strategy=Strategy.tree, num_draft_tokens=12, depth=4, width=3)
SHAPES = {"chain": CHAIN, "tree": TREE}
POLICIES = {
    "every": {},
    "every-3": dict(calibrate_every=3),
    "mismatch": dict(calibration_policy=CalibrationPolicy.mismatch),
    "never": dict(calibration_policy=CalibrationPolicy.never),
}


@pytest.fixture(scope="module")
def check_rows(models):
    """Assert that rows marked exact are exact; returns the largest error of the fuzzy rows of committed text."""
    plain = open_model(models["deep"], num_slots=256)

    def check(runner, request_id, token_ids) -> float:
        exact, cached = runner.exact_len(request_id), runner.cached_len(request_id)
        if not cached:
            return 0.0
        plain.open("x")
        plain.forward([Span("x", cached)], token_ids[:cached])
        kept, expected = (
            torch.stack((pool.keys[:, slots], pool.values[:, slots]))
            for pool, slots in (
                (runner.pool, runner.pool.slots(request_id)[:cached]),
                (plain.pool, plain.pool.slots("x")),
            )
        )
        plain.close("x")
        torch.testing.assert_close(kept[:, :, :exact], expected[:, :, :exact], atol=2e-5, rtol=1e-4)
        return float((kept - expected)[:, :, exact:].abs().max()) if exact < cached else 0.0

    return check


@pytest.mark.extended
@pytest.mark.parametrize(
    ("shape", "pipeline", "policy"),
    list(
        in_turn(
            [("chain", "sync"), ("tree", "sync"), ("chain", "pearl"), ("chain", "branches"), ("tree", "tree")], POLICIES
        )
    ),
)
def test_tokens_and_exact_rows_under_any_policy(open_room, make_requests, check_rows, shape, pipeline, policy):
    """Invariant 3 of the notes: what counts as exact equals sequential KV; nothing fuzzy survives under `every`."""
    requests = make_requests(2, max_tokens=20, longest=20)
    plain = open_room(pipeline="plain").serve(requests)
    errors, fuzzy = [], 0

    def compare(room):
        nonlocal fuzzy
        runner = room.draft.drafter.runner
        for request_id, context in room.draft.contexts.items():
            errors.append(check_rows(runner, request_id, context.token_ids))
            fuzzy += runner.cached_len(request_id) - runner.exact_len(request_id)

    room = open_room(replace(SHAPES[shape], **POLICIES[policy]), pipeline=pipeline).serve(requests, compare)
    assert (room.tokens, room.ends) == (plain.tokens, plain.ends)
    assert room.stats.num_accepted_tokens > 0
    if policy == "every":
        assert fuzzy == 0, "fuzzy rows in the committed text"
    elif policy != "mismatch":
        assert fuzzy > 0 and max(errors) > 1e-3, "nothing is ever fuzzy: the test shows nothing"


def judged(drafter, context, budget, num_accepted):
    """One round that accepts so many tokens of the first path; the draft."""
    (draft,) = drafter.propose([context], [budget])
    leaf = max(range(len(draft.tree.parents)), key=draft.tree.depths().__getitem__)
    path = tuple(draft.tree.path_to(leaf))[:num_accepted]
    tokens = (*(draft.tree.token_ids[node] for node in path), 5)
    drafter.observe(context, Commit(context.request_id, 0, len(context.token_ids), path, tokens))
    context.token_ids += tokens
    return draft


@pytest.fixture
def open_drafter(models):
    def open_(config):
        runner, _ = open_draft_model(replace(config, path=str(models["deep"])), SchedulerConfig(), SINGLE, "cpu")
        drafter = ModelDrafter(runner, config, OPTIONS)
        choose = random.Random(3)
        context = Context(1, 0, [choose.randrange(2, 97) for _ in range(9)], 9, SamplingParams())
        drafter.open(context)
        return drafter, runner, context

    return open_


@pytest.mark.parametrize("shape", SHAPES)
def test_calibration_is_the_first_draft_step_of_the_next_round(open_drafter, shape):
    """The round after one that accepted three tokens starts with one exact pass over those and the next token."""
    drafter, runner, context = open_drafter(SHAPES[shape])
    budget = SHAPES[shape].num_draft_tokens
    judged(drafter, context, budget, 3)
    passes = []
    run = runner.run
    runner.run = lambda plan, tokens, taps=(): (passes.append((plan.num_rows, plan.fuzzy)), run(plan, tokens, taps))[1]
    assert runner.cached_len(1) == len(context.token_ids) - 4
    judged(drafter, context, budget, 0)
    first, *others = passes
    assert first == (4, False), "the three accepted tokens and the next one"
    assert others and all(fuzzy for _, fuzzy in others)


@pytest.mark.parametrize(
    ("policy", "calibrated"),
    [
        ("every", [True] * 6),
        ("every-3", [False, False, True, False, False, True]),
        ("mismatch", [False, True, False, True, True, False]),
        ("never", [False] * 6),
    ],
)
def test_when_each_policy_calibrates(open_drafter, policy, calibrated):
    drafter, runner, context = open_drafter(replace(CHAIN, **POLICIES[policy]))
    seen = []
    for num_accepted in (5, 2, 5, 1, 1, 5):
        judged(drafter, context, 5, num_accepted)
        seen.append(runner.exact_len(1) == runner.cached_len(1))
    assert seen == calibrated


@pytest.mark.parametrize("policy", ["pearl", "branches", "tree"])
def test_after_a_hit_draft_ahead_starts_with_the_calibration(models, monkeypatch, policy):
    """The rows that a hit accepted are dropped; one exact pass feeds them, the next token and the whole proposal."""
    monkeypatch.setattr(
        actors.drafters.model.ahead_drafter, "AHEAD_WORTH", 0.0
    )  # models made at random are sure of nothing
    runner, _ = open_draft_model(replace(CHAIN, path=str(models["deep"])), SchedulerConfig(), SINGLE, "cpu")
    drafter = AheadDrafter(runner, replace(CHAIN, ahead_width=3), OPTIONS, policy)
    choose = random.Random(3)
    context = Context(1, 0, [choose.randrange(2, 97) for _ in range(9)], 9, SamplingParams())
    drafter.open(context)
    drafter.propose([context], [2])
    for _ in range(25):
        if drafter.wants_work:
            drafter.work()
    tree = drafter._states[1].tree
    num_offered = sum(node.offered for node in tree.nodes) - 1
    expected = [node for node in tree.best_chain(num_offered + 1) if tree.nodes[node].expanded]
    tokens = tuple(tree.nodes[node].token for node in expected)
    accepted = tuple(range(1, len(tokens)))
    drafter.observe(context, Commit(1, 0, len(context.token_ids), accepted, tokens))
    context.token_ids += tokens
    assert runner.cached_len(1) == runner.exact_len(1) == 9, "the text before the first proposal"
    assert drafter.prepared(context), "a hit"
    (draft,) = drafter.propose([context], [3])
    passes = []
    run = runner.run
    runner.run = lambda plan, tokens, taps=(): (passes.append((plan.fuzzy, list(tokens))), run(plan, tokens, taps))[1]
    assert drafter.work().refreshed, "the step reports that it refreshed rows"
    ((fuzzy, fed),) = passes
    known = context.token_ids[9:] + list(draft.tree.token_ids[1:])
    state = drafter._states[1]
    rows = sorted(node.row for node in state.tree.nodes if node.row >= 0)
    assert rows == list(range(state.num_suffix, state.num_rows)), "a node names a row that is gone"
    assert not fuzzy and fed[: len(context.token_ids) - 9] == context.token_ids[9:] and set(known) <= set(fed)
    drafter.observe(context, Commit(1, 0, len(context.token_ids), (1,), (draft.tree.token_ids[1], 5)))
    context.token_ids += [draft.tree.token_ids[1], 5]
    assert runner.exact_len(1) == runner.cached_len(1) == len(context.token_ids) - 1, "what was fed again is exact"


def test_rounds_are_counted_by_request():
    schedule = CalibrationSchedule(replace(CHAIN, calibrate_every=2))
    rounds = [1, 2, 1, 1, 2]
    assert [schedule.is_due(request_id, rejected=False) for request_id in rounds] == [False, False, True, False, True]
    schedule.release(1)
    assert not schedule.is_due(1, rejected=True), "a request that comes back starts anew"


class TestTree:
    """What draft-ahead keeps of its hypotheses when their rows are gone."""

    def grown(self):
        tree = DraftTree(0)
        tree.expand(0, [1, 2], [-0.1, -1.0])
        tree.expand(1, [3, 4], [-0.2, -2.0])
        return tree

    def test_expanding_again_keeps_children_and_revalues_all_below(self):
        tree = self.grown()
        tree.expand(0, [2, 9, 1], [-0.5, -0.6, -0.7])
        assert [tree.nodes[child].token for child in tree.root.children] == [2, 9, 1]
        assert tree.root.children[2] == 1 and [node.token for node in tree.nodes] == [0, 1, 2, 3, 4, 9]
        assert tree.nodes[3].value == pytest.approx(-0.9) and tree.nodes[1].value == pytest.approx(-0.7)
        tree.expand(0, [7], [-0.1])
        assert [tree.nodes[child].token for child in tree.root.children] == [7, 2, 9, 1], "the rest stays, after them"

    def test_the_proposal_is_fed_again_and_the_likeliest_of_the_rest(self):
        tree = self.grown()
        tree.expand(2, [5], [-0.1])
        tree.expand(3, [6], [-0.1])
        tree.offer([1])
        tree.nodes[1].row = 0
        tree.clear_rows()
        assert all(node.row < 0 for node in tree.nodes)
        assert tree.nodes_to_refresh(1) == [1]
        assert tree.nodes_to_refresh(2) == [1, 3] and tree.nodes_to_refresh(9) == [1, 2, 3]


@pytest.mark.parametrize("worth, makes_passes", [(0.0, True), (1e9, False)])
def test_draft_ahead_rests_when_a_pass_is_not_worth_it(models, monkeypatch, worth, makes_passes):
    monkeypatch.setattr(actors.drafters.model.ahead_drafter, "AHEAD_WORTH", worth)
    runner = open_model(models["drafter"], num_slots=512)
    drafter = AheadDrafter(runner, ModelDrafterConfig(num_draft_tokens=3), OPTIONS, "branches")
    context = Context(1, 0, [5, 6, 7], 3, SamplingParams())
    drafter.open(context)
    drafter.propose([context], [3])
    pending = runner.pool.pending_len(1)
    assert drafter.wants_work
    drafter.work()
    assert drafter.wants_work is (runner.pool.pending_len(1) > pending) is makes_passes
