"""`length_rule=priced`: of the ordered chains of a batch only tokens that are worth a row of the pass are proposed.

The coordinator knows what a row of the target's pass costs, and says with its orders how likely a token must be to be
accepted for it (`MeasuredCosts.least_chance`); the drafter knows how likely each is. A chain's tokens are accepted with
ever smaller chances, so one bound for all requests leaves the globally best beginnings of all chains, as many as pay:
TETRIS (arXiv 2502.15197) with the budget of SmartSpec (2406.14066). A chain whose next token cannot be worth it is
drafted no further. The token at which a chain ends is dropped, so this is for the coupled rule alone, which is exact
for any draft; the ratio rules need it to stay (`chain_rules.py`).

Chances follow from the lead of the token over the second one, in nats, noise included: a race that was won by much is
won in the target's scores too. Fitted to the verdicts, for greedy and sampled requests apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.drafters.model.chain_rules import ChainRule

_PRIOR = (1.7, 1.2)
"""Log-odds at a lead of a nat, and what a unit of its logarithm adds: about what the bundled pair has."""
_STIFFNESS = 2.0
"""Curvature of the prior, as of some ten tokens: what is never tested drifts back to it, and is tested again."""
_MEMORY, _ROUND_MEMORY = 0.998, 0.9
"""Share that the past keeps for every token tested, and at least in a round."""
_LEAST_LEAD, _MOST_LEAD = 0.03, 20.0
_LARGEST_STEP = 0.5


def _log_lead(lead: float) -> float:
    return math.log(min(max(lead, 0.0), _MOST_LEAD) + _LEAST_LEAD)


class LeadChances:
    """P(a token is accepted, given that those before it are) by its lead: logistic in the lead's logarithm.

    A Newton step for each batch of verdicts, with a curvature that forgets.
    """

    def __init__(self) -> None:
        self.weights = np.array(_PRIOR)
        self._curvature = np.zeros((2, 2))
        self._tested: list[tuple[float, bool]] = []

    def of(self, lead: float) -> float:
        return 1 / (1 + math.exp(-(self.weights[0] + self.weights[1] * _log_lead(lead))))

    def add(self, lead: float, *, kept: bool) -> None:
        """The target tested such a token."""
        self._tested.append((_log_lead(lead), kept))

    def fit(self) -> None:
        """Take in what was added since the last call."""
        if not self._tested:
            return
        tested = np.array(self._tested, dtype=float)
        self._tested = []
        rows = np.stack([np.ones(len(tested)), tested[:, 0]], axis=1)
        chances = 1 / (1 + np.exp(-rows @ self.weights))
        memory = max(_MEMORY ** len(tested), _ROUND_MEMORY)
        stiffness = _STIFFNESS * np.eye(2)
        self._curvature = memory * self._curvature + (rows * (chances * (1 - chances))[:, None]).T @ rows
        slope = rows.T @ (tested[:, 1] - chances) + (1 - memory) * stiffness @ (np.array(_PRIOR) - self.weights)
        step = np.linalg.solve(self._curvature + stiffness, slope)
        self.weights = self.weights + np.clip(step, -_LARGEST_STEP, _LARGEST_STEP)


@dataclass(slots=True)
class _Chain:
    """The last draft of a request, and how many of its tokens are proposed."""

    samples: bool
    least_chance: float
    leads: Sequence[float] = ()
    num_kept: int = 0


class PricedRule(ChainRule[_Chain]):
    """Ends a chain with the first token that is accepted, with all before it, less often than pays, and drops it."""

    reads_leads = True

    def __init__(self) -> None:
        super().__init__()
        self.chances = {False: LeadChances(), True: LeadChances()}
        """Those of greedy and of sampled requests."""

    def begin(self, request_id: int, *, samples: bool, least_chance: float) -> None:
        self.chances[samples].fit()
        self._requests[request_id] = _Chain(samples, least_chance)

    def continues(self, request_id: int, step: int, log_probs: Sequence[float]) -> bool:
        """Given the leads of the tokens."""
        chain, leads = self._requests[request_id], log_probs
        chance_of = self.chances[chain.samples].of
        goes_on = math.prod([chance_of(lead) for lead in leads]) >= chain.least_chance
        chain.leads, chain.num_kept = tuple(leads), len(leads) - (not goes_on)
        return goes_on

    def num_dropped(self, request_id: int) -> int:
        chain = self._requests[request_id]
        return len(chain.leads) - chain.num_kept

    def update(self, request_id: int, num_accepted: int) -> None:
        chain = self._requests.pop(request_id, None)
        if chain is None:
            return
        for place, lead in enumerate(chain.leads[: min(num_accepted + 1, chain.num_kept)]):
            self.chances[chain.samples].add(lead, kept=place < num_accepted)
