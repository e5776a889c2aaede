"""One pass of a draft model on one rank, tensor-parallel and layer-parallel, timed in one run:
`python -m docs.measurements.passes.run KEY=VALUE ...`, with the fields of `PassesConfig` as keys.

Reads no checkpoint: only the shape of a model decides the cost of its passes. Writes `runs/passes/passes.json`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from cluster.config.compose import typed_record
from cluster.io.console import Terminal
from cluster.observability.report import versions, write_json
from cluster.tools.bench.machine import machine
from docs.measurements.passes.config import PassesConfig
from docs.measurements.passes.measuring import PassTask, Sharing, measure_passes
from docs.measurements.passes.table import device_for, entry_of, read_model, sharings, table_of
from parallel.runtime.kv_sizing import choose_dtype, choose_weights


def run(config: PassesConfig, folder: Path) -> None:
    """Raises ValueError for a model that cannot be read, or that the ranks cannot share."""
    config.check("passes")
    terminal = Terminal()
    device = device_for(config.device, config.ranks)
    models = {name: read_model(name) for name in config.models}
    entries: dict[str, list[dict[str, Any]]] = {}
    with terminal.starting() as progress:
        for name, model in models.items():
            progress(f"timing passes of {name}")
            dtype = choose_dtype(config.dtype, device)
            weights = choose_weights(config.weights, config.dtype, device)
            assert weights != "packed", "random weights are not quantised"
            task = PassTask(
                model, sharings(model, config), tuple(config.rows), config.context, config.repeats, dtype, weights
            )
            times = measure_passes(task, device)
            single = {one.num_rows: one for one in times if one.sharing == Sharing()}
            entries[name] = [entry_of(one, single[one.num_rows]) for one in times]
    for name, rows in entries.items():
        terminal.table(f"A pass of {name} on {device}", *table_of(rows))
    folder.mkdir(parents=True, exist_ok=True)
    about = {"machine": machine(), "versions": versions(), "config": asdict(config)}
    write_json(folder / "passes.json", {"models": entries, **about})
    terminal.line(f"written to {folder}")


def main(words: Sequence[str]) -> None:
    """ValueError, one line, for a key that `PassesConfig` does not have, and for its value."""
    keys = {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in words)}
    run(typed_record(PassesConfig(), keys, "passes"), Path("runs") / "passes")


if __name__ == "__main__":
    main(sys.argv[1:])
