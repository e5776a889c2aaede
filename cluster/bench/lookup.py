"""What lookup costs against the length of the text: `python -m cluster.bench.lookup`.

Reads the standard library as one long text with the bundled tokenizer, two tokens a round, as an engine would commit
them, and measures the real drafters: time per proposal (with the two tokens entered), time to enter a prompt, and bytes
held per token. No engine, no model.
"""

from __future__ import annotations

import sysconfig
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median, quantiles

from actors.drafter import Context, Drafter
from actors.drafters.ngram import NgramDrafter
from actors.drafters.suffix import SuffixDrafter
from actors.messages import SamplingParams
from actors.options import NgramDrafterConfig, SuffixDrafterConfig
from cluster import pocket
from cluster.console import Terminal, figure
from cluster.text import load_tokenizer

LENGTHS = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000)
NUM_ROUNDS = 1_000
TOKENS_PER_ROUND = 2
NUM_DRAFT_TOKENS = 8
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": lambda: NgramDrafter(NgramDrafterConfig()),
    "suffix": lambda: SuffixDrafter(SuffixDrafterConfig()),
    "suffix, width 2": lambda: SuffixDrafter(SuffixDrafterConfig(width=2)),
}


@dataclass(frozen=True, slots=True)
class LookupCost:
    """Of one drafter behind one length of text; microseconds and bytes."""

    propose_us: float
    propose_p99_us: float
    enter_us_per_token: float
    bytes_per_token: float


def measure(make: Callable[[], Drafter], token_ids: Sequence[int], length: int, num_rounds: int) -> LookupCost:
    """`token_ids` holds `length` tokens of prompt and two for every round behind them."""
    context = Context(1, 0, list(token_ids[:length]), length, SamplingParams())
    tracemalloc.start()
    drafter = make()
    before, _ = tracemalloc.get_traced_memory()
    _enter(drafter, context)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    drafter = make()
    entered_s = _enter(drafter, context)
    times = []
    for start in range(length, length + TOKENS_PER_ROUND * num_rounds, TOKENS_PER_ROUND):
        context.token_ids += token_ids[start : start + TOKENS_PER_ROUND]
        started = time.perf_counter()
        drafter.propose([context], [NUM_DRAFT_TOKENS])
        times.append(1e6 * (time.perf_counter() - started))
    return LookupCost(median(times), quantiles(times, n=100)[-1], 1e6 * entered_s / length, held / length)


def _enter(drafter: Drafter, context: Context) -> float:
    """Seconds to take in the prompt."""
    started = time.perf_counter()
    drafter.open(context)
    drafter.prepare([context])
    return time.perf_counter() - started


def library_tokens(count: int) -> list[int]:
    """The first tokens of the standard library's modules in the order of their names."""
    tokenizer = load_tokenizer(pocket.TARGET)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    tokens = (token for file in files for token in tokenizer.encode(file.read_text(encoding="utf-8")).ids)
    return list(islice(tokens, count))


def main() -> None:
    terminal = Terminal()
    token_ids = library_tokens(max(LENGTHS) + TOKENS_PER_ROUND * NUM_ROUNDS)
    rows = []
    with terminal.counting("looking up", len(DRAFTERS) * len(LENGTHS)) as bar:
        for name, make in DRAFTERS.items():
            for length in LENGTHS:
                cost = measure(make, token_ids, length, NUM_ROUNDS)
                figures = (cost.propose_us, cost.propose_p99_us, cost.enter_us_per_token)
                rows.append(
                    [name, f"{length:,}", *(figure(value, 1) for value in figures), f"{cost.bytes_per_token:.0f}"]
                )
                bar.advance()
    columns = ("drafter", "context", "us/proposal", "99 of 100 below", "us/token of prompt", "bytes/token")
    terminal.table(f"Lookup, {NUM_DRAFT_TOKENS} draft tokens at most", columns, rows)


if __name__ == "__main__":
    main()
