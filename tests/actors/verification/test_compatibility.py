"""The table of allowed pairs, pair by pair: what it allows is exact, what it forbids is biased in an example.

Kinds of draws, alone and mixed, and every set of traits, against every rule. A trait concerns tokens that were drawn at
random only, save the shape of the tree.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from actors.options import VerifyRule
from actors.protocol.messages import SamplingKind, TokenTree
from actors.verification.compatibility import (
    EXACT_FOR,
    RANDOM,
    DraftTrait,
    check_scheme,
    choose_rule,
    is_exact,
)
from actors.verification.coupled import verify_coupled
from actors.verification.rules import RULES
from tests.actors.verification.conftest import random_law
from tests.actors.verification.keyed_rounds import emit, production
from tests.actors.verification.rule_enumeration import (
    WeightedDraft,
    coupled_outcomes,
    emission,
    enumerate_drafts,
    ratio_outcomes,
    total_variation,
)

ROOT, DET, COUPLED, IID, WOR = SamplingKind
BRANCHES, EDITED, SHARED, REPEATED = DraftTrait
EXACT, BIASED = 1e-12, 1e-3
VOCAB = 3

KINDS = [(kind,) for kind in (DET, COUPLED, IID, WOR)] + [*itertools.combinations((DET, IID, WOR), 2), (COUPLED, IID)]
TRAITS = [set(some) for size in range(5) for some in itertools.combinations(DraftTrait, size)]
TRAITS = [some for some in TRAITS if SHARED not in some or BRANCHES in some]  # a chain has no two nodes of one depth


def levels_of(kinds: tuple[SamplingKind, ...], traits: Collection[DraftTrait]) -> list[tuple[SamplingKind, ...]]:
    """Two levels; of two kinds, siblings have one each, or, in a chain, the levels."""
    if BRANCHES in traits:
        return [(kinds[0], kinds[-1]), (kinds[0],)]
    return [(kinds[0],), (kinds[-1],)]


def edited(draft: WeightedDraft, q) -> WeightedDraft:
    """Unlikely leaves are dropped and siblings sorted by their probability, both after the draw."""
    tree, size = draft.tree, len(draft.tree.parents)
    contexts = [tuple(tree.token_ids[i] for i in tree.path_to(node)) for node in range(size)]
    value = [1.0] + [float(q(context[:-1])[context[-1]]) for context in contexts[1:]]
    leaves = set(range(size)) - set(tree.parents)
    kept = [node for node in range(size) if node not in leaves or value[node] >= 0.4]
    depths = tree.depths()
    kept.sort(key=lambda node: (depths[node], -value[node]) if node else (-1, 0.0))
    place = {node: i for i, node in enumerate(kept)}
    return WeightedDraft(
        draft.weight,
        TokenTree(tuple(tree.token_ids[n] for n in kept), (-1, *(place[tree.parents[n]] for n in kept[1:]))),
        tuple(draft.sampling_kinds[n] for n in kept),
        tuple(draft.distributions[n] for n in kept),
    )


def shared(drafts: Iterator[WeightedDraft]) -> Iterator[WeightedDraft]:
    """Both children of the root lead to one node of the draft graph: what is drawn after it stands below both."""
    for draft in drafts:
        below = [i for i, parent in enumerate(draft.tree.parents) if parent > 0]
        tokens = list(draft.tree.token_ids)
        if len(below) == 2 and draft.sampling_kinds[below[1]] in RANDOM:
            if tokens[below[0]] != tokens[below[1]]:
                continue
            law = draft.distributions[1]
            assert law is not None
            weight = draft.weight / law.probs[law.token_ids.index(tokens[below[1]])]
            yield WeightedDraft(weight, draft.tree, draft.sampling_kinds, draft.distributions)
        else:
            yield draft


@cache
def distance(rule: VerifyRule, kinds: tuple[SamplingKind, ...], traits: frozenset[DraftTrait], seed: int) -> float:
    """Total variation of the output from the target's distribution."""
    levels = levels_of(kinds, traits)
    p, full = random_law(VOCAB, seed), random_law(VOCAB, seed + 30)
    q = full if SHARED not in traits else (lambda context: full((0,) * len(context)))  # merged nodes have one law
    if REPEATED in traits:
        # One number for a draw of a position: of either round, and, where draws are shared, of either parent.
        def keys(stream, position, round, node):
            again = ("draft", position, node // 10 % 10 if SHARED in traits else node % 10)
            return again if stream == "draft" else production(stream, position, round, node)

        # Two tokens show it, and are many fewer runs with branches.
        size = 2 if BRANCHES in traits else VOCAB
        p, full = random_law(size, seed), random_law(size, seed + 30)
        q = full if SHARED not in traits else (lambda context: full((0,) * len(context)))
        return total_variation(emit(rule, p, q, levels, keys=keys), p, 2)
    drafts = enumerate_drafts(q, levels)
    if SHARED in traits:
        drafts = shared(drafts)
    if EDITED in traits:
        drafts = (edited(draft, q) for draft in drafts)
    function, outcomes = (verify_coupled, coupled_outcomes) if rule == "coupled" else (RULES[rule], ratio_outcomes)
    return total_variation(emission(function, drafts, p, 3, outcomes), p, 3)


def pairs():
    """The coupled rule looks at no kind: by default it has two; `test_coupled.py` has draws at random."""
    for rule, kinds in itertools.product(EXACT_FOR, KINDS):
        is_more = rule == "coupled" and kinds not in [(DET,), (COUPLED,)]
        name = f"{'+'.join(kind.name for kind in kinds)}-{rule}"
        yield pytest.param(rule, kinds, id=name, marks=[pytest.mark.slow] if is_more else [])


@pytest.mark.parametrize(("rule", "kinds"), list(pairs()))
def test_every_pair_that_the_table_allows_is_exact(rule, kinds):
    for traits in TRAITS:
        if {EDITED, REPEATED} <= traits:
            continue  # no ratio test allows EDITED, and the coupled rule and fixed tokens allow each trait alone
        if is_exact(rule, kinds, traits):
            assert distance(rule, kinds, frozenset(traits), 1) < EXACT, traits
            check_scheme(rule, kinds, traits)


FORBIDDEN_KINDS = [
    (rule, kind) for rule in RULES for kind in SamplingKind if kind not in {ROOT, *EXACT_FOR[VerifyRule(rule)][0]}
]
FORBIDDEN_TRAITS = [
    (rule, kind, trait)
    for rule in RULES
    for kind in RANDOM & EXACT_FOR[VerifyRule(rule)][0]
    for trait in sorted(set(DraftTrait) - EXACT_FOR[VerifyRule(rule)][1])
]


@pytest.mark.parametrize("rule, kind", FORBIDDEN_KINDS)
def test_a_kind_that_the_table_forbids_is_biased(rule, kind):
    """Alone, or behind a token of a kind that it allows."""
    does = {DET: "chooses its tokens and draws none", WOR: "draws siblings without replacement"}
    does |= {COUPLED: "draws with the target's noise", IID: "draws siblings independently"}
    with pytest.raises(ValueError, match=f"verify.rule={rule} would bias .* drafter that {does[kind]}; use coupled"):
        check_scheme(rule, {kind})
    mixtures = [(kind,), *((other, kind) for other in sorted(EXACT_FOR[VerifyRule(rule)][0] & RANDOM))]
    assert any(distance(rule, kinds, frozenset({BRANCHES}), seed) > BIASED for kinds in mixtures for seed in range(4))


@pytest.mark.extended
@pytest.mark.parametrize("rule, kind, trait", FORBIDDEN_TRAITS)
def test_a_trait_that_the_table_forbids_biases_tokens_drawn_at_random(rule, kind, trait):
    with pytest.raises(ValueError, match=f"verify.rule={rule} .* drafts that {trait}; use coupled"):
        check_scheme(rule, {kind}, {trait})
    if rule == "block" and trait in (BRANCHES, SHARED):
        # It has no second child to try; a chain cannot show one draw twice.
        with pytest.raises(AssertionError, match="for chains"):
            distance(rule, (kind,), frozenset({BRANCHES, trait}), 0)
    else:
        traits = frozenset({trait, BRANCHES} if trait is SHARED else {trait})
        assert max(distance(rule, (kind,), traits, seed) for seed in range(6)) > BIASED


@pytest.mark.parametrize("trait", sorted(set(DraftTrait) - {BRANCHES}))
@pytest.mark.parametrize("rule", ["rejection", "traversal", "block"])
def test_tokens_without_randomness_of_their_own_may_have_any_trait(rule, trait):
    for kind in (DET, COUPLED):
        check_scheme(rule, {kind}, {trait})
    with pytest.raises(ValueError, match="verify.rule=block is for chains, not for drafts that branch; use coupled, "):
        check_scheme("block", {DET}, {BRANCHES})


def test_a_refusal_names_the_draws_and_the_rules_that_fit():
    with pytest.raises(ValueError, match="siblings without replacement; use coupled, rejection, block, traversal$"):
        check_scheme("kseq", [WOR, IID])
    with pytest.raises(ValueError, match="drafts that lose or re-sort tokens after the draw; use coupled$"):
        check_scheme("traversal", [WOR], [BRANCHES, EDITED])
    with pytest.raises(
        ValueError, match="'typical' is not one of coupled, rejection, block, traversal, kseq, transport"
    ):
        check_scheme("typical", [IID])
    check_scheme("kseq", [ROOT, IID])
    assert EXACT_FOR.keys() == {"coupled", *RULES} == set(VerifyRule) - {VerifyRule.auto}


@cache
def accepted_of_chains(seed: int) -> dict[str, float]:
    """Mean number of accepted tokens of three that were drawn independently, by rule."""
    p, q = random_law(VOCAB, seed), random_law(VOCAB, seed + 30)
    return {name: emission(RULES[name], enumerate_drafts(q, [(IID,)] * 3), p, 4).mean_accepted for name in RULES}


@pytest.mark.parametrize("kinds", [set(), *map(set, KINDS)])
@pytest.mark.parametrize("branches", [False, True])
def test_auto_takes_a_rule_that_is_exact_and_the_longest_of_chains(kinds, branches):
    traits = {BRANCHES} if branches else set()
    for is_greedy in (True, False):
        rule = choose_rule(kinds, traits, is_greedy=is_greedy)
        assert is_exact(rule, kinds, traits)
        drawn_chain = bool(kinds & RANDOM) and not branches
        assert rule is (VerifyRule.block if drawn_chain and not is_greedy else VerifyRule.coupled)
    if drawn_chain:
        for seed in range(3):
            accepted = accepted_of_chains(seed)
            assert accepted[rule] == pytest.approx(max(accepted.values())) and accepted[rule] > accepted["rejection"]


def to_markdown() -> str:
    """The table of `docs/verification.md`: a row for every way of drafting, a column for every rule."""
    schemes: list[tuple[str, set[SamplingKind], set[DraftTrait]]] = [
        ("chain of chosen tokens (lookups, greedy models, draft-ahead)", {SamplingKind.DETERMINISTIC}, set()),
        (
            "tree of chosen tokens (lookups, `best_first`, `dynamic`)",
            {SamplingKind.DETERMINISTIC},
            {DraftTrait.BRANCHES},
        ),
        ("chain drawn at random", {SamplingKind.IID}, set()),
        ("siblings drawn independently, duplicates kept", {SamplingKind.IID}, {DraftTrait.BRANCHES}),
        ("siblings drawn without replacement", {SamplingKind.WITHOUT_REPLACEMENT}, {DraftTrait.BRANCHES}),
        ("chosen and drawn tokens under one node", set(SamplingKind) - {SamplingKind.ROOT}, {DraftTrait.BRANCHES}),
    ]
    for trait in DraftTrait:
        if trait is not DraftTrait.BRANCHES:
            schemes.append((f"tokens drawn at random that {trait}", {SamplingKind.IID}, {trait}))
    rules = [str(rule) for rule in EXACT_FOR]
    lines = ["| drafts | " + " | ".join(f"`{rule}`" for rule in rules) + " |", "|---" * (1 + len(rules)) + "|"]
    for name, kinds, traits in schemes:
        cells = ["exact" if is_exact(rule, kinds, traits) else "refused" for rule in EXACT_FOR]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_the_page_shows_the_table():
    page = Path(__file__).parents[3] / "docs" / "verification.md"
    whole = f"\n\n{to_markdown()}\n\n"
    assert whole in page.read_text(), "write there what `to_markdown` returns"


# --- numbers that are met twice, with the production's keys but for one of them --------------------------------------


def one_coin_for_a_position(stream, position, round, node):
    return ("coin", position) if stream == "coin" else production(stream, position, round, node)


def residual_from_the_noise_of_the_draft(stream, position, round, node):
    """A rejected token is replaced with the number it was drawn with."""
    if stream in ("draft", "residual"):
        return ("draft", position, round)
    return production(stream, position, round, node)


@pytest.mark.extended
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kinds", [[(IID,), (IID,)], [(IID, IID)]])
def test_the_production_s_keys_are_exact(rule, kinds):
    if len(kinds[0]) > 1 and rule == "block":
        return
    p, q = random_law(2, 1), random_law(2, 31)
    assert total_variation(emit(rule, p, q, kinds, length=3), p, 3) < EXACT


@pytest.mark.parametrize("rule", ["block", "traversal"])
def test_a_coin_keyed_by_position_biases_rules_that_condition_on_all_they_tested(rule):
    found = []
    for seed in range(4):
        p, q = random_law(2, seed), random_law(2, seed + 30)
        found.append(total_variation(emit(rule, p, q, [(IID,)] * 3, 3, one_coin_for_a_position), p, 3))
    assert max(found) > BIASED


@pytest.mark.parametrize("rule", RULES)
def test_a_residual_drawn_with_the_noise_of_the_draft_biases_every_ratio_rule(rule):
    found = []
    for seed in range(4):
        p, q = random_law(VOCAB, seed), random_law(VOCAB, seed + 30)
        found.append(total_variation(emit(rule, p, q, [(IID,)], 1, residual_from_the_noise_of_the_draft), p, 1))
    assert np.mean(found) > BIASED
