"""Optimal transport for k independent drafts (SpecTr, arXiv 2310.15141): of all exact rules, the most often accepted.

The optimum is a linear program over V^(k+1) variables. Independent drafts allow a closed form. A draft token is
selected by a law that depends on the k drafts, then tested alone (the decomposition of arXiv 2410.18234). Selected laws
are those that give no set H of tokens more than the chance 1 - (1 - q(H))^k that a draft is in H. That chance is a
concave function of q(H), so only sets of the tokens of largest p / q can bind (arXiv 2502.18779), and the law
q * clip(p / q, low, high) loses the least. It is made by a mixture of orders: either the first draft in the order of
drawing is selected, or one of the tokens of large p / q if there is one, and again so within these or within the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actors.verification.distributions import NO_MASS, Accepted, ChildDistribution, DrawnTree, TargetRow, walk_down
from actors.verification.random_source import RandomSource


def verify_transport(draft: DrawnTree, target_row: TargetRow, random_source: RandomSource) -> Accepted:
    """(path, next_token): at each node at most one child is accepted, as often as any exact rule can."""

    def test(target: np.ndarray, children: Sequence[ChildDistribution]) -> int | np.ndarray:
        if not children:
            return target
        selection = Selection(target, children[0], len(children))
        chances = selection.accepted([child.token for child in children])
        refused = 1.0  # the chance that no child was accepted so far
        for child, chance in zip(children, chances, strict=True):
            if chance > 0 and random_source.accept(min(1.0, chance / refused), child.node):
                return child.node
            refused -= chance
        return selection.residual(target)

    return walk_down(draft, target_row, random_source, test)


class Selection:
    """Which of k independent draft tokens is selected, by what law, and how often it is accepted.

    Tokens are sorted by p / q, the largest first. `_blocks` are the mixtures: (start, middle, end, share) selects with
    chance `share` the first draft of the tokens from start to end, else one of those before `middle`, if there is one.
    """

    def __init__(self, target: np.ndarray, draft: ChildDistribution, num_draws: int) -> None:
        drawn = draft.probs > 0
        token_ids, probs = draft.token_ids[drawn], draft.probs[drawn]
        order = np.argsort(-target[token_ids] / probs, kind="stable")
        self._token_ids, self._probs = token_ids[order], probs[order]
        self._target = target[self._token_ids]
        self._left = np.append(np.cumsum(self._probs[::-1])[::-1], 0.0)  # mass of q from each token on
        self._missed = (self._left / self._left[0]) ** num_draws  # the chance that all drafts are there
        self._blocks: dict[tuple[int, int], tuple[int, float]] = {}
        self._law = np.zeros(len(probs))
        self._build(self._best_law())

    def _best_law(self) -> np.ndarray:
        """q * clip(p / q, low, high): the selected law that has the most in common with the target's."""
        below = np.append(0.0, np.cumsum(self._target))  # mass of p before each token
        last = len(self._probs)
        cut = int(np.argmin(1.0 - self._missed + below[last] - below))
        before, after = np.arange(1, cut + 1), np.arange(cut, last)
        law = self._target.copy()
        if cut > 0:  # drafts of the first `cut` tokens are selected whenever there are any
            # mass of q before each: of tokens that have hardly any, the difference of what is left would be 0
            drawn = np.cumsum(self._probs[:cut])
            high = ((1.0 - self._missed[cut] - below[cut] + below[before]) / drawn).max()
            law[:cut] = np.minimum(law[:cut], high * self._probs[:cut])
        if cut < last:  # the rest has to take what is selected otherwise
            low = ((self._missed[cut] - below[after] + below[cut]) / self._left[after]).min()
            law[cut:] = np.maximum(law[cut:], low * self._probs[cut:])
        return law

    def _build(self, law: np.ndarray) -> None:
        """Make the mixtures for `law`, and note the law that they have, which rounding may move."""
        pending = [(0, len(law), 1.0, law)]
        while pending:
            start, end, chance, wanted = pending.pop()
            at, own = np.arange(start + 1, end), self._probs[start:end]
            height = (self._missed[start] - self._missed[end]) / (self._left[start] - self._left[end])
            gain = self._missed[start] - self._missed[at] - height * (self._left[start] - self._left[at])
            excess = np.cumsum(wanted)[:-1] - height * (self._left[start] - self._left[at])
            split, steep = start, 0.0
            if (possible := np.flatnonzero(gain > NO_MASS)).size:
                best = possible[np.argmax(excess[possible] / gain[possible])]
                split, steep = int(at[best]), min(1.0, float(excess[best] / gain[best]))
            if steep <= NO_MASS:
                split, steep = start, 0.0
            self._blocks[start, end] = split, 1.0 - steep
            self._law[start:end] += chance * (1.0 - steep) * height * own
            if steep:
                steeper = height * own + (wanted - height * own) / steep
                pending.append((start, split, chance * steep, steeper[: split - start]))
                pending.append((split, end, chance * steep, steeper[split - start :]))

    def accepted(self, tokens: Sequence[int]) -> list[float]:
        """The chance of each drawn token, in the order of drawing, to be the one that is selected and accepted."""
        place = {int(token): i for i, token in enumerate(self._token_ids)}
        nowhere = len(self._probs)  # of a greedy request the likeliest tokens are drafted, all but one with q = 0
        places = [place.get(token, nowhere) for token in tokens]
        chances = [0.0] * len(tokens)
        start, end, chance = 0, len(self._probs), float(min(places) < nowhere)
        while chance > 0:
            split, share = self._blocks[start, end]
            first = next(i for i, at in enumerate(places) if start <= at < end)
            chances[first] += chance * share
            chance *= 1.0 - share
            start, end = (start, split) if any(start <= at < split for at in places) else (split, end)
        kept = np.minimum(self._target, self._law)
        return [
            float(chance * kept[at] / self._law[at]) if chance else 0.0
            for chance, at in zip(chances, places, strict=True)
        ]

    def residual(self, target: np.ndarray) -> np.ndarray:
        """What is drawn from if no token was accepted, [V] unnormalised: p less the selected law."""
        residual = target.copy()
        residual[self._token_ids] = np.maximum(self._target - self._law, 0.0)
        return residual if residual.sum() > NO_MASS else target
