"""Orders for a drafter on the target's ranks: what each pass of a mode asks of it, and which of its drafts are kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.coordinator.attached_port import AttachedPort
from actors.policy.decision import Mode
from actors.protocol.messages import MeasuredCosts, Proposal, ProposalBatch, TokenTree, VerdictBatch

COSTS = MeasuredCosts(0.03, 0.001, 0.25)


class Policy:
    """Orders three tokens for everybody it follows."""

    may_score = False
    costs = COSTS

    def __init__(self, mode, *, may_end=False, num_followed=9, length=3):
        self.mode, self.may_end, self._num_followed, self._length = mode, may_end, num_followed, length
        self.num_caught_up = 0

    def num_followed(self, num_able):
        return min(num_able, self._num_followed)

    def draft_length(self, request_id, most):
        return min(self._length, most)

    def caught_up(self):
        self.num_caught_up += 1


def sequence(request_id, *, speculates=True, uncached=1, remaining=9, proposal=None):
    return SimpleNamespace(
        request_id=request_id,
        speculates=speculates,
        token_ids=[3] * uncached,
        cached_len=0,
        may_hit=False,
        most_draft_tokens=remaining,
        draft=SimpleNamespace(proposal=proposal),
        is_current=lambda proposal: proposal.prefix_len == 5,
    )


def begun(policy, *rows):
    """The orders of a pass over rows of (sequence, tokens fed)."""
    port: Any = AttachedPort(policy, 0)
    return port, port.begin_pass([(one, count, None) for one, count in rows], [])


@pytest.mark.parametrize(
    ("mode", "reading"),
    [(Mode.speculate, [2]), (Mode.probe, [2]), (Mode.rest, []), (Mode.trial, []), (Mode.catch_up, [1, 4])],
)
def test_each_mode_reads_what_its_drafts_need(mode, reading):
    """Request 2 has more of its prompt to come, 3 does not speculate."""
    rows = (
        (sequence(1), 1),
        (sequence(2, uncached=9), 4),
        (sequence(3, speculates=False), 1),
        (sequence(4, remaining=2), 1),
    )
    _, orders = begun(Policy(mode), *rows)
    assert orders.lengths == {1: 3, 4: 2} and list(orders.reading) == reading
    assert orders.costs == COSTS


def test_where_no_request_speculates_nothing_is_ordered():
    _, orders = begun(Policy(Mode.speculate), (sequence(3, speculates=False), 1))
    assert orders.lengths == {}


def test_only_as_many_as_the_policy_follows_are_drafted_for():
    _, orders = begun(Policy(Mode.speculate, num_followed=1), (sequence(1), 1), (sequence(2), 1))
    assert orders.lengths == {1: 3}


@pytest.mark.parametrize(("proposal", "lengths"), [("a draft", {}), (None, {1: 3})])
def test_nothing_is_ordered_while_a_verdict_may_end_speculation(proposal, lengths):
    _, orders = begun(Policy(Mode.speculate, may_end=True), (sequence(1, proposal=proposal), 1))
    assert orders.lengths == lengths
    _, orders = begun(Policy(Mode.speculate), (sequence(1, proposal=proposal), 1))
    assert orders.lengths == {1: 3}


def test_a_trial_begins_once_texts_were_read():
    policy: Any = Policy(Mode.catch_up, num_followed=0)
    port: Any = AttachedPort(policy, 0)
    rows = [(sequence(1), 1, None)]
    for num_followed, caught_up in ((0, 0), (9, 0), (9, 1), (0, 2), (9, 2)):
        policy._num_followed = num_followed
        port.begin_pass(rows, [])
        assert policy.num_caught_up == caught_up
    policy.mode = Mode.speculate
    port.begin_pass(rows, [])
    policy.mode = Mode.catch_up
    port.begin_pass(rows, [])
    assert policy.num_caught_up == 2, "a pass of drafts reads no texts for a trial"


def answer(*proposals):
    return VerdictBatch(1, (), 0.0, 0.0, drafts=ProposalBatch(1, proposals, 0.0, 0.0))


@pytest.mark.parametrize(("length", "is_kept"), [(3, True), (0, False)])
def test_drafts_are_kept_for_the_texts_that_they_continue(length, is_kept):
    policy = Policy(Mode.speculate)
    current, other = sequence(1), sequence(2)
    port, _ = begun(policy, (current, 1), (other, 1))
    policy._length = length
    fresh, stale, gone = (Proposal(i, 0, prefix, 0, TokenTree.root(1)) for i, prefix in ((1, 5), (2, 4), (3, 5)))
    assert port.end_pass(answer(fresh, stale, gone), {1: current, 2: other}) == 2
    if is_kept:
        assert (current.draft.proposal, current.draft.num_ordered, current.draft.is_answered) == (fresh, 3, True)
    assert (current.draft.proposal is fresh) == is_kept and other.draft.proposal is None
    assert port.end_pass(VerdictBatch(1, (), 0.0, 0.0), {1: current}) == 0
