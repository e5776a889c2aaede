"""Where the time of a batch goes, by kind of round: `python -m docs.measurements.batch_rounds --prompts FILE`.

One engine completes the prompts with drafts and without in turn, so many at a time, and its own timeline tells of every
round what its pass read, how long pass and drafts took, and what was between two passes. `of plain` is what the tokens
and the rows of prompts of these rounds take plainly, by a line through the rounds of plain decoding; what the rounds of
a kind take beyond that is their loss.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from cluster.config import load_config
from cluster.engine import Engine
from cluster.io.prompts import read_prompts
from cluster.run_prompts import all_completed, serve_prompts
from docs.measurements import lines

COMMON = ("cluster=inprocess", "cluster.dashboard=false", "sampling.max_tokens=96", "sampling.ignore_eos=true")


@dataclass(slots=True)
class Sums:
    """Rounds of one kind, added up; times in seconds."""

    rounds: float = 0
    requests: float = 0
    tokens: float = 0
    prompt_rows: float = 0
    passes: float = 0
    drafts: float = 0
    between: float = 0

    @property
    def seconds(self) -> float:
        return self.passes + self.drafts + self.between


def kinds_of(spans: Iterable[Sequence[Any]]) -> dict[str, Sums]:
    """A round begins where the pass before it ended."""
    drafted: defaultdict[int, float] = defaultdict(float)
    draft_tokens: defaultdict[int, int] = defaultdict(int)
    passes = []
    for lane, name, started, finished, facts in spans:
        if lane == "draft":
            drafted[facts["round"]] += finished - started
            draft_tokens[facts["round"]] += facts.get("tokens", 0)
        elif lane == "target" and name in ("verify", "prefill", "decode"):
            passes.append((started, finished, name, facts))
    kinds: defaultdict[str, Sums] = defaultdict(Sums)
    for (_, last, _, before), (started, finished, name, facts) in pairwise(passes):
        drafts = drafted.get(before["round"], 0.0)  # behind the pass before, on the target's ranks
        one = kinds[name + (" behind drafts" if drafts and name != "verify" else "")]
        one.rounds += 1
        one.requests += facts["requests"]
        one.tokens += facts["tokens"]
        num_drafted = draft_tokens[before["round"]] if name == "verify" else 0
        one.prompt_rows += facts["rows"] - facts["requests"] - num_drafted
        one.passes += finished - started
        one.drafts += drafts
        one.between += started - last - drafts
    return dict(kinds)


def table(runs: Sequence[dict[str, Sums]], costs: Sequence[float]) -> str:
    """Means over the runs; milliseconds."""
    means = {
        kind: Sums(*[sum(getattr(run.get(kind, Sums()), one.name) for run in runs) / len(runs) for one in fields(Sums)])
        for kind in {kind for run in runs for kind in run}
    }
    columns = ("number", "requests", "tokens", "prompt rows", "passes", "drafts", "between", "all", "of plain")
    rows = [lines.head("rounds", *columns)]
    for kind, one in sorted(means.items(), key=lambda item: -item[1].seconds):
        plain_s = one.tokens * costs[0] + one.prompt_rows * costs[1]
        counts = one.rounds, one.requests, one.tokens, one.prompt_rows
        times_ms = (1e3 * part for part in (one.passes, one.drafts, one.between, one.seconds, plain_s))
        rows.append(lines.row(kind, *(f"{figure:.0f}" for figure in (*counts, *times_ms))))
    return "\n".join(rows) + "\n"


def plain_costs(runs: Sequence[dict[str, Sums]]) -> list[float]:
    """Seconds of a token and of a row of a prompt."""
    of = [one for run in runs for one in run.values()]
    given = np.array([(one.tokens, one.prompt_rows) for one in of])
    return np.linalg.lstsq(given, np.array([one.seconds for one in of]), rcond=None)[0].tolist()


def main() -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("overrides", nargs="*", default=["drafter=auto", "drafter.placement=attached"])
    options = parser.parse_intermixed_args()
    config, prompts = load_config([*COMMON, *options.overrides]), read_prompts(options.prompts, options.limit)
    found: dict[bool, list[dict[str, Sums]]] = {True: [], False: []}
    ratios = []
    with Engine(config) as engine:
        sampling = config.sampling_params(engine.tokenizer)
        for repeat in range(-1, options.repeats):
            speeds = {}
            for speculate in (True, False) if repeat % 2 else (False, True):
                how: dict[str, Any] = {"speculate": speculate, "concurrency": options.batch}
                run = serve_prompts(engine, prompts, sampling, **how, cache_salt=f"{repeat}{speculate}")
                speeds[speculate] = sum(len(one.token_ids) for one in all_completed(run)) / run.wall_s
                if repeat >= 0:  # the first one warms up
                    found[speculate].append(kinds_of(run.spans))
            ratios += [speeds[True] / speeds[False]] * (repeat >= 0)
    costs = plain_costs(found[False])
    for speculate in (False, True):
        sys.stdout.write(f"\n{'with drafts' if speculate else 'plain'}\n\n{table(found[speculate], costs)}")
    sys.stdout.write(f"\nof plain decoding: {lines.spread(ratios, '.2f')}\n")


if __name__ == "__main__":
    main()
