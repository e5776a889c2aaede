"""`drafter.search=clasp`: skips the layers without which the newest token's hidden state is closest to the exact one.

A dynamic program runs the token through the layers; `states[j]` is the best stream so far with j layers skipped, best
by its cosine to the exact stream at the same layer. The candidates of a layer are rows of one pass, beside the exact
row, and each sees the text and itself: one pass of the target with two rows more than layers to skip. One state is kept
for each number of skipped layers, so the result is a good mask, not always the best of all.

Source: CLaSp (arXiv 2505.24196). The token is the newest one, which the target has not fed yet, so that its exact
states come from the same pass and need not be kept from the verification.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.drafters.interface import Context
from actors.drafters.self_speculation.layer_search import Agree, LayerSearch
from parallel.model.layer_plan import LayerPlan
from parallel.self_speculation.replay import Replay

RunLayer = Callable[[int, Tensor], Tensor]
"""(layer, rows [R, H]) -> the rows after that layer, each on its own."""


def closest_skips(run: RunLayer, start: Tensor, num_layers: int, num_skipped: int) -> tuple[tuple[int, ...], float]:
    """The layers to skip, exactly so many, and the cosine to the exact stream at the end.

    `start` [H] enters the first layer; `run` gets `num_skipped` + 2 rows.
    """
    exact, states = start, start.expand(num_skipped + 1, -1)
    is_reached = torch.arange(num_skipped + 1, device=start.device) == 0
    skips: list[list[bool]] = []
    best = torch.ones(num_skipped + 1, device=start.device)
    for layer in range(num_layers):
        rows = run(layer, torch.cat([exact[None], states]))
        exact, kept = rows[0], rows[1:]
        skipped, can_skip = states.roll(1, dims=0), is_reached.roll(1)
        can_skip[0] = False
        by_keeping = F.cosine_similarity(kept, exact[None], dim=-1).masked_fill(~is_reached, -2.0)
        by_skipping = F.cosine_similarity(skipped, exact[None], dim=-1).masked_fill(~can_skip, -2.0)
        skip = by_skipping > by_keeping
        states = torch.where(skip[:, None], skipped, kept)
        best = torch.maximum(by_keeping, by_skipping)
        is_reached = is_reached | can_skip
        skips.append(skip.tolist())
    found, count = [], num_skipped
    for layer in reversed(range(num_layers)):
        if skips[layer][count]:
            found.append(layer)
            count -= 1
    return tuple(reversed(found)), float(best[num_skipped])


class ClaspSearch(LayerSearch):
    """Chooses anew every `every` rounds; in a batch from one request in turn, since all are drafted in one pass."""

    def __init__(
        self,
        num_layers: int,
        replay: Replay,
        agree: Agree,
        *,
        num_skipped: int,
        every: int,
    ) -> None:
        self._num_layers = num_layers
        self._num_skipped = num_skipped
        super().__init__(LayerPlan.prefix(num_layers - num_skipped), replay, agree, every)

    def _look(self, context: Context) -> bool:
        num_rows, length = self._num_skipped + 2, len(context.token_ids)
        if not self._replay.can_read(num_rows):
            return False
        siblings = [-1] * num_rows
        with self._replay.rows(context.request_id, length - 1, num_rows, siblings) as rows:
            start = rows.embed([context.token_ids[-1]] * num_rows)[0]
            skipped, cosine = closest_skips(
                lambda layer, hidden: rows.run(hidden, LayerPlan.span(layer, layer + 1)),
                start,
                self._num_layers,
                self._num_skipped,
            )
        *agreed, cosine = self._agree([*skipped, cosine])
        layers = {int(layer) for layer in agreed}
        self.layers = LayerPlan.skipping(self._num_layers, attention=layers, mlp=layers)
        self._found(cosine)
        return True
