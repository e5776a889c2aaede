"""Continue an earlier `completions.jsonl`: find the finished prompts, and drop the other lines from the file.

A prompt is finished if its line is whole and its request neither failed nor was aborted; the others are run again.
Must not know engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypedDict

from msgspec import Meta

from cluster.io.prompts import Prompt
from parallel.typed_json import as_type, parse_json
from parallel.whole_files import replaced_whole

UNFINISHED = ("abort", "error", "refused")


class CompletionFields(TypedDict):
    """The keys of a line of `completions.jsonl` that show whether its prompt is finished."""

    index: Annotated[int, Meta(ge=0)]
    prompt: str
    finish_reason: str


def drop_unfinished(path: Path, prompts: Sequence[Prompt]) -> set[int]:
    """Leave only the lines of finished prompts in the file; returns their indices, none if there is no file.

    Raises ValueError if a line belongs to another list of prompts.
    """
    if not path.exists():
        return set()
    kept: dict[int, bytes] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        try:
            content = parse_json(line)
        except ValueError:
            continue  # empty, or cut off when the last run was killed
        where, remedy = f"job.resume=true: {path} line {number}", "choose another hydra.run.dir, or job.resume=false"
        try:
            record = as_type(content, CompletionFields)
        except ValueError as error:
            raise ValueError(f"{where} is no completion ({error}); {remedy} to start over") from None
        if record["finish_reason"] in UNFINISHED:
            continue
        index = record["index"]
        if index >= len(prompts) or record["prompt"] != prompts[index].text:
            raise ValueError(f"{where} answers another list of prompts; {remedy} to start over")
        kept[index] = line
    with replaced_whole(path) as partial:  # finished lines are never lost
        partial.write_bytes(b"".join(line + b"\n" for line in kept.values()))
    return set(kept)
