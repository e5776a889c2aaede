"""Drafters beside each other: what their drafts bring and cost, what was predicted, and who would have been chosen.

Reads the entries of `report.json`. Pure but for the file it writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster.io.console import ABSENT, figure

Entry = Mapping[str, object]

COLUMNS = ("setting", "accepted + 1", "ms/draft", "ms/verify", "tokens/s decoding", "predicted", "error", "speed-up")


def drafter_table(entries: Sequence[Entry]) -> tuple[list[str], list[list[str]]]:
    """Tokens/s are those behind each request's first token; the speed-up is of whole requests."""
    rows = []
    for entry in entries:
        error = entry["prediction_error"]
        rows.append(
            [
                str(entry["name"]),
                figure(entry["mean_acceptance_length"]),
                figure(entry["ms_per_draft"]),
                figure(entry["verify_ms"], 1),
                figure(entry["decode_tokens_per_s"], 1),
                figure(entry["predicted_tokens_per_s"], 1),
                ABSENT if error is None else f"{100 * error:+.0f} %",
                figure(entry["speedup_vs_ar"], 2, "x"),
            ]
        )
    return list(COLUMNS), rows


def write_markdown(path: Path, entries: Sequence[Entry]) -> None:
    """The same table; the fastest of each comparison in bold."""
    fastest = [_best(group, "decode_tokens_per_s")["name"] for group in comparisons(entries)]
    columns, rows = drafter_table(entries)
    lines = [columns, ["---"] * len(columns)]
    lines += [[f"**{cell}**" for cell in row] if row[0] in fastest else row for row in rows]
    path.write_text("".join(f"| {' | '.join(line)} |\n" for line in lines), encoding="utf-8")


def choices(entries: Sequence[Entry]) -> list[str]:
    """For each comparison, the drafter the formula chooses after one repeat, and how far from the fastest it is."""
    said = []
    for group in comparisons(entries):
        known = [entry for entry in group if entry["first_prediction"] is not None]
        if len(known) < 2:
            continue
        fastest, chosen = _best(group, "decode_tokens_per_s"), _best(known, "first_prediction")
        lead = fastest["decode_tokens_per_s"] / chosen["decode_tokens_per_s"] - 1
        said.append(
            f"by measured costs of one repeat the walltime formula chooses {chosen['name']}; "
            + (f"{fastest['name']} is {100 * lead:.0f} % faster" if lead else "nothing is faster")
        )
    return said


def comparisons(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Settings that differ in nothing but the drafter."""
    groups: dict[tuple[object, ...], list[Entry]] = {}
    for entry in entries:
        if entry["decode_tokens_per_s"] is not None:
            key = tuple(entry["setting"][name] for name in ("pipeline", "temperature", "batch", "context", "workload"))
            groups.setdefault(key, []).append(entry)
    return list(groups.values())


def _best(entries: Sequence[Entry], by: str) -> Entry:
    return max(entries, key=lambda entry: entry[by])
