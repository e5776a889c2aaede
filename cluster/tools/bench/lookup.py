"""Cost of lookup drafters by the length of the text: `python -m cluster.tools.bench.lookup [--plot FILE.png]`.

Measures the real drafters on two long texts of the bundled tokenizer: the standard library, and one line repeated, as
small models write it. Two tokens a round, as an engine would commit them. Columns: time per proposal, with those tokens
entered; the same as child of a cascade's level, which enters provisional text and truncates it; time to enter a prompt;
bytes held per token. No engine, no model.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median, quantiles

from matplotlib.figure import Figure

from actors.drafters.interface import Context
from actors.drafters.lookup.maxgram import MaxgramDrafter, MaxgramDrafterConfig
from actors.drafters.lookup.ngram import NgramDrafter, NgramDrafterConfig
from actors.drafters.lookup.suffix import SuffixDrafter, SuffixDrafterConfig
from actors.protocol.messages import SamplingParams
from cluster import pocket
from cluster.io.console import Terminal, figure
from cluster.io.text import load_tokenizer

LENGTHS = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000)
NUM_ROUNDS = 500
TOKENS_PER_ROUND = 2
TAKEN_BACK = 17
"""Tokens that a last level one proposal of 8 ahead has entered when the target rejects the first."""
NUM_DRAFT_TOKENS = 8
LOOP = "            self.assertEqual(result, expected)\n"
Lookup = NgramDrafter | MaxgramDrafter | SuffixDrafter
DRAFTERS: dict[str, Callable[[], Lookup]] = {
    "ngram": lambda: NgramDrafter(NgramDrafterConfig()),
    "maxgram": lambda: MaxgramDrafter(MaxgramDrafterConfig()),
    "suffix": lambda: SuffixDrafter(SuffixDrafterConfig()),
    "suffix, width 2": lambda: SuffixDrafter(SuffixDrafterConfig(width=2)),
}
COLUMNS = (
    "drafter",
    "text",
    "context",
    "us/proposal",
    "99 of 100 below",
    f"{TAKEN_BACK} taken back",
    "us/token of prompt",
    "bytes/token",
)


@dataclass(frozen=True, slots=True)
class LookupCost:
    """Of one drafter after one length of text; microseconds and bytes."""

    propose_us: float
    propose_p99_us: float
    take_back_us: float
    enter_us_per_token: float
    bytes_per_token: float


def measure(make: Callable[[], Lookup], token_ids: Sequence[int], length: int, num_rounds: int) -> LookupCost:
    """`token_ids` holds `length` tokens of prompt, those of every round, and `TAKEN_BACK` provisional ones."""
    prompt = list(token_ids[:length])
    tracemalloc.start()
    traced = _entered(make, prompt)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del traced
    starts = range(length, length + TOKENS_PER_ROUND * num_rounds, TOKENS_PER_ROUND)
    drafter, context, entered_s = _entered(make, prompt.copy())
    times = [_propose(drafter, context, token_ids[start : start + TOKENS_PER_ROUND]) for start in starts]
    drafter, context, _ = _entered(make, prompt)
    revoked = []
    for start in starts:
        context.token_ids += token_ids[start : start + TAKEN_BACK]
        spent = _seconds(lambda: drafter.prefill([context]))
        context.cut(start)
        spent += _seconds(lambda: drafter.truncate(context))
        revoked.append(spent + _propose(drafter, context, token_ids[start : start + TOKENS_PER_ROUND]))
    return LookupCost(
        propose_us=1e6 * median(times),
        propose_p99_us=1e6 * quantiles(times, n=100)[-1],
        take_back_us=1e6 * median(revoked),
        enter_us_per_token=1e6 * entered_s / length,
        bytes_per_token=held / length,
    )


def _entered(make: Callable[[], Lookup], prompt: list[int]) -> tuple[Lookup, Context, float]:
    """A drafter that has entered the prompt, its context, and the seconds to enter."""
    drafter, context = make(), Context(1, 0, prompt, len(prompt), SamplingParams())
    drafter.open(context)
    return drafter, context, _seconds(lambda: drafter.prefill([context]))


def _propose(drafter: Lookup, context: Context, token_ids: Sequence[int]) -> float:
    """Seconds of a proposal after these tokens are committed."""
    context.token_ids += token_ids
    return _seconds(lambda: drafter.propose([context], [NUM_DRAFT_TOKENS]))


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def library_tokens(count: int) -> list[int]:
    """The first tokens of the standard library's modules in the order of their names."""
    tokenizer = load_tokenizer(pocket.TARGET)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    tokens = (token for file in files for token in tokenizer.encode(file.read_text(encoding="utf-8")).ids)
    return list(islice(tokens, count))


def periodic_tokens(count: int) -> list[int]:
    """One line, repeated."""
    return list(islice(cycle(load_tokenizer(pocket.TARGET).encode(LOOP).ids), count))


TEXTS = {"library": library_tokens, "periodic": periodic_tokens}


def draw(costs: dict[tuple[str, str, int], LookupCost], path: Path) -> None:
    """Time per proposal against the context, a panel for each text; dashed as child of a cascade's level."""
    page = Figure(figsize=(9, 3.4), dpi=110, layout="constrained")
    for panel, text in zip(page.subplots(1, len(TEXTS), sharey=True), TEXTS, strict=False):
        for name in DRAFTERS:
            lengths = [length for drafter, of_text, length in costs if (drafter, of_text) == (name, text)]
            found = [costs[name, text, length] for length in lengths]
            (line,) = panel.plot(lengths, [cost.propose_us for cost in found], marker="o", markersize=3, label=name)
            panel.plot(lengths, [cost.take_back_us for cost in found], "--", color=line.get_color())
        panel.set(xscale="log", yscale="log", title=f"{text} text", xlabel="tokens of context")
        panel.grid(alpha=0.3)
    page.legend(*panel.get_legend_handles_labels(), loc="outside right center", fontsize=8)
    page.axes[0].set_ylabel(f"us per proposal\n(dashed: {TAKEN_BACK} tokens taken back before it)")
    page.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m cluster.tools.bench.lookup", description="Cost of lookup drafters.")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the times against the context as well")
    options = parser.parse_args(arguments)
    terminal = Terminal()
    longest = max(LENGTHS) + TOKENS_PER_ROUND * NUM_ROUNDS + TAKEN_BACK
    texts = {text: read(longest) for text, read in TEXTS.items()}
    costs: dict[tuple[str, str, int], LookupCost] = {}
    with terminal.counting("looking up", len(TEXTS) * len(DRAFTERS) * len(LENGTHS)) as bar:
        for text, name, length in product(texts, DRAFTERS, LENGTHS):
            costs[name, text, length] = measure(DRAFTERS[name], texts[text], length, NUM_ROUNDS)
            bar.advance()
    rows = [
        [name, text, f"{length:,}", *(figure(us, 1) for us in microseconds), f"{size:.0f}"]
        for (name, text, length), cost in costs.items()
        for *microseconds, size in [astuple(cost)]
    ]
    terminal.table(f"Lookup, {NUM_DRAFT_TOKENS} draft tokens at most", COLUMNS, rows)
    if options.plot:
        draw(costs, options.plot)


if __name__ == "__main__":
    main()
