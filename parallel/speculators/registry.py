"""Checkpoints of speculators: which layout one has, and its record. The module of a layout is loaded for its
checkpoints alone. Loads no PyTorch, as far as that module loads none."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from parallel.model.checkpoint import find_tensors, resolve_checkpoint
from parallel.model.config import DecoderConfig
from parallel.model.config_fields import read_config_file
from parallel.model.families.fields import HfConfig
from parallel.model.families.registry import FAMILIES
from parallel.ranges import errors_of
from parallel.speculators.config import TARGET_LAYERS, SpeculatorConfig, method_of
from parallel.speculators.config_fields import ParamsFields, SpeculatorFields
from parallel.speculators.layout import CheckpointLayout
from parallel.speculators.published import PUBLISHED

OWN = {
    **dict.fromkeys(("eagle", "eagle3", "eagle3.1", "mtp", "p_eagle"), "eagle.layouts"),
    "chimera": "chimera.layouts",
    **dict.fromkeys(("glide", "longspec"), "glide.layouts"),
    "gloeckle": "gloeckle.layouts",
    **dict.fromkeys(("kangaroo", "eesd"), "exits.layouts"),
    **dict.fromkeys(("dflash", "dspark", "dflash2", "domino"), "block.layouts"),
    **dict.fromkeys(("streaming", "mask_lora", "s3d"), "streams.layouts"),
    **dict.fromkeys(("medusa", "blockwise", "hydra", "rnn", "mlp", "lstm"), "heads.layouts"),
}
"""Method that our own config.json names -> the module here whose `OWN` is the layout of its checkpoints."""


def read_speculator(path: str | Path, target_layers: int = 0) -> SpeculatorConfig:
    """The record of a checkpoint for a target of so many layers, 0 if that is not known; ValueError, one line, if no
    family knows it."""
    return read_layout(path, target_layers)[1]


def check_speculator(path: str | Path, target: DecoderConfig) -> None:
    """ValueError, one line, unless the checkpoint was made for this target and holds all its tensors whole; reads the
    headers of its files alone."""
    directory = resolve_checkpoint(str(path))
    layout, config = read_layout(path, target.num_layers - target.stretch)
    check_on(directory, config, target)
    find_tensors(directory, layout.tensors(directory, config, target))


def read_layout(path: str | Path, target_layers: int) -> tuple[CheckpointLayout, SpeculatorConfig]:
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


def check_on(directory: Path, config: SpeculatorConfig, target: DecoderConfig) -> None:
    """ValueError, one line, unless this checkpoint was made for this target."""
    with errors_of(str(directory)):
        config.check_target(target)
