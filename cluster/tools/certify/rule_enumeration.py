# ruff: noqa: ARG002  # a scripted source takes the arguments of the real one
"""Exact enumeration of a ratio test: every draft and every random choice, against the target's distribution.

The rule under test is the production function; only its random source is replaced, by one that takes both sides of
every decision with their exact weights. The cost is exponential: for vocabularies of three or four tokens, small trees.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from actors.protocol.messages import SamplingKind, SparseDistribution, TokenTree
from actors.verification.distributions import TargetRow

ConditionalDistribution = Callable[[tuple[int, ...]], np.ndarray]
"""A toy model: the tokens after the committed prefix -> probabilities [V] of the next token."""

Rule = Callable[..., tuple[tuple[int, ...], int]]


@dataclass(frozen=True, slots=True)
class WeightedDraft:
    """One possible proposal and its probability, `weight`."""

    weight: float
    tree: TokenTree
    sampling_kinds: tuple[int, ...]
    distributions: tuple[SparseDistribution | None, ...]


@dataclass(frozen=True, slots=True)
class Emission:
    """Output of a rule: joint distribution of the first tokens, by token tuple, and mean number of accepted tokens."""

    joint: dict[tuple[int, ...], float]
    mean_accepted: float


# A subtree during enumeration: (token, its sampling kind, its own children) in test order.
_Children = tuple[tuple[int, SamplingKind, "_Children"], ...]


def enumerate_drafts(q: ConditionalDistribution, scheme: Sequence[Sequence[SamplingKind]]) -> Iterator[WeightedDraft]:
    """All trees in which every node of level i gets children drawn as `scheme[i]` says, in that order.

    The j-th child without randomness of its own (DETERMINISTIC or COUPLED) is the j-th likeliest token of q. Without
    replacement, an exhausted distribution yields fewer children.
    """
    for children, weight in _subtrees(q, scheme, ()):
        yield _flatten(q, children, weight)


def _subtrees(
    q: ConditionalDistribution, scheme: Sequence[Sequence[SamplingKind]], context: tuple[int, ...]
) -> Iterator[tuple[_Children, float]]:
    if not scheme:
        yield (), 1.0
        return
    row = q(context)
    for tokens, sampling_kinds, weight in _siblings(row, row, scheme[0], 0):
        below = [list(_subtrees(q, scheme[1:], (*context, token))) for token in tokens]
        for combination in itertools.product(*below):
            children = tuple(zip(tokens, sampling_kinds, (subtree for subtree, _ in combination), strict=False))
            yield children, weight * float(np.prod([part for _, part in combination]))


def _siblings(
    row: np.ndarray, remaining: np.ndarray, kinds: Sequence[SamplingKind], num_fixed: int
) -> Iterator[tuple[tuple[int, ...], tuple[SamplingKind, ...], float]]:
    """(tokens, sampling_kinds, probability) of the children of a node; `remaining` is `row` without drawn tokens."""
    if not kinds:
        yield (), (), 1.0
        return
    kind, rest = kinds[0], kinds[1:]
    if kind in (SamplingKind.DETERMINISTIC, SamplingKind.COUPLED):
        token = int(np.argsort(-row, kind="stable")[num_fixed])
        for tokens, sampling_kinds, weight in _siblings(row, remaining, rest, num_fixed + 1):
            yield (token, *tokens), (kind, *sampling_kinds), weight
        return
    distribution = row if kind == SamplingKind.IID else remaining
    if distribution.sum() == 0:
        yield from _siblings(row, remaining, rest, num_fixed)
        return
    for token in np.flatnonzero(distribution).tolist():
        left = remaining
        if kind == SamplingKind.WITHOUT_REPLACEMENT:
            left = remaining.copy()
            left[token] = 0.0
        for tokens, sampling_kinds, weight in _siblings(row, left, rest, num_fixed):
            yield (token, *tokens), (kind, *sampling_kinds), weight * float(distribution[token] / distribution.sum())


def _flatten(q: ConditionalDistribution, children: _Children, weight: float) -> WeightedDraft:
    token_ids, parents, sampling_kinds = [0], [-1], [SamplingKind.ROOT]
    contexts: list[tuple[int, ...]] = [()]
    level = [(0, children)]
    while level:
        below = []
        for parent, siblings in level:
            for token, kind, grandchildren in siblings:
                below.append((len(token_ids), grandchildren))
                token_ids.append(token)
                parents.append(parent)
                sampling_kinds.append(kind)
                contexts.append((*contexts[parent], token))
        level = below
    distributions: list[SparseDistribution | None] = [None] * len(token_ids)
    for parent, kind in zip(parents, sampling_kinds, strict=True):
        if kind in (SamplingKind.IID, SamplingKind.WITHOUT_REPLACEMENT) and distributions[parent] is None:
            row = q(contexts[parent])
            support = np.flatnonzero(row)
            distributions[parent] = SparseDistribution(tuple(support.tolist()), tuple(row[support].tolist()))
    return WeightedDraft(
        weight, TokenTree(tuple(token_ids), tuple(parents)), tuple(sampling_kinds), tuple(distributions)
    )


class _ScriptedSource:
    """A random source that replays a script of decisions and accepts at every decision after its end."""

    def __init__(self, script: list[bool]) -> None:
        self.script = script
        self.weight = 1.0
        self.next_distribution = np.empty(0)
        self._num_decided = 0

    def accept(self, probability: float, node: int) -> bool:
        if probability <= 0.0 or probability >= 1.0:
            return probability >= 1.0
        if self._num_decided == len(self.script):
            self.script.append(True)
        decision = self.script[self._num_decided]
        self._num_decided += 1
        self.weight *= probability if decision else 1.0 - probability
        return decision

    def sample(self, weights: np.ndarray, node: int) -> int:
        """The last draw of a verification: its distribution is kept, the token returned is not used."""
        self.next_distribution = weights / weights.sum()
        return 0


def explore(
    rule: Rule, draft: WeightedDraft, target_row: TargetRow
) -> Iterator[tuple[float, tuple[int, ...], np.ndarray]]:
    """(probability, path, distribution of the next token) for every sequence of decisions on one draft."""
    script: list[bool] = []
    while True:
        random_source = _ScriptedSource(script)
        path, _ = rule(draft.tree, draft.sampling_kinds, draft.distributions, target_row, random_source)
        yield random_source.weight, path, random_source.next_distribution
        while script and not script[-1]:
            script.pop()
        if not script:
            return
        script[-1] = False


def emission(rule: Rule, drafts: Iterable[WeightedDraft], p: ConditionalDistribution, length: int) -> Emission:
    """The exact joint distribution of the first `length` tokens of `rule`; shorter outcomes are continued with p."""
    begun: dict[tuple[int, ...], float] = defaultdict(float)
    mean_accepted = 0.0
    for draft in drafts:
        contexts = _contexts(draft)
        rows = [p(context) for context in contexts]
        for probability, path, next_distribution in explore(rule, draft, rows.__getitem__):
            weight = draft.weight * probability
            mean_accepted += weight * len(path)
            accepted = contexts[path[-1]] if path else ()
            for token, share in enumerate(next_distribution.tolist()):
                begun[(*accepted, token)] += weight * share
    return Emission(_continued(begun, p, length), mean_accepted)


def coupled_emission(rule: Rule, drafts: Iterable[WeightedDraft], p: ConditionalDistribution, length: int) -> Emission:
    """The same for a rule that compares with the target's own tokens, `rule(tree, choices)`: one draw per context."""
    begun: dict[tuple[int, ...], float] = defaultdict(float)
    mean_accepted = 0.0
    for draft in drafts:
        contexts = _contexts(draft)
        rows = {context: p(context) for context in contexts}
        for tokens in itertools.product(*(np.flatnonzero(row).tolist() for row in rows.values())):
            drawn = dict(zip(rows, tokens, strict=False))
            weight = draft.weight * float(np.prod([rows[context][token] for context, token in drawn.items()]))
            path, next_token = rule(draft.tree, [drawn[context] for context in contexts])
            mean_accepted += weight * len(path)
            begun[(*(contexts[path[-1]] if path else ()), next_token)] += weight
    return Emission(_continued(begun, p, length), mean_accepted)


def _contexts(draft: WeightedDraft) -> list[tuple[int, ...]]:
    """Tokens on the way to every node."""
    return [tuple(draft.tree.token_ids[i] for i in draft.tree.path_to(n)) for n in range(len(draft.sampling_kinds))]


def _continued(
    begun: dict[tuple[int, ...], float], p: ConditionalDistribution, length: int
) -> dict[tuple[int, ...], float]:
    """The joint distribution of the first `length` tokens; shorter texts are continued with p."""
    joint: dict[tuple[int, ...], float] = defaultdict(float)
    for tokens, weight in begun.items():
        for whole, probability in _continuations(p, tokens, length):
            joint[whole] += weight * probability
    return dict(joint)


def _continuations(
    p: ConditionalDistribution, tokens: tuple[int, ...], length: int
) -> Iterator[tuple[tuple[int, ...], float]]:
    if len(tokens) >= length:
        yield tokens[:length], 1.0
        return
    for token, probability in enumerate(p(tokens).tolist()):
        for whole, rest in _continuations(p, (*tokens, token), length):
            yield whole, probability * rest


def total_variation(emitted: Emission, p: ConditionalDistribution, length: int) -> float:
    """Total variation between the emitted joint distribution and the target's over `length` tokens."""
    target = dict(_continuations(p, (), length))
    tokens = target.keys() | emitted.joint.keys()
    return 0.5 * sum(abs(emitted.joint.get(whole, 0.0) - target.get(whole, 0.0)) for whole in tokens)
