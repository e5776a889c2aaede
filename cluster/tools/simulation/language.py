"""A synthetic language: text that the target would write, and how well a drafter's guesses fit it.

Text is random; what is scripted is the rank at which a drafter lists the target's next token. Whether a branch is hit
then follows from which branches a policy prepared in the time it had, instead of being assumed. Knows no passes,
clocks or records.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate


def power_law(exponent: float, count: int = 8) -> tuple[float, ...]:
    """Runners-up whose misses fall as a power of the fan-out: P(not among the first F) = (F + 1) ** -exponent.

    The law that SSD measured (arXiv 2603.03251, section 4.1), counted from the first runner-up.
    """
    return tuple(rank**-exponent - (rank + 1) ** -exponent for rank in range(1, count + 1))


STRATA = 512
"""Positions drawn at a time. Short texts then meet the probabilities asked for, which independent draws would miss by
a few per cent; what is left of dependence between neighbours is far below that."""


@dataclass(frozen=True, slots=True)
class Language:
    """Parameters of the synthetic language; everything is drawn from `seed`."""

    acceptance: tuple[float, ...] = (0.8,)
    """P(the drafter's first choice is the target's token), by distance from the committed text; the last one repeats.
    One value is the i.i.d. acceptance of the closed forms."""
    runners_up: tuple[float, ...] = power_law(1.0)
    """P(the token is the drafter's second, third, ... choice), given that it is not the first."""
    unevenness: float = 0.0
    """0: the drafter is equally sure everywhere. Above: doubt gathers in few places, which the drafter knows, and its
    mean stays: 1 - acceptance is scaled by (1 + c) * u ** c, u uniform per position."""
    vocab_size: int = 32_000
    seed: int = 0

    def __post_init__(self) -> None:
        most = (1 - min(self.acceptance, default=0.0)) * (1 + self.unevenness)
        bounds = (
            ("acceptance", self.acceptance and all(0 <= p <= 1 for p in self.acceptance), "needs values in [0, 1]"),
            ("runners_up", all(p >= 0 for p in self.runners_up), "needs values of 0 or above"),
            ("runners_up", sum(self.runners_up) <= 1 + 1e-9, "must not sum to more than 1"),
            ("unevenness", self.unevenness >= 0, "must be 0 or above"),
            ("unevenness", self.unevenness == 0 or most <= 1, "leaves doubt above 1; lower it or raise acceptance"),
            ("vocab_size", self.vocab_size > len(self.runners_up) + 1, "must exceed the number of ranked choices"),
        )
        for name, good, rule in bounds:
            if not good:
                raise ValueError(f"language.{name}={getattr(self, name)!r} {rule}")

    def text(self, request_id: int, prompt: tuple[int, ...] = ()) -> Text:
        return Text(self, request_id, prompt)


class Text:
    """What one request's text will be, drawn as far as it is asked for, in an order that no question changes."""

    def __init__(self, language: Language, request_id: int, prompt: tuple[int, ...]) -> None:
        self._language = language
        self._random = random.Random(f"{language.seed}/{request_id}")
        self._tokens = list(prompt)
        self._marks = [(0.0, 0.0, 1.0)] * len(prompt)  # per position: where the rank falls, and how much doubt there is
        self._cumulative = list(accumulate(language.runners_up))
        self._laws: dict[float, list[float]] = {}

    def token(self, position: int) -> int:
        self._extend(position)
        return self._tokens[position]

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        self._extend(stop)
        return tuple(self._tokens[start:stop])

    def children(self, position: int, distance: int, count: int) -> tuple[list[int], list[float]]:
        """The drafter's ranked choices for a position `distance` tokens behind the first open one, and their log-probs.

        A drafter on a wrong path guesses no worse: nobody will look at it there.
        """
        self._extend(position)
        truth, (mark, runner_mark, scale) = self._tokens[position], self._marks[position]
        language = self._language
        doubt = (1 - language.acceptance[min(distance, len(language.acceptance) - 1)]) * scale
        rank = 0 if mark >= doubt else 1 + bisect_right(self._cumulative, runner_mark)
        count = min(count, 1 + len(language.runners_up))
        tokens = [(truth + 1 + i) % language.vocab_size for i in range(count)]
        if rank < count:
            tokens[rank] = truth
        return tokens, self._log_probs(doubt)[:count]

    def _log_probs(self, doubt: float) -> list[float]:
        if doubt not in self._laws:
            probs = [1 - doubt, *(doubt * share for share in self._language.runners_up)]
            self._laws[doubt] = [math.log(p) if p > 0 else -math.inf for p in probs]
        return self._laws[doubt]

    def _extend(self, position: int) -> None:
        language, draw = self._language, self._random
        while len(self._tokens) <= position:
            self._tokens += [draw.randrange(language.vocab_size) for _ in range(STRATA)]
            marks, runner_marks, ease = (_stratified(draw) for _ in range(3))
            scales = [(1 + language.unevenness) * u**language.unevenness for u in ease]
            self._marks += zip(marks, runner_marks, scales, strict=True)


def _stratified(draw: random.Random) -> list[float]:
    """Uniform numbers, one from each of `STRATA` equal parts of [0, 1), shuffled."""
    strata = list(range(STRATA))
    draw.shuffle(strata)
    return [(stratum + draw.random()) / STRATA for stratum in strata]
