"""A rank's mailbox: records for the rank and for the level below, each in order, each waited for as long as it may."""

from __future__ import annotations

import pytest

from actors.protocol.membership import Join, Recall, RoleBack, RoleLost, Stop
from actors.protocol.messages import DraftBatch, ProposalBatch
from actors.transport.mailbox import ANSWER_S, Mailbox


class Line:
    """Gives records in order, then none; notes how long each was waited for."""

    def __init__(self, *records):
        self.records, self.waits, self.sent, self.is_closed = list(records), [], [], False

    def receive(self, timeout_s):
        self.waits.append(timeout_s)
        return self.records.pop(0) if self.records else None

    def send(self, record):
        self.sent.append(record)

    def close(self):
        self.is_closed = True


def proposals(round_=1):
    return ProposalBatch(round_, (), 0.0, 0.0)


BATCH, JOIN, RECALL, STOP = DraftBatch(1), Join(1, 0), Recall(2), Stop("x")


@pytest.mark.parametrize("record", [proposals(), RoleLost("draft2"), RoleBack("draft2", 1)])
def test_records_of_the_level_below_end_one_wait_of_the_rank(record):
    line = Line(record, BATCH)
    mailbox = Mailbox(line)
    assert not mailbox.has_child_records and mailbox.receive(0.5) is None and mailbox.has_child_records
    assert mailbox.receive(0.25) == BATCH and line.waits == [0.5, 0.25]
    assert mailbox.receive_from_child(wait=True) == record and not mailbox.has_child_records
    assert line.waits == [0.5, 0.25], "it was there"
    assert mailbox.receive() is None and line.waits[-1] is None


@pytest.mark.parametrize(("wait", "waited"), [(True, ANSWER_S), (False, 0)])
def test_an_answer_is_waited_for_as_long_as_it_may_take(wait, waited):
    line = Line()
    assert Mailbox(line).receive_from_child(wait=wait) is None and line.waits == [waited]
    line = Line(proposals(3))
    assert Mailbox(line).receive_from_child(wait=wait) == proposals(3)


@pytest.mark.parametrize("record", [BATCH, JOIN, RECALL, STOP])
def test_a_record_for_the_rank_ends_the_wait_for_an_answer(record):
    line = Line(record, proposals())
    mailbox = Mailbox(line)
    assert mailbox.receive_from_child(wait=True) is None and len(line.waits) == 1
    assert mailbox.receive_from_child(wait=True) is None and len(line.waits) == 1, "it was not read yet"
    assert mailbox.receive() == record and mailbox.receive_from_child(wait=True) == proposals()


@pytest.mark.parametrize(("record", "ends"), [(BATCH, False), (JOIN, False), (RECALL, True), (STOP, True)])
def test_only_the_end_of_the_epoch_ends_the_wait_for_a_promised_answer(record, ends):
    line = Line(record, proposals())
    found = Mailbox(line).receive_from_child(wait=True, is_promised=True)
    assert found == (None if ends else proposals()) and line.waits == [None] * (1 if ends else 2)


def test_records_are_sent_and_the_line_is_closed():
    line = Line()
    mailbox = Mailbox(line)
    mailbox.send(BATCH)
    mailbox.close()
    assert line.sent == [BATCH] and line.is_closed
