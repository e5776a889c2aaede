"""Speculators opened from their checkpoints, each part where it runs: the module, what fuses its taps, and the target's
tables or passes that it needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from parallel.comm.group import SINGLE, Group
from parallel.model.checkpoint import resolve_checkpoint
from parallel.model.decoder import Decoder
from parallel.model.families.registry import read_config
from parallel.model.layers.weight import Stored
from parallel.model.weights import load_weights
from parallel.runtime.decoder_runner import DecoderRunner
from parallel.speculators.config import STREAMS
from parallel.speculators.fusing import TapFuser
from parallel.speculators.place import SpeculatorPlace, fill
from parallel.speculators.registry import check_on, read_layout, read_speculator
from parallel.speculators.runner import SpeculatorRunner


def open_speculator(path: str | Path, place: SpeculatorPlace) -> SpeculatorRunner:
    """Load a checkpoint beside its target."""
    directory = resolve_checkpoint(str(path))
    layout, config = read_layout(path, place.target_layers)
    target = place.tables.config
    if place.target_layers:  # the tables alone have none
        target = replace(target, num_layers=place.target_layers, stretch=0)
    check_on(directory, config, target)
    return layout.open(directory, config, place)


def open_fuser(
    path: str | Path,
    target_layers: int,
    device: torch.device | str,
    dtype: torch.dtype,
    weights: Stored | None = None,
) -> TapFuser | None:
    """Load what fuses taps, and nothing else of the checkpoint, for the target's side; None if features leave as they
    are."""
    directory, config = resolve_checkpoint(str(path)), read_speculator(path, target_layers)
    if config.fuser is None or not config.travels_fused:
        return None
    fuser = TapFuser(config.fuser, SINGLE, dtype=dtype, device=device)
    fill(fuser, config.fuser.tensor_shapes(), directory, None if weights == dtype else weights)
    return fuser


def with_streams(path: str | Path, target: DecoderRunner, prune_below: float = 0.0) -> DecoderRunner:
    """The target's runner, with streams in its passes if the speculator at `path` drafts from such; nodes are pruned
    (`StreamingRunner`) only with a checkpoint that has early logits."""
    config = read_speculator(path, target.config.num_layers - target.config.stretch)
    if STREAMS not in config.taps:
        return target
    from parallel.speculators.streams.layers import open_stream_layers  # for such speculators alone
    from parallel.speculators.streams.layouts import StreamsConfig
    from parallel.speculators.streams.target_pass import StreamingRunner

    assert isinstance(config, StreamsConfig)
    directory = resolve_checkpoint(str(path))
    check_on(directory, config, target.config)
    layers = open_stream_layers(directory, config, target.decoder)
    return StreamingRunner(target, layers, prune_below=prune_below)


def open_tables(
    path: str | Path,
    group: Group = SINGLE,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    weights: Stored | None = None,
) -> Decoder:
    """The target's embedding, final norm and head alone: a decoder of no layers, for a speculator on other ranks."""
    directory = resolve_checkpoint(str(path))
    tables = Decoder(replace(read_config(directory), num_layers=0), group, device, dtype, weights=weights)
    load_weights(tables, directory)
    return tables
