"""`strategy=cape`: a chain of the likeliest tokens, with the more siblings at a position the less sure the model is.

Siblings are leaves: only the likeliest token is fed. Which tokens are offered depends on their probabilities: exact
only for draws that are not tested by ratio. Source: CaPE, confidence-aware proposal expansion (arXiv 2402.02082).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from actors.drafters.model.tree_growth import Candidate, GrowingTree, StaticGrowth

WIDTHS = ((0.3, 7), (0.6, 5), (0.8, 3), (1.0, 1))
"""Children by the probability of the likeliest one, up to which each number holds: those of the paper."""
WIDEST = WIDTHS[0][1]


class ConfidenceGrowth(StaticGrowth):
    """`depth` positions; siblings are cut so that the chain has room in the budget first."""

    def __init__(self, depth: int) -> None:
        super().__init__([WIDEST] * depth)

    def max_fed(self, budget: int) -> int:
        return self.max_depth(budget) - 1

    def extend(self, tree: GrowingTree, candidates: Sequence[Candidate], budget: int) -> list[int]:
        if not candidates:
            return []
        level = tree.depth(candidates[0].parent)
        confidence = math.exp(candidates[0].log_prob)
        wanted = next((width for limit, width in WIDTHS if confidence <= limit), 1)
        left = budget + 1 - len(tree.token_ids) - (self.max_depth(budget) - level - 1)
        added = [tree.add(candidate) for candidate in candidates[: min(wanted, left)]]
        return self._unless_last(tree, added[:1], budget)
