"""The program that draws what a pool gives writes a row for each point, and the picture."""

from __future__ import annotations

import csv
import sys

import pytest

from docs.measurements import pools


@pytest.mark.extended
def test_rows_and_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(pools, "COSTS", {"flat": pools.COSTS["flat"]})
    monkeypatch.setattr(sys, "argv", ["pools.py", "--out", str(tmp_path), "--batches", "1", "--targets", "1,2"])
    monkeypatch.setattr(pools, "MOST_TOKENS", 25)
    pools.main()
    rows = list(csv.DictReader((tmp_path / "pools.csv").open()))
    assert [(row["pool"], row["targets"]) for row in rows] == [
        *((name, count) for name in pools.POOLS.values() for count in ("1", "2")),
        ("plain", "1"),
    ]
    speeds = {(row["pool"], row["targets"]): float(row["tokens_per_s_per_target"]) for row in rows}
    assert speeds["in turn", "2"] < speeds["drafts merged", "2"] and speeds["plain", "1"] < speeds["in turn", "2"]
    assert (tmp_path / "pools.png").stat().st_size > 10_000
