"""Kinds of ports, what none of them does without a drafter, and the bookkeeping of a bridge."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.coordinator import loop_heartbeat
from actors.coordinator.attached_port import AttachedPort
from actors.coordinator.bridged_port import BridgedPort
from actors.coordinator.loop_heartbeat import LoopHeartbeat
from actors.coordinator.port import DrafterPort, PassOrders, open_port
from actors.coordinator.separate_port import SeparatePort
from actors.coordinator.sequence import DraftState, Sequence
from actors.protocol.membership import HEARTBEAT_S
from actors.protocol.messages import (
    DraftPreviewBatch,
    FeatureExport,
    Proposal,
    ProposalBatch,
    Request,
    TokenTree,
    VerdictBatch,
)

POLICY: Any = SimpleNamespace(weighs_waiting=False)


@pytest.mark.parametrize(
    ("drafts", "attached", "bridged", "kind"),
    [
        (False, False, False, DrafterPort),
        (True, False, False, SeparatePort),
        (True, False, True, BridgedPort),
        (False, False, True, DrafterPort),
        (False, True, False, AttachedPort),
        (True, True, False, AttachedPort),
    ],
)
def test_a_drafter_has_the_port_of_its_place(drafts, attached, bridged, kind):
    port = open_port(POLICY, 8, drafts=drafts, attached=attached, bridged=bridged, first_round=5)
    assert type(port) is kind and port.round == 5
    assert open_port(POLICY, 8, drafts=drafts, attached=attached, bridged=bridged).round == 0


def test_without_a_drafter_nothing_is_ordered_and_every_proposal_is_stale():
    port, sequence = DrafterPort(), Sequence.start(Request(1, (3, 4)), 50)
    assert not port.is_present and port.pending is None and not port.may_draft(sequence)
    assert port.begin_pass([], []) == PassOrders() and port.missing_drafts([sequence], []) == []
    assert port.order([sequence], [], 0, 1.0) == [] and port.unusable([sequence]) == ()
    assert port.has_text_to_read([sequence], 3) is False
    proposal = Proposal(1, 0, 2, 0, TokenTree.root(4))
    assert port.receive(ProposalBatch(1, (proposal, proposal), 0.0, 0.0), {1: sequence}, 1.0) == 2
    assert port.end_pass(VerdictBatch(1, (), 0.0, 0.0), {1: sequence}) == 0
    port.receive_previews(DraftPreviewBatch(()), {1: sequence})
    for forget in (lambda: port.commit(sequence, None), lambda: port.release(sequence)):
        sequence.draft = DraftState(num_ordered=3)
        forget()
        assert sequence.draft == DraftState()


# --- hidden states ----------------------------------------------------------------------------------------------------


def export(number, *spans, bridge=7):
    return FeatureExport(bridge, number, 8, "float32", spans)


def bridged(*request_ids):
    port = BridgedPort(POLICY, 0, 8)
    sequences = {i: Sequence.start(Request(i, (3, 4, 5)), 50) for i in request_ids}
    port.regain(7)
    for sequence in sequences.values():
        port.admit(sequence)
    return port, sequences


def sent(port, sequences, *exports):
    for one in exports:
        port.end_pass(VerdictBatch(1, (), 0.0, 0.0, export=one), sequences)


def test_rows_that_continue_what_was_sent_are_wanted_and_others_are_marked():
    port, sequences = bridged(1, 2)
    assert [one.exported_len for one in sequences.values()] == [0, 0]
    sent(port, sequences, export(1, (1, 0, 2), (2, 1, 2), (9, 0, 1), (None, 0, 1)))
    assert (sequences[1].exported_len, sequences[2].exported_len) == (2, 0)
    sent(port, sequences, export(2, (1, 2, 1), (2, 0, 3)), export(1, (1, 3, 1), bridge=6))
    assert (sequences[1].exported_len, sequences[2].exported_len) == (3, 3), "another bridge's tensor is none"
    unsent, _ = port._flush_exports(sequences.values())
    assert [one.spans for one in unsent] == [
        ((1, 0, 2), (None, 1, 2), (None, 0, 1), (None, 0, 1)),
        ((1, 2, 1), (2, 0, 3)),
    ]
    assert port._flush_exports(sequences.values()) == ((), [])


def test_rows_of_a_request_that_ended_are_received_and_not_wanted():
    port, sequences = bridged(1, 2)
    sent(port, sequences, export(1, (1, 0, 2), (2, 0, 2)))
    port.release(sequences[1])
    unsent, _ = port._flush_exports([])
    assert unsent[0].spans == ((None, 0, 2), (2, 0, 2)) and sequences[1].exported_len is None


@pytest.mark.parametrize(
    ("speculates", "stands", "admitted"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_what_is_admitted_while_the_bridge_stands_is_sent_from_its_start(speculates, stands, admitted):
    port = BridgedPort(POLICY, 0, 8)
    if stands:
        port.regain(7)
    sequence = Sequence.start(Request(1, (3, 4), drafter=None if speculates else "none"), 50)
    port.admit(sequence)
    assert (sequence.exported_len == 0) == admitted == port.may_draft(sequence)
    assert list(port.unusable([sequence])) == []
    late = Sequence.start(Request(2, (3, 4)), 50)
    assert list(port.unusable([late])) == ([late] if stands else [])


def test_a_target_that_is_far_ahead_stops_sending():
    """64 tensors that were not answered for; then no text can be continued."""
    port, sequences = bridged(1)
    for number in range(63):
        sent(port, sequences, export(number + 1))
    assert port.begin_pass([], sequences.values()).bridge == 7 and sequences[1].exported_len == 0
    sent(port, sequences, export(64))
    orders = port.begin_pass([], sequences.values())
    assert (orders.bridge, orders.num_received) == (0, 0) and sequences[1].exported_len is None
    port._flush_exports([])
    port._num_received = port._num_flushed
    orders = port.begin_pass([], sequences.values())
    assert (orders.bridge, orders.num_received) == (7, 64)
    assert list(port.unusable(sequences.values())) == [sequences[1]]


@pytest.mark.parametrize(
    ("num_tensors", "rows", "is_due"), [(15, 1, False), (16, 1, True), (1, 127, False), (1, 128, True), (2, 64, True)]
)
def test_chunks_of_a_prompt_leave_without_an_order(num_tensors, rows, is_due):
    port, sequences = bridged()
    sent(port, sequences, *(export(number, (None, 0, rows)) for number in range(num_tensors)))
    assert bool(port._is_due) == is_due


def test_with_the_bridge_all_that_was_sent_is_lost():
    port, sequences = bridged(1)
    sent(port, sequences, export(1, (1, 0, 2)))
    port.lose(sequences.values())
    assert sequences[1].exported_len is None and port._flush_exports([]) == ((), [])
    assert port.begin_pass([], []).bridge == 0
    port.regain(8)
    orders = port.begin_pass([], [])
    assert (orders.bridge, orders.num_received) == (8, 0)


# --- heartbeats of the loop -------------------------------------------------------------------------------------------


def test_a_loop_sends_a_heartbeat_when_one_is_due(monkeypatch):
    sent_at = []
    monkeypatch.setattr(loop_heartbeat, "HEARTBEAT_S", 1000.0)
    heart = LoopHeartbeat(lambda: sent_at.append(1))
    now = heart._sent_at
    monkeypatch.setattr(loop_heartbeat, "HEARTBEAT_S", HEARTBEAT_S)
    assert heart.beat(now) is False
    assert heart.beat(now + 2 * HEARTBEAT_S) is True and heart.beat(now + 2.5 * HEARTBEAT_S) is False
    assert heart.beat(now + 3 * HEARTBEAT_S) is True and len(sent_at) == 2
    heart.stop()
    assert not heart._thread.is_alive()
