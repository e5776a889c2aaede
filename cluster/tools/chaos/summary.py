"""The summary of a drill, as `drill.json` has it: every fault, and the times of each kind of process and signal."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cluster.observability.report import middle
from cluster.tools.chaos.drill import DrillLoad, Fault

TIMES = ("noticed_s", "replaced_s", "stalled_s")


def summarise(faults: list[Fault], load: DrillLoad, num_planned: int) -> dict[str, Any]:
    """`passed` if the engine recovered from all that was planned and every request ended with its tokens."""
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    entries = [{"kind": fault.kind, "signal": fault.signal, **asdict(fault)} for fault in faults]
    for entry in entries:
        kinds.setdefault((entry["kind"], entry["signal"]), []).append(entry)
    return {
        "job": "drill",
        "passed": load.is_right and len(faults) == num_planned,
        "num_faults": len(faults),
        "num_requests": load.num_requests,
        "tokens": load.num_tokens,
        "num_failed": len(load.failed),
        "failures": load.failed,
        "num_unequal_requests": len(load.unequal),
        "unequal_prompts": sorted({index + 1 for index in load.unequal}),
        "faults": entries,
        "kinds": [
            {"kind": kind, "signal": signal, "num_faults": len(members)}
            | {name: middle(entry[name] for entry in members) for name in TIMES}
            for (kind, signal), members in sorted(kinds.items())
        ],
    }
