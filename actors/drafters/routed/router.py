"""Which member a prompt goes to: members are clusters of the prompts that came last, by their tokens.

A prompt is a vector of the square roots of its token counts, each weighed by how few of these prompts have the token,
and of length 1. Prompts are grouped by spherical k-means (Dhillon and Modha, 2001), anew with every one: from the
groups as they are, and from the prompts that are least like each other; the better grouping is kept, so that a topic
that is new soon has a member of its own. A group keeps the member that most of its prompts went to. Knows no drafter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

KEPT_PROMPTS = 64
"""Newest prompts, which the groups are made of."""
READ_TOKENS = 512
"""Last tokens of a prompt, which its vector counts."""
BUCKETS = 1024
"""Numbers of a vector; tokens share them."""
_ROUNDS = 5


class PromptRouter:
    """Groups prompts for `num_members` members."""

    def __init__(self, num_members: int) -> None:
        self._num_members = num_members
        self._counts: deque[np.ndarray] = deque(maxlen=KEPT_PROMPTS)
        self._members: deque[int] = deque(maxlen=KEPT_PROMPTS)

    def route(self, token_ids: Sequence[int]) -> int:
        """The member of a prompt, which counts from now on."""
        buckets = np.asarray(token_ids[-READ_TOKENS:], dtype=np.int64) % BUCKETS
        self._counts.append(np.bincount(buckets, minlength=BUCKETS).astype(np.float32))
        self._members.append(-1)  # the newest has none yet
        groups = self._group(_vectors(np.stack(self._counts)))
        member = self._members_of(groups)[groups[-1]]
        self._members[-1] = member
        return member

    def _group(self, vectors: np.ndarray) -> np.ndarray:
        """The group of every prompt, the better one of two."""
        known = np.array(self._members)
        starts = [_farthest(vectors, min(self._num_members, len(vectors)))]
        if (known >= 0).any():
            starts.append(np.stack([vectors[known == member].sum(0) for member in np.unique(known[known >= 0])]))
        return max((_grouped(vectors, start) for start in starts), key=lambda found: found[0])[1]

    def _members_of(self, groups: np.ndarray) -> dict[int, int]:
        """Group -> member: the one that most of its prompts went to, or for a new group one that is free."""
        known, left = np.array(self._members), set(range(self._num_members))
        shared = {
            (group, member): int(((groups == group) & (known == member)).sum())
            for group in set(groups.tolist())
            for member in left
        }
        found: dict[int, int] = {}
        for group, member in sorted(shared, key=lambda pair: (-shared[pair], *pair)):
            if group not in found and member in left:
                found[group] = member
                left.remove(member)
        return found


def _vectors(counts: np.ndarray) -> np.ndarray:
    """[prompts, buckets] -> of length 1 each."""
    rarity = np.log((1 + len(counts)) / (1 + (counts > 0).sum(0))) + 0.1
    weighed = np.sqrt(counts) * rarity
    return weighed / np.maximum(np.linalg.norm(weighed, axis=1, keepdims=True), 1e-12)


def _farthest(vectors: np.ndarray, count: int) -> np.ndarray:
    """So many prompts, each the least like those before it; the first is the least like the mean."""
    likeness = vectors @ vectors.mean(0)
    chosen: list[int] = []
    for _ in range(count):
        chosen.append(int(likeness.argmin()))
        own = vectors @ vectors[chosen[-1]]
        likeness = own if len(chosen) == 1 else np.maximum(likeness, own)
    return vectors[chosen]


def _grouped(vectors: np.ndarray, centres: np.ndarray) -> tuple[float, np.ndarray]:
    """How alike prompts and the centres of their groups are in all, and the groups."""
    groups = np.full(len(vectors), -1)
    for _ in range(_ROUNDS):
        centres = centres / np.maximum(np.linalg.norm(centres, axis=1, keepdims=True), 1e-12)
        likeness = vectors @ centres.T
        before, groups = groups, likeness.argmax(1)
        if (groups == before).all():
            break
        centres = np.stack([vectors[groups == group].sum(0) for group in range(len(centres))])
    return float(likeness.max(1).sum()), groups
