"""What passes of the target and of some of its layers cost, and what drafting with those layers then brings.

The times are measured, and on a busy machine they may contradict each other: a pass over more rows that takes less, or
parts that do not add up to the whole. What follows from them is bounded by what is possible, and the contradiction is
named. Knows no models and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from parallel.model.layer_plan import LayerPlan

_MOST_FALL = 0.2
"""Share of its time that a pass over more rows may seem to save by chance."""
_MOST_APART = 2.0
"""Factor by which the sum of the parts of a pass may differ from the whole: parts alone stay in the processor's cache,
and starting a kernel counts more in them."""


@dataclass(frozen=True, slots=True)
class Value:
    """What drafting with some layers brings: expected tokens per second over those of plain decoding at the best draft
    length, and what that follows from. `chances[i]` is how often the next i + 1 tokens are all accepted."""

    speedup: float
    num_draft_tokens: int
    chances: tuple[float, ...]
    pass_share: float


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Seconds of passes of the target over 0, 1, 2, ... draft tokens, never fewer for more of them; and over one row of
    embedding, norm and head, of one attention, and of one MLP."""

    verify_s: tuple[float, ...]
    ends_s: float
    attention_s: float
    mlp_s: float

    @staticmethod
    def of(verify_s: Sequence[float], ends_s: float, attention_s: float, mlp_s: float, num_layers: int) -> LayerCosts:
        """The costs in measured passes: of the target over drafts, and over one row without sublayers, with all
        attentions and with all MLPs."""
        one_attention, one_mlp = (max(0.0, seconds - ends_s) / num_layers for seconds in (attention_s, mlp_s))
        return LayerCosts(tuple(rising(verify_s)), ends_s, one_attention, one_mlp)

    def pass_s(self, layers: LayerPlan) -> float:
        """Seconds of a pass of these layers over one row: embedding, norm and head, and the sublayers that run. Their
        times were measured together, because single passes of a small model differ more by chance than by a sublayer.
        """
        return self.ends_s + len(layers.attention) * self.attention_s + len(layers.mlp) * self.mlp_s

    def value(self, chances: Sequence[float], layers: LayerPlan) -> Value:
        """What drafting with these layers brings if the first i + 1 tokens are all accepted with `chances[i]`. The
        speed-up with k draft tokens is below k + 1: a round gives at most so many tokens and takes at least a plain
        pass."""
        tokens, pass_s, plain_s = list(accumulate(chances, initial=1.0)), self.pass_s(layers), self.verify_s[0]
        speeds = [tokens[k] * plain_s / (k * pass_s + self.verify_s[k]) for k in range(1, len(tokens))]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        return Value(speeds[best], best + 1, tuple(chances), pass_s / plain_s)


def rising(times: Sequence[float]) -> list[float]:
    """The nearest times, by least squares, none of which is below the one before: neighbours that fall become their
    mean (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []  # sum and number of times
    for seconds in times:
        total, size = seconds, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / size:
            before, num_before = blocks.pop()
            total, size = before + total, num_before + size
        blocks.append((total, size))
    return [total / size for total, size in blocks for _ in range(size)]


def contradiction(verify_s: Sequence[float], whole_s: float) -> str:
    """How the measured times of passes over 1, 2, ... rows contradict each other, or the sum `whole_s` of the parts of
    the first; empty: they do not."""
    most_s = 0.0
    for num_rows, seconds in enumerate(verify_s, 1):
        if seconds < (1 - _MOST_FALL) * most_s:
            return (
                f"a pass of the target over {num_rows} rows took {seconds / most_s:.2f} of the time of one over fewer"
            )
        most_s = max(most_s, seconds)
    if not 1 / _MOST_APART <= (ratio := whole_s / verify_s[0]) <= _MOST_APART:
        return f"the parts of a pass of the target took {ratio:.2f} of the time of the whole"
    return ""
