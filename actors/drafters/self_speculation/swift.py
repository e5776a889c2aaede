"""`drafter.search=swift`: tries masks of a fixed number of sublayers while text is generated.

A trial is one parallel pass of the mask over the last generated tokens; its score is the share that it reproduces. The
search ends once a mask reproduces `_ENOUGH` of them several times in a row, or after trials without a better one; from
then on it costs nothing. The best mask is scored over the same text, since texts differ more than masks do: what is
recorded of a tried mask is by how much it did better.

Source: SWIFT (arXiv 2410.06916): first and last layer kept, 45 % of the sublayers skipped, random masks and Bayesian
optimisation in turn.
"""

from __future__ import annotations

import time

from actors.drafters.interface import Context
from actors.drafters.self_speculation.layer_search import Agree, Clock, LayerSearch, Scores, TextWindow
from actors.drafters.self_speculation.mask_search import MaskSearch, MaskSpace
from actors.drafters.self_speculation.sublayers import Sublayers
from actors.policy.estimators import Ewma

_ENOUGH = 0.95
_CONFIRMATIONS = 3
"""Texts in a row of which a mask reproduces enough: one of some tokens may be easy."""
_MEMORY = 0.8
"""Share that the score of the best mask keeps at every text: about the last five count."""
_NUM_RANDOM = 8
_MODEL_EVERY = 5
"""One in so many proposals is the Gaussian process's: fitting it takes as long as some passes of a small model."""


class SwiftSearch(LayerSearch):
    """Makes at most `trials` trials, at most `fruitless` of them without a better mask."""

    tries_others = True

    def __init__(
        self,
        sublayers: Sublayers,
        scores: Scores,
        agree: Agree,
        *,
        num_skipped: int,
        window: int,
        every: int,
        trials: int,
        fruitless: int,
        clock: Clock = time.monotonic,
    ) -> None:
        self._sublayers = sublayers
        self._scores = scores
        space = MaskSpace(len(sublayers.places), num_skipped)
        self.search = MaskSearch(space, num_random=_NUM_RANDOM, model_every=_MODEL_EVERY)
        self._window = window
        self._trials = trials
        self._fruitless = fruitless
        self._since_better = 0
        self._confirmed = 0
        self._confirmed_at: tuple[int, int] | None = None
        self._mean = Ewma(_MEMORY)
        super().__init__(sublayers.plan(space.spread()), scores.replay, agree, every, clock)

    @property
    def ended(self) -> bool:
        found = self._confirmed >= _CONFIRMATIONS
        return found or self._since_better >= self._fruitless or len(self.history) >= self._trials

    def _look(self, context: Context) -> bool:
        window = TextWindow.of(context, self._window, fewest=self._window // 2)
        if window is None or not self._replay.can_read(len(window.token_ids)):
            return False
        best = self.search.best
        score = self._score(window, best)
        self._mean.update(score)
        self.search.record(best, self._mean.mean)
        if score >= _ENOUGH:
            self._confirm(context)
        else:
            self._confirmed = 0
            # the same masks on all ranks: proposals follow from sums, too, that ranks may round apart
            mask = tuple(bool(bit) for bit in self._agree([float(bit) for bit in self.search.propose()]))
            self.search.record(mask, self._mean.mean + self._score(window, mask) - score)
        self._since_better += 1
        if self.search.best_value > self.search.values[best]:  # another one that is as good is no progress
            self._since_better, self._mean = 0, Ewma(_MEMORY, mean=self.search.best_value, weight=1.0)
        self.layers = self._sublayers.plan(self.search.best)
        self._found(self.search.best_value)
        return True

    def _confirm(self, context: Context) -> None:
        """The best mask reproduces this text; text that was compared before counts once."""
        request_id, length = place = context.request_id, len(context.token_ids)
        before = self._confirmed_at
        if not self._confirmed or before is None or request_id != before[0] or length >= before[1] + self._window:
            self._confirmed, self._confirmed_at = self._confirmed + 1, place

    def _score(self, window: TextWindow, mask: tuple[bool, ...]) -> float:
        return self._agree([self._scores.reproduced(window, self._sublayers.plan(mask))])[0]
