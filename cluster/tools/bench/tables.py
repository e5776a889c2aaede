"""Rows of a bench: for the terminal and for `bench.csv`. Pure; reads the entries of `report.json`."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster.io.console import ABSENT, figure, percent
from cluster.tools.bench.prediction import DRAFTING
from cluster.tools.bench.sides import peer_sides

Entry = Mapping[str, object]
Table = tuple[list[str], list[list[str]]]
"""Columns and rows."""

_PLAIN_COLUMNS = (
    "tokens",
    "wall_s",
    "tokens_per_s",
    "plain_tokens_per_s",
    "speedup_vs_ar",
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "decode_ms_per_token",
    "draft_busy",
    "target_busy",
    "round_ms",
    "round_overhead_ms",
    "preemptions",
    "stale",
    "num_unequal_requests",
    "repeats",
    *DRAFTING,
)


def speed_table(entries: Sequence[Entry]) -> Table:
    """How fast, against plain decoding in the same engine; the range is least to most over the repeats."""
    columns = ["setting", "tokens/s", "plain", "speed-up", "range", "accepted + 1", "ms/token", "plain", "first ms"]
    rows = []
    for entry in entries:
        sides, ratio = entry["sides"], entry["ratios"]["speculative / plain"]
        unequal = sides["plain"]["num_unequal_requests"]
        rows.append(
            [
                str(entry["name"]),
                figure(entry["tokens_per_s"], 1),
                figure(entry["plain_tokens_per_s"], 1),
                figure(ratio["median"], 2, "x"),
                f"{ratio['min']:.2f}-{ratio['max']:.2f}",
                figure(entry["mean_acceptance_length"]),
                figure(entry["decode_ms_per_token"]),
                figure(_median(sides["plain"]["decode_ms_per_token"])),
                figure(_median(sides["speculative"]["ttft_s"], 1e3), 1),
                _equality(unequal, entry),
            ]
        )
    return [*columns, "tokens"], rows


def round_table(entries: Sequence[Entry]) -> Table:
    """Where the time of a round goes, and what the ranks hold in memory."""
    columns = ["setting", "round ms", "of it overhead", "", "target busy", "drafter busy", "target threads", "memory"]
    rows = []
    for entry in entries:
        round_ms, overhead_ms = entry["round_ms"], entry["round_overhead_ms"]
        rows.append(
            [
                str(entry["name"]),
                figure(round_ms),
                figure(overhead_ms),
                percent(overhead_ms / round_ms if round_ms else None),
                percent(entry["target_busy"]),
                percent(entry["draft_busy"]),
                str(entry["num_threads"]["target"]),
                figure(sum(entry["resident_bytes"].values()) / 2**20, 0, " MiB"),
            ]
        )
    return columns, rows


def peer_table(entries: Sequence[Entry]) -> Table | None:
    """Other engines on the same prompts: their speed, and by how much ours beats it; None without peers."""
    peers = peer_sides(side for entry in entries for side in entry["sides"])
    if not peers:
        return None
    rows = []
    for entry in entries:
        for peer in peers:
            if (side := entry["sides"].get(peer)) is not None:
                rows.append(
                    [
                        str(entry["name"]),
                        peer,
                        figure(_median(side["tokens_per_s"]), 1),
                        figure(_median(side["decode_ms_per_token"])),
                        figure(_median(entry["ratios"][f"speculative / {peer}"]), 2, "x"),
                        figure(_median(entry["ratios"][f"plain / {peer}"]), 2, "x"),
                        _equality(side["num_unequal_requests"], entry),
                    ]
                )
    return ["setting", "peer", "tokens/s", "ms/token", "speculation over it", "plain over it", "tokens"], rows


def category_table(entries: Sequence[Entry]) -> Table | None:
    """Categories down, settings across: speed-up over plain decoding and acceptance length; None without categories."""
    categories = list(dict.fromkeys(name for entry in entries for name in entry["categories"]))
    if not categories:
        return None
    rows = []
    for category in categories:
        cells = [entry["categories"][category] for entry in entries]
        rows.append([category, *(_category_cell(cell) for cell in cells)])
    return ["category", *(str(entry["name"]) for entry in entries)], rows


def _category_cell(cell: Mapping[str, float | None]) -> str:
    return f"{figure(cell['speculative / plain'], 2, 'x')}  {figure(cell['mean_acceptance_length'])}"


def csv_row(entry: Entry) -> dict[str, object]:
    """One flat row; columns of peers and categories are named after them."""
    row: dict[str, object] = {"name": entry["name"], **entry["setting"]}
    row |= {name: entry[name] for name in _PLAIN_COLUMNS}
    row["resident_bytes"] = sum(entry["resident_bytes"].values())
    for side, figures in entry["sides"].items():
        row[f"{side} ttft_s"] = _median(figures["ttft_s"])
        row[f"{side} decode_ms_per_token"] = _median(figures["decode_ms_per_token"])
        row[f"{side} tokens_per_s"] = _median(figures["tokens_per_s"])
    for name, ratio in entry["ratios"].items():
        row |= {name: ratio["median"], f"{name} min": ratio["min"], f"{name} max": ratio["max"]}
    for category, figures in entry["categories"].items():
        row |= {f"{category}: {name}": value for name, value in figures.items()}
    return row


def write_csv(path: Path, entries: Sequence[Entry]) -> None:
    rows = [csv_row(entry) for entry in entries]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def _equality(num_unequal: int | None, entry: Entry) -> str:
    if num_unequal is None:
        return ABSENT
    return f"{num_unequal} of {entry['num_requests']} differ" if num_unequal else "all equal"


def _median(values: Mapping[str, float] | None, factor: float = 1.0) -> float | None:
    return None if values is None else values["median"] * factor
