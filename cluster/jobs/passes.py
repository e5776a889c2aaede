"""`job=passes`: one pass of a draft model on one rank, tensor-parallel and layer-parallel, timed in one run.

Reads no checkpoint: only the shape of a model decides the cost of its passes. Writes `passes.json`.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from cluster.config.jobs import PassesConfig
from cluster.config.schema import LaunchConfig
from cluster.io.console import Table, Terminal, figure, percent
from cluster.observability.report import versions, write_json
from cluster.tools.bench.machine import machine
from cluster.tools.planning.layouts import draft_model
from cluster.tools.planning.passes import PassTask, PassTime, Sharing, measure_passes
from parallel.model.config import DecoderConfig
from parallel.model.families.registry import read_config
from parallel.runtime.kv_sizing import choose_dtype


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 4096,
        "tie_word_embeddings": True,
        "head_dim": 64,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
    }


SIZES = {"5M": _llama(256, 8, 4, 2, 448), "30M": _llama(512, 10, 8, 4, 1408)}
"""Draft models by their parameters: 5.4 and 31.6 million."""


def run(config: LaunchConfig, run_dir: Path) -> None:
    """Raises ValueError for a model that cannot be read, or that the ranks cannot share."""
    terminal, job = Terminal(), config.job
    drafter = draft_model(config)
    device = _device(drafter.device, job.ranks)
    models = {name: _model(name) for name in job.models}
    entries: dict[str, list[dict[str, Any]]] = {}
    with terminal.starting() as progress:
        for name, model in models.items():
            progress(f"timing passes of {name}")
            dtype = choose_dtype(drafter.dtype, device)
            task = PassTask(model, _sharings(model, job), tuple(job.rows), job.context, job.repeats, dtype)
            times = measure_passes(task, device)
            single = {one.num_rows: one for one in times if one.sharing == Sharing()}
            entries[name] = [_entry(one, single[one.num_rows]) for one in times]
    for name, rows in entries.items():
        terminal.table(f"A pass of {name} on {device}", *_table(rows))
    about = {"machine": machine(), "versions": versions(), "config": asdict(config)}
    write_json(run_dir / "passes.json", {"job": job.name, "models": entries, **about})
    terminal.line(f"written to {run_dir}")


def _device(wanted: str, num_ranks: int) -> str:
    num_gpus = torch.cuda.device_count()
    if wanted == "cuda" and num_gpus < num_ranks:
        raise ValueError(f"job.ranks={num_ranks}: {num_gpus} GPUs here; lower it")
    return wanted if wanted != "auto" else "cuda" if num_gpus >= num_ranks else "cpu"


def _model(name: str) -> DecoderConfig:
    if name in SIZES:
        return read_config(SIZES[name])
    try:
        return read_config(Path(name).expanduser())
    except ValueError as error:
        raise ValueError(f"job.models: {error}; known sizes are {', '.join(SIZES)}") from error


def _sharings(model: DecoderConfig, job: PassesConfig) -> tuple[Sharing, ...]:
    if job.ranks == 1:
        return (Sharing(),)
    model.check_ranks(job.ranks)
    layers = [Sharing(job.ranks, group, mlp) for group in job.layer_groups for mlp in ("replicated", "tensor")]
    return (Sharing(), Sharing(job.ranks), *layers)


def _entry(one: PassTime, single: PassTime) -> dict[str, Any]:
    return {
        "sharing": one.sharing.name,
        "pass": "fuzzy" if one.fuzzy else "exact",
        "rows": one.num_rows,
        "ms": one.seconds * 1e3,
        "over_single": single.seconds / one.seconds,
        "undisturbed_ms": one.undisturbed * 1e3,
        "undisturbed_over_single": single.undisturbed / one.undisturbed,
        "communication_share": one.communication_share,
        "split_ms": {kind: seconds * 1e3 for kind, seconds in one.split.items()},
    }


def _table(entries: list[dict[str, Any]]) -> Table:
    columns = ["shared", "pass", "rows", "ms", "over single", "fastest tenth, ms", "over single", "communication"]
    rows = [
        [
            *(str(entry[name]) for name in ("sharing", "pass", "rows")),
            figure(entry["ms"]),
            figure(entry["over_single"], 2, "x"),
            figure(entry["undisturbed_ms"]),
            figure(entry["undisturbed_over_single"], 2, "x"),
            percent(entry["communication_share"]),
        ]
        for entry in entries
    ]
    return columns, rows
