"""Every allowed pair of drafting scheme and ratio test, enumerated: the emitted joint law is the target's."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from actors.options import INDEPENDENT_ONLY, VerifyRule
from actors.protocol.messages import SamplingKind, SparseDistribution, TokenTree
from actors.verification.compatibility import is_exact
from actors.verification.distributions import DrawnTree
from actors.verification.rules import RULES
from tests.actors.verification.rule_enumeration import (
    WeightedDraft,
    emission,
    enumerate_drafts,
    ratio_outcomes,
    total_variation,
)

ROOT, DET, _, IID, WOR = SamplingKind
EXACT = 1e-12
SEEDS = [0, pytest.param(1, marks=pytest.mark.slow)]
LARGE = "(3, 2)", "(2, 2)", "(2, 1, 1)"
"""Trees whose enumeration takes a third of a second, and over which a rule loops as over the smaller ones."""
RATIO_RULES = [VerifyRule(name) for name in RULES]

CHAINS = ((1,), (1, 1), (1, 1, 1))
TREES = ((2,), (2, 1), (1, 2), (3, 1), (2, 1, 1), (2, 2))


def scheme(kind: SamplingKind, *widths: int) -> list[tuple[SamplingKind, ...]]:
    return [(kind,) * width for width in widths]


SCHEMES = {
    **{f"{kind.name} {widths}": scheme(kind, *widths) for kind in (DET, IID, WOR) for widths in CHAINS + TREES},
    "WITHOUT_REPLACEMENT (3, 2)": scheme(WOR, 3, 2),
    "sampled, then fixed": [(WOR, DET), (WOR,)],
    "fixed, then sampled": [(DET, IID), (IID,)],
    "fixed among sampled": [(WOR, DET, WOR), (DET,)],
    "fixed below sampled": [(WOR, WOR), (DET, DET)],
    "two kinds of sampling": [(IID, WOR, WOR), (WOR,)],
}

KEPT = "WITHOUT_REPLACEMENT (2, 1, 1)"
"""The deepest tree that is enumerated by default."""


def check(rule, p, q, levels, vocab_size: int, drafts=None):
    length = len(levels) + 1
    return total_variation(emission(rule, drafts or enumerate_drafts(q, levels), p, length), p, length)


@pytest.mark.parametrize("rule", ["rejection", "traversal", "block"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name.endswith(LARGE) and name != KEPT else []) for name in SCHEMES],
)
def test_rejection_traversal_and_block_are_exact(random_law, rule, name):
    levels = SCHEMES[name]
    if rule == "block" and any(len(level) > 1 for level in levels):
        return
    for vocab_size in (3, 4) if len(levels) == 1 or name.endswith("(2, 1)") else (3,):
        p, q = random_law(vocab_size, seed=1), random_law(vocab_size, seed=2)
        assert check(RULES[rule], p, q, levels, vocab_size) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "traversal"])
@pytest.mark.parametrize(
    "vocab_size, kind, widths",
    [
        (4, IID, (2, 2)),
        (3, IID, (3, 2)),
        (4, WOR, (3, 2)),
        (4, IID, (2, 1, 1)),
        (4, IID, (1, 1, 1)),
        (3, WOR, (2, 2, 1)),
    ],
)
def test_larger_enumerations(random_law, rule, vocab_size, kind, widths):
    p, q = random_law(vocab_size, seed=3), random_law(vocab_size, seed=4)
    assert check(RULES[rule], p, q, scheme(kind, *widths), vocab_size) < EXACT


@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("target, draft", [("sparse", "sparse"), ("one-hot", "dense"), ("dense", "one-hot")])
def test_zeros_and_disjoint_supports(random_law, rule, seed, target, draft):
    p, q = random_law(3, seed, target), random_law(3, seed + 100, draft)
    for kind in (IID, WOR):
        if is_exact(VerifyRule(rule), {kind}):
            widths = (1, 1) if rule == "block" else (2, 1)
            assert check(RULES[rule], p, q, scheme(kind, *widths), 3) < EXACT


@pytest.mark.extended
@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize("seed", range(2))
def test_texts_end_where_no_token_can_follow_as_often_as_without_drafts(random_law, rule, seed):
    """An impossible distribution is one whose mass is on a token that no draft names: here the last of four."""
    possible, draft = random_law(3, seed), random_law(3, seed + 100)

    def p(context):
        is_impossible = 3 in context or (len(context) > 0 and context[-1] == seed % 3)
        return np.eye(4)[3] if is_impossible else np.append(possible(context), 0.0)

    def q(context):
        return np.append(draft(context), 0.0)

    for kind in (IID, WOR):
        if is_exact(VerifyRule(rule), {kind}):
            assert check(RULES[rule], p, q, scheme(kind, *((1, 1) if rule == "block" else (2, 1))), 4) < EXACT


@pytest.mark.extended
@pytest.mark.parametrize("rule, widths", [(rule, widths) for rule in RULES for widths in [(1, 1, 1), (2, 1)]])
def test_a_perfect_drafter_is_always_accepted(random_law, rule, widths):
    if rule == "block" and widths == (2, 1):
        return
    p = random_law(4, seed=5)
    drafts = enumerate_drafts(p, scheme(IID, *widths))
    result = emission(RULES[rule], drafts, p, len(widths) + 1)
    assert total_variation(result, p, len(widths) + 1) < EXACT
    if rule != "kseq" or widths == (1, 1, 1):  # k-SEQ discounts all drafts alike and can lose all of them
        assert result.mean_accepted == pytest.approx(len(widths), abs=1e-12)


@pytest.mark.extended
@pytest.mark.parametrize("rule", INDEPENDENT_ONLY)
@pytest.mark.parametrize(
    "widths",
    [
        *CHAINS,
        (2,),
        (3,),
        (2, 1),
        pytest.param((2, 2), marks=pytest.mark.slow),
        pytest.param((3, 1), marks=pytest.mark.slow),
    ],
)
def test_rules_of_independent_draws_are_exact(random_law, rule, widths):
    for vocab_size in (3, 4) if len(widths) == 1 else (3,):
        p, q = random_law(vocab_size, seed=6), random_law(vocab_size, seed=7)
        assert check(RULES[rule], p, q, scheme(IID, *widths), vocab_size) < EXACT


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
@pytest.mark.parametrize("seed", [*SEEDS, pytest.param(2, marks=pytest.mark.slow)])
def test_adaptive_growth_is_exact(random_law, rule, seed):
    """Whether a sibling or a level is added may depend on what was drawn, as long as nothing drawn is taken back."""
    p, q = random_law(3, seed), random_law(3, seed + 50)

    def grown():
        for draft in enumerate_drafts(q, scheme(WOR, 2, 1)):
            (first, second), row = draft.tree.children()[0], q(())
            keep_second = row[draft.tree.token_ids[first]] < 0.5
            deep = [node for node in (first, second) if row[draft.tree.token_ids[node]] >= 0.3]
            kept = [0, first, second] if keep_second else [0, first]
            kept += [child for node in deep if node in kept for child in draft.tree.children()[node]]
            yield restrict(draft, sorted(kept))

    assert check(RULES[rule], p, q, scheme(WOR, 2, 1), 3, grown()) < EXACT


def restrict(draft: WeightedDraft, kept: list[int]) -> WeightedDraft:
    """The draft with these nodes only."""
    place = {node: i for i, node in enumerate(kept)}
    tree = TokenTree(
        tuple(draft.tree.token_ids[node] for node in kept),
        tuple(place.get(draft.tree.parents[node], -1) for node in kept),
    )
    return WeightedDraft(
        draft.weight, tree, tuple(draft.sampling_kinds[n] for n in kept), tuple(draft.distributions[n] for n in kept)
    )


@pytest.mark.parametrize("rule, kind", [(r, kind) for r in RATIO_RULES for kind in (IID, WOR) if is_exact(r, {kind})])
def test_a_truncated_law_that_was_really_sampled_is_exact(random_law, rule, kind):
    p, full = random_law(4, seed=8), random_law(4, seed=9)

    def top_two(context):
        row = full(context).copy()
        row[np.argsort(row)[:2]] = 0.0
        return row / row.sum()

    widths = (1, 1) if rule == "block" else (2, 2)
    assert check(RULES[rule], p, top_two, scheme(kind, *widths), 4) < EXACT


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("kind", [IID, DET])
def test_block_and_traversal_are_one_rule_on_a_chain(random_law, seed, depth, kind):
    """Two derivations of one law: every path is as likely under both, and longer than token by token."""
    p, q = random_law(3, seed), random_law(3, seed + 20)
    block, bottom_up, token_level = (
        emission(RULES[rule], enumerate_drafts(q, scheme(kind, *[1] * depth)), p, depth + 1)
        for rule in ("block", "traversal", "rejection")
    )
    assert total_variation(block, p, depth + 1) < EXACT
    assert block.mean_accepted == pytest.approx(bottom_up.mean_accepted, abs=1e-12)
    if kind == DET or depth == 1:
        assert block.mean_accepted == pytest.approx(token_level.mean_accepted, abs=1e-12)
    else:
        assert block.mean_accepted > token_level.mean_accepted


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_block_and_traversal_accept_the_same_prefixes_of_every_draft(random_law, depth):
    p, q = random_law(3, 1), random_law(3, 21)
    for draft in enumerate_drafts(q, scheme(IID, *[1] * depth)):
        block, bottom_up = (
            sorted((path, float(row[token])) for path, row, token in outcomes_of(RULES[rule], draft, p))
            for rule in ("block", "traversal")
        )
        assert [path for path, _ in block] == [path for path, _ in bottom_up]
        assert [weight for _, weight in block] == pytest.approx([weight for _, weight in bottom_up], abs=1e-12)


def outcomes_of(rule, draft: WeightedDraft, p):
    """(path, probability of it and each next token [V], token)."""
    contexts = [tuple(draft.tree.token_ids[i] for i in draft.tree.path_to(n)) for n in range(len(draft.tree.parents))]
    joint = defaultdict(lambda: np.zeros(3))
    for weight, (path, row) in ratio_outcomes(rule, draft, contexts, [*map(p, contexts)]):
        joint[path] += weight * row
    return [(path, row, token) for path, row in joint.items() for token in range(3)]


@pytest.mark.extended
@pytest.mark.parametrize("kind", [IID, WOR])
@pytest.mark.parametrize("widths", [(2,), (3,), (2, 1), (2, 2), pytest.param((2, 1, 1), marks=pytest.mark.slow)])
def test_traversal_is_never_shorter_and_equal_on_one_level(random_law, kind, widths):
    p, q = random_law(3, seed=10), random_law(3, seed=11)
    bottom_up, top_down = (
        emission(RULES[rule], enumerate_drafts(q, scheme(kind, *widths)), p, len(widths) + 1).mean_accepted
        for rule in ("traversal", "rejection")
    )
    if len(widths) == 1:
        assert bottom_up == pytest.approx(top_down, abs=1e-12)
    else:
        assert bottom_up > top_down


# --- what the rules may look at --------------------------------------------------------------------------------------


class _Scripted:
    """Coins with given answers, and a record of the questions."""

    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)
        self.probabilities: list[float] = []

    def accept(self, probability: float, node: int) -> bool:
        self.probabilities.append(probability)
        return self.answers.pop(0)

    def sample(self, weights: np.ndarray, node: int) -> int:
        return int(np.argmax(weights))


P = np.array([0.5, 0.3, 0.2])
Q = SparseDistribution((0, 1, 2), (0.2, 0.3, 0.5))


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_the_empty_proposal_is_plain_decoding(rule):
    assert RULES[rule](DrawnTree(TokenTree.root(7), (ROOT,), (None,)), lambda node: P, _Scripted(True)) == ((), 0)


@pytest.mark.parametrize("rule", ["rejection", "kseq", "transport"])
def test_top_down_rules_ask_only_for_rows_of_visited_nodes(rule):
    tree = TokenTree((7, 2, 1, 0, 0), (-1, 0, 0, 1, 2))
    draft = DrawnTree(tree, (ROOT, IID, IID, IID, IID), (Q, Q, Q, None, None))
    visited = []
    path, _ = RULES[rule](draft, lambda n: visited.append(n) or P, _Scripted(False, True, True))
    assert path == (2, 4)
    assert visited == [0, 2, 4]


def test_traversal_does_not_descend_into_what_cannot_be_reached():
    draft = DrawnTree(TokenTree((7, 2, 1), (-1, 0, 1)), (ROOT, DET, DET), (None,) * 3)
    visited = []
    row = np.array([0.5, 0.5, 0.0])
    RULES["traversal"](draft, lambda n: visited.append(n) or row, _Scripted(True))
    assert visited == [0]


def test_acceptance_probabilities_of_the_second_sibling():
    """The second of draws without replacement is tested against the law it was drawn from, not against the first's."""
    tree = TokenTree((7, 2, 1), (-1, 0, 0))
    for kind, distribution in ((IID, 0.3), (WOR, 0.3 / 0.5), (DET, 1.0)):
        random_source = _Scripted(False, False)
        draft = DrawnTree(tree, (ROOT, kind, kind), (Q, None, None))
        RULES["rejection"](draft, lambda node: P, random_source)
        first = 0.2 if kind == DET else 0.2 / 0.5
        residual = 0.3 / 0.8 if kind == DET else 0.0  # p - q leaves token 0 only: (0.3, 0, -0.3)
        assert random_source.probabilities == pytest.approx([first, min(1.0, residual / distribution)])
