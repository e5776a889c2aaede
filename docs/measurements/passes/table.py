"""The table of passes: models by name, the device and the ways to share them, and what a pass of each costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from cluster.io.console import Table, figure, percent
from docs.measurements.passes.config import PassesConfig
from docs.measurements.passes.measuring import PassTime, Sharing
from parallel.model.config import DecoderConfig
from parallel.model.families.registry import read_config


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


def device_for(wanted: str, num_ranks: int) -> str:
    num_gpus = torch.cuda.device_count()
    if wanted == "cuda" and num_gpus < num_ranks:
        raise ValueError(f"passes.ranks={num_ranks}: {num_gpus} GPUs here; lower it")
    return wanted if wanted != "auto" else "cuda" if num_gpus >= num_ranks else "cpu"


def read_model(name: str) -> DecoderConfig:
    if name in SIZES:
        return read_config(SIZES[name])
    try:
        return read_config(Path(name).expanduser())
    except ValueError as error:
        raise ValueError(f"passes.models: {error}; known sizes are {', '.join(SIZES)}") from error


def sharings(model: DecoderConfig, job: PassesConfig) -> tuple[Sharing, ...]:
    if job.ranks == 1:
        return (Sharing(),)
    model.check_ranks(job.ranks)
    layers = [Sharing(job.ranks, group, mlp) for group in job.layer_groups for mlp in ("replicated", "tensor")]
    return (Sharing(), Sharing(job.ranks), *layers)


def entry_of(one: PassTime, single: PassTime) -> dict[str, Any]:
    return {
        "sharing": one.sharing.name,
        "pass": "fuzzy" if one.fuzzy else "exact",
        "rows": one.num_rows,
        "ms": one.seconds * 1e3,
        "over_single": single.seconds / one.seconds,
        "undisturbed_ms": one.undisturbed * 1e3,
        "undisturbed_over_single": single.undisturbed / one.undisturbed,
        "communication_share": one.communication_share,
        "bytes_read": one.bytes_read,
        "read_gb_per_s": None if one.bandwidth is None else one.bandwidth / 1e9,
        "bandwidth_share": one.bandwidth_share,
        "split_ms": {kind: seconds * 1e3 for kind, seconds in one.split.items()},
    }


def table_of(entries: list[dict[str, Any]]) -> Table:
    times = ["ms", "over single", "fastest tenth, ms", "over single", "communication", "of read bandwidth"]
    columns = ["shared", "pass", "rows", *times]
    rows = [
        [
            *(str(entry[name]) for name in ("sharing", "pass", "rows")),
            figure(entry["ms"]),
            figure(entry["over_single"], 2, "x"),
            figure(entry["undisturbed_ms"]),
            figure(entry["undisturbed_over_single"], 2, "x"),
            percent(entry["communication_share"]),
            "" if entry["bandwidth_share"] is None else percent(entry["bandwidth_share"]),
        ]
        for entry in entries
    ]
    return columns, rows
