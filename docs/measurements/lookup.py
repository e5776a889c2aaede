"""Cost of drafters without a model by the length of the text: `python -m docs.measurements.lookup [--plot FILE.png]`.

Measures the real drafters on two long texts of the bundled tokenizer: the standard library, and one line repeated, as
small models write it. Two tokens a round, as an engine would commit them. Columns: time per proposal, with those tokens
entered; the same as child of a cascade's level, which enters provisional text and truncates it; time to enter a prompt;
bytes held per token. Drafters that learn from the target's rows get rows that are made up, the text's next token first;
reading them is part of a proposal, and of a prompt. A second table has the others for many requests with short texts:
`--drafters suffix`, once more with `SPECDEC_KERNELS=0`, compares its kernel with Python. No engine, no model.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np

from actors.drafters.adjacency.config import AdedDrafterConfig, RecyclingDrafterConfig
from actors.drafters.config import DrafterConfig, DraftSetup
from actors.drafters.interface import Context, Draft, Drafter
from actors.drafters.jacobi.config import JacobiDrafterConfig, LookaheadDrafterConfig
from actors.drafters.lookup.maxgram import MaxgramDrafterConfig
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.lookup.suffix import SuffixDrafterConfig
from actors.drafters.retrieval.config import RestDrafterConfig
from actors.drafters.retrieval.datastore import write_datastore
from actors.options import SchedulerConfig, VerifyConfig
from actors.protocol.messages import Commit, SamplingParams, TopTokens
from actors.tokenizer_file import tokenizer_digest
from cluster import pocket
from cluster.io.console import Terminal, figure
from cluster.io.pictures import picture
from cluster.io.text import load_tokenizer
from docs.measurements import lines
from docs.measurements.long_contexts import text_of
from parallel.comm.group import SINGLE
from parallel.kernels.suffixes import CompiledSuffixAutomaton

LENGTHS = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000)
NUM_ROUNDS = 500
TOKENS_PER_ROUND = 2
TAKEN_BACK = 17
"""Tokens that a last level one proposal of 8 ahead has entered when the target rejects the first."""
NUM_COPIED = 8
PROMPT_LEN = 150
NUM_REQUESTS = 16
TOKENS_PER_REQUEST = 4
NUM_BATCHED_ROUNDS = 40
STORED = 200_000
"""Tokens of the datastore of `rest`, the library's."""
LOOP = "            self.assertEqual(result, expected)\n"
DRAFTERS: dict[str, DrafterConfig] = {
    "ngram": NgramDrafterConfig(num_draft_tokens=NUM_COPIED),
    "maxgram": MaxgramDrafterConfig(num_draft_tokens=NUM_COPIED),
    "suffix": SuffixDrafterConfig(num_draft_tokens=NUM_COPIED),
    "suffix, width 2": SuffixDrafterConfig(num_draft_tokens=NUM_COPIED, width=2),
    "recycling": RecyclingDrafterConfig(),
    "aded": AdedDrafterConfig(),
    "rest": RestDrafterConfig(),
    "jacobi": JacobiDrafterConfig(),
    "lookahead": LookaheadDrafterConfig(),
}
Result = TypeVar("Result")
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
BATCH_COLUMNS = (
    "drafter",
    "text",
    f"ms/prompt of {PROMPT_LEN}",
    f"ms/proposals for {NUM_REQUESTS}",
    "us/request closed",
)


@dataclass(frozen=True, slots=True)
class LookupCost:
    """Costs of one drafter after one length of text, in microseconds and bytes."""

    propose_us: float
    propose_p99_us: float
    take_back_us: float
    enter_us_per_token: float
    bytes_per_token: float


def measure(config: DrafterConfig, token_ids: Sequence[int], length: int, num_rounds: int) -> LookupCost:
    """`token_ids` holds `length` tokens of prompt, those of every round, and `TAKEN_BACK` provisional ones."""
    prompt = list(token_ids[:length])
    before = _held_by_kernels()
    tracemalloc.start()
    traced = _Drafting(config, prompt)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    held += _held_by_kernels() - before
    del traced
    starts = range(length, length + TOKENS_PER_ROUND * num_rounds, TOKENS_PER_ROUND)
    drafting = _Drafting(config, prompt.copy())
    entered_s = drafting.entered_s
    times = [drafting.propose(token_ids[start : start + TOKENS_PER_ROUND]) for start in starts]
    drafting = _Drafting(config, prompt)
    revoked = []
    for start in starts:
        spent = drafting.take_back(token_ids[start : start + TAKEN_BACK])
        revoked.append(spent + drafting.propose(token_ids[start : start + TOKENS_PER_ROUND]))
    return LookupCost(
        propose_us=1e6 * median(times),
        propose_p99_us=1e6 * quantiles(times, n=100)[-1],
        take_back_us=1e6 * median(revoked),
        enter_us_per_token=1e6 * entered_s / length,
        bytes_per_token=held / length,
    )


@dataclass(frozen=True, slots=True)
class BatchCost:
    """Costs of one drafter for many requests at once, medians: of one prompt, of one round, of a request's end."""

    prompt_ms: float
    round_ms: float
    close_us: float


def measure_batch(config: DrafterConfig, token_ids: Sequence[int]) -> BatchCost:
    """Requests of `PROMPT_LEN` tokens are opened and read, drafted for in rounds of `TOKENS_PER_REQUEST`, and closed;
    then as many others, which draft from their answers too. The second half is measured."""
    drafter = config.build(_SETUP)[0]
    share = PROMPT_LEN + TOKENS_PER_REQUEST * NUM_BATCHED_ROUNDS
    budgets = [config.num_draft_tokens] * NUM_REQUESTS
    prompts, rounds, ends = list[float](), list[float](), list[float]()
    for first in (0, NUM_REQUESTS):
        texts = [token_ids[i * share : (i + 1) * share] for i in range(first, first + NUM_REQUESTS)]
        contexts = [Context(i, 0, [*text[:PROMPT_LEN]], PROMPT_LEN, SamplingParams()) for i, text in enumerate(texts)]
        prompts = [_seconds(lambda one=one: _open(drafter, one)) for one in contexts]
        rounds.clear()
        for start in range(PROMPT_LEN, share, TOKENS_PER_REQUEST):
            for context, text in zip(contexts, texts, strict=True):
                context.extend([*text[start : start + TOKENS_PER_REQUEST]])
            rounds.append(_seconds(lambda batch=contexts: drafter.propose(batch, budgets)))
        ends = [_seconds(lambda one=one: drafter.release(one.request_id)) for one in contexts]
    return BatchCost(1e3 * median(prompts), 1e3 * median(rounds), 1e6 * median(ends))


def _open(drafter: Drafter, context: Context) -> None:
    drafter.open(context)
    if drafter.capabilities.prefills is not None:
        drafter.capabilities.prefills.prefill([context])


def _held_by_kernels() -> int:
    """Bytes of all automata in C++, which Python does not see."""
    gc.collect()
    return sum(one.num_bytes for one in gc.get_objects() if type(one) is CompiledSuffixAutomaton)


class _Drafting:
    """A drafter that has entered a prompt, in `entered_s`."""

    def __init__(self, config: DrafterConfig, prompt: list[int]) -> None:
        self._top_k = config.target_top_k
        self._budget = config.num_draft_tokens
        self._drafter: Drafter = config.build(_SETUP)[0]
        self._context = Context(1, 0, prompt, len(prompt), SamplingParams())
        self._rows: TopTokens | None = None
        rows = _rows_of(0, prompt, prompt[1:], self._top_k) if config.reads_prompts else None
        self.entered_s = _seconds(lambda: self._enter(rows))

    def propose(self, token_ids: Sequence[int]) -> float:
        """Seconds of a proposal after these tokens are committed, the rows of the draft before among them."""
        spent, (draft,) = _timed(lambda: self._commit_and_propose(tuple(token_ids)))
        if self._top_k:
            following = [*token_ids, *draft.tree.token_ids]
            self._rows = _rows_of(len(self._context.token_ids), draft.tree.token_ids, following, self._top_k)
        return spent

    def take_back(self, token_ids: Sequence[int]) -> float:
        """Seconds to enter provisional tokens and to take them back."""
        context, settled = self._context, len(self._context.token_ids)
        prefills, truncates = self._drafter.capabilities.prefills, self._drafter.capabilities.truncates
        context.token_ids += token_ids
        spent = _seconds(lambda: prefills.prefill([context])) if prefills is not None else 0.0
        context.cut(settled)
        return spent + (_seconds(lambda: truncates.truncate(context)) if truncates is not None else 0.0)

    def _enter(self, rows: TopTokens | None) -> None:
        can = self._drafter.capabilities
        self._drafter.open(self._context)
        if can.prefills is not None:
            can.prefills.prefill([self._context])
        if can.reads_top_tokens is not None and rows is not None:
            can.reads_top_tokens.read_top_tokens(rows)

    def _commit_and_propose(self, token_ids: tuple[int, ...]) -> list[Draft]:
        drafter, context, can = self._drafter, self._context, self._drafter.capabilities
        if can.reads_top_tokens is not None and self._rows is not None:
            can.reads_top_tokens.read_top_tokens(self._rows)
        drafter.observe(context, Commit(1, 0, len(context.token_ids), (), token_ids))
        context.token_ids += token_ids
        return drafter.propose([context], [self._budget])


def _rows_of(prefix_len: int, token_ids: Sequence[int], following: Sequence[int], k: int) -> TopTokens:
    """Rows of these tokens: `following` is the likeliest after each, and half as likely every further token."""
    own, likeliest = np.array(token_ids, np.int32), np.resize(np.array(following, np.int32), len(token_ids))
    contexts = np.stack([np.roll(own, 1), own], 1)
    candidates = (likeliest[:, None] + np.arange(0, 37 * k, 37)) % _VOCAB_SIZE
    probs = np.tile(0.5 ** np.arange(1, k + 1), (len(own), 1))
    arrays = contexts.tobytes(), candidates.astype(np.int32).tobytes(), probs.astype(np.float32).tobytes()
    return TopTokens(k, *arrays, ((1, prefix_len, len(own)),))


def _timed(work: Callable[[], Result]) -> tuple[float, Result]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def _seconds(work: Callable[[], object]) -> float:
    return _timed(work)[0]


def with_datastore(config: DrafterConfig, folder: Path) -> DrafterConfig:
    """The record of `rest` with a datastore of the library in this folder; others as they are."""
    if not isinstance(config, RestDrafterConfig):
        return config
    path = folder / "library.store"
    if not path.exists():
        write_datastore(path, [text_of(pocket.TARGET, STORED)], tokenizer_digest(pocket.TARGET))
    return replace(config, datastore=str(path))


def periodic_tokens(count: int) -> list[int]:
    """One line, repeated."""
    return list(islice(cycle(load_tokenizer(pocket.TARGET).encode(LOOP).ids), count))


_SETUP = DraftSetup(VerifyConfig(), "sync", SchedulerConfig(), SINGLE, "cpu", ())
_VOCAB_SIZE = load_tokenizer(pocket.TARGET).get_vocab_size()
TEXTS = {"library": partial(text_of, pocket.TARGET), "periodic": periodic_tokens}


def draw(costs: dict[tuple[str, str, int], LookupCost], path: Path) -> None:
    """Time per proposal against the context, a panel for each text; dashed as child of a cascade's level."""
    with picture(path, 9, 3.4, columns=len(TEXTS), sharey=True) as (panels,):
        for panel, text in zip(panels, TEXTS, strict=True):
            for name in dict.fromkeys(drafter for drafter, *_ in costs):
                lengths = [length for drafter, of_text, length in costs if (drafter, of_text) == (name, text)]
                found = [costs[name, text, length] for length in lengths]
                (line,) = panel.plot(lengths, [cost.propose_us for cost in found], marker="o", markersize=3, label=name)
                panel.plot(lengths, [cost.take_back_us for cost in found], "--", color=line.get_color())
            panel.set(xscale="log", yscale="log", title=f"{text} text", xlabel="tokens of context")
            panel.grid()
        panels[0].figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
        panels[0].set_ylabel(f"us per proposal\n(dashed: {TAKEN_BACK} tokens taken back before it)")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the times against the context as well")
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS), metavar="NAME")
    options = parser.parse_args(arguments)
    terminal = Terminal()
    batched = 2 * NUM_REQUESTS * (PROMPT_LEN + TOKENS_PER_REQUEST * NUM_BATCHED_ROUNDS)
    longest = max(batched, max(LENGTHS) + TOKENS_PER_ROUND * NUM_ROUNDS + TAKEN_BACK)
    texts = {text: read(longest) for text, read in TEXTS.items()}
    costs: dict[tuple[str, str, int], LookupCost] = {}
    num_steps = len(TEXTS) * len(options.drafters) * len(LENGTHS)
    with TemporaryDirectory() as folder, terminal.counting("looking up", num_steps) as bar:
        configs = {name: with_datastore(DRAFTERS[name], Path(folder)) for name in options.drafters}
        for text, name, length in product(texts, configs, LENGTHS):
            costs[name, text, length] = measure(configs[name], texts[text], length, NUM_ROUNDS)
            bar.advance()
        batches = {
            (name, text): measure_batch(configs[name], texts[text])
            for text, name in product(texts, configs)
            if not configs[name].target_top_k
        }
    rows = [
        [name, text, f"{length:,}", *(figure(us, 1) for us in microseconds), f"{size:.0f}"]
        for (name, text, length), cost in costs.items()
        for *microseconds, size in [astuple(cost)]
    ]
    terminal.table("Drafters without a model", COLUMNS, rows)
    rows = [[*key, *(figure(cost, 2) for cost in astuple(costs_of))] for key, costs_of in batches.items()]
    terminal.table(f"{NUM_REQUESTS} requests, {TOKENS_PER_REQUEST} tokens each in a round", BATCH_COLUMNS, rows)
    if options.plot:
        draw(costs, options.plot)


if __name__ == "__main__":
    main()
