"""`job=passes`: one pass of a draft model on one rank, tensor-parallel and layer-parallel, timed in one run.

Reads no checkpoint: only the shape of a model decides the cost of its passes. Writes `passes.json`.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.config.schema import LaunchConfig
from cluster.io.console import Terminal
from cluster.observability.report import versions, write_json
from cluster.tools.bench.machine import machine
from cluster.tools.planning.layouts import draft_model
from cluster.tools.planning.passes import PassTask, Sharing, measure_passes
from cluster.tools.planning.passes_table import device_for, entry_of, read_model, sharings, table_of
from parallel.runtime.kv_sizing import choose_dtype, choose_weights


def run(config: LaunchConfig, run_dir: Path) -> None:
    """Raises ValueError for a model that cannot be read, or that the ranks cannot share."""
    terminal, job = Terminal(), config.job
    drafter = draft_model(config)
    device = device_for(drafter.device, job.ranks)
    models = {name: read_model(name) for name in job.models}
    entries: dict[str, list[dict[str, Any]]] = {}
    with terminal.starting() as progress:
        for name, model in models.items():
            progress(f"timing passes of {name}")
            dtype = choose_dtype(drafter.dtype, device)
            weights = choose_weights(drafter.weights, drafter.dtype, device)
            assert weights != "packed", "random weights are not quantised"
            task = PassTask(model, sharings(model, job), tuple(job.rows), job.context, job.repeats, dtype, weights)
            times = measure_passes(task, device)
            single = {one.num_rows: one for one in times if one.sharing == Sharing()}
            entries[name] = [entry_of(one, single[one.num_rows]) for one in times]
    for name, rows in entries.items():
        terminal.table(f"A pass of {name} on {device}", *table_of(rows))
    about = {"machine": machine(), "versions": versions(), "config": asdict(config)}
    write_json(run_dir / "passes.json", {"job": job.name, "models": entries, **about})
    terminal.line(f"written to {run_dir}")
