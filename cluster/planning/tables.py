"""A plan as rows: for the terminal and for `plan.csv`. Pure; reads the entries of `plan.json`."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster.console import ABSENT, figure, percent

Entry = Mapping[str, object]
Table = tuple[list[str], list[list[str]]]
"""Columns and rows."""

SHOWN = 12
CLOSE = 0.15
"""A prediction that is further off than this is marked."""

CSV_COLUMNS = (
    "layout",
    "num_draft_tokens",
    "tokens_per_s",
    "over_plain",
    "round_ms",
    "tokens_per_round",
    "branch_hit_rate",
    "target_busy",
    "draft_busy",
    "binding",
)
TRIAL_COLUMNS = ("tokens_per_s", "tokens_per_s_off", "round_ms", "round_ms_off", "tokens_per_round")


def plan_table(entries: Sequence[Entry]) -> Table:
    """The fastest layouts, and plain decoding wherever it stands."""
    columns = ["layout", "draft", "tokens/s", "over plain", "round ms", "a round", "hits", "target", "drafter", "binds"]
    shown = [entry for i, entry in enumerate(entries) if i < SHOWN or not entry["num_draft_tokens"]]
    rows = [
        [
            str(entry["layout"]),
            str(entry["num_draft_tokens"] or ABSENT),
            figure(entry["tokens_per_s"], 1),
            figure(entry["over_plain"], 2, "x"),
            figure(entry["round_ms"]),
            figure(entry["tokens_per_round"]),
            percent(entry["branch_hit_rate"]),
            percent(entry["target_busy"]),
            percent(entry["draft_busy"]),
            str(entry["binding"]),
        ]
        for entry in shown
    ]
    return columns, rows


def trial_table(entries: Sequence[Entry]) -> Table | None:
    """Predicted beside measured; None where nothing was run."""
    tried = [entry for entry in entries if entry["measured"]]
    if not tried:
        return None
    columns = ["layout", "draft", "tokens/s", "measured", "off", "round ms", "measured", "off", ""]
    rows = []
    for entry in tried:
        measured = entry["measured"]
        rows.append(
            [
                str(entry["layout"]),
                str(entry["num_draft_tokens"] or ABSENT),
                figure(entry["tokens_per_s"], 1),
                figure(measured["tokens_per_s"], 1),
                signed(measured["tokens_per_s_off"]),
                figure(entry["round_ms"]),
                figure(measured["round_ms"]),
                signed(measured["round_ms_off"]),
                verdict(measured["round_ms_off"]),
            ]
        )
    return columns, rows


def verdict(off: float | None) -> str:
    """What to think of a prediction of the round time."""
    if off is None:
        return ABSENT
    return "as predicted" if abs(off) <= CLOSE else f"OFF by more than {CLOSE:.0%}"


def signed(share: float | None) -> str:
    return ABSENT if share is None else f"{share:+.0%}"


def write_csv(path: Path, entries: Sequence[Entry]) -> None:
    """All layouts; what was measured stands in columns of its own."""
    columns = [*CSV_COLUMNS, *(f"measured {name}" for name in TRIAL_COLUMNS), "overrides"]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for entry in entries:
            measured = entry["measured"] or {}
            row = {name: entry[name] for name in CSV_COLUMNS}
            row |= {f"measured {name}": measured.get(name) for name in TRIAL_COLUMNS}
            writer.writerow(row | {"overrides": " ".join(entry["overrides"])})
