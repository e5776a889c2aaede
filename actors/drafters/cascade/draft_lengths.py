"""How many tokens each level of a cascade passes up at a time: as configured, or chosen from measured cost and
acceptance.

A level of length 0 forwards the drafts of the level below it, so a choice of lengths is a choice among all cascades
that can be made of the levels. `drafter.lengths=auto` predicts the wall time of each within the configured lengths and
takes the best for the next drafts. Acceptance that was observed seldom, or long ago, is credited with its standard
error (optimism in the face of uncertainty: Auer et al., Finite-time Analysis of the Multiarmed Bandit Problem, 2002),
so every level is tried now and then, and promising ones often. Counts and seconds only; knows no model and no token.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from actors.policy.cascade_model import CascadeCosts, acceptance_of, best_lengths
from actors.policy.estimators import OUTLIER, Ewma, LinearFit
from actors.protocol.messages import LevelWork, TokenTree

TARGET = -1
"""Stands for the target where a level's number is expected."""
WINDOW = 2
"""Drafts between two choices."""
_MEMORY = 0.99
"""Weight of the past per window: about the last 200 drafts count."""
_OPTIMISM = 1.0
"""Standard errors that acceptance is credited with."""
_LEAST_VARIANCE = 1.0
"""The least variance of a draft's accepted tokens: they come in runs, so a few equal outcomes are no certainty."""


@dataclass
class PassedLengths:
    """Tokens that each level passes up at a time, the cheapest level first; a level's tail is part of them."""

    lengths: tuple[int, ...]

    def source(self, level: int) -> int | None:
        """The level whose drafts this level receives: the next one below that drafts any tokens."""
        return next((below for below in reversed(range(level)) if self.lengths[below]), None)

    def longest(self, level: int) -> int:
        """Tokens that this level receives at a time, at most."""
        source = self.source(level)
        return 0 if source is None else self.lengths[source]


@dataclass(slots=True)
class _PassCost:
    """Decayed sums; a first level that is a model is counted by drafted tokens instead of passes."""

    count: float = 0.0
    seconds: float = 0.0

    def update(self, count: float, seconds: float) -> None:
        if self.count:
            seconds = min(seconds, OUTLIER * count * self.seconds / self.count)
        self.count += count
        self.seconds += seconds

    def decay(self) -> None:
        self.count *= _MEMORY
        self.seconds *= _MEMORY


def _mean() -> Ewma:
    return Ewma(memory=1.0)  # decays once per window, not per observation


@dataclass(slots=True)
class _Acceptance:
    """Tokens per draft of one level that one verifier was offered and accepted; an empty lookup counts as rejected."""

    tokens: Ewma = field(default_factory=_mean)
    accepted: Ewma = field(default_factory=_mean)
    squares: Ewma = field(default_factory=_mean)

    def update(self, num_tokens: int, num_accepted: int) -> None:
        self.tokens.update(num_tokens)
        self.accepted.update(num_accepted)
        self.squares.update(num_accepted**2)

    def decay(self) -> None:
        for mean in (self.tokens, self.accepted, self.squares):
            mean.decay(_MEMORY)

    def optimistic(self) -> float:
        """Acceptance per token, credited with the standard error of its measurement."""
        length, mean = self.tokens.mean, self.accepted.mean
        variance = max(0.0, self.squares.mean - mean**2) + _LEAST_VARIANCE
        credited = mean + _OPTIMISM * (variance / self.tokens.weight) ** 0.5
        return acceptance_of(min(credited, length), length, 1)


@dataclass(slots=True)
class LengthControl(PassedLengths):
    """Chooses lengths within the given ones; `names` of the levels, and `drafts_at_once`: the first is a lookup.

    `agree` returns rank 0's choice on every rank.
    """

    names: Sequence[str]
    drafts_at_once: bool
    agree: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda lengths: lengths
    clock: Callable[[], float] = time.monotonic
    bounds: tuple[int, ...] = field(init=False)
    _costs: defaultdict[tuple[int, bool], _PassCost] = field(default_factory=lambda: defaultdict(_PassCost))
    _acceptance: defaultdict[tuple[int, int], _Acceptance] = field(default_factory=lambda: defaultdict(_Acceptance))
    _target_s: LinearFit = field(default_factory=LinearFit)  # from sending drafts to the next orders, by draft length
    _sent_at: float | None = None
    _num_sent: float = 0.0
    _num_orders: int = 0
    _prefixes: Mapping[int, int] = field(default_factory=dict)  # request -> tokens committed at the last order
    _drafts: defaultdict[int, list[tuple[int, int, TokenTree]]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.bounds = self.lengths

    def request_opened(self) -> None:
        """A request arrived: the time until the next order may be idle time, so it is not measured."""
        self._sent_at = None

    def drafts_ordered(self, prefixes: Mapping[int, int]) -> None:
        """Drafts are ordered after so many committed tokens of each request; the target has verified the last ones."""
        self._prefixes = prefixes
        self._drafts.clear()
        if self._sent_at is not None:
            self._target_s.update(self._num_sent, self.clock() - self._sent_at)
        self._num_orders += 1
        if self._num_orders % WINDOW == 0:
            self.lengths = self.agree(self.choose())
            for estimate in (*self._costs.values(), *self._acceptance.values()):
                estimate.decay()

    def drafts_sent(self, mean_draft_tokens: float) -> None:
        """The ordered drafts leave for the target."""
        self._sent_at, self._num_sent = self.clock(), mean_draft_tokens

    def record_acceptance(self, level: int, verifier: int, num_tokens: int, num_accepted: int) -> None:
        """`verifier`, a level or the target, accepted so many of the `num_tokens` that it ordered from `level`."""
        self._acceptance[level, verifier].update(num_tokens, num_accepted)
        if self._is_by_token(level):
            self._costs[level, False].count += num_tokens

    def record_draft(self, request_id: int, length: int, level: int, num_tokens: int, tree: TokenTree) -> None:
        """The draft of a level that `num_tokens` were ordered from, after `length` tokens of text."""
        if self._prefixes.get(request_id) == length:
            self._drafts[request_id].append((level, num_tokens, tree))

    def record_commit(self, request_id: int, token_ids: Sequence[int]) -> None:
        """The target's own tokens show how many it would have accepted of every level's draft at the same text."""
        for level, num_tokens, tree in self._drafts.pop(request_id, ()):
            if token_ids:
                offered = min(num_tokens, len(token_ids))
                self._acceptance[level, TARGET].update(offered, tree.agreed_depth(token_ids))

    def record_work(self, work: Iterable[LevelWork]) -> None:
        """Passes and seconds of the levels at the present lengths."""
        for item in work:
            if item.num_passes:
                level = self.names.index(item.level)
                if self._is_by_token(level):
                    self._costs[level, False].seconds += item.busy_s
                else:
                    self._costs[level, any(self.lengths[:level])].update(item.num_passes, item.busy_s)

    def choose(self) -> tuple[int, ...]:
        """The lengths of the least predicted wall time per token; the configured ones while a level has not worked."""
        costs = {key: cost.seconds / cost.count for key, cost in self._costs.items() if cost.count}
        for level in range(len(self.names)):
            known = costs.get((level, True), costs.get((level, False)))
            if known is None:
                return self.bounds
            costs.setdefault((level, True), known)
            costs.setdefault((level, False), known)
        acceptance = {
            key: estimate.optimistic() for key, estimate in self._acceptance.items() if estimate.tokens.weight
        }
        slope = self._target_s.slope(0.0, 1.0)
        return best_lengths(
            CascadeCosts(costs, acceptance, self.drafts_at_once),
            lambda length: max(0.5 * self._target_s.mean_y, self._target_s.at(length, slope)),
            self.bounds,
        )

    def _is_by_token(self, level: int) -> bool:
        return level == 0 and not self.drafts_at_once
