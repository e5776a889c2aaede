"""The enumeration can fail: every classic mistake of drafting or testing, made on purpose, is found by it.

A few random models over four tokens, two children and one below each, as in the exactness tests. Each mistake has a
floor for the mean distance over the models. The small ones (duplicates dropped, no renormalisation) are the dangerous
ones, as no benchmark sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from actors.options import INDEPENDENT_ONLY
from actors.protocol.messages import SamplingKind, SparseDistribution, TokenTree
from actors.verification import distributions, kseq, rejection
from actors.verification.distributions import ChildDistribution, child_distributions
from actors.verification.rules import RULES
from tests.actors.verification.rule_enumeration import (
    PatchedSource,
    WeightedDraft,
    emission,
    enumerate_drafts,
    total_variation,
)
from tests.matrices import in_turn

VOCAB, LENGTH, MODELS = 4, 3, 3
DET, IID, WOR = SamplingKind.DETERMINISTIC, SamplingKind.IID, SamplingKind.WITHOUT_REPLACEMENT


def drafts_of(kind: SamplingKind, q) -> Iterator[WeightedDraft]:
    return enumerate_drafts(q, [(kind, kind), (kind,)])


def distances(
    random_law, rule, kind: SamplingKind, mistake: Callable = lambda draft, q: draft, models: int = MODELS
) -> np.ndarray:
    """Total variation of each model after `mistake` was made on every draft; both laws are four-token Dirichlet."""
    found = []
    for seed in range(models):
        p, q = random_law(VOCAB, seed), random_law(VOCAB, seed + 500)
        drafts = (mistake(draft, q) for draft in drafts_of(kind, q))
        found.append(total_variation(emission(rule, drafts, p, LENGTH), p, LENGTH))
    return np.array(found)


def contexts(tree: TokenTree) -> list[tuple[int, ...]]:
    return [tuple(tree.token_ids[i] for i in tree.path_to(node)) for node in range(len(tree.parents))]


def relabelled(draft: WeightedDraft, kind: SamplingKind, distributions=None) -> WeightedDraft:
    sampling_kinds = (SamplingKind.ROOT,) + (kind,) * draft.tree.num_draft_tokens
    return replace(
        draft,
        sampling_kinds=sampling_kinds,
        distributions=draft.distributions if distributions is None else distributions,
    )


def restricted(draft: WeightedDraft, kept: list[int]) -> WeightedDraft:
    """These nodes only, in this order (parents first); the rest is lost as if never drawn."""
    place = {node: i for i, node in enumerate(kept)}
    return replace(
        draft,
        tree=TokenTree(
            tuple(draft.tree.token_ids[node] for node in kept),
            (-1, *(place[draft.tree.parents[node]] for node in kept[1:])),
        ),
        sampling_kinds=tuple(draft.sampling_kinds[node] for node in kept),
        distributions=tuple(draft.distributions[node] for node in kept),
    )


def probability(q, draft: WeightedDraft, node: int) -> float:
    """Draft probability of a node's token in its context."""
    context = contexts(draft.tree)[node]
    return float(q(context[:-1])[context[-1]])


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
@pytest.mark.parametrize("kind", [IID, WOR])
def test_without_a_mistake_the_distance_is_zero(random_law, rule, kind):
    assert distances(random_law, RULES[rule], kind).max() < 1e-12


# --- mistakes of the drafter -----------------------------------------------------------------------------------------


def drop_duplicates(draft: WeightedDraft, q) -> WeightedDraft:
    kept = [0]
    for node in range(1, len(draft.tree.parents)):
        parent = draft.tree.parents[node]
        twin = any(
            draft.tree.parents[i] == parent and draft.tree.token_ids[i] == draft.tree.token_ids[node] for i in kept
        )
        if parent in kept and not twin:
            kept.append(node)
    return restricted(draft, kept)


def read_without_replacement_as_independent(draft: WeightedDraft, q) -> WeightedDraft:
    return relabelled(draft, IID)


def full_laws(draft: WeightedDraft, q) -> tuple[SparseDistribution | None, ...]:
    places = contexts(draft.tree)
    inner = set(draft.tree.parents)
    return tuple(
        SparseDistribution(tuple(range(VOCAB)), tuple(q(place).tolist())) if node in inner else None
        for node, place in enumerate(places)
    )


def read_top_k_as_sampled(draft: WeightedDraft, q) -> WeightedDraft:
    return relabelled(draft, WOR, full_laws(draft, q))


def prune_after_the_draw(draft: WeightedDraft, q) -> WeightedDraft:
    """Keep the root, and of the drawn nodes those above a path probability, as tree reranking does."""
    kept = [0]
    for node in range(1, len(draft.tree.parents)):
        path = draft.tree.path_to(node)
        if draft.tree.parents[node] in kept and np.prod([probability(q, draft, i) for i in path]) >= 0.15:
            kept.append(node)
    return restricted(draft, kept)


def sort_siblings(draft: WeightedDraft, q) -> WeightedDraft:
    first, second = draft.tree.children()[0]
    if probability(q, draft, first) >= probability(q, draft, second):
        return draft
    (below_first,), (below_second,) = draft.tree.children()[first], draft.tree.children()[second]
    return restricted(draft, [0, second, first, below_second, below_first])


def record_another_temperature(draft: WeightedDraft, q) -> WeightedDraft:
    def hotter(distribution: SparseDistribution | None) -> SparseDistribution | None:
        if distribution is None:
            return None
        flat = np.sqrt(distribution.probs)
        return SparseDistribution(distribution.token_ids, tuple((flat / flat.sum()).tolist()))

    return replace(draft, distributions=tuple(hotter(distribution) for distribution in draft.distributions))


def read_top_k_as_its_own_softmax(draft: WeightedDraft, q) -> WeightedDraft:
    """MCSD as released with a drafter at temperature 0: top-k tokens, tested against the softmax over these k."""

    def over_the_chosen(node: int) -> SparseDistribution | None:
        tokens = [draft.tree.token_ids[child] for child in draft.tree.children()[node]]
        if not tokens:
            return None
        probs = q(contexts(draft.tree)[node])[tokens]
        return SparseDistribution(tuple(tokens), tuple((probs / probs.sum()).tolist()))

    return relabelled(draft, WOR, tuple(map(over_the_chosen, range(len(draft.tree.parents)))))


def read_top_k_as_independent(draft: WeightedDraft, q) -> WeightedDraft:
    """LongSpec's sampling mode as released: top-k children, tested one by one against the same distribution."""
    return relabelled(draft, IID, full_laws(draft, q))


def record_the_untrimmed_law(draft: WeightedDraft, q) -> WeightedDraft:
    """The drafter knows three of the four tokens; its distribution is recorded as if it knew all."""
    return relabelled(draft, IID, full_laws(draft, q))


@pytest.mark.parametrize(
    ("kind", "mistake", "floor", "rule"),
    list(
        in_turn(
            [
                (IID, drop_duplicates, 0.002),
                (DET, read_top_k_as_its_own_softmax, 0.1),
                (DET, read_top_k_as_independent, 0.2),
                (WOR, read_without_replacement_as_independent, 0.004),
                (DET, read_top_k_as_sampled, 0.2),
                (WOR, prune_after_the_draw, 0.05),
                (WOR, sort_siblings, 0.05),
                (WOR, record_another_temperature, 0.05),
            ],
            ["rejection", "traversal"],
        )
    ),
)
def test_mistakes_of_the_drafter_are_found(random_law, rule, kind, mistake, floor):
    found = distances(random_law, RULES[rule], kind, mistake)
    assert found.mean() > floor
    assert np.median(found) > 1e-4


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_a_trimmed_vocabulary_whose_law_was_recorded_whole_is_found(random_law, rule):
    """And with the law it was really drawn from, zero outside the trimmed vocabulary, nothing is lost."""

    def trimmed(q):
        return lambda context: np.append(q(context)[:-1] / q(context)[:-1].sum(), 0.0)

    found, right = [], []
    for seed in range(MODELS):
        p, q = random_law(VOCAB, seed), random_law(VOCAB, seed + 500)
        for distances_of, mistake in ((found, record_the_untrimmed_law), (right, lambda draft, q: draft)):
            drafts = (mistake(draft, q) for draft in enumerate_drafts(trimmed(q), [(IID, IID), (IID,)]))
            distances_of.append(total_variation(emission(RULES[rule], drafts, p, LENGTH), p, LENGTH))
    assert max(right) < 1e-12 and np.mean(found) > 0.01


@pytest.mark.parametrize("rule", ["rejection", "block", "traversal"])
@pytest.mark.parametrize("drops", [True, False])
def test_a_chain_that_drops_its_last_unlikely_token_is_found_and_one_that_ends_with_it_is_exact(
    random_law, rule, drops
):
    """Confidence may end a draft *after* the token that fell short, not take that token back."""

    def ended(draft: WeightedDraft, q) -> WeightedDraft:
        length = 0
        while length < 2 and probability(q, draft, length + 1) >= 0.4:
            length += 1
        return restricted(draft, [*range(min(2, length + (not drops)) + 1)])

    found = []
    for seed in range(8):
        p, q = random_law(VOCAB, seed), random_law(VOCAB, seed + 500)
        drafts = (ended(draft, q) for draft in enumerate_drafts(q, [(IID,), (IID,)]))
        found.append(total_variation(emission(RULES[rule], drafts, p, LENGTH), p, LENGTH))
    assert np.mean(found) > 0.05 if drops else max(found) < 1e-12


# --- mistakes of the test --------------------------------------------------------------------------------------------


def next_from_the_target(draft, target_row, random_source):
    wrong = PatchedSource(random_source.accept, lambda _, node: random_source.sample(target_row(node), node))
    return RULES["rejection"](draft, target_row, wrong)


def longest_path_of_independent_coins(draft, target_row, random_source):
    """One coin per edge against the parent's own law, keep the longest surviving path, then draw from p."""
    tree, best = draft.tree, 0
    alive = {0}
    for node in range(1, len(tree.parents)):
        parent = tree.parents[node]
        if parent in alive:
            distribution = child_distributions(draft, parent, [node])[0]
            if random_source.accept(min(1.0, float(target_row(parent)[tree.token_ids[node]]) / distribution.own), node):
                alive.add(node)
                if len(tree.path_to(node)) > len(tree.path_to(best)):
                    best = node
    return tuple(tree.path_to(best)), random_source.sample(target_row(best), best)


def arg_max_match_with_sampled_bonus(draft, target_row, random_source):
    tree, path, node = draft.tree, [], 0
    while True:
        likeliest = int(np.argmax(target_row(node)))
        matching = [child for child in tree.children()[node] if tree.token_ids[child] == likeliest]
        if not matching:
            return tuple(path), random_source.sample(target_row(node), node)
        node = matching[0]
        path.append(node)


@pytest.mark.extended
@pytest.mark.parametrize(
    "rule, floor",
    [
        (next_from_the_target, 0.03),
        (longest_path_of_independent_coins, 0.03),
        (arg_max_match_with_sampled_bonus, 0.1),
    ],
)
def test_mistakes_of_the_test_are_found(random_law, rule, floor):
    found = distances(random_law, rule, WOR)
    assert found.mean() > floor


def sharing_numbers(rule: str, shared: Callable[[TokenTree, int], int]):
    """`rule`, in which nodes of the same `shared` are tested with the same random number."""

    def verify(draft, target_row, random_source):
        def accept(chance, node):
            return random_source.accept(chance, shared(draft.tree, node))

        source = PatchedSource(accept, random_source.sample)
        return RULES[rule](draft, target_row, source)

    return verify


SHARED = {
    "branch": lambda tree, node: tree.children()[0].index(tree.path_to(node)[0]) if node else 0,
    "depth": lambda tree, node: len(tree.path_to(node)),
    "all": lambda tree, node: 0,
}
SHARING = [rule for rule in RULES if rule != "block"]
"""Rules that test several children of a node."""


@pytest.mark.parametrize(("rule", "shared"), list(in_turn(SHARING, SHARED, extended=SHARING[2:])))
def test_a_random_number_that_nodes_share_is_found(random_law, rule, shared):
    found = distances(random_law, sharing_numbers(rule, SHARED[shared]), IID if rule in INDEPENDENT_ONLY else WOR)
    assert found.mean() > 1e-4


def shared_by_all(random_law, rule: str, levels: list[tuple[SamplingKind, ...]]) -> float:
    found, shared = [], sharing_numbers(rule, lambda tree, node: 0)
    for seed in range(MODELS):
        p, q = random_law(VOCAB, seed), random_law(VOCAB, seed + 500)
        emitted = emission(shared, enumerate_drafts(q, levels), p, len(levels) + 1)
        found.append(total_variation(emitted, p, len(levels) + 1))
    return float(np.mean(found))


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "block"])
def test_a_random_number_that_siblings_share_is_found(random_law, rule):
    """One with which the first was refused says more about the second than a new one would."""
    kind = IID if rule in INDEPENDENT_ONLY else WOR
    assert shared_by_all(random_law, rule, [(kind,) * 3]) > 0.003


def test_a_random_number_that_the_prefixes_of_a_chain_share_is_found(random_law):
    assert shared_by_all(random_law, "block", [(IID,), (IID,)]) > 0.003


def test_independent_coins_on_top_k_tokens_are_worse(random_law):
    found = distances(random_law, longest_path_of_independent_coins, DET, read_top_k_as_sampled)
    assert found.mean() > 0.2


def threshold(level: float):
    """A likely enough token is accepted whatever the coin says, as with SGLang's `threshold_single` below 1."""

    def verify(draft, target_row, random_source):
        tree = draft.tree

        def accept(chance, node):
            likely = target_row(tree.parents[node])[tree.token_ids[node]] >= level
            return likely or random_source.accept(chance, node)

        lenient = PatchedSource(accept, random_source.sample)
        return RULES["rejection"](draft, target_row, lenient)

    return verify


@pytest.mark.parametrize("level, floor", [(0.3, 0.01), pytest.param(0.9, 0.0, marks=pytest.mark.slow)])
def test_a_threshold_of_acceptance_is_found_where_it_does_anything(random_law, level, floor):
    assert distances(random_law, threshold(level), WOR).mean() > floor


# --- mistakes of block verification ---------------------------------------------------------------------------------


def block_with(*, stops=False, token_residual=False, uncapped=False, padded=False):
    """The paper's four lines with one of them wrong; without a mistake, `verify_block` again."""

    def verify(draft, target_row, random_source):
        tree, last = draft.tree, draft.tree.num_draft_tokens
        p = [target_row(i) for i in range(last + 1)]
        q = [np.zeros_like(p[0]) for _ in range(last)]
        for row, distribution in zip(q, draft.distributions, strict=False):
            row[list(distribution.token_ids)] = distribution.probs
        reach, joint = [1.0], 1.0
        for i, token in enumerate(tree.token_ids[1:]):
            joint *= p[i][token] / q[i][token]
            reach.append(min(1.0, reach[i] * p[i][token] / q[i][token]))
        residuals = [np.maximum(reach[i] * p[i] - q[i], 0.0) for i in range(last)] + [p[last]]
        accepted = 0
        for i in range(1, last + 1):
            chance = reach[i] if not uncapped or i < last else min(1.0, joint)
            if i < last or padded:  # padded: the row after the last draft token is taken for a further one's
                rest = residuals[i].sum() if i < last else reach[i] * 0.5
                spare = rest + 1.0 - reach[i]
                chance = rest / spare if spare > 0 else 1.0
            if random_source.accept(chance, i):
                accepted = i
            elif stops:
                break
        wrong = (
            np.maximum(p[accepted] - q[accepted], 0.0) if token_residual and accepted < last else residuals[accepted]
        )
        return tuple(range(1, accepted + 1)), random_source.sample(wrong if wrong.sum() > 0 else p[accepted], accepted)

    return verify


@pytest.mark.parametrize(
    "mistake, floor",
    [(None, 0), ("stops", 0.05), ("token_residual", 0.001), ("uncapped", 0.02), ("padded", 0.02)],
)
def test_mistakes_of_block_verification_are_found(random_law, mistake, floor):
    """`stops`: an early break; `token_residual`: as released for Ascend; `uncapped`: as in hierarchical speculative
    decoding (2601.05724); `padded`: a ragged batch whose chains end early."""
    rule = block_with(**({mistake: True} if mistake else {}))
    found = []
    for seed in range(MODELS):
        p, q = random_law(3, seed), random_law(3, seed + 500)
        emitted = emission(rule, enumerate_drafts(q, [(IID,)] * 3), p, 4)
        found.append(total_variation(emitted, p, 4))
        if mistake is None:
            ours = emission(RULES["block"], enumerate_drafts(q, [(IID,)] * 3), p, 4)
            assert ours.mean_accepted == pytest.approx(emitted.mean_accepted, abs=1e-12)
    assert np.mean(found) > floor if floor else max(found) < 1e-12


def law_without(
    distribution: SparseDistribution, gone: list[int], token: int, node: int, *, renormalise: bool
) -> ChildDistribution:
    """`distribution` with tokens removed, for a child that may be one of them (then `own` is never looked at again)."""
    left = {t: prob for t, prob in zip(distribution.token_ids, distribution.probs, strict=False) if t not in gone}
    probs = np.array(list(left.values()))
    probs = probs / probs.sum() if renormalise else probs
    found = ChildDistribution(np.array(list(left)), probs, token if token in left else min(left), node)
    found.token = token
    return found


@pytest.mark.extended
@pytest.mark.parametrize(
    "kind, renormalise, floor",
    [
        pytest.param(WOR, False, 0.004, id="without replacement, not renormalised"),
        pytest.param(IID, True, 0.02, id="independent draws, tested as without replacement"),
    ],
)
def test_a_wrong_conditional_law_is_found(random_law, monkeypatch, kind, renormalise, floor):
    def wrong(draft, node, children):
        tokens, law = [draft.tree.token_ids[child] for child in children], draft.distributions[node]
        return [
            law_without(law, tokens[:i], token, child, renormalise=renormalise)
            for i, (token, child) in enumerate(zip(tokens, children, strict=True))
        ]

    monkeypatch.setattr(distributions, "child_distributions", wrong)
    assert distances(random_law, rejection.verify_rejection, kind).mean() > floor


def test_dropping_duplicates_is_right_if_the_rest_is_read_as_without_replacement(random_law):
    def mend(draft: WeightedDraft, q) -> WeightedDraft:
        return relabelled(drop_duplicates(draft, q), WOR)

    assert distances(random_law, RULES["rejection"], IID, mend).max() < 1e-12


def test_two_tokens_cannot_see_a_dropped_duplicate_and_three_can(random_law):
    """Why the vocabulary of these tests is never two."""
    for vocab_size, seen in ((2, False), (3, True)):
        p, q = random_law(vocab_size, 1), random_law(vocab_size, 2)
        drafts = (drop_duplicates(draft, q) for draft in enumerate_drafts(q, [(IID, IID, IID)]))
        assert (total_variation(emission(RULES["rejection"], drafts, p, 2), p, 2) > 1e-4) == seen


@pytest.mark.extended
@pytest.mark.parametrize("off", [0.95, pytest.param(1.05, marks=pytest.mark.slow)])
def test_a_wrong_discount_of_kseq_is_found(random_law, monkeypatch, off):
    """A smaller one leaves a negative residual; a larger one is merely slower, and stays exact."""
    right = kseq.discount

    def wrong(target, distribution, num_draws):
        rho = right(target, distribution, num_draws)[0] * off
        return rho, float(np.minimum(target[distribution.token_ids] / rho, distribution.probs).sum())

    monkeypatch.setattr(kseq, "discount", wrong)
    found = distances(random_law, kseq.verify_kseq, IID, models=2).max()
    assert found > 1e-3 if off < 1 else found < 1e-12
