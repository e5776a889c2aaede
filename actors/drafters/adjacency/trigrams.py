"""The tri-gram table of `drafter=aded`: for a pair of tokens, weights of the tokens that may follow it.

Weights come from the target's distributions and from the tokens it emitted. Knows tokens and weights, not requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from actors.protocol.messages import TopTokens

NUDGE = 0.04
"""Added to the weight of a tri-gram of the latest tokens whenever they are observed; as published."""
HEAVIEST = 3.0
"""Weights grow no further; as published."""
WINDOW = 16
"""Latest tokens whose tri-grams are nudged; as published."""

Pair = tuple[int, int]


class TrigramTable:
    """Keeps at most `capacity` pairs, the one that was not changed for longest dropped first, with `width` followers
    each."""

    def __init__(self, capacity: int, width: int) -> None:
        self._capacity = capacity
        self._width = width
        self._weights: dict[Pair, dict[int, float]] = {}  # in the order of their last change
        self._ranked: dict[Pair, list[tuple[int, float]]] = {}

    def __len__(self) -> int:
        return len(self._weights)

    def copy(self) -> TrigramTable:
        """The same weights, which then change by themselves."""
        other = TrigramTable(self._capacity, self._width)
        other._weights = {pair: dict(weights) for pair, weights in self._weights.items()}
        return other

    def weight(self, pair: Pair, token: int) -> float:
        """The weight of one tri-gram."""
        return self._weights.get(pair, {}).get(token, 0.0)

    def followers(self, pair: Pair) -> list[tuple[int, float]]:
        """(token, share of the weight) after this pair, the heaviest first, of equals the smaller token.

        Weights below one in sum are probabilities as they stand: the rest belongs to tokens that the table lacks.
        """
        ranked = self._ranked.get(pair)
        if ranked is None:
            weights = self._weights.get(pair)
            if weights is None:
                return []
            total = max(1.0, sum(weights.values()))
            shares = [(token, weight / total) for token, weight in weights.items()]
            self._ranked[pair] = ranked = sorted(shares, key=lambda one: (-one[1], one[0]))[: self._width]
        return ranked

    def nudge(self, token_ids: list[int]) -> None:
        """Raise the weights of the tri-grams of these tokens."""
        for before, last, token in zip(token_ids, token_ids[1:], token_ids[2:], strict=False):
            weights = self._changed((before, last))
            weights[token] = min(HEAVIEST, weights.get(token, 0.0) + NUDGE)
            if len(weights) > 2 * self._width:
                self._weights[before, last] = dict(sorted(weights.items(), key=lambda one: -one[1])[: self._width])

    def count(self, corpus: Iterable[Sequence[int]]) -> None:
        """Enter the share of each follower of the pairs of a corpus."""
        counts: dict[Pair, Counter[int]] = {}
        for token_ids in corpus:
            for before, last, token in zip(token_ids, token_ids[1:], token_ids[2:], strict=False):
                counts.setdefault((before, last), Counter())[token] += 1
        for pair, followers in counts.items():
            total = followers.total()
            self._changed(pair).update((token, num / total) for token, num in followers.most_common(self._width))

    def learn(self, top_tokens: TopTokens) -> None:
        """The pair of each row keeps the target's likeliest tokens, each with the mean of its old weight and its
        probability; a token that had no weight gets its probability."""
        k = min(top_tokens.k, self._width)
        contexts = np.frombuffer(top_tokens.contexts, np.int32).reshape(-1, 2).tolist()
        token_ids = np.frombuffer(top_tokens.token_ids, np.int32).reshape(-1, top_tokens.k)[:, :k].tolist()
        probs = np.frombuffer(top_tokens.probs, np.float32).reshape(-1, top_tokens.k)[:, :k].tolist()
        for (before, last), tokens, row in zip(contexts, token_ids, probs, strict=True):
            if before >= 0:
                weights = self._changed((before, last))
                learned = [(token, (weights.get(token, p) + p) / 2) for token, p in zip(tokens, row, strict=True)]
                weights.clear()
                weights.update(learned)

    def _changed(self, pair: Pair) -> dict[int, float]:
        """The weights of a pair that is about to change, now the latest changed."""
        weights = self._weights.pop(pair, None)
        if weights is None:
            weights = {}
            if len(self._weights) >= self._capacity:
                oldest = next(iter(self._weights))
                del self._weights[oldest]
                self._ranked.pop(oldest, None)
        self._weights[pair] = weights
        self._ranked.pop(pair, None)
        return weights
