"""A plan as rows: for the terminal and for the CSV files. Pure; reads the entries of `plan.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.io.console import ABSENT, Table, figure, percent

Entry = Mapping[str, Any]

SHOWN = 12
CLOSE = 0.15
"""Relative error of a predicted round time above which it is marked."""

TRIAL_COLUMNS = (
    "tokens_per_s",
    "tokens_per_s_off",
    "round_ms",
    "round_ms_off",
    "tokens_per_round",
    "target_busy",
    "draft_busy",
)
PARTS = ("attention", "mlp", "communication", "rest")


def shown(entries: Sequence[Entry]) -> list[Entry]:
    """The fastest layouts, and plain decoding at any rank."""
    return [entry for i, entry in enumerate(entries) if i < SHOWN or not entry["num_draft_tokens"]]


def plan_table(entries: Sequence[Entry]) -> Table:
    columns = ["layout", "draft", "tokens/s", "over plain", "round ms", "a round", "hits", "target", "drafter", "binds"]
    rows = [
        [
            entry["layout"],
            str(entry["num_draft_tokens"] or ABSENT),
            figure(entry["tokens_per_s"], 1),
            figure(entry["over_plain"], 2, "x"),
            figure(entry["round_ms"]),
            figure(entry["tokens_per_round"]),
            *(percent(entry[name]) for name in ("branch_hit_rate", "target_busy", "draft_busy")),
            entry["binding"],
        ]
        for entry in shown(entries)
    ]
    return columns, rows


def trial_table(entries: Sequence[Entry]) -> Table:
    """Predicted beside measured, of the layouts that were run."""
    columns = ["layout", "draft", "tokens/s", "measured", "off", "round ms", "measured", "off", ""]
    rows = [
        [
            entry["layout"],
            str(entry["num_draft_tokens"] or ABSENT),
            figure(entry["tokens_per_s"], 1),
            figure(measured["tokens_per_s"], 1),
            f"{measured['tokens_per_s_off']:+.0%}",
            figure(entry["round_ms"]),
            figure(measured["round_ms"]),
            f"{measured['round_ms_off']:+.0%}",
            "as predicted" if abs(measured["round_ms_off"]) <= CLOSE else f"OFF by more than {CLOSE:.0%}",
        ]
        for entry in entries
        if (measured := entry["measured"])
    ]
    return columns, rows


def parts_table(parts: Sequence[Entry]) -> Table:
    """How the time of a pass divides, and the method's costs in ms: an attention block a, an MLP m, an all-gather g and
    an all-reduce ar."""
    rows = []
    for part in parts:
        total, blocks, collectives = sum(part["parts_ms"].values()), part["block_ms"], part["collective_ms"]
        shares = [percent(part["parts_ms"].get(kind, 0.0) / total) for kind in PARTS]
        costs = [blocks.get("attention"), blocks.get("mlp")]
        costs += [collectives.get("all_gather"), collectives.get("all_reduce")]
        name = f"{part['role']}: {part['subject']}"
        milliseconds = [figure(cost, 3) for cost in costs]
        rows.append([name, str(part["cores"] or ABSENT), figure(part["pass_ms"]), *shares, *milliseconds])
    return ["a pass of", "cores a rank", "ms", *PARTS, "a, ms", "m, ms", "g, ms", "ar, ms"], rows


def fidelity_table(found: Sequence[Entry]) -> Table:
    """Acceptance under layer-parallel drafting, and how near its passes are to exact ones."""
    columns = ["layers side by side", "as", "calibrated", "accepted + 1", "kept", "accepted", "kept"]
    columns += ["top-1 equal", "cosine", "KL, nats", "logits off"]
    rows = [
        [
            str(one["layer_group"]),
            " ".join(map(str, one["partition"])),
            one["calibration"],
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
    return columns, rows if len(rows) > 1 else []


def layout_rows(entries: Sequence[Entry]) -> list[Entry]:
    """Rows of `plan.csv`: all layouts; measurements in columns of their own."""
    rows = []
    for entry in entries:
        measured = entry["measured"] or {}
        row = {name: value for name, value in entry.items() if name not in ("overrides", "measured")}
        row |= {f"measured {name}": measured.get(name) for name in TRIAL_COLUMNS}
        rows.append(row | {"overrides": " ".join(entry["overrides"])})
    return rows


def fidelity_rows(found: Sequence[Entry]) -> list[Entry]:
    """Rows of `fidelity.csv`: one per partition and calibration; acceptance by distance in columns of its own."""
    rows = []
    for one in found:
        row = {name: value for name, value in one.items() if name != "acceptance"}
        row["partition"] = " ".join(map(str, one["partition"]))
        rows.append(row | {f"acceptance {i}": rate for i, rate in enumerate(one["acceptance"], 1)})
    return rows
