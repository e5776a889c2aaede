"""The bundled pocket pair: where its checkpoints and its held-out prompts lie. Loads nothing."""

from __future__ import annotations

from pathlib import Path

TARGET = Path(__file__).parent / "target"
"""Checkpoint of the target, in Hugging Face format."""
DRAFTER = Path(__file__).parent / "drafter"
"""Checkpoint of the draft model, in Hugging Face format, with the target's vocabulary."""
DEEP_DRAFTER = Path(__file__).parent / "deep"
"""Checkpoint of a draft model of eight narrow layers instead of two: for layer-parallel drafting and cascades."""
SPECULATOR = Path(__file__).parent / "speculator"
"""Checkpoint of a block drafter (DSpark) that reads the target's hidden states."""
PROMPTS = Path(__file__).parent / "prompts.jsonl"
"""Prompts from modules neither model has seen, one JSON object with `prompt`, `source` and `category` per line."""


def is_bundled(path: str | Path) -> bool:
    return Path(path).parent == TARGET.parent


def described(path: str | Path) -> str:
    """The path of a checkpoint, and whether it is a bundled one."""
    return f"{path} (bundled)" if is_bundled(path) else str(path)
