"""`drafter.search=fly`: skips the attention of layers in which it hardly turned the residual stream of the prompt.

Every request's prompt is read once more, its last tokens: where the cosine of the streams before and after an attention
is above a threshold, on average over these tokens, the attention is skipped. The first and the last layer keep theirs,
and at most half of the layers in a row lose it. No search and no text of the answer is needed. The mean over the
requests that are drafted for counts, since they are drafted for in one pass.

Source: Draft on the Fly (arXiv 2410.01028).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from actors.drafters.interface import Context
from actors.drafters.self_speculation.layer_search import Agree, LayerSearch
from actors.drafters.self_speculation.sublayers import Sublayers
from parallel.model.layer_plan import LayerPlan
from parallel.self_speculation.replay import Replay


def idle_attentions(cosines: Sequence[float], threshold: float) -> tuple[int, ...]:
    """The layers whose attention is skipped, the largest cosines first, as long as the rules allow another."""
    num_layers, skipped = len(cosines), set[int]()
    inner = [layer for layer, part in Sublayers.inner(num_layers).places if part == 0]
    for layer in sorted(inner, key=lambda one: -cosines[one]):
        if cosines[layer] > threshold and _longest_run({*skipped, layer}) <= max(1, num_layers // 2):
            skipped.add(layer)
    return tuple(sorted(skipped))


def _longest_run(layers: set[int]) -> int:
    runs = dict.fromkeys(layers, 0)
    for layer in sorted(layers):
        runs[layer] = runs.get(layer - 1, 0) + 1
    return max(runs.values())


class FlySearch(LayerSearch):
    """`window` tokens of each prompt, the last ones, are read once more."""

    def __init__(
        self,
        num_layers: int,
        replay: Replay,
        agree: Agree,
        *,
        threshold: float,
        window: int,
    ) -> None:
        self._num_layers = num_layers
        self._threshold = threshold
        self._window = window
        self._cosines: dict[int, list[float]] = {}
        self._batch: tuple[int, ...] = ()
        super().__init__(LayerPlan.whole(num_layers), replay, agree, 1)

    def before_draft(self, contexts: Sequence[Context]) -> LayerPlan:
        for context in contexts:
            if context.request_id not in self._cosines:
                self._look(context)
        batch = tuple(one.request_id for one in contexts if one.request_id in self._cosines)
        if batch and batch != self._batch:
            self._batch = batch
            columns = zip(*(self._cosines[request_id] for request_id in batch), strict=True)
            skipped = idle_attentions([sum(column) / len(batch) for column in columns], self._threshold)
            self.layers = LayerPlan.skipping(self._num_layers, attention=skipped)
            self._found(len(skipped) / self._num_layers)
        return self.layers

    def release(self, request_id: int) -> None:
        self._cosines.pop(request_id, None)

    def _look(self, context: Context) -> bool:
        first = max(0, context.prompt_len - self._window)
        tokens = context.token_ids[first : context.prompt_len]
        if not self._replay.can_read(len(tokens)):
            return False
        cosines = []
        with self._replay.rows(context.request_id, first, len(tokens)) as rows, torch.inference_mode():
            hidden = rows.embed(tokens)
            for layer in range(self._num_layers):
                attended = rows.run(hidden, LayerPlan((layer,), ()))
                cosines.append(float(F.cosine_similarity(hidden, attended, dim=-1).mean()))
                hidden = rows.run(attended, LayerPlan((), (layer,)))
        self._cosines[context.request_id] = self._agree(cosines)
        return True
