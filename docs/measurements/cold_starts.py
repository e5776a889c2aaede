"""How fast an engine is just after its start: `python -m docs.measurements.cold_starts PROMPTS.jsonl [overrides]`.

Each start is an engine in this process that completes a few prompts one after the other, without a warm-up: what the
decision has to learn, it learns from them. The file has a `prompt` in each line. Prints tokens per second of all starts
by the first of their prompts, and the mean.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from actors.protocol.messages import SamplingParams
from cluster.config import load_config
from cluster.engine import Engine
from docs.measurements import lines

LAUNCH = ("cluster=inprocess", "drafter=auto", "drafter.placement=attached")
SAMPLING = SamplingParams(max_tokens=96, ignore_eos=True)


def tokens_per_s(prompts: Sequence[str], overrides: Sequence[str]) -> float:
    """Of one start."""
    with Engine(load_config([*LAUNCH, *overrides])) as engine:
        started = time.monotonic()
        num_tokens = sum(len(engine.submit(prompt, SAMPLING).result().token_ids) for prompt in prompts)
        return num_tokens / (time.monotonic() - started)


def main() -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--first", type=int, nargs="+", default=[1, 13, 25, 37, 49, 61], help="prompts, from 1")
    parser.add_argument("--count", type=int, default=4, help="prompts of a start")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args()
    prompts = [json.loads(line)["prompt"] for line in given.file.read_text(encoding="utf-8").splitlines()]
    speeds = {first: [0.0] * given.starts for first in given.first}
    for start in range(given.starts):
        for first in given.first:
            speeds[first][start] = tokens_per_s(prompts[first - 1 : first - 1 + given.count], given.overrides)
    for first, found in speeds.items():
        print(f"{first}: {mean(found):.0f} ({', '.join(f'{one:.0f}' for one in sorted(found))})")
    print(f"mean: {mean(one for found in speeds.values() for one in found):.0f}")


if __name__ == "__main__":
    main()
