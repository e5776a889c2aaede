"""The layouts of speculators' checkpoints: which config.json is whose, and how it is opened. A row for each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from parallel.comm.group import SINGLE, Group
from parallel.model.checkpoint import Shape, find_tensors, resolve_checkpoint
from parallel.model.config import DecoderConfig
from parallel.model.config_fields import read_config_file
from parallel.model.decoder import Decoder
from parallel.model.families.fields import HfConfig
from parallel.model.families.registry import FAMILIES, read_config
from parallel.model.layers.weight import Stored
from parallel.model.weights import load_weights
from parallel.ranges import errors_of
from parallel.runtime.decoder_runner import DecoderRunner
from parallel.speculators.block import layouts as block
from parallel.speculators.chimera import runner as chimera
from parallel.speculators.config import STREAMS, TARGET_LAYERS, SpeculatorConfig, method_of
from parallel.speculators.config_fields import ParamsFields, SpeculatorFields
from parallel.speculators.eagle import layouts as eagle
from parallel.speculators.eagle.config import METHODS as DRAFT_LAYERS
from parallel.speculators.eagle.config import read_own
from parallel.speculators.exits import runner as exits
from parallel.speculators.fusing import TapFuser
from parallel.speculators.glide import runner as glide
from parallel.speculators.gloeckle import layouts as gloeckle
from parallel.speculators.heads import layouts as heads
from parallel.speculators.place import SpeculatorPlace, fill
from parallel.speculators.runner import SpeculatorRunner
from parallel.speculators.streams import runner as streams
from parallel.speculators.streams.layers import StreamsConfig, open_stream_layers
from parallel.speculators.streams.target_pass import StreamingRunner


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """One layout of checkpoints: `recognises` its config.json, `read` it, `open` the runner from its directory; all its
    `tensors`, with their shapes, beside a target."""

    recognises: Callable[[HfConfig], bool]
    read: Callable[[HfConfig], Any]
    open: Callable[[Path, Any, SpeculatorPlace], SpeculatorRunner]
    tensors: Callable[[Path, Any, DecoderConfig], Mapping[str, Shape]] = lambda _directory, config, _target: (
        config.tensor_shapes()
    )


def _heads(
    recognises: Callable[[HfConfig], bool], read: Callable[[HfConfig], Any], names: heads.SourcesOf
) -> CheckpointLayout:
    """A layout of heads with its names for their tensors."""
    return CheckpointLayout(
        recognises,
        read,
        lambda directory, config, place: heads.open_heads(names, directory, config, place),
        lambda directory, config, _target: heads.tensor_shapes(names, directory, config),
    )


def _own(methods: Collection[str]) -> Callable[[HfConfig], bool]:
    """Whether a config.json is our own of one of these methods."""
    return lambda hf: method_of(hf) in methods


LAYOUTS: dict[str, CheckpointLayout] = {
    "draft layers": CheckpointLayout(_own(DRAFT_LAYERS.keys() - {"p_eagle"}), read_own, eagle.open_draft_layer),
    "P-EAGLE": CheckpointLayout(_own(["p_eagle"]), read_own, eagle.open_parallel_eagle),
    "chimera": CheckpointLayout(_own(["chimera"]), chimera.read_own, chimera.open_chimera),
    "glide": CheckpointLayout(_own(["glide", glide.LONGSPEC]), glide.read_own, glide.open_glide),
    "LongSpec": CheckpointLayout(glide.is_longspec, glide.read_longspec, glide.open_glide),
    "gloeckle": CheckpointLayout(_own([gloeckle.METHOD]), gloeckle.read_own, gloeckle.open_heads),
    "multi-token prediction of Gloeckle et al.": CheckpointLayout(
        gloeckle.is_published, gloeckle.read_published, gloeckle.open_heads
    ),
    "exits": CheckpointLayout(_own(exits.METHODS), exits.read_own, exits.open_exit),
    "block": CheckpointLayout(_own(block.METHODS), block.read_own, block.open_block),
    "dflash": CheckpointLayout(block.is_dflash, block.read_dflash, block.open_block),
    "dspark": CheckpointLayout(block.is_dspark, block.read_dspark, block.open_block),
    "domino": CheckpointLayout(block.is_domino, block.read_domino, block.open_block),
    "EAGLE-3": CheckpointLayout(eagle.is_eagle3, eagle.read_eagle3, eagle.open_draft_layer),
    "P-EAGLE of SpecForge and speculators": CheckpointLayout(
        eagle.is_p_eagle, eagle.read_p_eagle, eagle.open_parallel_eagle
    ),
    "EAGLE-3 of speculators": CheckpointLayout(eagle.is_vllm_eagle3, eagle.read_vllm_eagle3, eagle.open_draft_layer),
    "MTP of speculators": CheckpointLayout(eagle.is_vllm_mtp, eagle.read_vllm_mtp, eagle.open_draft_layer),
    "MTP of MiMo": CheckpointLayout(eagle.is_native_mtp, eagle.read_native_mtp, eagle.open_draft_layer),
    "EAGLE-1": CheckpointLayout(eagle.is_eagle, eagle.read_eagle, eagle.open_draft_layer),
    "streams": CheckpointLayout(
        _own(streams.METHODS),
        streams.read_own,
        streams.open_streams,
        lambda _directory, config, target: streams.tensor_shapes(config, target),
    ),
    "heads": _heads(_own(heads.CELLS), heads.read_own, heads.own_names),
    **{name: _heads(*functions) for name, functions in heads.PUBLISHED.items()},
}
"""Name -> layout; the first that recognises a config.json reads it."""


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
    for layout in LAYOUTS.values():
        if layout.recognises(hf):
            return layout
    is_model = not FAMILIES.keys().isdisjoint(hf.get("architectures") or ())
    remedy = "use drafter=model for a whole model; " if is_model else ""
    raise ValueError(f"is of no known speculator; {remedy}known are {', '.join(LAYOUTS)}")


def _check_target(directory: Path, config: SpeculatorConfig, target: DecoderConfig) -> None:
    with errors_of(str(directory)):
        config.check_target(target)
