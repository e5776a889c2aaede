"""Continue an earlier `completions.jsonl`: find the finished prompts, drop the other lines from the file, and refuse
completions that were made with other settings.

A prompt is finished if its line is whole and its request neither failed nor was aborted; the others are run again.
Must not know engines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from cluster.io.prompts import Prompt
from parallel.typed_json import as_type, parse_json, read_json
from parallel.whole_files import replaced_whole

UNFINISHED = ("abort", "error", "refused")
_REMEDY = "choose another hydra.run.dir, or job.resume=false"


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
        where = f"job.resume=true: {path} line {number}"
        try:
            record = as_type(content, CompletionFields)
        except ValueError as error:
            raise ValueError(f"{where} is no completion ({error}); {_REMEDY} to start over") from None
        if record["finish_reason"] in UNFINISHED:
            continue
        index = record["index"]
        if index >= len(prompts) or record["prompt"] != prompts[index].text:
            raise ValueError(f"{where} answers another list of prompts; {_REMEDY} to start over")
        kept[index] = line
    with replaced_whole(path) as partial:  # finished lines are never lost
        partial.write_bytes(b"".join(line + b"\n" for line in kept.values()))
    return set(kept)


class _TargetFields(TypedDict):
    path: str


class _ConfigFields(TypedDict):
    """What of the configuration in a report decides the tokens of a prompt."""

    target: _TargetFields
    sampling: dict[str, Any]


class _ReportFields(TypedDict):
    config: _ConfigFields


def check_same_settings(report: Path, target: str, sampling: Mapping[str, Any]) -> None:
    """Raise ValueError if the run that wrote the report completed its prompts with another target or sampling: one
    file would hold texts of both. A report that is missing or damaged tells nothing."""
    try:
        before = as_type(read_json(report), _ReportFields)["config"]
    except ValueError:
        return
    here = {"target.path": target} | {f"sampling.{name}": value for name, value in sampling.items()}
    there = {"target.path": before["target"]["path"]}
    there |= {f"sampling.{name}": value for name, value in before["sampling"].items()}
    for key, value in json.loads(json.dumps(here)).items():  # as JSON has it: lists, and keys that are texts
        if (old := there.get(key, value)) != value:
            raise ValueError(f"job.resume=true: {key}={value}, but {report} says {old}; {_REMEDY} to start over")
