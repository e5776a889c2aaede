"""What running streams notice of long prompts that arrive: `python -m docs.measurements.arriving_prompts [options]
[OVERRIDE ...]`.

For each value of `scheduler.text_pass_ms` of `--text-pass-ms` an engine in this process. `--streams` requests decode
`--tokens` tokens each, one after the other on each stream, while `--readers` clients send a new prompt of
`--prompt-tokens` tokens, one after the other, for `--answer` tokens, until each has had `--each` prompts; a stream that
is at its end begins anew. The engines take turns, with other prompts each time; the first turn is not counted. Prints
for each value, as medians over the turns: the longest time between tokens of a stream and the 99th and 50th of a
hundred, the time to a prompt's first token, prompts a second, tokens/s of the streams, and rows a second of all that
was read and written. Exit code 1 if the tokens of a prompt differed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

from actors.protocol.messages import SamplingParams
from cluster import pocket
from cluster.config import load_config
from cluster.config.schema import LaunchConfig
from cluster.engine import Engine
from cluster.io.prompts import read_prompts
from docs.measurements import lines
from docs.measurements.long_contexts import modules
from docs.measurements.serving import quantile


@dataclass(slots=True)
class Turn:
    """Times are in seconds; `answers` has the tokens of each long prompt, in order of their numbers."""

    wall_s: float = 0.0
    gaps: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    num_streamed: int = 0
    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def figures(self, prompt_tokens: int) -> dict[str, float]:
        num_answered = sum(map(len, self.answers.values()))
        rows = prompt_tokens * len(self.answers) + num_answered + self.num_streamed
        return {
            "longest gap, ms": 1e3 * max(self.gaps),
            "p99": 1e3 * quantile(self.gaps, 0.99),
            "p50": 1e3 * quantile(self.gaps, 0.5),
            "TTFT p50, ms": 1e3 * quantile(self.ttft, 0.5),
            "p90": 1e3 * quantile(self.ttft, 0.9),
            "prompts/s": len(self.answers) / self.wall_s,
            "tokens/s of the streams": self.num_streamed / self.wall_s,
            "rows/s": rows / self.wall_s,
        }


def long_texts(engine: Engine, num_tokens: int) -> Iterator[tuple[int, ...]]:
    """So many tokens of each module of the standard library that has them."""
    for token_ids in modules(engine.tokenizer):
        if len(token_ids) >= num_tokens:
            yield tuple(token_ids[:num_tokens])


async def run_turn(engine: Engine, texts: Sequence[tuple[int, ...]], options: argparse.Namespace, salt: str) -> Turn:
    """All prompts once, beside the streams."""
    turn, is_over = Turn(), asyncio.Event()
    short = [prompt.text for prompt in read_prompts(pocket.PROMPTS, options.streams)]
    left = iter(enumerate(texts))

    async def stream(prompt: str) -> None:
        sampling = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
        while not is_over.is_set():
            completion, last = engine.submit(prompt, sampling, cache_salt=salt), None
            async for _ in completion:
                now = time.monotonic()
                if last is not None and now - last > 1e-4:  # tokens of one round come together
                    turn.gaps.append(now - last)
                last = now
                turn.num_streamed += 1
                if is_over.is_set():
                    completion.abort()
                    break

    async def read() -> None:
        sampling = SamplingParams(max_tokens=options.answer, ignore_eos=True)
        for number, text in left:
            sent = time.monotonic()
            completion = engine.submit(text, sampling, cache_salt=salt)
            async for token in completion:
                if not token.index:
                    turn.ttft.append(time.monotonic() - sent)
            turn.answers[number] = tuple(completion.token_ids)

    streams = [asyncio.create_task(stream(prompt)) for prompt in short]
    await asyncio.sleep(options.begin_s)
    turn.gaps.clear()
    turn.num_streamed = 0
    started = time.monotonic()
    await asyncio.gather(*(read() for _ in range(options.readers)))
    turn.wall_s = time.monotonic() - started
    is_over.set()
    await asyncio.gather(*streams)
    return turn


def compare(options: argparse.Namespace) -> bool:
    """Prints the figures of each value; whether all answers were equal."""
    values: list[float] = options.text_pass_ms
    with ExitStack() as stack:
        engines = [stack.enter_context(Engine(_config(value, options.overrides))) for value in values]
        texts = list(long_texts(engines[0], options.prompt_tokens))
        number, found, is_equal = options.readers * options.each, list[list[Turn]](), True
        for turn in range(options.turns + 1):
            chosen = [texts[(turn * number + place) % len(texts)] for place in range(number)]
            order = range(len(values)) if turn % 2 else reversed(range(len(values)))
            ran = {place: asyncio.run(run_turn(engines[place], chosen, options, str(turn))) for place in order}
            found.append([ran[place] for place in range(len(values))])
            is_equal &= all(one.answers == ran[0].answers for one in ran.values())
        for place, value in enumerate(values):
            rows = [one[place].figures(options.prompt_tokens) for one in found[1:]]
            cells = [f"{name} {median([row[name] for row in rows]):.4g}" for name in rows[0]]
            sys.stdout.write(f"text_pass_ms={value:g}: {', '.join(cells)}\n")
        return is_equal


def _config(text_pass_ms: float, overrides: Sequence[str]) -> LaunchConfig:
    return load_config(["cluster=inprocess", f"scheduler.text_pass_ms={text_pass_ms:g}", *overrides])


def main() -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--text-pass-ms", type=float, nargs="+", default=[0, 150])
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=400, help="of a completion of a stream")
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--each", type=int, default=4, help="prompts of each reader, one after the other")
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--answer", type=int, default=16, help="tokens of the answer to each")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--begin-s", type=float, default=1.0, help="seconds before the first prompt")
    sys.exit(not compare(parser.parse_intermixed_args()))


if __name__ == "__main__":
    main()
