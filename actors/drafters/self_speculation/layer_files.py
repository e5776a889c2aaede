"""The file in which `job=search` keeps a choice of layers, and from which `drafter.layers` reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from parallel.whole_files import write_text


def write_layers(path: Path, num_layers: int, skipped: Sequence[str], about: Mapping[str, object]) -> None:
    """`skipped` as `drafter.skip` names sublayers, of a target of so many layers."""
    record = {"num_layers": num_layers, "skip": list(skipped), **about}
    write_text(path, json.dumps(record, indent=1) + "\n")


def read_layers(path: Path) -> tuple[int, list[str]]:
    """The target's layers and the sublayers to skip; ValueError, one line, for a file of something else."""
    try:
        record = json.loads(path.read_text())
        return int(record["num_layers"]), [str(entry) for entry in record["skip"]]
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError):
        raise ValueError("is no choice of layers; give a file written by job=search") from None
