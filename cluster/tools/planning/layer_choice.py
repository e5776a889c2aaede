"""What a choice of layers to draft with brings: measured acceptance and measured passes, and searches by that.

Acceptance is measured on text that the target wrote: a parallel pass of the layers over it shows after which tokens
they say what the target said, in which runs. Times are those of a pass of one row with these layers and of passes of
the target over drafts of every length. What follows from them is in `layer_costs.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from actors.drafters.interface import Context
from actors.drafters.model.drafter import node_rows
from actors.drafters.model.prefill import prefill
from actors.drafters.self_speculation.layer_search import Scores, TextWindow
from actors.drafters.self_speculation.mask_search import MaskSearch
from actors.drafters.self_speculation.sublayers import Sublayers
from actors.sampling.logits import choose_batch
from cluster.tools.offline import OfflineTask
from cluster.tools.planning.layer_costs import LayerCosts, Value, contradiction
from parallel.kv.pass_plan import Span
from parallel.model.layer_plan import LayerPlan
from parallel.runtime.decoder_runner import DecoderRunner
from parallel.self_speculation.replay import Replay

_REPEATS = 25
"""Timed passes of each kind, in turn with those of the other kinds; the fastest counts: other work on the machine only
adds time, and under load the medians of passes of a millisecond were 10 to 60 times their fastest."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One choice that a search tried, and the best so far; `at_s` is the time since the search began."""

    at_s: float
    value: float
    best: float
    layers: LayerPlan


def write_texts(target: DecoderRunner, task: OfflineTask, chunk: int) -> list[Context]:
    """The target's continuations, ends of text passed over; it keeps rows of all tokens but the last."""
    contexts = [
        Context(i, 0, list(prompt), len(prompt), params)
        for i, (prompt, params) in enumerate(zip(task.prompts, task.sampling, strict=True))
    ]
    for context in contexts:
        target.open(context.request_id)
        prefill(target, context.request_id, context.token_ids, leave=1, chunk=chunk)
    for _ in range(task.num_tokens):
        spans = [Span(context.request_id, 1) for context in contexts]
        logits = target.forward(spans, [context.token_ids[-1] for context in contexts]).logits
        rows = [node_rows(context, context.token_ids[-1:], (-1,), [0]) for context in contexts]
        for context, token in zip(contexts, choose_batch(logits, rows, ()).tolist(), strict=True):
            target.commit(context.request_id, [0])
            context.extend([token])
    return contexts


class LayerValues:
    """Measures choices of layers on these texts; drafts have at most `longest` tokens."""

    def __init__(self, target: DecoderRunner, contexts: Sequence[Context], longest: int, *, coupled: bool) -> None:
        self._target = target
        self._whole = LayerPlan.whole(target.config.num_layers)
        self._longest = longest
        replay = Replay(target)
        self._replay = replay
        self._scores = Scores(replay, coupled=coupled)
        windows = (TextWindow.of(context, len(context.token_ids)) for context in contexts)
        self._windows = [window for window in windows if window is not None]
        if not self._windows:
            raise ValueError("sampling.max_tokens: leaves texts too short to compare layers on; raise it")
        num_layers = target.config.num_layers
        parts = LayerPlan((), ()), LayerPlan(tuple(range(num_layers)), ()), LayerPlan((), tuple(range(num_layers)))
        kinds = [(self._whole, 1 + k) for k in range(longest + 1)] + [(part, 1) for part in parts]
        *verify_s, ends_s, attention_s, mlp_s = self._pass_times(kinds)
        self.costs = LayerCosts.of(verify_s, ends_s, attention_s, mlp_s, num_layers)
        self.contradiction = contradiction(verify_s, self.costs.pass_s(self._whole))
        """How the measured times contradict each other; empty: they do not."""

    def _pass_times(self, kinds: Sequence[tuple[LayerPlan, int]]) -> list[float]:
        """The times of passes of these layers over so many rows, with logits of every row."""
        context = self._windows[0].context
        request_id, text = context.request_id, context.token_ids
        times: list[list[float]] = [[] for _ in kinds]
        for _ in range(_REPEATS):
            for (layers, num_rows), of_kind in zip(kinds, times, strict=True):
                started = time.perf_counter()
                with self._replay.rows(request_id, len(text) - num_rows, num_rows) as rows:
                    rows.logits(rows.run(rows.embed(text[-num_rows:]), layers))[0, 0].item()
                of_kind.append(time.perf_counter() - started)
        return [min(of_kind) for of_kind in times]

    def value(self, layers: LayerPlan) -> Value:
        """What drafting with these layers brings on the texts."""
        reached = [0] * self._longest
        places = 0
        for window in self._windows:
            right = self._scores.right(window, layers).tolist()
            places += len(right)
            run = 0
            for said in reversed(right):
                run = run + 1 if said else 0
                for length in range(min(run, self._longest)):
                    reached[length] += 1
        return self.costs.value([count / places for count in reached], layers)


def search_masks(
    values: LayerValues,
    sublayers: Sublayers,
    search: MaskSearch,
    evaluations: int,
    progress: Callable[[], None],
) -> list[Evaluation]:
    """Evaluate the masks that `search` proposes."""
    found: list[Evaluation] = []
    started = time.perf_counter()
    with torch.inference_mode():
        for _ in range(evaluations):
            mask = search.propose()
            value = values.value(sublayers.plan(mask)).speedup
            search.record(mask, value)
            found.append(
                Evaluation(time.perf_counter() - started, value, search.best_value, sublayers.plan(search.best))
            )
            progress()
    return found
