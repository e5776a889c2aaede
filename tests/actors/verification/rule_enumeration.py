"""Exact enumeration of a ratio test: every draft and every random choice, against the target's distribution.

The rule under test is the production function; only its random source is replaced, by one that takes both sides of
every decision with their exact weights. Decisions that ask for the same random number share it. The cost is
exponential: for vocabularies of three or four tokens, small trees.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from actors.protocol.messages import SamplingKind, SparseDistribution, TokenTree
from actors.verification.distributions import DrawnTree

ConditionalDistribution = Callable[[tuple[int, ...]], np.ndarray]
"""A toy model: the tokens after the committed prefix -> probabilities [V] of the next token."""

_FIXED = frozenset({SamplingKind.DETERMINISTIC, SamplingKind.COUPLED})
_ROUNDING = 1e-14
"""Shorter intervals of a random number are rounding errors."""
_Result = TypeVar("_Result")

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


def enumerate_drafts(q: ConditionalDistribution, scheme: Sequence[Sequence[SamplingKind]]) -> Iterator[WeightedDraft]:
    """All trees in which every node of level i gets children drawn by the kinds of `scheme[i]`, in that order.

    The j-th child without randomness of its own (DETERMINISTIC or COUPLED) is the j-th likeliest token of q. Without
    replacement, an exhausted distribution yields fewer children.
    """
    return _grown(q, WeightedDraft(1.0, TokenTree((0,), (-1,)), (SamplingKind.ROOT,), (None,)), range(1), scheme)


def _grown(
    q: ConditionalDistribution, draft: WeightedDraft, leaves: range, scheme: Sequence[Sequence[SamplingKind]]
) -> Iterator[WeightedDraft]:
    """`draft` with one more level of children below `leaves` for every entry of `scheme`."""
    if not scheme:
        yield draft
        return
    contexts = _contexts(draft)
    rows = [q(contexts[leaf]) for leaf in leaves]
    for families in itertools.product(*(list(_siblings(row, row, scheme[0], 0)) for row in rows)):
        weight, distributions = draft.weight, list(draft.distributions)
        token_ids, parents, sampling_kinds = [*draft.tree.token_ids], [*draft.tree.parents], [*draft.sampling_kinds]
        for leaf, row, (tokens, kinds, share) in zip(leaves, rows, families, strict=True):
            weight *= share
            token_ids += tokens
            parents += [leaf] * len(tokens)
            sampling_kinds += kinds
            if not _FIXED.issuperset(kinds):
                support = np.flatnonzero(row)
                distributions[leaf] = SparseDistribution(tuple(support.tolist()), tuple(row[support].tolist()))
        distributions += [None] * (len(token_ids) - len(distributions))
        tree = TokenTree(tuple(token_ids), tuple(parents))
        grown = WeightedDraft(weight, tree, tuple(sampling_kinds), tuple(distributions))
        yield from _grown(q, grown, range(len(draft.tree.token_ids), len(token_ids)), scheme[1:])


def _siblings(
    row: np.ndarray, remaining: np.ndarray, kinds: Sequence[SamplingKind], num_fixed: int
) -> Iterator[tuple[tuple[int, ...], tuple[SamplingKind, ...], float]]:
    """(tokens, sampling_kinds, probability) of the children of a node; `remaining` is `row` without drawn tokens."""
    if not kinds:
        yield (), (), 1.0
        return
    kind, rest = kinds[0], kinds[1:]
    if kind in _FIXED:
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


class Tape:
    """A random source that takes the decisions of `script`, and the first possible one at each draw after its end.

    A key names a uniform random number, as in the production, where a key that is met again gives the same number: each
    draw from it cuts the interval in which it is known to lie. A draw without a key has a number of its own.
    """

    def __init__(self, script: list[int]) -> None:
        self.weight = 1.0
        self._script = script
        self._distributions: list[list[float]] = []
        self._intervals: dict[Hashable, tuple[float, float]] = {}

    def draw(self, weights: Sequence[float] | np.ndarray, key: Hashable = None) -> int:
        """The index in whose part the number falls, if [0, 1) is shared in proportion to `weights`."""
        sums = [0.0, *itertools.accumulate(map(float, weights))]
        bounds = [one / sums[-1] for one in sums]  # of a few parts: lists are several times faster than arrays
        low, high = self._intervals.get(key, (0.0, 1.0))
        cut = [(max(start, low), min(end, high)) for start, end in itertools.pairwise(bounds)]
        parts = [end - start if end - start >= _ROUNDING else 0.0 for start, end in cut]
        whole = sum(parts)
        choice = self._decide([part / whole for part in parts])
        if key is not None:
            self._intervals[key] = cut[choice]
        return choice

    def _decide(self, distribution: list[float]) -> int:
        if len(self._distributions) == len(self._script):
            self._script.append(next(i for i, probability in enumerate(distribution) if probability))
        choice = self._script[len(self._distributions)]
        self._distributions.append(distribution)
        self.weight *= distribution[choice]
        return choice

    def successor(self) -> list[int] | None:
        """The script of the next run, None after the last."""
        script = self._script[: len(self._distributions)]
        while script:
            last, distribution = script.pop(), self._distributions[len(script)]
            later = [choice for choice in range(last + 1, len(distribution)) if distribution[choice]]
            if later:
                return [*script, later[0]]
        return None


def all_runs(run: Callable[[Tape], _Result]) -> Iterator[tuple[float, _Result]]:
    """(probability, result) for every sequence of decisions."""
    script: list[int] | None = []
    while script is not None:
        tape = Tape(script)
        result = run(tape)
        yield tape.weight, result
        script = tape.successor()


@dataclass(frozen=True, slots=True)
class TapeSource:
    """The random numbers of one verification, `key`, with a number for each stream and node as `HashRandomSource`."""

    tape: Tape
    key: Hashable = ()

    def accept(self, probability: float, node: int) -> bool:
        if not 0.0 < probability < 1.0:
            return probability >= 1.0
        return self.tape.draw([probability, 1.0 - probability], (self.key, "accept", node)) == 0

    def sample(self, weights: np.ndarray, node: int) -> int:
        return self.tape.draw(weights, (self.key, "residual", node))


class PatchedSource:
    """A random source made of two functions, to replace one of them by another."""

    def __init__(self, accept: Callable[[float, int], bool], sample: Callable[[np.ndarray, int], int]) -> None:
        self._accept, self._sample = accept, sample

    def accept(self, probability: float, node: int) -> bool:
        return self._accept(probability, node)

    def sample(self, weights: np.ndarray, node: int) -> int:
        return self._sample(weights, node)


Contexts = Sequence[tuple[int, ...]]
"""The tokens on the way to every node."""
Outcomes = Iterator[tuple[float, tuple[tuple[int, ...], np.ndarray]]]
"""Probability, accepted path, and distribution [V] of the next token."""


def ratio_outcomes(rule: Rule, draft: WeightedDraft, _contexts: Contexts, rows: Sequence[np.ndarray]) -> Outcomes:
    """Every sequence of decisions of a ratio test; `rows` are the target's distributions after the nodes."""

    def run(tape: Tape) -> tuple[tuple[int, ...], np.ndarray]:
        drawn_from = []

        def keep(weights: np.ndarray, _node: int) -> int:
            """The last draw of a verification: its distribution is kept, the token returned is not used."""
            drawn_from.append(weights / weights.sum())
            return 0

        source = PatchedSource(TapeSource(tape).accept, keep)
        path, _ = rule(DrawnTree(draft.tree, draft.sampling_kinds, draft.distributions), rows.__getitem__, source)
        return path, drawn_from[-1]

    return all_runs(run)


def coupled_outcomes(rule: Rule, draft: WeightedDraft, contexts: Contexts, rows: Sequence[np.ndarray]) -> Outcomes:
    """The same for a rule that compares with the target's own tokens, `rule(tree, choices)`: one draw per context."""
    row_of = dict(zip(contexts, rows, strict=True))

    def run(tape: Tape) -> tuple[tuple[int, ...], np.ndarray]:
        drawn = {context: tape.draw(row) for context, row in row_of.items()}
        path, next_token = rule(draft.tree, [drawn[context] for context in contexts])
        return path, np.eye(len(rows[0]))[next_token]

    return all_runs(run)


def emission(
    rule: Rule,
    drafts: Iterable[WeightedDraft],
    p: ConditionalDistribution,
    length: int,
    outcomes: Callable[[Rule, WeightedDraft, Contexts, Sequence[np.ndarray]], Outcomes] = ratio_outcomes,
) -> Emission:
    """The exact joint distribution of the first `length` tokens of `rule`; shorter texts are continued with p."""
    begun: dict[tuple[int, ...], float] = defaultdict(float)
    mean_accepted = 0.0
    for draft in drafts:
        contexts = _contexts(draft)
        for probability, (path, next_distribution) in outcomes(rule, draft, contexts, [*map(p, contexts)]):
            weight = draft.weight * probability
            mean_accepted += weight * len(path)
            accepted = contexts[path[-1]] if path else ()
            for token in np.flatnonzero(next_distribution).tolist():
                begun[(*accepted, token)] += weight * float(next_distribution[token])
    joint: dict[tuple[int, ...], float] = defaultdict(float)
    for tokens, weight in begun.items():
        for whole, probability in _continuations(p, tokens, length):
            joint[whole] += weight * probability
    return Emission(dict(joint), mean_accepted)


def _contexts(draft: WeightedDraft) -> list[tuple[int, ...]]:
    """Tokens on the way to every node."""
    return [tuple(draft.tree.token_ids[i] for i in draft.tree.path_to(n)) for n in range(len(draft.sampling_kinds))]


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
