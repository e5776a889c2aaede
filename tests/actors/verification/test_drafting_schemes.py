"""Drafting schemes that draw whole trees: stochastic beams, enumerated exactly, and the sampler against it.

A stochastic beam orders the sequences of its depth by perturbed log-probability, which is drawing them one by one
without replacement; the beam of a level is the first `width` prefixes that appear. So its trees are enumerated over the
orders of sequences, as far as an order decides anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import permutations, product

import numpy as np
import pytest
import torch

from actors.drafters.model.merging import leaders
from actors.drafters.model.tree_growth import BeamGrowth, Candidate, GrowingTree
from actors.protocol.messages import SamplingKind, SamplingParams, SparseDistribution, TokenTree
from actors.sampling.draft_sampling import draw_beam, draw_without_replacement
from actors.verification.rules import RULES
from tests.actors.verification.rule_enumeration import WeightedDraft, emission, total_variation
from tests.matrices import in_turn

VOCAB = 3
EXACT = 1e-12
WOR = SamplingKind.WITHOUT_REPLACEMENT

Beams = tuple[tuple[tuple[int, ...], ...], ...]
"""The prefixes of each level, best first."""


def law(seed: int):
    """Random conditional distributions [V] by context."""

    @cache
    def row(context: tuple[int, ...]) -> np.ndarray:
        return np.random.default_rng((seed, len(context), *context)).dirichlet(np.ones(VOCAB))

    return row


def enumerate_beams(q, depth: int, width: int) -> Iterator[tuple[float, Beams]]:
    """(probability, beams) of a stochastic beam search."""
    weights = {
        whole: float(np.prod([q(whole[:i])[whole[i]] for i in range(depth)]))
        for whole in product(range(VOCAB), repeat=depth)
    }

    def follow(beams: Beams, probability: float) -> Iterator[tuple[float, Beams]]:
        room = [len(beam) < min(width, VOCAB ** (level + 1)) for level, beam in enumerate(beams)]
        news = {
            whole: weight
            for whole, weight in weights.items()
            if any(free and whole[: i + 1] not in beams[i] for i, free in enumerate(room))
        }
        if not news:
            yield probability, beams
            return
        for whole, weight in news.items():  # the first of these to appear; the others change nothing
            longer = tuple(
                (*beam, whole[: i + 1]) if room[i] and whole[: i + 1] not in beam else beam
                for i, beam in enumerate(beams)
            )
            yield from follow(longer, probability * weight / sum(news.values()))

    return follow(((),) * depth, 1.0)


def draft_of(q, beams: Beams, weight: float) -> WeightedDraft:
    """The proposal of these beams, level by level."""
    place: dict[tuple[int, ...], int] = {(): 0}
    token_ids, parents = [0], [-1]
    for prefix in (prefix for beam in beams for prefix in beam):
        place[prefix] = len(token_ids)
        token_ids.append(prefix[-1])
        parents.append(place[prefix[:-1]])
    inner = set(parents)
    distributions = tuple(
        SparseDistribution(tuple(range(VOCAB)), tuple(q(prefix).tolist())) if node in inner else None
        for prefix, node in place.items()
    )
    kinds = (SamplingKind.ROOT, *[WOR] * (len(parents) - 1))
    return WeightedDraft(weight, TokenTree(tuple(token_ids), tuple(parents)), kinds, distributions)


def distance(rule, p, q, depth, width, mistake=lambda draft: draft):
    drafts = (mistake(draft_of(q, beams, weight)) for weight, beams in enumerate_beams(q, depth, width))
    return total_variation(emission(rule, drafts, p, depth + 1), p, depth + 1)


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
@pytest.mark.parametrize(
    ("depth", "width"), [(2, 2), *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((2, 3), (2, 4), (3, 2)))]
)
def test_stochastic_beams_are_exact(rule, depth, width):
    for seed in range(3):
        assert distance(RULES[rule], law(seed), law(seed + 10), depth, width) < EXACT


def sort_siblings(draft: WeightedDraft) -> WeightedDraft:
    """Children of the root by their probability instead of their scores."""
    tree, row = draft.tree, draft.distributions[0]
    assert row is not None
    first = sorted(tree.children()[0], key=lambda node: -row.probs[tree.token_ids[node]])
    order = [0, *first, *range(1 + len(first), len(tree.parents))]
    place = {node: i for i, node in enumerate(order)}
    parents = (-1, *(place[tree.parents[node]] for node in order[1:]))
    return replace(
        draft,
        tree=TokenTree(tuple(tree.token_ids[node] for node in order), parents),
        distributions=tuple(draft.distributions[node] for node in order),
    )


def as_independent(draft: WeightedDraft) -> WeightedDraft:
    return replace(draft, sampling_kinds=(SamplingKind.ROOT, *[SamplingKind.IID] * draft.tree.num_draft_tokens))


@pytest.mark.extended
@pytest.mark.parametrize("rule", ["rejection", "traversal"])
@pytest.mark.parametrize(("mistake", "floor"), [(sort_siblings, 0.05), (as_independent, 0.004)])
def test_mistakes_with_beams_are_found(rule, mistake, floor):
    found = [distance(RULES[rule], law(seed), law(seed + 10), 2, 2, mistake) for seed in range(3)]
    assert np.mean(found) > floor


# --- draft graphs: paths with the same last tokens are fed as one --------------------------------------------------


def enumerate_merged(q, *, leader=leaders, shares_draws=False, tells_own_law=False) -> Iterator[WeightedDraft]:
    """Two chains of three tokens whose second tokens, where they agree, are fed as one, in the leader's context."""
    for first, second in permutations(range(VOCAB), 2):
        chance = q(())[first] * q(())[second] / (1 - q(())[first])
        for tokens in product(range(VOCAB), repeat=2):
            tree = GrowingTree(0)
            for candidate in (Candidate(0, first, 0), Candidate(0, second, 0)):
                tree.add(candidate)
            for parent, token in enumerate(tokens, start=1):
                tree.add(Candidate(parent, token, 0))
            lead = leader(tree, [3, 4], 1)
            rows = [q(prefix_of(tree, lead[node])) for node in (3, 4)]
            share = chance * q((first,))[tokens[0]] * q((second,))[tokens[1]]
            below = [q(prefix_of(tree, node)) for node in (3, 4)] if tells_own_law else rows
            laws = [q(()), q((first,)), q((second,)), *below]
            distributions = (
                *(SparseDistribution(tuple(range(VOCAB)), tuple(law.tolist())) for law in laws),
                None,
                None,
            )
            is_one_draw = shares_draws and tokens[0] == tokens[1]
            for last in product(range(VOCAB), repeat=2):
                if is_one_draw and last[0] != last[1]:
                    continue
                weight = share * rows[0][last[0]] * (1 if is_one_draw else rows[1][last[1]])
                whole = TokenTree((0, first, second, *tokens, *last), (-1, 0, 0, 1, 2, 3, 4))
                yield WeightedDraft(weight, whole, (SamplingKind.ROOT, *[WOR] * 6), distributions)


def distances_of_merged(rule: str, **mistake) -> list[float]:
    found = []
    for seed in range(2):
        p, q = law(seed), law(seed + 10)
        found.append(total_variation(emission(RULES[rule], enumerate_merged(q, **mistake), p, 4), p, 4))
    return found


def last_leads(tree, nodes, length):
    found = leaders(tree, nodes[::-1], length)
    return {node: found[node] for node in nodes}


@pytest.mark.extended
@pytest.mark.parametrize(("leader", "rule"), list(in_turn([leaders, last_leads], ["rejection", "traversal"])))
def test_merged_paths_are_exact_with_draws_of_their_own(rule, leader):
    """Whichever of them is fed."""
    assert max(distances_of_merged(rule, leader=leader)) < EXACT


@pytest.mark.extended
@pytest.mark.parametrize(
    ("mistake", "biased", "rule"),
    [
        ("tells_own_law", {"rejection", "traversal"}, "rejection"),
        pytest.param("tells_own_law", {"rejection", "traversal"}, "traversal", marks=pytest.mark.slow),
        pytest.param("shares_draws", {"traversal"}, "rejection", marks=pytest.mark.slow),
        ("shares_draws", {"traversal"}, "traversal"),
    ],
)
def test_mistakes_with_merged_paths_are_found(rule, mistake, biased):
    """One draw in two places, as in GSD, hurts the rule that works bottom-up; another law than was used hurts all."""
    found = distances_of_merged(rule, **{mistake: True})
    assert np.mean(found) > 5e-4 if rule in biased else max(found) < EXACT


# --- the sampler -----------------------------------------------------------------------------------------------------


def sampled_beams(q, depth: int, width: int, steps: range) -> list[Beams]:
    """Trees that the production sampler and the production growth make, one for each step."""
    growth, params = BeamGrowth(depth, width), SamplingParams(temperature=1.0, seed=7)
    trees, frontier = [GrowingTree(0) for _ in steps], [[0] for _ in steps]
    for level in range(depth):
        places = [(i, node) for i, nodes in enumerate(frontier) for node in nodes]
        rows = torch.tensor(np.log([q(prefix_of(trees[i], node)) for i, node in places]))
        paths = [(trees[i].values[node], trees[i].scores[node]) for i, node in places]
        at = [steps[i] for i, _ in places]
        drawn = draw_beam(rows, [params] * len(places), at, [n for _, n in places], growth.width(level), VOCAB, paths)
        offered: list[list[Candidate]] = [[] for _ in trees]
        for (i, node), one in zip(places, drawn, strict=True):
            fields = zip(one.token_ids, one.log_probs, one.scores, strict=True)
            offered[i] += [Candidate(node, *child) for child in fields]
        frontier = growth.extend_all(trees, offered, [depth * width] * len(trees))
    return [beams_of(tree, depth) for tree in trees]


def prefix_of(tree: GrowingTree, node: int) -> tuple[int, ...]:
    return (*prefix_of(tree, tree.parents[node]), tree.token_ids[node]) if node else ()


def beams_of(tree: GrowingTree, depth: int) -> Beams:
    prefixes = [prefix_of(tree, node) for node in range(1, len(tree.token_ids))]
    return tuple(tuple(prefix for prefix in prefixes if len(prefix) == level) for level in range(1, depth + 1))


def chi_square_excess(expected: dict[Beams, float], found: list[Beams]) -> float:
    """Standard deviations by which the statistic exceeds its mean; rare trees are one cell."""
    counts: dict[Beams | str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for beams, probability in expected.items():
        counts[beams if probability * len(found) >= 5 else "rare"][0] += probability * len(found)
    for beams in found:
        assert beams in expected, "a tree that cannot be drawn"
        counts[beams if expected[beams] * len(found) >= 5 else "rare"][1] += 1
    statistic = sum((seen - mean) ** 2 / mean for mean, seen in counts.values())
    degrees = len(counts) - 1
    return (statistic - degrees) / (2 * degrees) ** 0.5


@pytest.mark.extended
def test_the_sampler_draws_the_enumerated_beams():
    q = law(3)
    expected: dict[Beams, float] = defaultdict(float)
    for probability, beams in enumerate_beams(q, 2, 2):
        expected[beams] += probability
    assert sum(expected.values()) == pytest.approx(1.0)
    found = sampled_beams(q, 2, 2, range(2000))
    assert chi_square_excess(expected, found) < 5
    unlike: dict[Beams, float] = defaultdict(float)
    for probability, beams in enumerate_beams(law(4), 2, 2):
        unlike[beams] += probability
    assert chi_square_excess(unlike, found) > 20, "the comparison can fail"


def test_the_first_child_has_its_parents_score_and_the_scores_fall():
    rows = torch.randn(40, 30, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(temperature=1.0)] * 40
    paths = [(-0.1 * i, -0.2 * i) for i in range(40)]
    drawn = draw_beam(rows, params, range(40), [2] * 40, 5, 20, paths)
    for one, (_, score), unranked in zip(
        drawn, paths, draw_without_replacement(rows, params, range(40), [2] * 40, 5, 20), strict=True
    ):
        assert one.scores[0] == pytest.approx(score, abs=1e-9)
        assert list(one.scores) == sorted(one.scores, reverse=True)
        assert one.token_ids == unranked.token_ids, "the order of the children is that of their noise"
        probs = dict(zip(one.distribution.token_ids, one.distribution.probs, strict=True))
        assert one.log_probs == pytest.approx([np.log(probs[token]) for token in one.token_ids])
