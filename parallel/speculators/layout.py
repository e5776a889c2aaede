"""What a layout of checkpoints is: how its config.json is read, and how the module is opened from its directory.

Every family has its layouts in its own folder; `published.py` and `registry.py` say which checkpoint is of which.
Loads no PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel.model.checkpoint import Shape, tensor_headers
from parallel.model.config import DecoderConfig
from parallel.model.families.fields import HfConfig

if TYPE_CHECKING:
    from parallel.speculators.place import SpeculatorPlace
    from parallel.speculators.runner import SpeculatorRunner


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """`read` gives the record of a config.json, `open` the runner of a directory with that record; `tensors` are all
    that the files of a checkpoint hold, with their shapes, beside a target."""

    read: Callable[[HfConfig], Any]
    open: Callable[[Path, Any, SpeculatorPlace], SpeculatorRunner]
    tensors: Callable[[Path, Any, DecoderConfig], Mapping[str, Shape]] = lambda _directory, config, _target: (
        config.tensor_shapes()
    )


def opened_by(module: str, *given: Any) -> Callable[[Path, Any, SpeculatorPlace], SpeculatorRunner]:
    """Opens by `open_runner` of a module below `parallel.speculators`, which is also `given` this. The module, with all
    that runs passes, is loaded only then."""

    def open_runner(directory: Path, config: Any, place: SpeculatorPlace) -> SpeculatorRunner:
        found = import_module(f"parallel.speculators.{module}")
        return found.open_runner(directory, config, place, *given)

    return open_runner


def stored_tensors(hf: HfConfig) -> Mapping[str, Shape]:
    """Tensors beside a config.json that was read from a directory; none where its files cannot be read, which is
    reported when they are loaded."""
    try:
        return tensor_headers(Path(hf["_name_or_path"]))
    except ValueError:
        return {}
