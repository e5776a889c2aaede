"""What a cascade should bring: expected tokens and time per round from acceptance rates and pass costs.

Acceptance is taken to be independent from token to token (the usual simplification; real acceptance comes in runs).
`draft_s` follows this engine's cascade, not the published closed forms: a level reviews until it has what was ordered.

Source: Chen et al., Cascade Speculative Drafting (arXiv 2312.11462), section 3 and theorem 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from actors.protocol.messages import LevelWork


def tokens_per_round(acceptance: float, num_draft_tokens: int) -> float:
    """Expected tokens of a round, the target's own included: 1 + a + ... + a^k."""
    return sum(acceptance**i for i in range(num_draft_tokens + 1))


@dataclass(frozen=True, slots=True)
class LevelCost:
    """One level as measured: seconds of a pass, how likely the level above takes its token, tokens it hands up.

    A lookup, which needs one pass whatever the length, `drafts_at_once`.
    """

    pass_s: float
    acceptance: float
    num_draft_tokens: int
    drafts_at_once: bool = False


def measured_cost(work: LevelWork, num_draft_tokens: int, *, is_first: bool, drafts_at_once: bool) -> LevelCost:
    """The cost of a level from its counters; the first one has no level below it."""
    acceptance = acceptance_of(work.num_accepted_tokens, work.num_draft_tokens, work.num_drafts)
    if drafts_at_once:  # some of its passes found no draft
        acceptance *= min(1.0, work.num_drafts / work.num_passes)
    num_passes = work.num_draft_tokens if is_first and not drafts_at_once else work.num_passes
    return LevelCost(work.busy_s / num_passes, acceptance, num_draft_tokens, drafts_at_once)


def draft_s(levels: Sequence[LevelCost], num_draft_tokens: int) -> float:
    """Expected seconds that a cascade, the cheapest level first, takes for a draft of so many tokens."""
    first = levels[0]
    seconds = _alone(first.pass_s, num_draft_tokens, at_once=first.drafts_at_once)
    for below, this in pairwise(levels):
        seconds = _reviewing(this.pass_s, below.acceptance, below.num_draft_tokens, seconds, num_draft_tokens)
    return seconds[num_draft_tokens]


def tokens_per_s(levels: Sequence[LevelCost], verify_s: float) -> float:
    """Expected speed when drafting and verifying take turns; the last level's acceptance is the target's of it."""
    length = levels[-1].num_draft_tokens if levels else 0
    acceptance = levels[-1].acceptance if levels else 0.0
    return tokens_per_round(acceptance, length) / (verify_s + (draft_s(levels, length) if levels else 0.0))


UNSEEN = 0.9
"""Acceptance that is assumed for a level before it was measured: high enough for a trial if its passes are cheap."""


@dataclass(frozen=True, slots=True)
class CascadeCosts:
    """Costs and acceptance of levels that can be combined to a cascade; level 0 is the cheapest.

    `pass_s[level, reviews]`: seconds of a pass of a level; a level that reviews the drafts of another feeds several
    rows. For the first level it is seconds per token, or per draft if it `drafts_at_once`. `acceptance[level, above]`:
    probability that a token of a level is accepted by the level above, or by the target (-1); `UNSEEN` where missing.
    """

    pass_s: Mapping[tuple[int, bool], float]
    acceptance: Mapping[tuple[int, int], float]
    drafts_at_once: bool


def best_lengths(costs: CascadeCosts, verify_s: Callable[[int], float], bounds: Sequence[int]) -> tuple[int, ...]:
    """The fastest draft length of every level, at most `bounds`, by exhaustive search; 0 leaves a level out.

    At least one level drafts: whether to speculate at all is decided elsewhere. `verify_s(length)` is the seconds from
    one draft of this length to the next, the target's pass included.
    """
    best, best_speed = tuple(bounds), 0.0
    for level in range(len(bounds)):
        rate = costs.acceptance.get((level, -1), UNSEEN)
        for lengths, seconds in _drafting(costs, level, bounds):
            tokens = 1.0
            for length in range(1, bounds[level] + 1):
                tokens += rate**length
                speed = tokens / (verify_s(length) + seconds[length])
                if speed > best_speed and length > max(lengths, default=0):
                    best, best_speed = (*lengths, length, *[0] * (len(bounds) - level - 1)), speed
    return best


def _drafting(costs: CascadeCosts, level: int, bounds: Sequence[int]) -> Iterator[tuple[tuple[int, ...], list[float]]]:
    """Every way to draft up to a level: lengths of the levels below, and seconds for 0, 1, 2, ... tokens of its own."""
    at_once = level == 0 and costs.drafts_at_once
    yield (0,) * level, _alone(costs.pass_s[level, False], bounds[level], at_once=at_once)
    for below in range(level):
        rate = costs.acceptance.get((below, level), UNSEEN)
        for lengths, seconds in _drafting(costs, below, bounds):
            for handed in range(1, min(bounds[below], bounds[level] - 1) + 1):
                if handed > max(lengths, default=0):
                    drafting = _reviewing(costs.pass_s[level, True], rate, handed, seconds, bounds[level])
                    yield (*lengths, handed, *[0] * (level - below - 1)), drafting


def _alone(pass_s: float, longest: int, *, at_once: bool) -> list[float]:
    """Seconds for drafts of 0 to `longest` tokens by a level that drafts alone."""
    return [pass_s * (min(length, 1) if at_once else length) for length in range(longest + 1)]


def _reviewing(pass_s: float, rate: float, handed: int, below_s: Sequence[float], longest: int) -> list[float]:
    """Expected seconds for drafts of 0 to `longest` tokens by reviews of `handed` tokens that are taken with `rate`."""
    seconds = [0.0]
    for length in range(1, longest + 1):
        asked = min(handed, length - 1)
        total, chance = pass_s + below_s[asked], 1.0
        for accepted in range(asked):
            total += chance * (1 - rate) * seconds[length - accepted - 1]
            chance *= rate
        seconds.append(total + chance * seconds[length - asked - 1])
    return seconds


def acceptance_of(num_accepted: float, num_draft_tokens: float, num_drafts: float) -> float:
    """The acceptance per token that gives this mean number of accepted tokens, if it is the same at every position."""
    length, mean = num_draft_tokens / num_drafts, num_accepted / num_drafts
    low, high = 0.0, 1.0
    for _ in range(30):
        rate = (low + high) / 2
        expected = length if rate == 1 else rate * (1 - rate**length) / (1 - rate)
        low, high = (rate, high) if expected < mean else (low, rate)
    return high
