"""A plan of a fleet as rows: for the terminal and for the CSV file. Pure; reads the entries of `fleet.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.io.console import ABSENT, Table, figure, percent

FleetEntry = Mapping[str, Any]


def places(entry: FleetEntry) -> str:
    """Targets and pools of each region, as `west 5+1`; regions with nothing are left out."""
    pools = entry["pools"]
    return ", ".join(
        f"{name} {targets}" + f"+{pools[name]}" * bool(pools[name])
        for name, targets in entry["targets"].items()
        if targets or pools[name]
    )


def fleet_table(entries: Sequence[FleetEntry]) -> Table:
    columns = ["layout", "targets + pools", "devices", "$/h", "tokens/s", "of offered", "$/M tokens", "a stream/s"]
    columns += ["slow tenth", "first, s", "late, s", "target", "pool"]
    rows = [
        [
            entry["layout"],
            places(entry),
            str(entry["num_devices"]),
            figure(entry["dollars_per_hour"]),
            figure(entry["tokens_per_s"], 0),
            percent(entry["tokens_per_s"] / entry["offered_tokens_per_s"] if entry["offered_tokens_per_s"] else None),
            figure(entry["dollars_per_million"]),
            figure(entry["stream_tokens_per_s"], 0),
            figure(entry["slow_stream_tokens_per_s"], 0),
            figure(entry["first_token_s"]),
            figure(entry["late_first_token_s"]),
            percent(entry["target_busy"]),
            percent(entry["pool_busy"]) if any(entry["pools"].values()) else ABSENT,
        ]
        for entry in entries
    ]
    return columns, rows


def loss_table(entries: Sequence[FleetEntry]) -> Table:
    """What was lost meanwhile, and what became of the text."""
    columns = ["layout", "requests", "waiting", "tokens", "different", "drafters lost", "targets lost", "moved"]
    columns += ["to other regions", "preempted", "tokens a draft", "on drafts", "rows a draft pass"]
    names = ("num_requests", "num_waiting", "num_tokens", "num_different", "drafters_lost", "targets_lost")
    names += ("num_moves", "num_far_moves", "num_preemptions")
    rows = [
        [
            entry["layout"],
            *(f"{entry[name]:,}" for name in names),
            figure(entry["mean_acceptance_length"]),
            percent(entry["drafted_share"]),
            figure(entry["rows_per_draft_pass"], 0),
        ]
        for entry in entries
    ]
    return columns, rows


def flat_rows(entries: Sequence[FleetEntry]) -> list[FleetEntry]:
    """Rows of `fleet.csv`: one column for the targets and one for the pools of each region."""
    return [
        {name: value for name, value in entry.items() if name not in ("targets", "pools")}
        | {f"targets {name}": count for name, count in entry["targets"].items()}
        | {f"pools {name}": count for name, count in entry["pools"].items()}
        for entry in entries
    ]
