"""Checkpoints of speculators: which layout one has, its record, and what it opens. The module of a layout is loaded for
its checkpoints alone."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from parallel.comm.group import SINGLE, Group
from parallel.model.checkpoint import find_tensors, resolve_checkpoint
from parallel.model.config import DecoderConfig
from parallel.model.config_fields import read_config_file
from parallel.model.decoder import Decoder
from parallel.model.families.fields import HfConfig
from parallel.model.families.registry import FAMILIES, read_config
from parallel.model.layers.weight import Stored
from parallel.model.weights import load_weights
from parallel.ranges import errors_of
from parallel.runtime.decoder_runner import DecoderRunner
from parallel.speculators.config import STREAMS, TARGET_LAYERS, SpeculatorConfig, method_of
from parallel.speculators.config_fields import ParamsFields, SpeculatorFields
from parallel.speculators.fusing import TapFuser
from parallel.speculators.layout import CheckpointLayout
from parallel.speculators.place import SpeculatorPlace, fill
from parallel.speculators.published import PUBLISHED
from parallel.speculators.runner import SpeculatorRunner

OWN = {
    **dict.fromkeys(("eagle", "eagle3", "eagle3.1", "mtp", "p_eagle"), "eagle.layouts"),
    "chimera": "chimera.runner",
    **dict.fromkeys(("glide", "longspec"), "glide.runner"),
    "gloeckle": "gloeckle.layouts",
    **dict.fromkeys(("kangaroo", "eesd"), "exits.runner"),
    **dict.fromkeys(("dflash", "dspark", "dflash2", "domino"), "block.layouts"),
    **dict.fromkeys(("streaming", "mask_lora", "s3d"), "streams.runner"),
    **dict.fromkeys(("medusa", "blockwise", "hydra", "rnn", "mlp", "lstm"), "heads.layouts"),
}
"""Method that our own config.json names -> the module here whose `OWN` is the layout of its checkpoints."""


def read_speculator(path: str | Path, target_layers: int = 0) -> SpeculatorConfig:
    """The record of a checkpoint for a target of so many layers, 0 if that is not known; ValueError, one line, if no
    family knows it."""
    return _read(path, target_layers)[1]


def check_speculator(path: str | Path, target: DecoderConfig) -> None:
    """ValueError, one line, unless the checkpoint was made for this target and holds all its tensors whole; reads the
    headers of its files alone."""
    directory = resolve_checkpoint(str(path))
    layout, config = _read(path, target.num_layers - target.stretch)
    _check_target(directory, config, target)
    find_tensors(directory, layout.tensors(directory, config, target))


def open_speculator(path: str | Path, place: SpeculatorPlace) -> SpeculatorRunner:
    """Load a checkpoint beside its target."""
    directory = resolve_checkpoint(str(path))
    layout, config = _read(path, place.target_layers)
    target = place.tables.config
    if place.target_layers:  # the tables alone have none
        target = replace(target, num_layers=place.target_layers, stretch=0)
    _check_target(directory, config, target)
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
    from parallel.speculators.streams.layers import StreamsConfig, open_stream_layers  # for such speculators alone
    from parallel.speculators.streams.target_pass import StreamingRunner

    assert isinstance(config, StreamsConfig)
    directory = resolve_checkpoint(str(path))
    _check_target(directory, config, target.config)
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


def _read(path: str | Path, target_layers: int) -> tuple[CheckpointLayout, SpeculatorConfig]:
    """The layout and the record of a checkpoint. Beside its fields, readers find its directory, which `_name_or_path`
    names as transformers has it, because some files do not say all."""
    directory = resolve_checkpoint(str(path))
    known = {TARGET_LAYERS: target_layers} if target_layers else {}
    hf = _read_fields(directory) | {"_name_or_path": str(directory)} | known
    with errors_of(f"{directory}/config.json"):
        try:
            layout = _layout_of(hf)
            config = layout.read(hf)
            config.check_record()
        except KeyError as error:
            raise ValueError(f"lacks {error.args[0]}; fetch the file again") from None
    return layout, config


def _read_fields(directory: Path) -> dict[str, Any]:
    """Those of config.json, or of params.json where a checkpoint of Meta's has that instead."""
    params = directory / "params.json"
    if (directory / "config.json").exists() or not params.exists():
        return read_config_file(directory, SpeculatorFields)
    return read_config_file(params, ParamsFields)


def _layout_of(hf: HfConfig) -> CheckpointLayout:
    found = next((place for recognises, place in PUBLISHED.values() if recognises(hf)), None)
    if (method := method_of(hf)) in OWN:
        found = OWN[method], "OWN"
    if found is None:
        is_model = not FAMILIES.keys().isdisjoint(hf.get("architectures") or ())
        remedy = "use drafter=model for a whole model; " if is_model else ""
        raise ValueError(f"is of no known speculator; {remedy}known are {', '.join((*OWN, *PUBLISHED))}")
    module, name = found
    return getattr(import_module(f"parallel.speculators.{module}"), name)


def _check_target(directory: Path, config: SpeculatorConfig, target: DecoderConfig) -> None:
    with errors_of(str(directory)):
        config.check_target(target)
