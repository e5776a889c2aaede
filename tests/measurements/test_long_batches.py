"""The program of `docs/measurements/long_batches.py`: its rows, and one of them with engines."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from docs.measurements.long_batches import BatchTurns, main, row
from docs.measurements.long_contexts import make_pair


def test_a_row_compares_drafts_with_plain_decoding() -> None:
    counters = Counter({"num_spec_rounds": 4, "draft_busy_s": 0.02, "target_busy_s": 0.1})
    plain = BatchTurns([10.0, 12.0, 8.0], [[[1, 2]]])
    drafted = BatchTurns([5.0, 4.0, 8.0], [[[1, 2]]], 10, 25, counters)
    expected = "| self | 4 | 3.50 | 10.0 | 5.0 | 5 | 25 | 2.00 (1.00 to 3.00) | yes |"
    assert row("self", 4, plain, drafted) == expected
    drafted.tokens.append([[1, 3]])
    assert row("self", 4, plain, drafted) == expected.replace("yes", "no")


@pytest.mark.extended
def test_batches_of_the_bundled_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_pair(tmp_path / "pair")
    options = [
        "--settings",
        "self, streaming",
        "--requests",
        "2",
        "--length",
        "40",
        "--tokens",
        "150",
        "--repeats",
        "1",
    ]
    main([str(tmp_path / "pair"), *options])
    _, _, line = capsys.readouterr().out.splitlines()
    name, num_requests, tokens, *_, equal = line.strip("| ").split(" | ")
    assert (name, num_requests, equal) == ("self, streaming", "2", "yes")
    assert float(tokens) > 4, "all rows are within the window"
