"""The file in which `job=search` keeps a choice of layers, and from which `drafter.layers` reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypedDict

from msgspec import Meta

from parallel.model.config_fields import MOST_LAYERS
from parallel.typed_json import as_type, read_json
from parallel.whole_files import write_text


class LayerFields(TypedDict):
    num_layers: Annotated[int, Meta(ge=1, le=MOST_LAYERS)]
    skip: list[str]


def write_layers(path: Path, num_layers: int, skipped: Sequence[str], about: Mapping[str, object]) -> None:
    """`skipped` as `drafter.skip` names sublayers, of a target of so many layers."""
    record = {"num_layers": num_layers, "skip": list(skipped), **about}
    write_text(path, json.dumps(record, indent=1) + "\n")


def read_layers(path: Path) -> tuple[int, list[str]]:
    """The target's layers and the sublayers to skip; ValueError, one line, for a file of something else."""
    try:
        record = as_type(read_json(path), LayerFields)
    except ValueError:
        raise ValueError("is no choice of layers; give a file written by job=search") from None
    return record["num_layers"], record["skip"]
