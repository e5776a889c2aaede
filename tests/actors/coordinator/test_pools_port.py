"""Several leases at a time: requests are divided among them, move from lost and slow ones, and come back."""

from __future__ import annotations

import pytest

from actors.coordinator.pools_port import RETRY, PoolsPort
from actors.coordinator.port import open_port
from actors.coordinator.sequence import Sequence
from actors.policy.policy import Policy
from actors.protocol.messages import (
    Commit,
    DraftPreview,
    DraftPreviewBatch,
    Proposal,
    ProposalBatch,
    Request,
    TokenTree,
)
from actors.topology import child_role, is_draft_role, parent_role, seat_of, seat_role

PASS_S = 0.01


@pytest.fixture
def port() -> PoolsPort:
    policy = Policy("branches", 4)
    policy.wait.update_pass(PASS_S, reads_prompt=False)
    port = open_port(policy, 8, drafts=True, num_seats=2)
    assert isinstance(port, PoolsPort)
    return port


def running(*request_ids: int) -> list[Sequence]:
    sequences = [Sequence.start(Request(number, (3, 4)), 50) for number in request_ids]
    for sequence in sequences:
        sequence.cached_len = sequence.prefix_len - 1
    return sequences


def ordered(port: PoolsPort, sequences: list[Sequence], verifying=()) -> list[list[int]]:
    """Requests of the orders, by seat; all of them are answered within a millisecond, without a draft."""
    found: list[list[int]] = [[], []]
    for batch in port.order(sequences, verifying, port.round + 1, 1.0):
        found[batch.seat] = [order.request_id for order in batch.orders if order.num_draft_tokens]
        by_id = {one.request_id: one for one in sequences}
        port.of(seat_role(batch.seat)).receive(ProposalBatch(batch.round, (), 0.0, 0.0), by_id, 1.001)
    for sequence in sequences:
        sequence.draft.is_answered = False
    return found


def commit(port: PoolsPort, sequence: Sequence) -> None:
    sequence.draft.num_ordered = 4
    port.commit(sequence, Commit(sequence.request_id, 0, sequence.prefix_len, (), (5,)))


def make_known(port: PoolsPort, role: str, seconds: float, num_accepted: int = 2) -> None:
    for _ in range(8):
        port.of(role).delay_s.update(seconds)
        port.of(role).num_accepted.update(num_accepted)


def test_roles_of_seats_stand_side_by_side():
    assert [seat_role(seat) for seat in range(3)] == ["draft", "draft@1", "draft@2"]
    assert [seat_of(role) for role in ("draft", "draft@1", "draft@12")] == [0, 1, 12]
    assert parent_role("draft@1") is None and child_role("draft@1") == "draft2" and is_draft_role("draft@1-0")


def test_requests_are_divided_and_move_when_a_lease_is_lost(port):
    sequences = running(1, 2, 3, 4)
    assert ordered(port, sequences) == [[1, 3], [2, 4]]
    port.of("draft@1").lose(sequences)
    assert port.is_present and ordered(port, sequences) == [[1, 2, 3, 4], []]
    port.of("draft").lose(sequences)
    assert not port.is_present and port.missing_drafts(sequences, ()) == [] == port.order(sequences, (), 9, 1.0)
    assert port.pending is None, "nothing is waited for"
    port.of("draft@1").regain(2)
    assert ordered(port, sequences) == [[], [1, 2, 3, 4]]
    for sequence in sequences:
        port.release(sequence)
    port.of("draft").regain(2)
    assert ordered(port, running(5, 6)) == [[5], [6]], "ended requests count no more"


def test_requests_one_after_the_other_try_both_leases_and_then_take_the_faster(port):
    found = []
    for number, role in ((1, "draft"), (2, "draft@1"), (3, ""), (4, "")):
        (sequence,) = running(number)
        found.append([seat for seat, requests in enumerate(ordered(port, [sequence])) if requests])
        if role:
            make_known(port, role, {"draft": 0.002, "draft@1": 0.001}[role])
        port.release(sequence)
    assert found == [[0], [1], [1], [1]]


@pytest.mark.parametrize(("seconds", "num_accepted", "moves"), [(0.5, 2, True), (0.001, 0, True), (0.002, 2, False)])
def test_requests_leave_a_lease_that_is_slow_or_drafts_badly(port, seconds, num_accepted, moves):
    sequences = running(1, 2)
    assert ordered(port, sequences) == [[1], [2]]
    make_known(port, "draft", 0.001)
    make_known(port, "draft@1", seconds, num_accepted)
    assert ordered(port, sequences, verifying={2})[1] == [], "it is ordered nothing while it is verified"
    assert 2 in port.of("draft@1").requests, "the accepted path is one of its lease's draft"
    assert ordered(port, sequences) == ([[1, 2], []] if moves else [[1], [2]])
    more = running(3)
    assert ordered(port, [*sequences, *more]) == ([[1, 2, 3], []] if moves else [[1, 3], [2]])
    for _ in range(RETRY):
        commit(port, sequences[0])
    latest = running(4)
    assert ordered(port, [*sequences, *more, *latest])[1] == ([4] if moves else [2, 4]), "it may be fast again"


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_draft_that_came_is_verified_before_its_request_moves(port, is_lost):
    """It may have come so late that its lease is known to be slow since, and another one's is waited for."""
    sequences = running(1, 2)
    make_known(port, "draft", 0.001)
    make_known(port, "draft@1", 0.001)
    port.order(sequences, (), 1, 1.0)
    two, late = sequences[1], port.of("draft@1")
    tree = TokenTree.chain(4, [5, 6])
    answer = ProposalBatch(late.round, (Proposal.deterministic(*two.prefix, tree),), 0.0, 0.0)
    late.receive(answer, {2: two}, 2.0)
    if is_lost:
        late.lose(sequences)
    port.order(sequences, (), 1, 2.0)
    assert two.draft.proposal is not None and two.draft.proposal.tree == tree
    two.draft.proposal = None  # the pass over it begins
    assert ordered(port, sequences, verifying={1, 2}) == [[], []]
    port.commit(two, Commit(2, 0, two.prefix_len, (1,), (5, 6)))
    port.of("draft").pending = None
    assert ordered(port, sequences) == [[1, 2], []]


def test_drafts_that_were_shown_before_their_verdict_took_no_time(port):
    sequences = running(1, 2)
    ordered(port, sequences)
    for delay_s in (0.3, 0.3):
        port.of("draft").delay_s.update(delay_s)
    slow = port.of("draft").delay_s.mean
    tree = TokenTree.chain(4, [5, 6])
    one = sequences[0]
    preview = DraftPreview(1, one.epoch, one.prefix_len, one.prefix_hash, tree)
    port.of("draft@1").receive_previews(DraftPreviewBatch((preview,)), {1: one})
    assert one.preview is None, "of a lease that it is not placed at"
    port.of("draft").receive_previews(DraftPreviewBatch((preview,)), {1: one})
    assert one.preview is not None
    port.of("draft").pending = None
    commit(port, one)
    assert port.of("draft").delay_s.mean == slow
    assert one.draft.prepared is not None
    ordered(port, sequences)
    assert port.of("draft").delay_s.mean < slow


def test_the_order_that_is_waited_for_is_one_of_drafts(port):
    sequences = running(1, 2)
    (first, second) = port.order(sequences, (), 1, 1.0)
    assert (first.seat, second.seat) == (0, 1) and port.pending is port.of("draft").pending
    port.of("draft").pending.has_first_part = True
    assert port.pending is port.of("draft@1").pending, "the rest of an answer may not be worth a wait"
    port.of("draft").pending.is_skipped = True
    assert port.pending is port.of("draft@1").pending
    port.of("draft@1").pending.prefixes = {}
    assert port.pending is port.of("draft@1").pending, "the other is not waited for any more"
