"""`drafter.search=exit`: the exit layer that brings the most tokens for its time, at its best draft length.

The last generated tokens are read once more, with the target's norm and head after every layer: that shows how often
each exit says what the text says. The exit is the one with the largest E(k) / (1 + k * share) over the lengths k, share
being the bytes of weights that a draft pass reads, of those of the whole model. The length itself follows from measured
rounds, as for any drafter (`actors/policy/draft_length.py`).

Source: the choice of DEL (arXiv 2504.05598), tokens per layer, with bytes of weights for layers.
"""

from __future__ import annotations

from actors.drafters.interface import Context
from actors.drafters.self_speculation.layer_search import Agree, LayerSearch, Scores, TextWindow
from actors.drafters.self_speculation.sublayers import PassShares, best_speed
from actors.policy.estimators import Ewma
from parallel.model.layer_plan import LayerPlan

_MEMORY = 0.8
"""Share that the acceptance of an exit keeps at every look: about the last five count."""


class ExitSearch(LayerSearch):
    """Chooses anew every `every` rounds from what `window` tokens showed."""

    def __init__(
        self,
        num_layers: int,
        scores: Scores,
        agree: Agree,
        shares: PassShares,
        *,
        longest: int,
        window: int,
        every: int,
    ) -> None:
        self._scores = scores
        self._longest = longest
        self._window = window
        self._shares = [shares.of(LayerPlan.prefix(stop)) for stop in range(1, num_layers)]
        self._acceptance = [Ewma(_MEMORY) for _ in self._shares]
        super().__init__(LayerPlan.prefix(max(1, num_layers // 2)), scores.replay, agree, every)

    def _look(self, context: Context) -> bool:
        window = TextWindow.of(context, self._window)
        if window is None or not self._replay.can_read(len(window.token_ids)):
            return False
        found = self._agree(self._scores.reproduced_by_exit(window, len(self._shares)))
        for mean, share in zip(self._acceptance, found, strict=True):
            mean.update(share)
        choices = [
            (*best_speed(mean.mean, share, self._longest), stop)
            for stop, (mean, share) in enumerate(zip(self._acceptance, self._shares, strict=True), 1)
        ]
        speed, _, stop = max(choices)
        self.layers = LayerPlan.prefix(stop)
        self._found(speed)
        return True
