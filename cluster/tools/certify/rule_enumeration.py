"""Certify a ratio test: run it through every draft and every coin, and compare the emitted law with the target's.

The rule under test is the production function; only its coins are replaced, by ones that take both sides of every
decision with their exact weights. Slow by nature: for vocabularies of three or four tokens and small trees.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from actors.protocol.messages import SamplingKind, SparseDistribution, TokenTree
from actors.verification.distributions import TargetRow

Law = Callable[[tuple[int, ...]], np.ndarray]
"""Conditional law of a toy model: the tokens behind the committed prefix -> probabilities [V]."""

Rule = Callable[..., tuple[tuple[int, ...], int]]


@dataclass(frozen=True, slots=True)
class Draft:
    """One possible proposal and its probability."""

    weight: float
    tree: TokenTree
    sampling_kinds: tuple[int, ...]
    distributions: tuple[SparseDistribution | None, ...]


@dataclass(frozen=True, slots=True)
class Emission:
    """What a rule emits: the joint law of the first tokens, by token tuple, and the mean number of accepted drafts."""

    joint: dict[tuple[int, ...], float]
    mean_accepted: float


# A subtree during enumeration: (token, draw, its own children) in test order.
_Children = tuple[tuple[int, SamplingKind, "_Children"], ...]


def enumerate_drafts(q: Law, scheme: Sequence[Sequence[SamplingKind]]) -> Iterator[Draft]:
    """All trees in which every node of level i gets children drawn as `scheme[i]` says, in that order.

    The j-th child without randomness of its own (DETERMINISTIC or COUPLED) is the j-th likeliest token of q. Without
    replacement, an exhausted law yields fewer children.
    """
    for children, weight in _subtrees(q, scheme, ()):
        yield _flatten(q, children, weight)


def _subtrees(
    q: Law, scheme: Sequence[Sequence[SamplingKind]], context: tuple[int, ...]
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
    """(tokens, sampling_kinds, probability) of the children of one node; `remaining` is `row` without tokens used up."""
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


def _flatten(q: Law, children: _Children, weight: float) -> Draft:
    token_ids, parents, sampling_kinds = [0], [-1], [SamplingKind.ROOT]
    contexts: list[tuple[int, ...]] = [()]
    level = [(0, children)]
    while level:
        below = []
        for parent, siblings in level:
            for token, draw, grandchildren in siblings:
                below.append((len(token_ids), grandchildren))
                token_ids.append(token)
                parents.append(parent)
                sampling_kinds.append(draw)
                contexts.append((*contexts[parent], token))
        level = below
    distributions: list[SparseDistribution | None] = [None] * len(token_ids)
    for parent, draw in zip(parents, sampling_kinds, strict=False):
        if draw in (SamplingKind.IID, SamplingKind.WITHOUT_REPLACEMENT) and distributions[parent] is None:
            row = q(contexts[parent])
            support = np.flatnonzero(row)
            distributions[parent] = SparseDistribution(tuple(support.tolist()), tuple(row[support].tolist()))
    return Draft(weight, TokenTree(tuple(token_ids), tuple(parents)), tuple(sampling_kinds), tuple(distributions))


class _Explorer:
    """Coins that replay a script of decisions, and say yes to every decision behind its end."""

    def __init__(self, script: list[bool]) -> None:
        self.script = script
        self.weight = 1.0
        self.next_law = np.empty(0)
        self._asked = 0

    def accept(self, probability: float, node: int) -> bool:
        if probability <= 0.0 or probability >= 1.0:
            return probability >= 1.0
        if self._asked == len(self.script):
            self.script.append(True)
        decision = self.script[self._asked]
        self._asked += 1
        self.weight *= probability if decision else 1.0 - probability
        return decision

    def sample(self, weights: np.ndarray, node: int) -> int:
        """The last question of a verification: its whole law is kept, the answer does not matter."""
        self.next_law = weights / weights.sum()
        return 0


def explore(rule: Rule, draft: Draft, target_row: TargetRow) -> Iterator[tuple[float, tuple[int, ...], np.ndarray]]:
    """(probability, path, law of the next token) for every way the coins can fall on one draft."""
    script: list[bool] = []
    while True:
        random_source = _Explorer(script)
        path, _ = rule(draft.tree, draft.sampling_kinds, draft.distributions, target_row, random_source)
        yield random_source.weight, path, random_source.next_law
        while script and not script[-1]:
            script.pop()
        if not script:
            return
        script[-1] = False


def emission(rule: Rule, drafts: Iterator[Draft], p: Law, length: int) -> Emission:
    """The exact joint law of the first `length` tokens that `rule` emits; shorter outcomes are continued with p."""
    begun: dict[tuple[int, ...], float] = defaultdict(float)
    mean_accepted = 0.0
    for draft in drafts:
        contexts = _contexts(draft)
        for weight, path, next_law in explore(rule, draft, lambda node: p(contexts[node])):
            weight *= draft.weight
            mean_accepted += weight * len(path)
            accepted = contexts[path[-1]] if path else ()
            for token, probability in enumerate(next_law.tolist()):
                begun[(*accepted, token)] += weight * probability
    return Emission(_continued(begun, p, length), mean_accepted)


def matching_emission(rule: Rule, drafts: Iterator[Draft], p: Law, length: int) -> Emission:
    """The same for a rule that looks at the target's own sampling_kinds, `rule(tree, choices)`: one draw for every context."""
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


def _contexts(draft: Draft) -> list[tuple[int, ...]]:
    """Tokens on the way to every node."""
    return [tuple(draft.tree.token_ids[i] for i in draft.tree.path_to(n)) for n in range(len(draft.sampling_kinds))]


def _continued(begun: dict[tuple[int, ...], float], p: Law, length: int) -> dict[tuple[int, ...], float]:
    """The joint law of the first `length` tokens; what is shorter goes on with p."""
    joint: dict[tuple[int, ...], float] = defaultdict(float)
    for tokens, weight in begun.items():
        for whole, probability in _continuations(p, tokens, length):
            joint[whole] += weight * probability
    return dict(joint)


def _continuations(p: Law, tokens: tuple[int, ...], length: int) -> Iterator[tuple[tuple[int, ...], float]]:
    if len(tokens) >= length:
        yield tokens[:length], 1.0
        return
    for token, probability in enumerate(p(tokens).tolist()):
        for whole, rest in _continuations(p, (*tokens, token), length):
            yield whole, probability * rest


def total_variation(emitted: Emission, p: Law, length: int) -> float:
    """Distance of what was emitted from the target's joint law over `length` tokens."""
    target = dict(_continuations(p, (), length))
    tokens = target.keys() | emitted.joint.keys()
    return 0.5 * sum(abs(emitted.joint.get(whole, 0.0) - target.get(whole, 0.0)) for whole in tokens)
