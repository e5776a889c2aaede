"""Drafts that no pass verifies: what of them agrees with the text, and that nothing else depends on them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from actors.coordinator.attached_port import AttachedPort
from actors.coordinator.scored_drafts import ScoredDrafts
from actors.coordinator.separate_port import SeparatePort
from actors.coordinator.sequence import Sequence
from actors.policy.acceptance import DraftOutcome
from actors.policy.decision import Mode
from actors.policy.policy import Policy
from actors.protocol.messages import (
    DraftBatch,
    Proposal,
    ProposalBatch,
    Request,
    SamplingParams,
    SparseDistribution,
    TokenTree,
    VerdictBatch,
    VerifyBatch,
)
from tests.actors.scripted_roles import World
from tests.actors.small_language import oracle

CHAIN = TokenTree.chain(5, [6, 7, 8])
BUSHY = TokenTree((5, 9, 6, 7, 3), (-1, 0, 0, 2, 2))


def text(*tokens, request_id=1):
    return Sequence.start(Request(request_id, (4, *tokens), SamplingParams(max_tokens=30)), 99)


def proposal(tree, prefix_len=2, request_id=1):
    return Proposal(request_id, 0, prefix_len, 0, tree)


@pytest.mark.parametrize(
    ("tree", "follows", "path"),
    [
        (CHAIN, [], None),
        (CHAIN, [6, 7], None),
        (CHAIN, [9], ()),
        (CHAIN, [6, 7, 3], (1, 2)),
        (CHAIN, [6, 7, 8], (1, 2, 3)),
        (CHAIN, [6, 7, 8, 9, 9], (1, 2, 3)),
        (BUSHY, [6], None),
        (BUSHY, [9], (1,)),
        (BUSHY, [6, 3, 8], (2, 4)),
        (TokenTree.root(5), [], ()),
    ],
)
def test_a_draft_is_decided_as_soon_as_the_text_leaves_it_or_has_reached_its_end(tree, follows, path):
    scored, sequence = ScoredDrafts(), text(5)
    scored.order(sequence, 4)
    assert scored.take({1: sequence}) == [], "nothing was drafted yet"
    scored.answer([proposal(tree)], {1: sequence})
    sequence.token_ids += follows
    size = tree.num_draft_tokens
    decided = (
        [] if path is None else [DraftOutcome(1, 4, path, len(path) + 1, 4 - size) if size else DraftOutcome(1, 4, ())]
    )
    assert scored.take({1: sequence}) == decided
    assert bool(scored.drafts) is (path is None) and scored.take({1: sequence}) == []


@pytest.mark.parametrize("proposals", [[], [proposal(CHAIN, prefix_len=1)], [proposal(CHAIN, request_id=2)]])
def test_an_answer_without_a_draft_for_the_text_that_was_ordered_is_an_empty_draft(proposals):
    scored, sequence = ScoredDrafts(), text(5)
    scored.order(sequence, 4)
    scored.answer(proposals, {1: sequence})
    assert scored.take({1: sequence}) == [DraftOutcome(1, 4, ())]


def test_a_request_that_has_ended_shows_nothing():
    scored, sequence = ScoredDrafts(), text(5)
    scored.order(sequence, 4)
    scored.answer([proposal(CHAIN)], {})
    assert scored.take({}) == [] and not scored.drafts


def test_what_a_lost_drafter_has_not_answered_is_forgotten():
    scored, sequences = ScoredDrafts(), {i: text(5, request_id=i) for i in (1, 2)}
    scored.order(sequences[1], 4)
    scored.answer([proposal(CHAIN)], sequences)
    scored.order(sequences[2], 4)
    scored.lose()
    assert [*scored.drafts] == [1]


class Resting(Policy):
    """Decodes plainly, and asks for drafts to compare whenever there may be some again."""

    weighs_waiting, may_score, mode = True, True, Mode.rest

    def __init__(self, pipeline: str = "sync") -> None:
        super().__init__(pipeline, 4)
        self.scored: list[DraftOutcome] = []
        self.num_begun = 0

    def draft_length(self, request_id, most):
        return 0

    def num_followed(self, num_requests):
        return 0

    def begin_scoring(self):
        self.num_begun += 1

    def update(self, seen):
        self.scored += seen.scored
        assert not any(outcome.num_ordered for outcome in seen.outcomes)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("answers", [("right",), ("wrong",), ("missing",), ("bushy", "stale", "twice", "strange")])
@pytest.mark.parametrize("pipeline", ["sync", "tree"])
def test_drafts_beside_plain_decoding_show_what_they_would_bring_and_change_nothing(pipeline, answers, seed):
    """Whenever the answer comes. No pass verifies them, none waits for them, and the tokens are those of the target."""
    policy: Any = Resting(pipeline)
    world = World(random.Random(seed), pipeline, answers, policy=policy)
    requests = [Request(i, (3, 4 + i), SamplingParams(max_tokens=25)) for i in range(3)]
    for request in requests:
        world.deliver(request)
    world.settle()
    assert world.tokens == {request.request_id: oracle(request) for request in requests}
    passes = [batch for batch in world.sent if isinstance(batch, VerifyBatch)]
    assert not any(item.proposal for batch in passes for item in batch.items)
    batches = [batch for batch in world.sent if isinstance(batch, DraftBatch)]
    assert batches and all(batch.unverified and not batch.works_ahead for batch in batches if batch.orders)
    assert policy.num_begun == sum(bool(batch.orders) for batch in batches) and policy.scored
    accepted = {len(outcome.path) == outcome.num_ordered for outcome in policy.scored}
    match answers:
        case ("right",):
            assert accepted == {True}
        case ("wrong",) | ("missing",):
            assert not any(outcome.path for outcome in policy.scored)
            assert all(bool(outcome.num_tokens) is (answers == ("wrong",)) for outcome in policy.scored)


def test_a_request_that_allows_no_draft_tokens_shows_nothing():
    """Else a batch of such requests would tell of zero tokens."""
    request = Request(1, (3, 4), SamplingParams(max_tokens=9), num_draft_tokens=0)
    sequence = Sequence.start(request, 99)
    rows: Any = [(sequence, 2, None)]
    assert AttachedPort(Resting(), 0).begin_pass(rows, []).lengths == {}
    policy: Any = Resting()
    world = World(random.Random(1), "sync", ("right",), policy=policy)
    world.deliver(request)
    world.settle()
    assert world.tokens[1] == oracle(request) and not policy.scored and not policy.num_begun


def test_requests_that_leave_are_released_though_none_can_be_drafted_for():
    policy: Any = Resting()
    world = World(random.Random(1), "sync", ("right",), policy=policy)
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    world.deliver(Request(1, (3, 4), sampling))
    world.deliver(Request(2, (3, 5), SamplingParams(max_tokens=25, ignore_eos=True)))
    while 1 not in world.ends:
        world.deliver_one()
    policy.longest_draft = 0
    for _ in range(6):
        world.deliver_one()
    assert 1 not in world.drafter.knows.texts and 2 in world.drafter.knows.texts


def test_a_drafter_on_the_targets_ranks_drafts_behind_a_pass_that_verifies_nothing():
    policy: Any = Resting()
    port, sequence = AttachedPort(policy, 0), text(5)
    orders = port.begin_pass([(sequence, 2, None)], [])
    assert orders.unverified and dict(orders.lengths) == {1: 4} and not orders.reading and policy.num_begun == 1
    sequence.token_ids.append(6)
    drafts = ProposalBatch(1, (proposal(TokenTree.chain(6, [7, 8]), prefix_len=3),), 0.0, 0.0)
    assert port.end_pass(VerdictBatch(1, (), 0.0, 0.0, drafts=drafts), {1: sequence}) == 0
    assert sequence.draft.proposal is None
    sequence.token_ids += [7, 3]
    assert port.scored.take({1: sequence}) == [DraftOutcome(1, 4, (1,), 2, 2)]
    sequence.draft.proposal, sequence.cached_len = proposal(CHAIN), sequence.prefix_len - 1
    assert not port.begin_pass([(sequence, 1, sequence.draft.proposal)], []).unverified, "a verdict is to come"


@pytest.mark.parametrize("drawn", [False, True])
def test_the_answer_tells_how_far_away_the_drafter_is_unless_its_drafts_were_drawn(drawn):
    policy: Any = Resting()
    seen: list[tuple[float, float, int]] = []
    policy.saw_exchange = lambda *exchange: seen.append(exchange)
    port, sequence = SeparatePort(policy, 0, 8), text(5)
    sequence.cached_len = sequence.prefix_len - 1
    (batch,) = port.order([sequence], (), 1, 1.0)
    laws = (None, *[SparseDistribution((6,), (1.0,))] * 3) if drawn else ()
    answer = Proposal(1, sequence.epoch, sequence.prefix_len, sequence.prefix_hash, CHAIN, distributions=laws)
    first = ProposalBatch(batch.round, (), 5.0, 5.0, num_missing=1)
    port.receive(first, {1: sequence}, 1.1)
    assert port.pending is not None and not seen, "of a drafter that works ahead the misses come second"
    port.receive(ProposalBatch(batch.round, (answer,), 5.0, 5.02), {1: sequence}, 1.2)
    sequence.token_ids += [6, 9]
    if drawn:
        assert seen == [(0.0, 0.0, 0)] and not port.scored.drafts and not port.shows_drafts
        return
    (exchange,) = seen
    assert exchange == (pytest.approx(0.2), pytest.approx(0.02), 4)
    assert port.scored.take({1: sequence}) == [DraftOutcome(1, 4, (1,), 2, 1)]
