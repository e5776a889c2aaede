"""How many tokens each level of a cascade hands up at a time: as configured, or as measured costs and acceptance say.

A level of length 0 passes on what the one beneath it says, so that lengths choose among all cascades that can be made
of the levels. `drafter.lengths=auto` predicts the walltime of each, at all lengths within the configured ones, from
what was measured, and takes the best for the next drafts. What was seldom seen is credited with as much as it may well
be worth (optimism in the face of uncertainty: Auer et al., Finite-time Analysis of the Multiarmed Bandit Problem,
2002), and what was seen long ago counts as seldom seen: so every level is tried, the hopeful ones often. Counts and
seconds only; knows no model and no token.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from actors.policy.cascade_model import CascadeCosts, acceptance_of, best_lengths
from actors.policy.estimators import LinearFit
from actors.protocol.messages import LevelWork, TokenTree

TARGET = -1
"""Who judges, where that is no level."""
WINDOW = 2
"""Drafts between two choices."""
_MEMORY = 0.99
"""Weight of the past per window: about the last 200 drafts count."""
_OPTIMISM = 1.0
"""Standard errors that acceptance is credited with."""
_LEAST_VARIANCE = 1.0
"""Of the tokens accepted of a draft, since acceptance comes in runs: a few equal outcomes are no certainty."""
_HICCUP = 2.0
"""A pass that takes longer than so many times the mean is counted as that: it is the machine's."""


class Lengths:
    """Tokens that each level hands up at a time."""

    lengths: tuple[int, ...]

    def source(self, level: int) -> int | None:
        """The level whose tokens come from beneath this one: the next that drafts any."""
        return next((below for below in reversed(range(level)) if self.lengths[below]), None)

    def longest(self, level: int) -> int:
        """Tokens that come from beneath this level at a time."""
        source = self.source(level)
        return 0 if source is None else self.lengths[source]


@dataclass(frozen=True, slots=True)
class FixedLengths(Lengths):
    """As configured; a level's tail is part of what it hands up."""

    lengths: tuple[int, ...]


@dataclass(slots=True)
class _Passes:
    """Decaying sums; what a first level that is a model does token by token counts as tokens."""

    count: float = 0.0
    seconds: float = 0.0

    def update(self, count: float, seconds: float) -> None:
        if self.count:
            seconds = min(seconds, _HICCUP * count * self.seconds / self.count)
        self.count += count
        self.seconds += seconds


@dataclass(slots=True)
class _Judged:
    """Decaying sums over the drafts of one level that one other judged; a lookup that found nothing was wrong."""

    drafts: float = 0.0
    tokens: float = 0.0
    accepted: float = 0.0
    squares: float = 0.0

    def update(self, num_tokens: int, num_accepted: int) -> None:
        self.drafts += 1
        self.tokens += num_tokens
        self.accepted += num_accepted
        self.squares += num_accepted**2

    def acceptance(self) -> float:
        """As much as it may well be."""
        length, mean = self.tokens / self.drafts, self.accepted / self.drafts
        variance = max(0.0, self.squares / self.drafts - mean**2) + _LEAST_VARIANCE
        hoped = mean + _OPTIMISM * (variance / self.drafts) ** 0.5
        return acceptance_of(min(hoped, length), length, 1)


@dataclass(slots=True)
class LengthControl(Lengths):
    """`names` and `bounds` of the levels, the cheapest first; `drafts_at_once` says that the first is a lookup.

    `agree` makes the choice of the first rank everybody's.
    """

    names: Sequence[str]
    bounds: tuple[int, ...]
    drafts_at_once: bool
    agree: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda lengths: lengths
    clock: Callable[[], float] = time.monotonic
    lengths: tuple[int, ...] = ()
    _passes: defaultdict[tuple[int, bool], _Passes] = field(default_factory=lambda: defaultdict(_Passes))
    _judged: defaultdict[tuple[int, int], _Judged] = field(default_factory=lambda: defaultdict(_Judged))
    _away: LinearFit = field(default_factory=LinearFit)
    _left_at: float | None = None
    _num_left: float = 0.0
    _num_orders: int = 0
    _prefixes: Mapping[int, int] = field(default_factory=dict)  # request -> tokens committed at the last order
    _guesses: defaultdict[int, list[tuple[int, int, TokenTree]]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.lengths = self.bounds

    def interrupted(self) -> None:
        """A request came: the next draft may have been waited for with nobody at work."""
        self._left_at = None

    def ordered(self, prefixes: Mapping[int, int]) -> None:
        """Drafts are wanted behind so many committed tokens: since the last were sent, the target has verified."""
        self._prefixes = prefixes
        self._guesses.clear()
        if self._left_at is not None:
            self._away.update(self._num_left, self.clock() - self._left_at)
        self._num_orders += 1
        if self._num_orders % WINDOW == 0:
            self.lengths = self.agree(self.choose())
            for sums in (*self._passes.values(), *self._judged.values()):
                for name in sums.__slots__:
                    setattr(sums, name, _MEMORY * getattr(sums, name))

    def answered(self, mean_draft_tokens: float) -> None:
        self._left_at, self._num_left = self.clock(), mean_draft_tokens

    def judged(self, level: int, judge: int, num_tokens: int, num_accepted: int) -> None:
        """A level was asked for a draft of `num_tokens`, and `judge`, a level or the target, took so many of them."""
        self._judged[level, judge].update(num_tokens, num_accepted)
        if self._by_token(level):
            self._passes[level, False].count += num_tokens

    def guessed(self, request_id: int, length: int, level: int, num_tokens: int, tree: TokenTree) -> None:
        """What a level that was asked for `num_tokens` said behind a text of some length."""
        if self._prefixes.get(request_id) == length:
            self._guesses[request_id].append((level, num_tokens, tree))

    def committed(self, request_id: int, token_ids: Sequence[int]) -> None:
        """What the target says shows, of every level that was asked at that text, what it would have made of it."""
        for level, num_tokens, tree in self._guesses.pop(request_id, ()):
            if token_ids:
                self._judged[level, TARGET].update(min(num_tokens, len(token_ids)), _depth_agreed(tree, token_ids))

    def update(self, work: Iterable[LevelWork]) -> None:
        """What was worked at the present lengths."""
        for one in work:
            if one.num_passes:
                level = self.names.index(one.level)
                if self._by_token(level):
                    self._passes[level, False].seconds += one.busy_s
                else:
                    self._passes[level, any(self.lengths[:level])].update(one.num_passes, one.busy_s)

    def choose(self) -> tuple[int, ...]:
        """The lengths that what was seen speaks for; as configured while a level has not worked yet."""
        costs = {key: passes.seconds / passes.count for key, passes in self._passes.items() if passes.count}
        for level in range(len(self.names)):
            one_of_both = costs.get((level, True), costs.get((level, False)))
            if one_of_both is None:
                return self.bounds
            costs.setdefault((level, True), one_of_both)
            costs.setdefault((level, False), one_of_both)
        acceptance = {key: judged.acceptance() for key, judged in self._judged.items() if judged.drafts}
        away = self._away
        slope = away.slope(0.0, 1.0)
        return best_lengths(
            CascadeCosts(costs, acceptance, self.drafts_at_once),
            lambda length: max(0.5 * away.mean_y, away.at(length, slope)),
            self.bounds,
        )

    def _by_token(self, level: int) -> bool:
        return level == 0 and not self.drafts_at_once


def _depth_agreed(tree: TokenTree, token_ids: Sequence[int]) -> int:
    """How many of the tokens a walk down the tree finds."""
    children, node = tree.children(), 0
    for depth, token in enumerate(token_ids):
        node = next((child for child in children[node] if tree.token_ids[child] == token), None)
        if node is None:
            return depth
    return len(token_ids)
