"""A synthetic language: random text of the target, and the rank at which a drafter lists each of its tokens.

The rank is what is scripted. Whether a branch is hit then follows from the branches that a policy prepared in the time
it had. Knows no passes, clocks or records.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Protocol

from parallel.ranges import Range, Section, require

STRATA = 512
"""Positions drawn at a time, stratified: short texts meet the given probabilities, which independent draws would miss
by a few per cent. The dependence between neighbours that this leaves is far smaller."""


def power_law(exponent: float, count: int = 8) -> tuple[float, ...]:
    """Probabilities of the runners-up such that P(not among the first F) = (F + 1) ** -exponent.

    The law that SSD measured (arXiv 2603.03251, section 4.1), counted from the first runner-up.
    """
    return tuple(rank**-exponent - (rank + 1) ** -exponent for rank in range(1, count + 1))


class RequestText(Protocol):
    """The text of one request, and how a drafter ranks its tokens."""

    def token(self, position: int) -> int: ...

    def children(self, position: int, distance: int, count: int) -> tuple[list[int], list[float]]:
        """The drafter's ranked choices `distance` tokens after the first open position, and their log-probabilities."""
        ...


class TextSource(Protocol):
    """A `Language`, or recorded text."""

    def text(self, request_id: int, prompt: tuple[int, ...] = ()) -> RequestText: ...


@dataclass(frozen=True, slots=True)
class Language(Section):
    """Parameters of the synthetic language; all draws follow from `seed`."""

    acceptance: Annotated[tuple[float, ...], Range(0, 1)] = (0.8,)
    """P(the drafter's first choice is the target's token), by distance from the committed text; the last one repeats.
    One value is the i.i.d. acceptance of the closed forms."""
    runners_up: Annotated[tuple[float, ...], Range(0)] = power_law(1.0)
    """P(the token is the drafter's second, third, ... choice), given that it is not the first."""
    unevenness: Annotated[float, Range(0)] = 0.0
    """0: the drafter is equally sure everywhere. Above: the probability that its first choice is wrong,
    1 - acceptance, is scaled per position by (1 + c) * u ** c, u uniform: few positions are hard, the drafter's
    probabilities show which, and the mean stays."""
    vocab_size: int = 32_000
    seed: int = 0

    def __post_init__(self) -> None:
        self.check("language")

    def check_fields(self, where: str) -> None:
        require(bool(self.acceptance), f"{where}.acceptance", self.acceptance, "must have at least one value")
        sums = sum(self.runners_up) <= 1 + 1e-9
        require(sums, f"{where}.runners_up", self.runners_up, "must not sum to more than 1")
        most = (1 - min(self.acceptance)) * (1 + self.unevenness)
        remedy = "makes first choices wrong with a probability above 1; lower it or raise acceptance"
        require(self.unevenness == 0 or most <= 1, f"{where}.unevenness", self.unevenness, remedy)
        enough = self.vocab_size > len(self.runners_up) + 1
        require(enough, f"{where}.vocab_size", self.vocab_size, "must exceed the number of ranked choices")

    def text(self, request_id: int, prompt: tuple[int, ...] = ()) -> SimulatedText:
        return SimulatedText(self, request_id, prompt)


class SimulatedText:
    """The text of one request, drawn as far as it is read; the order of reads changes nothing."""

    def __init__(self, language: Language, request_id: int, prompt: tuple[int, ...]) -> None:
        self._language = language
        self._random = random.Random(f"{language.seed}/{request_id}")
        self._tokens = list(prompt)
        self._marks = [(0.0, 0.0, 1.0)] * len(prompt)  # per position: draws of the rank, and the scale of misses
        self._cumulative = list(accumulate(language.runners_up))
        self._log_probs: dict[float, list[float]] = {}  # miss -> log-probabilities by rank

    def token(self, position: int) -> int:
        self._extend(position)
        return self._tokens[position]

    def children(self, position: int, distance: int, count: int) -> tuple[list[int], list[float]]:
        """The path in front is not looked at: choices on a wrong path are never compared with the text."""
        self._extend(position)
        truth, (mark, runner_mark, scale) = self._tokens[position], self._marks[position]
        language = self._language
        miss = (1 - language.acceptance[min(distance, len(language.acceptance) - 1)]) * scale
        rank = 0 if mark >= miss else 1 + bisect_right(self._cumulative, runner_mark)
        count = min(count, 1 + len(language.runners_up))
        tokens = [(truth + 1 + i) % language.vocab_size for i in range(count)]
        if rank < count:
            tokens[rank] = truth
        if miss not in self._log_probs:
            probs = [1 - miss, *(miss * share for share in language.runners_up)]
            self._log_probs[miss] = [math.log(p) if p > 0 else -math.inf for p in probs]
        return tokens, self._log_probs[miss][:count]

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
