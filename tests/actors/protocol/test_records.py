"""Copies of records, against those of the standard library."""

from __future__ import annotations

import dataclasses

import pytest

from actors.protocol.membership import Alive
from actors.protocol.messages import Tokens, VerdictBatch
from actors.protocol.records import replace

RECORDS = [
    (Tokens(1, 2, (3, 4), "stop", proposers=(("", 2),)), {"request_id": 7}),
    (VerdictBatch(1, (), 0.0, 1.0, 5, hits=((1, 2),)), {"num_tokens": 6, "drafts": None, "dropped_s": 0.5}),
    (Alive("target", 0, 1, 2, bridge=3), {"busy": True, "round": 9}),
    (Alive("target", 0, 1, 2, bridge=3), {}),
]


@pytest.mark.parametrize(("record", "changes"), RECORDS)
def test_a_copy_is_what_the_standard_library_makes(record, changes):
    before = dataclasses.asdict(record)
    copy = replace(record, **changes)
    assert copy == dataclasses.replace(record, **changes) and type(copy) is type(record)
    assert dataclasses.asdict(record) == before


def test_a_field_that_does_not_exist_is_refused():
    with pytest.raises(KeyError):
        replace(RECORDS[0][0], other=1)
