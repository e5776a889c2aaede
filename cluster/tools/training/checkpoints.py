"""Files that are whole or absent, also after a kill: written beside their place, then renamed. Knows no model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def save_whole(content: Any, path: Path) -> None:
    """Save what `torch.load` reads; a reader of `path` meanwhile sees the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.part")
    with partial.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
