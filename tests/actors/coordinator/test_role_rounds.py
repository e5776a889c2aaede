"""How long a round may take: measured, in proportion to its rows, and unlimited before anything is known."""

from __future__ import annotations

import math

import pytest

from actors.coordinator.membership import FACTOR, FLOOR_S, IDLE_S, MOST_UNREAD, RoleRounds
from actors.protocol.messages import (
    Admit,
    Commit,
    DraftBatch,
    DraftOrder,
    ProposalBatch,
    VerdictBatch,
    VerifyBatch,
    VerifyItem,
)
from actors.protocol.sampling_params import SamplingParams


def verify(round_: int, rows: int) -> VerifyBatch:
    return VerifyBatch(round_, items=(VerifyItem(1, rows),))


def verdict(round_: int, seconds: float) -> VerdictBatch:
    return VerdictBatch(round_, (), 10.0, 10.0 + seconds)


def test_before_a_round_was_measured_none_is_too_long():
    pace = RoleRounds()
    pace.ordered(verify(1, 500), 0.0)
    assert pace.limit_s == math.inf


def test_many_times_the_longest_and_more_for_more_rows():
    pace = RoleRounds()
    for round_, rows, seconds in ((1, 10, 2.0), (2, 1, 0.1)):
        pace.ordered(verify(round_, rows), 0.0)
        pace.answered(verdict(round_, seconds), 0.0)
    pace.ordered(verify(3, 5), 0.0)
    assert pace.limit_s == FLOOR_S + FACTOR * 2.0
    pace.ordered(verify(4, 40), 0.0)
    assert pace.limit_s == FLOOR_S + FACTOR * 8.0
    pace.ordered(verify(5, 1), 0.0)
    assert pace.limit_s == FLOOR_S + FACTOR * 8.0, "the one before is not answered yet"


def test_rows_of_a_drafter_are_what_it_reads_and_what_it_writes():
    admit, commit = Admit(1, 0, (3, 4, 5), 3, SamplingParams()), Commit(2, 0, 9, (), (7, 8))
    batch = DraftBatch(1, admits=(admit,), commits=(commit,), orders=(DraftOrder(1, 4), DraftOrder(2, 4)))
    pace = RoleRounds()
    pace.ordered(batch, 0.0)
    pace.answered(ProposalBatch(1, (), 0.0, 1.0), 0.0)
    assert pace.limit_s == FLOOR_S + FACTOR
    pace.ordered(DraftBatch(2, orders=(DraftOrder(1, 3 * (3 + 2 + 8)),)), 2.0)
    assert pace.limit_s == FLOOR_S + 3 * FACTOR


def trips(batch: VerifyBatch | DraftBatch, sent_at: float, *answers: tuple[VerdictBatch | ProposalBatch, float]):
    rounds = RoleRounds()
    rounds.ordered(batch, sent_at)
    for answer, now in answers:
        rounds.answered(answer, now)
    found = rounds.take_trips()
    assert not rounds.take_trips(), "each is counted once"
    return found


def test_the_first_answer_to_a_batch_tells_how_long_records_travel():
    first, second = (VerdictBatch(3, (), 50.0, 50.5), 11.0), (VerdictBatch(3, (), 50.0, 50.5), 11.5)
    assert trips(verify(3, 5), 10.0, first, second) == [0.5], "clocks of two hosts, and a second part of the answer"
    assert not trips(verify(4, 5), 20.0, first), "a late answer to another"
    assert trips(verify(5, 5), 20.0, (VerdictBatch(5, (), 50.0, 52.0), 21.0)) == [0.0], "no time is below 0"


@pytest.mark.parametrize("made", [dict(ran_ahead=True), dict(dropped_s=0.25)])
def test_a_batch_whose_pass_was_made_ahead_or_that_waited_for_another_measures_no_link(made):
    assert not trips(verify(3, 5), 10.0, (VerdictBatch(3, (), 50.0, 50.5, **made), 11.0))


@pytest.mark.parametrize(("idle_s", "is_measured"), [(2 * IDLE_S, True), (IDLE_S / 2, False)])
def test_an_order_that_waits_for_a_pass_ahead_measures_no_link(idle_s, is_measured):
    answer = ProposalBatch(1, (), 10.0 + idle_s, 10.5 + idle_s, ahead=((9.0, 10.0, False),))
    assert bool(trips(DraftBatch(1), 5.0, (answer, 6.0))) is is_measured


def test_what_is_not_asked_for_is_looked_at_in_time():
    rounds = RoleRounds()
    for round_ in range(1, 10 * MOST_UNREAD):
        rounds.ordered(verify(round_, 5), 10.0)
        rounds.answered(verdict(round_, 0.5), 11.0)
        assert len(rounds._unread) < MOST_UNREAD
    assert rounds.take_trips() == [0.5] * (round_)
