"""Rollouts of uneven lengths, by the order in which they begin: `python -m docs.measurements.longest_first [--seed N]`.

64 requests on eight places of an engine in this process, with passes of at least 10 ms (`target.pace_ms`) and without a
drafter. Their lengths are log-normal, 8 to 400 tokens. Prints the seconds until the last one ends: as submitted, and
with `expected_tokens`, exact or off by up to 30 %.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from actors.protocol.messages import SamplingParams
from cluster.config import load_config
from cluster.engine import Engine
from docs.measurements import lines

NUM_REQUESTS, NUM_PLACES, ERROR = 64, 8, 0.3
LAUNCH = "cluster=inprocess", "pipeline=plain", "target.pace_ms=10", f"scheduler.max_num_seqs={NUM_PLACES}"


def seconds(engine: Engine, lengths: Sequence[int], expected: Sequence[int]) -> float:
    started = time.monotonic()
    rollouts = []
    for number, (length, guess) in enumerate(zip(lengths, expected, strict=True)):
        sampling = SamplingParams(temperature=1.0, seed=number, max_tokens=length, ignore_eos=True)
        rollouts.append(engine.submit([5 + number, 7, 9], sampling, expected_tokens=guess))
    for rollout in rollouts:
        rollout.result()
    return time.monotonic() - started


def main() -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=2)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    lengths = [min(400, max(8, int(draw.lognormvariate(3.6, 1.0)))) for _ in range(NUM_REQUESTS)]
    rough = [round(length * draw.uniform(1 - ERROR, 1 + ERROR)) for length in lengths]
    ways = {"as submitted": [0] * NUM_REQUESTS, "expected, exact": lengths, "expected, within 30 %": rough}
    with Engine(load_config([*LAUNCH])) as engine:
        for _ in range(given.repeats):
            for way, expected in ways.items():
                print(f"{way}: {seconds(engine, lengths, expected):.2f} s", flush=True)


if __name__ == "__main__":
    main()
