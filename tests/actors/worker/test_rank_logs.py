"""What a rank writes down of its batches: each admission, and at the most detailed level each round's requests."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from actors.logs import logger_of
from actors.protocol.membership import Join
from actors.protocol.messages import Admit, DraftBatch, DraftOrder, SamplingParams, VerifyBatch, VerifyItem
from tests.actors.worker.test_rank_loop import Role, run


class Lines(logging.Handler):
    """(event, facts) of every line about a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, Any]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        facts = dict(record.__dict__["facts"])
        if (event := facts.pop("event", record.msg)) in ("admit", "round"):
            self.found.append((event, facts))


class Drafts(Role):
    """A drafter that says nothing."""

    wants_work = False

    def close(self) -> None:
        pass

    def answer(self, batch):
        return iter(())


ADMITS = (Admit(5, 3, (1, 2, 4, 8), 2, SamplingParams()), Admit(6, 7, (1,), 1, SamplingParams()))
ADMITTED = [("admit", dict(request=5, epoch=3, tokens=4)), ("admit", dict(request=6, epoch=7, tokens=1))]
VERIFY = VerifyBatch(2, ADMITS, items=(VerifyItem(5, 4), VerifyItem(9, 1)), after=1)
DRAFT = DraftBatch(2, ADMITS, orders=(DraftOrder(5, 4), DraftOrder(9, 1)), after=1)


@pytest.mark.parametrize(("make_role", "batch"), [(Role, VERIFY), (Drafts, DRAFT)])
@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (logging.DEBUG, [*ADMITTED, ("round", dict(round=2, requests=[5, 9]))]),
        (logging.INFO, ADMITTED),
        (logging.WARNING, []),
    ],
)
def test_admissions_and_rounds_are_lines_by_their_level(make_role, batch, level, expected):
    logger, lines = logger_of("target-0" if make_role is Role else "draft-0"), Lines()
    before = logger.level
    logger.addHandler(lines)
    logger.setLevel(level)
    try:
        run([Join(1, 1), batch], make_role=make_role)
    finally:
        logger.removeHandler(lines)
        logger.setLevel(before)
    assert lines.found == expected
