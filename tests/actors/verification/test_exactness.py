"""Every allowed pair of drafting scheme and ratio test, enumerated: the emitted joint law is the target's."""

from __future__ import annotations

import numpy as np
import pytest

from actors.protocol.messages import SamplingKind, SparseDistribution, TokenTree
from actors.verification.rules import ALLOWED, RULES, check_scheme
from cluster.tools.certify.rule_enumeration import WeightedDraft, emission, enumerate_drafts, total_variation

ROOT, DET, COUPLED, IID, WOR = (
    SamplingKind.ROOT,
    SamplingKind.DETERMINISTIC,
    SamplingKind.COUPLED,
    SamplingKind.IID,
    SamplingKind.WITHOUT_REPLACEMENT,
)
EXACT = 1e-12

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


def check(rule, p, q, levels, vocab_size: int, drafts=None):
    length = len(levels) + 1
    return total_variation(emission(rule, drafts or enumerate_drafts(q, levels), p, length), p, length)


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
@pytest.mark.parametrize("name", SCHEMES)
def test_rejection_and_traversal_are_exact(random_law, rule, name):
    levels = SCHEMES[name]
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


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("target, draft", [("sparse", "sparse"), ("one-hot", "dense"), ("dense", "one-hot")])
def test_zeros_and_disjoint_supports(random_law, rule, seed, target, draft):
    p, q = random_law(3, seed, target), random_law(3, seed + 100, draft)
    for kind in (IID, WOR):
        if kind in ALLOWED[rule]:
            assert check(RULES[rule], p, q, scheme(kind, 2, 1), 3) < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 1)])
def test_a_perfect_drafter_is_always_accepted(random_law, rule, widths):
    p = random_law(4, seed=5)
    drafts = enumerate_drafts(p, scheme(IID, *widths))
    result = emission(RULES[rule], drafts, p, len(widths) + 1)
    assert total_variation(result, p, len(widths) + 1) < EXACT
    if rule != "kseq" or widths == (1, 1, 1):  # k-SEQ discounts all drafts alike and can lose all of them
        assert result.mean_accepted == pytest.approx(len(widths), abs=1e-12)


@pytest.mark.parametrize("widths", [*CHAINS, (2,), (3,), (2, 1), (2, 2), (3, 1)])
def test_kseq_is_exact_for_independent_draws(random_law, widths):
    for vocab_size in (3, 4) if len(widths) == 1 else (3,):
        p, q = random_law(vocab_size, seed=6), random_law(vocab_size, seed=7)
        assert check(RULES["kseq"], p, q, scheme(IID, *widths), vocab_size) < EXACT


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
@pytest.mark.parametrize("seed", range(6))
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


@pytest.mark.parametrize("rule, kind", [(rule, kind) for rule in RULES for kind in (IID, WOR) if kind in ALLOWED[rule]])
def test_a_truncated_law_that_was_really_sampled_is_exact(random_law, rule, kind):
    p, full = random_law(4, seed=8), random_law(4, seed=9)

    def top_two(context):
        row = full(context).copy()
        row[np.argsort(row)[:2]] = 0.0
        return row / row.sum()

    assert check(RULES[rule], p, top_two, scheme(kind, 2, 2), 4) < EXACT


def block(tree, sampling_kinds, distributions, target_row, random_source):
    """Block verification as its paper states it (2403.10444), for chains: the oracle of `traversal`."""
    depth = len(tree.token_ids) - 1
    p = [target_row(i) for i in range(depth + 1)]
    q = [np.zeros_like(p[0]) for _ in range(depth)]
    for row, distribution in zip(q, distributions, strict=False):
        row[list(distribution.token_ids)] = distribution.probs
    reach = [1.0]
    for i in range(depth):
        x = tree.token_ids[i + 1]
        reach.append(min(1.0, reach[i] * p[i][x] / q[i][x]))
    residuals = [np.maximum(reach[i] * p[i] - q[i], 0.0) for i in range(depth)] + [p[depth]]
    accepted = 0
    for i in range(1, depth + 1):
        left = residuals[i].sum()
        spare = left + (1.0 - reach[i])
        if random_source.accept(reach[i] if i == depth else left / spare if spare > 0 else 1.0, i):
            accepted = i
    residual = residuals[accepted] if residuals[accepted].sum() > 0 else p[accepted]
    return tuple(range(1, accepted + 1)), random_source.sample(residual, accepted)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_traversal_is_block_verification_on_a_chain(random_law, seed, depth):
    p, q = random_law(3, seed), random_law(3, seed + 20)
    levels = scheme(IID, *[1] * depth)
    ours = emission(RULES["traversal"], enumerate_drafts(q, levels), p, depth + 1)
    paper = emission(block, enumerate_drafts(q, levels), p, depth + 1)
    token_level = emission(RULES["rejection"], enumerate_drafts(q, levels), p, depth + 1)
    assert total_variation(paper, p, depth + 1) < EXACT
    assert ours.mean_accepted == pytest.approx(paper.mean_accepted, abs=1e-12)
    assert ours.mean_accepted >= token_level.mean_accepted - 1e-12


@pytest.mark.parametrize("kind", [IID, WOR])
@pytest.mark.parametrize("widths", [(2,), (3,), (2, 1), (2, 2), (2, 1, 1)])
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


# --- the table of allowed pairs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kinds", [(DET, DET), (COUPLED, COUPLED), (IID, IID), (WOR, WOR), (IID, DET), (DET, WOR)])
def test_the_table_tells_exact_pairs_from_biased_ones(random_law, rule, kinds):
    """Exact where `ALLOWED` says so; off by more than a percent everywhere else."""
    worst = max(
        check(RULES[rule], random_law(3, seed), random_law(3, seed + 30), [kinds, kinds[:1]], 3) for seed in range(4)
    )
    if ALLOWED[rule].issuperset(kinds):
        check_scheme(rule, kinds)
        assert worst < EXACT
    else:
        with pytest.raises(ValueError, match=f"verify.rule={rule} would bias"):
            check_scheme(rule, kinds)
        assert worst > 0.01


def test_a_refusal_names_the_draws_and_the_rules_that_fit():
    with pytest.raises(ValueError, match="draws WITHOUT_REPLACEMENT; use coupled, rejection, traversal"):
        check_scheme("kseq", [WOR, IID])
    with pytest.raises(ValueError, match="'typical' is not one of coupled, rejection, traversal, kseq"):
        check_scheme("typical", [IID])
    check_scheme("kseq", [ROOT, IID])
    assert ALLOWED.keys() == {"coupled", *RULES}


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


@pytest.mark.parametrize("rule", RULES)
def test_the_empty_proposal_is_plain_decoding(rule):
    assert RULES[rule](TokenTree.root(7), (ROOT,), (None,), lambda node: P, _Scripted(True)) == ((), 0)


@pytest.mark.parametrize("rule", ["rejection", "kseq"])
def test_top_down_rules_ask_only_for_rows_of_visited_nodes(rule):
    tree = TokenTree((7, 2, 1, 0, 0), (-1, 0, 0, 1, 2))
    visited = []
    path, _ = RULES[rule](
        tree, (ROOT, IID, IID, IID, IID), (Q, Q, Q, None, None), lambda n: visited.append(n) or P, _Scripted(0, 1, 1)
    )
    assert path == (2, 4)
    assert visited == [0, 2, 4]


def test_traversal_does_not_descend_into_what_cannot_be_reached():
    tree = TokenTree((7, 2, 1), (-1, 0, 1))
    visited = []
    row = np.array([0.5, 0.5, 0.0])
    RULES["traversal"](tree, (ROOT, DET, DET), (None,) * 3, lambda n: visited.append(n) or row, _Scripted(True))
    assert visited == [0]


def test_acceptance_probabilities_of_the_second_sibling():
    """Without replacement the second is tested against the law it was drawn from, not against the first's."""
    tree = TokenTree((7, 2, 1), (-1, 0, 0))
    for kind, distribution in ((IID, 0.3), (WOR, 0.3 / 0.5), (DET, 1.0)):
        random_source = _Scripted(False, False)
        RULES["rejection"](tree, (ROOT, kind, kind), (Q, None, None), lambda node: P, random_source)
        first = 0.2 if kind == DET else 0.2 / 0.5
        residual = 0.3 / 0.8 if kind == DET else 0.0  # p - q leaves token 0 only: (0.3, 0, -0.3)
        assert random_source.probabilities == pytest.approx([first, min(1.0, residual / distribution)])
