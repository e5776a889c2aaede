"""What training writes: states to continue from, and checkpoints; each file whole or as it was. Knows no model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from parallel.whole_files import replaced_whole, write_text


def save_whole(content: Any, path: Path) -> None:
    """Save what `torch.load` reads; a reader of `path` meanwhile sees the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_whole(path) as partial, partial.open("wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # PyTorch closes its archive after an error of the file, and fails once more
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
        file.flush()
        os.fsync(file.fileno())


def write_checkpoint(folder: Path, tensors: Mapping[str, Tensor], hf: Mapping[str, Any]) -> None:
    """`model.safetensors` and `config.json` in a folder that is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    with replaced_whole(folder / "model.safetensors") as partial:
        save_file(dict(tensors), partial, metadata={"format": "pt"})
    write_text(folder / "config.json", json.dumps(hf, indent=2) + "\n")
