"""The tables of what rounds cost beside their passes, and of what a neighbour does to single tokens."""

from docs.measurements import rounds, threads


def test_windows_of_a_setting_are_one_row_with_the_range_of_the_share():
    line = {"setting": "a", "tokens_per_s": 500.0, "round_ms": 5.0, "overhead_ms": 0.5}
    rows = rounds.table([line | {"share": share} for share in (0.1, 0.14, 0.12)]).splitlines()
    assert rows[2:] == ["| `a` | 500 | 5.00 | 0.50 | 12.0% (10.0% to 14.0%) |"]


def test_the_worst_token_is_that_of_all_windows():
    line = {"label": "a", "neighbour": 2.0, "p99_ms": 3.0}
    rows = threads.table([line | {"median_ms": 1.0, "worst_ms": 4.0}, line | {"median_ms": 2.0, "worst_ms": 6.0}])
    assert rows.splitlines()[2:] == ["| a | 2 | 1.50 | 3.00 | 6.00 | 4.0 |"]
