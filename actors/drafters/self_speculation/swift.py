"""`drafter.search=swift`: tries masks of a fixed number of sublayers while text is generated.

A trial is one parallel pass of the mask over the last generated tokens; its score is the share that it reproduces. The
search ends once a mask reproduces `_ENOUGH` of them several times in a row, or after trials without a better one; from
then on it costs nothing. A mask that seems better than the best is compared with it over the same text: texts differ
more than masks.

Source: SWIFT (arXiv 2410.06916): first and last layer kept, 45 % of the sublayers skipped, random masks and Bayesian
optimisation in turn.
"""

from __future__ import annotations

from actors.drafters.interface import Context
from actors.drafters.self_speculation.layer_search import CLOCK, Agreement, Clock, LayerSearch, Scores, TextWindow
from actors.drafters.self_speculation.mask_search import MaskSearch, MaskSpace
from actors.drafters.self_speculation.sublayers import Sublayers

_ENOUGH = 0.95
_CONFIRMATIONS = 3
"""Texts in a row of which a mask reproduces enough: one of some tokens may be easy."""
_NUM_RANDOM = 8
_MODEL_EVERY = 5
"""Of the proposals, the share of the Gaussian process: fitting it takes as long as some passes of a small model."""


class SwiftSearch(LayerSearch):
    """At most `trials` trials, at most `fruitless` without a better mask."""

    tries_others = True

    def __init__(
        self,
        sublayers: Sublayers,
        scores: Scores,
        agreement: Agreement,
        *,
        num_skipped: int,
        window: int,
        every: int,
        trials: int,
        fruitless: int,
        clock: Clock = CLOCK,
    ) -> None:
        self._sublayers = sublayers
        self._scores = scores
        self._agreement = agreement
        space = MaskSpace(len(sublayers.places), num_skipped)
        self.search = MaskSearch(space, num_random=_NUM_RANDOM, model_every=_MODEL_EVERY)
        self._window = window
        self._trials = trials
        self._fruitless = fruitless
        self._since_better = 0
        self._confirmed = 0
        super().__init__(sublayers.plan(space.spread()), scores.replay, every, clock)

    @property
    def ended(self) -> bool:
        found = self._confirmed >= _CONFIRMATIONS
        return found or self._since_better >= self._fruitless or self.search.num_evaluated >= self._trials

    def _look(self, context: Context) -> bool:
        window = TextWindow.of(context, self._window, fewest=self._window // 2)
        if window is None or not self._replay.can_read(len(window.token_ids)):
            return False
        before = self.search.best
        # the same masks on all ranks: proposals follow from sums, too, that ranks may round apart
        proposed = before if self._confirmed else self.search.propose()
        mask = tuple(bool(bit) for bit in self._agreement.of([float(bit) for bit in proposed]))
        is_first = not self.search.num_evaluated
        value = self._score(window, mask)
        if not is_first and mask != before and value > self.search.best_value:
            self.search.record(before, self._score(window, before))
        self.search.record(mask, value)
        is_better = is_first or self.search.best != before
        self._since_better = 0 if is_better else self._since_better + 1
        self._confirmed = self._confirmed + 1 if mask == self.search.best and value >= _ENOUGH else 0
        self.layers = self._sublayers.plan(self.search.best)
        self._found(self.search.best_value)
        return True

    def _score(self, window: TextWindow, mask: tuple[bool, ...]) -> float:
        return self._agreement.of([self._scores.reproduced(window, self._sublayers.plan(mask))])[0]
