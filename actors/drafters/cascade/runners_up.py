"""The runners-up of a level's own tokens: what makes the proposal of a level that verifies a tree.

A level has computed its distribution at every node that it accepted. Beside the token that came out there, `width - 1`
more are taken from the same distribution as siblings, leaves of the tree: the next-best under the noise shared with the
target, or, for a ratio rule, drawn with numbers of their own after the first token. As that token follows the level's
distribution whatever the child drafted, siblings drawn so are draws without replacement in this order (independent
ones for k-SEQ), which every rule but block verification is exact for. How many there are never depends on a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from actors.sampling.logits import LogitRows, process_logits, top_children
from actors.verification.random_source import RandomSource
from actors.verification.verifier import VerifyInput, VerifyResult


def best_runners_up(
    logits: Tensor, verified: VerifyInput, result: VerifyResult, eos_token_ids: Sequence[int], width: int
) -> list[tuple[int, ...]]:
    """The `width - 1` tokens that rank behind each token of the result; `logits` [n, V] are those of all nodes."""
    nodes = (0, *result.path)
    rows = LogitRows(verified.sampling, verified.prompt_len, verified.token_ids, verified.tree, nodes)
    scores = process_logits(logits[list(nodes)], rows, eos_token_ids)
    width = min(width, scores.shape[-1])
    ranked = top_children(scores, [verified.sampling] * len(nodes), rows.positions(), width)[0].tolist()
    own = (*(verified.tree.token_ids[node] for node in result.path), result.next_token)
    return [
        tuple(other for other in row if other != token)[: width - 1] for row, token in zip(ranked, own, strict=True)
    ]


def drawn_runners_up(
    verified: VerifyInput, result: VerifyResult, random_source: RandomSource, width: int, *, independent: bool
) -> list[tuple[int, ...]]:
    """The same drawn from the distributions of the result, with numbers that the rule has not used."""
    own = (*(verified.tree.token_ids[node] for node in result.path), result.next_token)
    number = len(verified.tree.parents)  # the rule used the numbers below
    drawn = []
    for token, distribution in zip(own, result.distributions, strict=True):
        siblings: list[int] = []
        weights = np.array(distribution.probs)
        for _ in range(width - 1):
            if not independent:
                weights[distribution.token_ids.index(siblings[-1] if siblings else token)] = 0.0
            if not weights.sum() > 0:
                break
            siblings.append(distribution.token_ids[random_source.sample(weights, number)])
            number += 1
        drawn.append(tuple(siblings))
    return drawn


def num_own(num_nodes: int, width: int) -> int:
    """Tokens on the path of a proposal of so many nodes, each with up to `width - 1` siblings."""
    return -(-num_nodes // width)


def with_siblings(
    token_ids: list[int], parents: list[int], num_path: int, siblings: Sequence[tuple[int, ...]], room: int
) -> int:
    """Append the siblings of the first `num_path` tokens below the root, level by level; returns how many fitted."""
    before = len(token_ids)
    for node, others in zip(range(num_path), siblings, strict=False):
        for token in others[: room - (len(token_ids) - before)]:
            token_ids.append(token)
            parents.append(node)
    return len(token_ids) - before
