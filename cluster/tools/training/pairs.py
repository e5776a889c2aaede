"""Sources and their texts for encoder-decoders: lines of the standard library, and what typing errors make of them.

The corrupted line is the source, the line its text: a task of correction whose answers mostly repeat the source. It
must not know tokens or models.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from cluster.tools.training.corpus import Source
from parallel.typed_json import json_lines

LENGTHS = range(12, 90)
"""Characters of a line that is taken."""
MOST_ERRORS = 3
"""Errors in a line, at most; at least one."""


@dataclass(frozen=True, slots=True)
class Pair:
    source: str
    text: str


class PairFields(TypedDict, total=False):
    """A line of `job.text`."""

    source: str
    text: str


def corrupted(line: str, choose: random.Random) -> str:
    """The line with one to `MOST_ERRORS` typing errors: a character left out, doubled, swapped with the next, or hit
    beside its place."""
    characters = list(line)
    for _ in range(choose.randint(1, MOST_ERRORS)):
        place = choose.randrange(len(characters) - 1)
        kind = choose.randrange(4)
        if kind == 0 and len(characters) > 2:
            del characters[place]
        elif kind == 1:
            characters.insert(place, characters[place])
        elif kind == 2:
            characters[place : place + 2] = reversed(characters[place : place + 2])
        else:
            characters[place] = choose.choice(string.ascii_lowercase)
    return "".join(characters)


def library_pairs(sources: list[Source], count: int, seed: int) -> list[Pair]:
    """Up to `count` different lines, corrupted, in an order that depends on the seed alone."""
    lines = {line.strip() for source in sources for line in source.text.splitlines()}
    fitting = sorted(line for line in lines if len(line) in LENGTHS and line.isascii())
    choose = random.Random(seed)
    chosen = choose.sample(fitting, min(count, len(fitting)))
    return [Pair(corrupted(line, choose), line) for line in chosen]


def read_pairs(path: Path) -> Iterator[Pair]:
    """The pairs of a JSONL file. ValueError, one line, for what has no `source`, and for a file that cannot be read."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"job.text={path}: cannot be read ({type(error).__name__}); give a JSONL file") from None
    for place, record in json_lines(content, PairFields, f"job.text={path}"):
        if not (source := record.get("source")):
            raise ValueError(f"{place} has no `source`; correct or remove it")
        yield Pair(source, record.get("text", ""))
