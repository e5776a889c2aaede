"""Recorded text as a language of the simulator: what the target wrote, and how the drafter ranked every token of it.

The synthetic language draws from probabilities; this one plays back a measurement, so that runs of easy and hard
tokens are as long as they really are. Knows neither models nor clocks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Recorded:
    """A token the target wrote, and the drafter's ranked choices for its place, given the true text in front of it."""

    token: int
    choices: tuple[int, ...]
    log_probs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Transcript:
    """Texts one behind the other, each `STEP` tokens further on for every further request.

    `kept` is, by distance from the committed text, the part of right first choices that a drafter keeps which is not
    quite the recorded one (layer-parallel passes); the last one repeats.
    """

    tokens: tuple[Recorded, ...]
    kept: tuple[float, ...] = (1.0,)
    seed: int = 0

    def text(self, request_id: int, prompt: tuple[int, ...] = ()) -> TranscriptText:
        start = request_id * STEP % len(self.tokens)
        return TranscriptText(self, prompt, self.tokens[start:] + self.tokens[:start])


STEP = 61


@dataclass(slots=True)
class TranscriptText:
    """One request's text; behind its end it starts again."""

    _transcript: Transcript
    _prompt: tuple[int, ...]
    _tokens: Sequence[Recorded]
    _marks: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = random.Random(self._transcript.seed)
        self._marks = [draw.random() for _ in self._tokens]

    def token(self, position: int) -> int:
        return self._prompt[position] if position < len(self._prompt) else self._at(position).token

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        return tuple(map(self.token, range(start, stop)))

    def children(self, position: int, distance: int, count: int) -> tuple[list[int], list[float]]:
        """The recorded choices; where a worse drafter errs, its first two change places."""
        recorded = self._at(position)
        tokens, log_probs = list(recorded.choices[:count]), list(recorded.log_probs[:count])
        kept = self._transcript.kept[min(distance, len(self._transcript.kept) - 1)]
        index = (position - len(self._prompt)) % len(self._tokens)
        if recorded.choices[0] == recorded.token and self._marks[index] > kept:
            tokens[0] = recorded.choices[1]
            tokens[1:2] = [recorded.token] * (len(tokens) > 1)
        return tokens, log_probs

    def _at(self, position: int) -> Recorded:
        return self._tokens[(position - len(self._prompt)) % len(self._tokens)]
