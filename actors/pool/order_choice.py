"""Which of the orders that wait together are drafted for, where one of them delays the drafts of the others.

Each pass takes longer the more requests it has. The drafts of one call are answered together, so each takes as many
passes as the longest; where drafts are made pass by pass, each takes as many as it is long. An order is left out, and
its engine decodes plainly, where the other engines gain more tokens per second without it than that engine loses. One
order always stays. Where passes take the same time whatever is in them and drafts are equally long, none is left out.
Pure arithmetic; it must not know drafters or clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.policy.estimators import Ewma, LinearFit

LEAST_GAIN = 0.02
"""Share of the tokens per second of all that leaving an order out must bring: estimates are no better."""
MOST_LEFT_OUT = 16
"""Orders of an engine that are left out in a row; then one is drafted for, since its text may have changed."""
_KNOWN = 12.0
"""Weight of the observations of a kind from which on they decide."""
_STIFFNESS = 0.5
"""Variance of requests at which their measured cost weighs as much as the prior, that they are free."""


@dataclass(frozen=True, slots=True)
class WaitingOrder:
    """An order of `num_requests` drafts with `longest` tokens at most. Expected are `num_accepted` draft tokens in all,
    and `rest_s` seconds from the answer to the engine's next order; 0: not known."""

    num_requests: int
    longest: int
    num_accepted: float
    rest_s: float

    def tokens_per_s(self, draft_s: float) -> float:
        """Tokens per second of the engine while its drafts take `draft_s`."""
        return (self.num_requests + self.num_accepted) / (draft_s + self.rest_s)

    @property
    def plain_tokens_per_s(self) -> float:
        return self.num_requests / self.rest_s


@dataclass(slots=True)
class CallCost:
    """Measured seconds of passes, by the requests in them. `by_pass`: drafts are not answered together."""

    by_pass: bool = False
    _passes: LinearFit = field(default_factory=LinearFit)

    def update(self, num_requests: int, longest: int, seconds: float) -> None:
        """`longest` passes, of that many requests each, took so long."""
        self._passes.update(num_requests, seconds / longest)

    @property
    def is_known(self) -> bool:
        return self._passes.weight >= _KNOWN

    def seconds(self, orders: Sequence[WaitingOrder], own: WaitingOrder) -> float:
        """Seconds after which `own`, one of these orders that are drafted for together, is answered."""
        per_request = self._passes.slope(0.0, _STIFFNESS)
        num_requests = sum(order.num_requests for order in orders)
        pass_s = max(self._passes.at(num_requests, per_request), per_request * num_requests, 0.0)
        return (own.longest if self.by_pass else max(order.longest for order in orders)) * pass_s

    def tokens_per_s(self, orders: Sequence[WaitingOrder]) -> float:
        """Those of the engines of these orders of which enough is known."""
        return sum(order.tokens_per_s(self.seconds(orders, order)) for order in orders if order.rest_s)


@dataclass(slots=True)
class OrderHistory:
    """What is known of the orders of one engine."""

    acceptance: Ewma = field(default_factory=Ewma)
    """Accepted draft tokens per draft token."""
    rest_s: Ewma = field(default_factory=lambda: Ewma(outlier=2.0))
    num_left_out: int = 0
    """Its latest orders, in a row, that were left out."""
    num_passes: int = 0
    """Passes, or calls, for its drafts, and how many of them had drafts of other engines too."""
    num_merged_passes: int = 0

    def took_part(self, num_orders: int) -> None:
        """A pass for the drafts of so many engines had drafts of this one."""
        self.num_passes += 1
        self.num_merged_passes += num_orders > 1

    def accepted(self, num_drafted: int, num_accepted: int) -> None:
        """The verdict on a draft."""
        if num_drafted:
            self.acceptance.update(num_accepted / num_drafted, num_drafted)

    def order(self, budgets: Sequence[int]) -> WaitingOrder:
        is_known = self.acceptance.weight >= _KNOWN and self.rest_s.weight >= _KNOWN
        may_wait = is_known and self.num_left_out < MOST_LEFT_OUT
        num_accepted = self.acceptance.mean * sum(budgets)
        return WaitingOrder(len(budgets), max(budgets), num_accepted, self.rest_s.mean if may_wait else 0.0)


def choose_orders(orders: Sequence[WaitingOrder], cost: CallCost, num_begun: int = 0) -> list[int]:
    """Indices of the orders that are drafted for, ascending; those are left out first that gain least per row. An order
    of an engine of which too little is known stays, and counts as one that loses nothing by waiting; so do the first
    `num_begun`, whose drafts are being made."""
    chosen = list(range(len(orders)))
    if not cost.is_known:
        return chosen
    worst_first = sorted(
        (i for i in chosen[num_begun:] if orders[i].rest_s),
        key=lambda i: orders[i].num_accepted / (orders[i].num_requests * orders[i].longest),
    )
    for i in worst_first:
        others = [j for j in chosen if j != i]
        if not others:
            break
        together = [orders[j] for j in chosen]
        total, own = cost.tokens_per_s(together), orders[i].tokens_per_s(cost.seconds(together, orders[i]))
        gained = cost.tokens_per_s([orders[j] for j in others]) - (total - own)
        if gained - max(0.0, own - orders[i].plain_tokens_per_s) <= LEAST_GAIN * total:
            continue
        chosen = others
    return chosen
