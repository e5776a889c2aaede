"""Proposals judged by a ratio test, for a target or for a level of a cascade. Loaded where such a rule is chosen.

A rule needs the distributions that the draft tokens were drawn from, and the target's at the nodes that it visits.
Knows logits and one rule, no pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from actors.protocol.messages import SamplingKind, SparseDistribution
from actors.sampling.draft_sampling import truncate_distribution
from actors.sampling.logits import LogitRows, is_greedy, process_batch, process_logits
from actors.verification.distributions import DrawnTree
from actors.verification.random_source import HashRandomSource, RandomSource
from actors.verification.rules import RULES
from actors.verification.target_rows import DeferredDraw, TargetRows, renumbered

if TYPE_CHECKING:
    from actors.verification.verifier import VerifyInput

Judged = tuple[tuple[int, ...], int, tuple[SparseDistribution, ...]]
"""Accepted path, next token, and the cut distributions of all these tokens."""


def _random_source(verified: VerifyInput) -> HashRandomSource:
    return HashRandomSource(verified.sampling.seed, len(verified.token_ids))


class RatioTest:
    """`law_size`: the likeliest tokens that are kept of each distribution at a level; None for the target."""

    def __init__(self, rule: str, eos_token_ids: Sequence[int], law_size: int | None) -> None:
        self._rule = rule
        self._eos_token_ids = eos_token_ids
        self._law_size = law_size

    def judge(
        self,
        inputs: Sequence[VerifyInput],
        rows: Sequence[LogitRows],
        parts: Sequence[slice],
        logits: Tensor,
        make_random_source: Callable[[VerifyInput], RandomSource] | None,
    ) -> list[Judged]:
        """`parts`: the rows of `logits` that are each input's; `make_random_source` gives a level its randomness."""
        if self._law_size is None:
            assert make_random_source is None, "only levels bring a source of their own"
            return self._whole(inputs, rows, parts, logits)
        make_random_source = make_random_source or _random_source
        return [
            self._cut(one, own, logits[part], self._law_size, make_random_source(one))
            for one, own, part in zip(inputs, rows, parts, strict=True)
        ]

    def _whole(
        self, inputs: Sequence[VerifyInput], rows: Sequence[LogitRows], parts: Sequence[slice], logits: Tensor
    ) -> list[Judged]:
        """Tests against whole distributions, which take two reads by the host on a GPU."""
        drafts, names = zip(*[renumbered(_drawn(one)) for one in inputs], strict=True)
        greedy = [is_greedy(own.params) for own in rows for _ in own.tree.parents]
        scores = process_batch(logits, rows, self._eos_token_ids)
        target = TargetRows(scores, greedy, [*chain.from_iterable(names)])
        paths, ends, draws = list[tuple[int, ...]](), list[int](), list[DeferredDraw]()
        for one, draft, part in zip(inputs, drafts, parts, strict=True):
            draw = DeferredDraw(_random_source(one))
            row_of = partial(lambda start, node: target.row(start + node), part.start)
            paths.append(RULES[self._rule](draft, row_of, draw)[0])
            ends.append(part.start + draw.node)
            draws.append(draw)
        tokens = target.draw(ends, [draw.weights for draw in draws], [draw.mark() for draw in draws])
        return [(path, token, ()) for path, token in zip(paths, tokens, strict=True)]

    def _cut(
        self, verified: VerifyInput, rows: LogitRows, logits: Tensor, law_size: int, random_source: RandomSource
    ) -> Judged:
        """The same for a level, whose distributions are cut."""
        scores = process_logits(logits, rows, self._eos_token_ids)
        cut: dict[int, SparseDistribution] = {}

        def target_row(node: int) -> np.ndarray:  # on demand: most rules visit few nodes of a tree
            if node not in cut:
                cut[node] = truncate_distribution(scores[node : node + 1], rows.params, law_size)
            row = np.zeros(scores.shape[-1])
            row[list(cut[node].token_ids)] = cut[node].probs
            return row

        path, next_token = RULES[self._rule](_drawn(verified), target_row, random_source)
        return path, next_token, tuple(cut[node] for node in (0, *path))


def _drawn(verified: VerifyInput) -> DrawnTree:
    """The draft of an input; one without a proposal has a root alone."""
    proposal = verified.proposal
    if proposal is None:
        return DrawnTree(verified.tree, (SamplingKind.ROOT,), (None,))
    return DrawnTree(proposal.tree, proposal.sampling_kinds, proposal.distributions)
