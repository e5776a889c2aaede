"""Going on from an earlier `completions.jsonl`: which prompts are finished, and the file as it must be to go on.

Only whole lines of requests that ended by themselves count; a line that was being written when the process died, an
error or an abort is dropped, and its prompt is run again. Knows nothing of engines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from cluster.io.prompts import Prompt

UNFINISHED = ("abort", "error")


def take_up(path: Path, prompts: Sequence[Prompt]) -> set[int]:
    """Indices of the prompts that are finished; leaves only their lines in the file. Empty where there is none.

    ValueError if a line is of another list of prompts.
    """
    if not path.exists():
        return set()
    kept: dict[int, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # empty, or cut off by whatever ended the last run
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
    os.replace(partial, path)  # at no moment is there less on disk than before
    return set(kept)
