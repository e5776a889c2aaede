"""Batches behind long texts, over plain decoding in the same engine: `python -m docs.measurements.long_batches PAIR`.

PAIR is what `long_contexts.py --make` makes. Each of `--settings`, names of `long_contexts.SETTINGS`, starts an engine
for each of `--requests`. So many requests, each behind another part of the standard library of `--length` tokens, are
decoded plainly and with drafts in turn, `--repeats` times; the texts were read before, and their rows are kept. Timed
is from when every request has a token to when the first has all of `--tokens`. Prints Markdown: tokens a target pass of
a request, milliseconds in which each request gains a token, and of a round those of the draft and of the target, what
drafts are over plain decoding, the median of the turns and their range, and whether tokens were equal.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from actors.protocol.messages import PLAIN_DECODING, SamplingParams
from cluster.config import load_config
from cluster.engine import Engine
from docs.measurements import lines
from docs.measurements.long_contexts import NOT_TIMED, SETTINGS, overrides, text_of

COUNTERS = "num_spec_rounds", "draft_busy_s", "target_busy_s"
POLL_S = 2e-3
ROOM = 512
"""KV rows for each request beside its text and tokens: texts that ended keep theirs."""


@dataclass
class BatchTurns:
    """Of plain decoding or of drafts, in each turn: milliseconds a token, and tokens of every request."""

    ms: list[float] = field(default_factory=list)
    tokens: list[list[list[int]]] = field(default_factory=list)
    num_passes: int = 0
    num_accepted: int = 0
    counters: Counter[str] = field(default_factory=Counter)
    """Of rounds with drafts, by the names of `report.json`."""

    @property
    def tokens_a_pass(self) -> float:
        return 1 + self.num_accepted / self.num_passes if self.num_passes else 1.0

    def ms_of_round(self, counter: str) -> float:
        return 1e3 * self.counters[counter] / self.counters["num_spec_rounds"]


def serve(engine: Engine, texts: Sequence[list[int]], num_tokens: int, turns: BatchTurns, drafter: str | None) -> None:
    """One turn of all texts at a time."""
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    engine.report(reset=True, spans=False)
    completions = [engine.submit(text, sampling, drafter=drafter) for text in texts]
    seen = [(time.monotonic(), 0)]
    while not any(completion.finished for completion in completions):
        counts = [len(completion.token_ids) for completion in completions]
        if all(counts) and sum(counts) > seen[-1][1]:
            seen.append((time.monotonic(), sum(counts)))
        time.sleep(POLL_S)
    if len(seen) < 3:
        raise ValueError("a request ended before another one had a token; raise --tokens")
    (began, before), (ended, after) = seen[1], seen[-1]
    turns.ms.append(1e3 * (ended - began) * len(texts) / (after - before))
    turns.tokens.append([completion.result().token_ids for completion in completions])
    found = engine.report(spans=False).counters
    turns.counters.update({name: found[name] for name in COUNTERS})
    turns.num_passes += sum(completion.stats.num_spec_steps for completion in completions)
    turns.num_accepted += sum(completion.stats.num_accepted_tokens for completion in completions)


def measure(options: argparse.Namespace, name: str, num_requests: int) -> tuple[BatchTurns, BatchTurns]:
    """Plain decoding and drafts, in turn in one engine."""
    tokens = text_of(options.pair / "target", num_requests * options.length)
    texts = [tokens[first : first + options.length] for first in range(0, len(tokens), options.length)]
    rows = num_requests * (options.length + 2 * options.tokens + ROOM)
    words = overrides(options.pair, None, rows, SETTINGS[name])
    words += [f"scheduler.max_num_seqs={num_requests}", "placement=colocated", *options.override]
    plain, drafted = BatchTurns(), BatchTurns()
    with Engine(load_config(words)) as engine:
        for drafter in (PLAIN_DECODING, None):
            list(engine.generate(texts, SamplingParams(max_tokens=NOT_TIMED, ignore_eos=True), drafter=drafter))
        for _ in range(options.repeats):
            serve(engine, texts, options.tokens, plain, PLAIN_DECODING)
            serve(engine, texts, options.tokens, drafted, None)
    return plain, drafted


def row(name: str, num_requests: int, plain: BatchTurns, drafted: BatchTurns) -> str:
    ratios = [own / other for own, other in zip(plain.ms, drafted.ms, strict=True)]
    cells = [f"{median(turns.ms):.1f}" for turns in (plain, drafted)]
    cells += [f"{drafted.ms_of_round(counter):.0f}" for counter in COUNTERS[1:]]
    equal = "yes" if plain.tokens == drafted.tokens else "no"
    return lines.row(name, num_requests, f"{drafted.tokens_a_pass:.2f}", *cells, lines.spread(ratios, ".2f"), equal)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("pair", type=Path)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=["self, streaming", "self, chunks"])
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--override", nargs="+", default=[], help="further settings of the engine")
    options = parser.parse_args(arguments)
    head = ["", "requests", "tokens a pass", "ms a token, plain", "with drafts"]
    head += ["ms of a draft", "ms of its verification", "over plain", "tokens equal"]
    print(lines.head(*head), flush=True)
    for name in options.settings:
        for num_requests in options.requests:
            print(row(name, num_requests, *measure(options, name, num_requests)), flush=True)


if __name__ == "__main__":
    main()
