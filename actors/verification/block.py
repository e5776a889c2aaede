"""Block verification of a chain (arXiv 2403.10444): every prefix is tested as a whole, and the longest one kept stands.

The longest mean path of all rules for a single chain. With P_0 = 1, P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i)) and
S_i = sum over x of (P_i p_{i+1}(x) - q_{i+1}(x))+, the prefix of i tokens is kept with S_i / (S_i + 1 - P_i), the whole
chain with P_n; the next token follows (P_i p_{i+1} - q_{i+1})+, or p after the whole chain. All prefixes are tested: a
refusal ends nothing. Traversal verification says the same on a chain, bottom-up. Like that rule this one conditions on
every token it tested, so noise must not be used twice. Chains only; `compatibility.py` refuses trees at the start.
"""

from __future__ import annotations

from actors.verification.distributions import NO_MASS, Accepted, DrawnTree, Residual, TargetRow, child_distributions
from actors.verification.random_source import RandomSource


def verify_block(draft: DrawnTree, target_row: TargetRow, random_source: RandomSource) -> Accepted:
    """(path, next_token): `reach` is P_i, the probability that the path to node i is accepted."""
    tree = draft.tree
    assert tree.is_chain, "block verification is for chains"
    last = tree.num_draft_tokens
    accepted, weights = 0, None
    node, reach = 0, 1.0
    while reach > 0:
        residual, kept, below = Residual(target_row(node)), reach, 0.0
        if node < last:
            (drawn,) = child_distributions(draft, node, [node + 1])
            below = min(1.0, reach * residual.probability(drawn.token) / drawn.own)
            left = residual.subtract(drawn, reach)
            spare = left + (1.0 - reach)  # in this order, so that the root's chance is 1
            kept = left / spare if spare > NO_MASS else 1.0
        if node == 0 or random_source.accept(kept, node):
            accepted, weights = node, residual.weights
        node, reach = node + 1, below
    assert weights is not None, "the empty prefix is always kept"
    return tuple(range(1, accepted + 1)), random_source.sample(weights, accepted)
