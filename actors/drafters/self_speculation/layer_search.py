"""What a search for the layers to draft with is: when it looks, at which text, and that all ranks decide alike.

A search reads text again that is there (`parallel/self_speculation/replay.py`), never a token that is still to be
drawn, so its choice cannot bias what is drawn. It takes its time between two drafts, once in so many rounds; rounds
without speculation cost nothing. Knows no method of search.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.drafters.interface import Context
from actors.sampling.logits import choose_plain, is_plain
from parallel.model.layer_plan import LayerPlan
from parallel.self_speculation.replay import Replay, ReplayedRows

Agree = Callable[[Sequence[float]], list[float]]
"""Numbers of rank 0 on every rank, as `Group.agree` brings them."""
Clock = Callable[[], float]

MOST_STEPS = 10_000
"""Steps that are remembered: a search may go on as long as the engine runs."""

_FEWEST_TOKENS = 8


@dataclass(frozen=True, slots=True)
class SearchStep:
    """One look of a search: when, what it measured, and the layers it draws with from then on."""

    at_s: float
    value: float
    layers: LayerPlan


@dataclass(frozen=True, slots=True)
class TextWindow:
    """Generated tokens of a request whose layers are compared by what they say after each: `token_ids` lie from `first`
    on, `following` are the tokens that came after each."""

    context: Context
    first: int
    token_ids: list[int]
    following: list[int]

    @staticmethod
    def of(context: Context, longest: int, fewest: int = _FEWEST_TOKENS) -> TextWindow | None:
        """The last `longest` generated tokens; None: fewer than `fewest`, too few to compare on."""
        text = context.token_ids
        first = max(context.prompt_len - 1, len(text) - 1 - longest)
        if len(text) - 1 - first < fewest:
            return None
        return TextWindow(context, first, text[first:-1], text[first + 1 :])


class Scores:
    """How often some layers say what the text says."""

    def __init__(self, replay: Replay, *, coupled: bool) -> None:
        self.replay = replay
        self._coupled = coupled

    def reproduced(self, window: TextWindow, layers: LayerPlan) -> float:
        """The share of the window's tokens that a pass of these layers reproduces, as SWIFT scores a mask."""
        return float(self.right(window, layers).float().mean())

    def right(self, window: TextWindow, layers: LayerPlan) -> Tensor:
        """Whether these layers say what followed, after each of the window's tokens, bool [T]."""
        with self._rows(window) as rows:
            return self._right(window, rows.logits(rows.run(rows.embed(window.token_ids), layers)))

    def reproduced_by_exit(self, window: TextWindow, num_layers: int) -> list[float]:
        """The share that an exit after 1, 2, ... `num_layers` layers reproduces, in one pass."""
        with self._rows(window) as rows:
            hidden, shares = rows.embed(window.token_ids), []
            for layer in range(num_layers):
                hidden = rows.run(hidden, LayerPlan.span(layer, layer + 1))
                shares.append(float(self._right(window, rows.logits(hidden)).float().mean()))
        return shares

    def _rows(self, window: TextWindow) -> AbstractContextManager[ReplayedRows]:
        return self.replay.rows(window.context.request_id, window.first, len(window.token_ids))

    def _right(self, window: TextWindow, logits: Tensor) -> Tensor:
        """Whether each draft is right. Under the coupled rule it is drawn with the target's noise; else the likeliest
        token stands for it."""
        size, sampling = len(window.token_ids), window.context.sampling
        if self._coupled and is_plain(sampling):
            said = choose_plain(logits, [sampling] * size, range(window.first + 1, window.first + 1 + size))
        else:
            said = logits.argmax(dim=-1)
        return said.cpu() == torch.tensor(window.following)


_LONGEST_PAUSE = 16
"""A search that confirmed its choice again and again looks once in so many times the configured rounds."""


class LayerSearch(ABC):
    """`layers` are those to draft with; the search looks at one request in every `every` rounds, in turn.

    Unless it `tries_others`, a look that changes nothing doubles the rounds until the next one.
    """

    tries_others = False

    def __init__(
        self, layers: LayerPlan, replay: Replay, agree: Agree, every: int, clock: Clock = time.monotonic
    ) -> None:
        self.layers = layers
        self.history: deque[SearchStep] = deque(maxlen=MOST_STEPS)
        self._replay = replay
        self._agree = agree
        self._every = every
        self._clock = clock
        self._started = clock()
        self._pause = every
        self._left = 0
        self._looks = 0

    @property
    def ended(self) -> bool:
        """Whether the layers stay as they are."""
        return False

    def before_draft(self, contexts: Sequence[Context]) -> LayerPlan:
        """The layers of the next drafts of these requests, which have rows of all tokens but the last."""
        if not self.ended:
            if self._left == 0:
                before, looked = self.layers, self._look(contexts[self._looks % len(contexts)])
                self._looks += looked
                is_confirmed = looked and self.layers == before and not self.tries_others
                longest = _LONGEST_PAUSE * self._every
                self._left = self._pause = min(2 * self._pause, longest) if is_confirmed else self._every
            self._left -= 1
        return self.layers

    def before_trial(self, contexts: Sequence[Context]) -> LayerPlan:
        """The same, and no look in the next rounds: one that is due within half of its time is made now."""
        if 2 * self._left <= self._pause:
            self._left = 0
            return self.before_draft(contexts)
        return self.layers

    def release(self, request_id: int) -> None:  # noqa: B027  most keep nothing of a request
        """The request ended."""

    def _found(self, value: float) -> None:
        self.history.append(SearchStep(self._clock() - self._started, value, self.layers))

    @abstractmethod
    def _look(self, context: Context) -> bool:
        """Read text of this request again and choose layers; whether there was text enough."""
