"""A plan as rows: for the terminal and for `plan.csv`. Pure; reads the entries of `plan.json`."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster.io.console import ABSENT, figure, percent

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
TRIAL_COLUMNS = (
    "tokens_per_s",
    "tokens_per_s_off",
    "round_ms",
    "round_ms_off",
    "tokens_per_round",
    "target_busy",
    "draft_busy",
)


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


def parts_table(parts: Sequence[Entry]) -> Table | None:
    """How the time of a pass divides, and the method's costs: an attention block a, an MLP m, and by themselves an
    all-gather g and an all-reduce ar."""
    if not parts:
        return None
    kinds = ("attention", "mlp", "communication", "rest")
    rows = []
    for part in parts:
        shares = part["parts_ms"]
        total = sum(shares.values())
        cells = [percent(shares.get(kind, 0.0) / total) for kind in kinds]
        costs = [part["block_ms"].get("attention"), part["block_ms"].get("mlp")]
        costs += [part["collective_ms"].get("all_gather"), part["collective_ms"].get("all_reduce")]
        cells += [figure(cost, 3) for cost in costs]
        name = f"{part['role']}: {part['subject']}"
        rows.append([name, str(part["cores"] or ABSENT), figure(part["pass_ms"]), *cells])
    return ["a pass of", "cores a rank", "ms", *kinds, "a, ms", "m, ms", "g, ms", "ar, ms"], rows


def fidelity_table(found: Sequence[Entry]) -> Table | None:
    """Layers side by side: what they cost in acceptance, and how near their passes are to exact ones."""
    if len(found) < 2:
        return None
    columns = ["layers side by side", "as", "calibrated", "accepted + 1", "kept", "accepted", "kept"]
    columns += ["top-1 equal", "cosine", "KL, nats", "logits off"]
    rows = [
        [
            str(one["layer_group"]),
            " ".join(map(str, one["partition"])),
            str(one["calibration"]),
            figure(one["acceptance_length"]),
            percent(one["length_kept"]),
            figure(one["acceptance_length"] - 1),
            percent(one["accepted_kept"]),
            percent(one["top1_agreement"]),
            figure(one["cosine"], 3),
            figure(one["divergence"], 3),
            percent(one["logit_distance"]),
        ]
        for one in found
    ]
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
    rows = []
    for entry in entries:
        measured = entry["measured"] or {}
        row = {name: entry[name] for name in CSV_COLUMNS}
        row |= {f"measured {name}": measured.get(name) for name in TRIAL_COLUMNS}
        rows.append(row | {"overrides": " ".join(entry["overrides"])})
    _write_rows(path, rows)


def write_fidelity(path: Path, found: Sequence[Entry]) -> None:
    """One row per width and policy; acceptance by distance in columns of their own."""
    rows = []
    for one in found:
        row = {name: value for name, value in one.items() if name != "acceptance"}
        row["partition"] = " ".join(map(str, one["partition"]))
        rows.append(row | {f"acceptance {i}": rate for i, rate in enumerate(one["acceptance"], 1)})
    _write_rows(path, rows)


def _write_rows(path: Path, rows: Sequence[Entry]) -> None:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
