"""New weights for a running engine: checked against the checkpoint that it was started with before any rank hears of
them, and tensors in memory written where ranks can read them.

Reads configurations and the headers of weights, which loads no PyTorch. Must not know engines.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from parallel.model.checkpoint import find_tensors, quantization_of, resolve_checkpoint, tensor_shapes, tensor_types
from parallel.model.config import DecoderConfig
from parallel.model.families.registry import read_config
from parallel.model.quantization import Quantization
from parallel.whole_files import replaced_whole

if TYPE_CHECKING:
    from torch import Tensor


class WeightLayout:
    """What every checkpoint must have in common with the first one, read while that is there."""

    def __init__(self, first: Path) -> None:
        self._first = resolve_checkpoint(str(first))
        self._config: DecoderConfig = read_config(self._first)
        self._quantization: Quantization | None = quantization_of(self._first)
        self._types = tensor_types(self._first, tensor_shapes(self._config))

    def check(self, path: str | Path) -> str:
        """The path under which ranks find the checkpoint; ValueError, one line, for another shape, a tensor that is
        missing, or numbers of another type."""
        directory = resolve_checkpoint(str(path))
        if read_config(directory) != self._config or quantization_of(directory) != self._quantization:
            raise ValueError(f"{directory}: config.json describes another model than {self._first / 'config.json'}")
        shapes = tensor_shapes(self._config)
        find_tensors(directory, shapes)
        for name, kind in tensor_types(directory, shapes).items():
            if kind != self._types[name]:
                remedy = "save it in the type of the weights that the engine was started with"
                raise ValueError(f"{directory}: tensor {name} is {kind}, not {self._types[name]}; {remedy}")
        return str(directory.absolute()) if Path(path).expanduser().is_dir() else str(path)

    def write(self, tensors: Mapping[str, Tensor]) -> Path:
        """A checkpoint in a new temporary directory of this machine that holds them; the caller deletes it."""
        from safetensors.torch import save_file

        directory = Path(tempfile.mkdtemp(prefix="specdec-weights-"))
        try:
            shutil.copy(self._first / "config.json", directory)
            names = tensor_shapes(self._config)  # of those that a model shares under two names, one is read
            with replaced_whole(directory / _FILE) as partial:
                save_file({name: tensors[name].contiguous() for name in names if name in tensors}, partial)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        return directory


_FILE = "model.safetensors"
