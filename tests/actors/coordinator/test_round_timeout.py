"""How long a round may take: measured, in proportion to its rows, and unlimited before anything is known."""

from __future__ import annotations

import math

from actors.coordinator.round_timeout import FACTOR, FLOOR_S, RoundTimeout, num_rows
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
    pace = RoundTimeout()
    pace.ordered(verify(1, 500))
    assert pace.limit_s == math.inf


def test_many_times_the_longest_and_more_for_more_rows():
    pace = RoundTimeout()
    for round_, rows, seconds in ((1, 10, 2.0), (2, 1, 0.1)):
        pace.ordered(verify(round_, rows))
        pace.answered(verdict(round_, seconds))
    pace.ordered(verify(3, 5))
    assert pace.limit_s == FLOOR_S + FACTOR * 2.0
    pace.ordered(verify(4, 40))
    assert pace.limit_s == FLOOR_S + FACTOR * 8.0
    pace.ordered(verify(5, 1))
    assert pace.limit_s == FLOOR_S + FACTOR * 8.0, "the one before is not answered yet"


def test_rows_of_a_drafter_are_what_it_reads_and_what_it_writes():
    admit, commit = Admit(1, 0, (3, 4, 5), 3, SamplingParams()), Commit(2, 0, 9, (), (7, 8))
    batch = DraftBatch(1, admits=(admit,), commits=(commit,), orders=(DraftOrder(1, 4), DraftOrder(2, 4)))
    assert num_rows(batch) == 3 + 2 + 8 and num_rows(DraftBatch(2)) == 1
    pace = RoundTimeout()
    pace.ordered(batch)
    pace.answered(ProposalBatch(1, (), 0.0, 1.0))
    assert pace.limit_s == FLOOR_S + FACTOR
