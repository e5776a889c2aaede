"""`job=passes`: what one pass of a draft model takes on one rank, tensor-parallel and layer-parallel, in one run.

No checkpoint is read: only the shape of a model decides what its passes cost. Writes `passes.json`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from cluster.config.jobs import PassesConfig
from cluster.config.schema import LaunchConfig
from cluster.io.console import Terminal, figure, percent
from cluster.observability.report import versions, write_json
from cluster.tools.bench.machine import machine
from cluster.tools.planning.passes import PassTime, Sharing, measure_passes
from parallel.model.config import DecoderConfig
from parallel.model.families.registry import read_config
from parallel.runtime.kv_sizing import choose_dtype

_COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4096,
    "tie_word_embeddings": True,
    "head_dim": 64,
}
SIZES = {
    "5M": _COMMON
    | {
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 448,
    },
    "30M": _COMMON
    | {
        "hidden_size": 512,
        "num_hidden_layers": 10,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1408,
    },
}
"""Draft models by their parameters: 5.4 and 31.6 million."""


def run(config: LaunchConfig, run_dir: Path) -> None:
    """Raises ValueError for a model that is none, or that the ranks cannot share."""
    terminal, job = Terminal(), config.job
    device = _device(config)
    models = {name: _model(name) for name in job.models}
    found: dict[str, list[PassTime]] = {}
    with terminal.starting() as say:
        for name, model in models.items():
            say(f"timing passes of {name}")
            found[name] = measure_passes(
                model,
                list(_sharings(model, job)),
                num_rows=job.rows,
                context=job.context,
                repeats=job.repeats,
                device=device,
                dtype=choose_dtype(config.drafter.dtype, device),
            )
    entries = {name: [_entry(one, times) for one in times] for name, times in found.items()}
    for name, rows in entries.items():
        terminal.table(f"A pass of {name} on {device}", *_table(rows))
    about = {"machine": machine(), "versions": versions(), "config": asdict(config)}
    write_json(run_dir / "passes.json", {"job": job.name, "models": entries, **about})
    terminal.line(f"written to {run_dir}")


def _device(config: LaunchConfig) -> str:
    wanted = config.drafter.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.device_count() >= config.job.ranks else "cpu"
    if wanted == "cuda" and torch.cuda.device_count() < config.job.ranks:
        raise ValueError(f"job.ranks={config.job.ranks}: {torch.cuda.device_count()} GPUs here; lower it")
    return wanted


def _model(name: str) -> DecoderConfig:
    if name in SIZES:
        return read_config(SIZES[name])
    try:
        return read_config(Path(name).expanduser())
    except ValueError as error:
        raise ValueError(f"job.models: {error}; known sizes are {', '.join(SIZES)}") from error


def _sharings(model: DecoderConfig, job: PassesConfig) -> Iterator[Sharing]:
    yield Sharing()
    if job.ranks == 1:
        return
    model.check_ranks(job.ranks)
    yield Sharing(job.ranks)
    for group in job.layer_groups:
        for mlp in ("replicated", "tensor"):
            yield Sharing(job.ranks, group, mlp)


def _entry(one: PassTime, times: list[PassTime]) -> dict[str, object]:
    single = next(time for time in times if time.sharing == Sharing() and time.num_rows == one.num_rows)
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


def _table(entries: list[dict[str, object]]) -> tuple[list[str], list[list[str]]]:
    columns = ["shared", "pass", "rows", "ms", "over single", "fastest tenth, ms", "over single", "communication"]
    rows = [
        [
            str(entry["sharing"]),
            str(entry["pass"]),
            str(entry["rows"]),
            figure(entry["ms"]),
            figure(entry["over_single"], 2, "x"),
            figure(entry["undisturbed_ms"]),
            figure(entry["undisturbed_over_single"], 2, "x"),
            percent(entry["communication_share"]),
        ]
        for entry in entries
    ]
    return columns, rows
