"""Continue an earlier `completions.jsonl`: find the finished prompts, and drop the other lines from the file.

A prompt is finished if its line is whole and its request neither failed nor was aborted; the others are run again.
Must not know engines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from cluster.io.prompts import Prompt

UNFINISHED = ("abort", "error")


def drop_unfinished(path: Path, prompts: Sequence[Prompt]) -> set[int]:
    """Leave only the lines of finished prompts in the file; returns their indices, none if there is no file.

    Raises ValueError if a line belongs to another list of prompts.
    """
    if not path.exists():
        return set()
    kept: dict[int, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # empty, or cut off when the last run was killed
        if record.get("finish_reason") in UNFINISHED:
            continue
        index = record["index"]
        if index >= len(prompts) or record["prompt"] != prompts[index].text:
            raise ValueError(
                f"job.resume=true: {path} line {number} answers another list of prompts; "
                "choose another hydra.run.dir, or job.resume=false to start over"
            )
        kept[index] = line
    partial = path.with_suffix(".part")
    partial.write_text("".join(f"{line}\n" for line in kept.values()), encoding="utf-8")
    os.replace(partial, path)  # atomic: finished lines are never lost
    return set(kept)
