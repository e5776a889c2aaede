"""Levels under a target, enumerated: what a cascade hands up was drawn from exactly the law that it reports.

Its proposals, with their weights, go through the production rule of the target. The known wrong variants of multi-level
drafting are made on purpose and must be found.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from actors.drafters.interface import Context
from actors.drafters.interface import Draft as Guess
from actors.protocol.messages import Commit, SamplingParams, SparseDistribution, TokenTree
from actors.verification import rejection
from actors.verification.distributions import Residual
from actors.verification.rules import RULES
from tests.actors.verification.cascade_enumeration import (
    PROMPT,
    VOCAB,
    ToyChild,
    distance,
    enumerate_proposals,
    toy_level,
)
from tests.actors.verification.rule_enumeration import Tape, all_runs

EXACT = 1e-12


@pytest.mark.parametrize("rule", ["rejection", "traversal", "kseq", "transport"])
@pytest.mark.parametrize("lengths, tail", [((1, 2), 0), ((2, 3), 0), ((1, 3), 1)])
def test_two_levels_are_exact(random_law, rule, lengths, tail):
    p, m, s = (random_law(VOCAB, seed) for seed in (1, 2, 3))
    proposed = enumerate_proposals([s, m], lengths, rule, tail)
    assert sum(weight for weight, _ in proposed) == pytest.approx(1, abs=EXACT)
    assert all(guess.tree.num_draft_tokens == lengths[-1] for _, guess in proposed)
    assert distance(p, proposed, rule) < EXACT


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
@pytest.mark.parametrize("lengths", [(2, 0), (1, 0, 2), (1, 2, 0), (2, 0, 0)])
def test_a_level_that_forwards_the_drafts_of_its_child_is_exact(random_law, rule, lengths):
    """The level may be at any place of a cascade: the law of what it hands up is that of the level which drafted it."""
    p, *distributions = (random_law(VOCAB, seed) for seed in range(1, len(lengths) + 2))
    proposed = enumerate_proposals(distributions, lengths, rule)
    assert distance(p, proposed, rule) < EXACT
    nearest = next(place for place in reversed(range(len(lengths))) if lengths[place])
    for _, guess in proposed:
        assert dict(guess.parts) == {str(nearest): lengths[nearest]}
        distribution = guess.distributions[0]
        assert distribution is not None
        assert dict(zip(distribution.token_ids, distribution.probs, strict=False)) == pytest.approx(
            dict(enumerate(distributions[nearest](())))
        )


@pytest.mark.parametrize("rule", ["rejection", "traversal", "kseq", "transport"])
def test_the_cut_law_is_the_one_that_is_verified_against_and_reported(random_law, rule):
    p, m, s = (random_law(VOCAB, seed) for seed in (1, 2, 3))
    proposed = enumerate_proposals([s, m], (1, 2), rule, law_size=2)
    assert all(
        len(distribution.probs) == 2
        for _, guess in proposed
        for distribution in guess.distributions
        if distribution is not None
    )
    assert distance(p, proposed, rule) < EXACT


@pytest.mark.parametrize("rule", ["rejection", pytest.param("traversal", marks=pytest.mark.slow)])
def test_three_levels_are_exact(random_law, rule):
    p, m, s, r = (random_law(VOCAB, seed) for seed in (1, 2, 3, 4))
    assert distance(p, enumerate_proposals([r, s, m], (1, 2, 2), rule), rule) < EXACT


@pytest.mark.extended
@pytest.mark.parametrize("rule", ["rejection", "traversal", "kseq", "transport"])
@pytest.mark.parametrize(
    "lengths, widths",
    [
        ((1, 2), (1, 2)),  # the last level hands a tree to the target
        ((2, 3), (1, 2)),
        ((1, 2, 2), (1, 2, 1)),  # the middle one to the last, whose chain is verified
        pytest.param((1, 2, 4), (1, 2, 2), marks=pytest.mark.slow),  # both
        pytest.param((1, 4, 3), (1, 2, 1), marks=pytest.mark.slow),  # a deeper one
        ((1, 2, 0), (1, 2, 1)),  # the middle one to the target, past a level that forwards
    ],
)
def test_a_level_that_hands_up_a_tree_is_exact(random_law, rule, lengths, widths):
    p, *distributions = (random_law(VOCAB, seed) for seed in range(1, len(lengths) + 2))
    proposed = enumerate_proposals(distributions, lengths, rule, widths=widths)
    assert sum(weight for weight, _ in proposed) == pytest.approx(1, abs=EXACT)
    chains = {guess.tree.is_chain for _, guess in proposed}
    assert chains == {widths[-1] == 1 and lengths[-1] > 0}
    assert distance(p, proposed, rule) < EXACT


@pytest.mark.parametrize("style", ["sparse", "one-hot"])
def test_runners_up_of_distributions_with_zeros(random_law, style):
    p, m, s = random_law(VOCAB, 1, style), random_law(VOCAB, 11, style), random_law(VOCAB, 21)
    for rule in ("rejection", "traversal"):
        assert distance(p, enumerate_proposals([s, m], (1, 3), rule, widths=(1, 3)), rule) < EXACT


@pytest.mark.parametrize("style", ["sparse", "one-hot"])
def test_zeros_and_disjoint_supports(random_law, style):
    for seed in range(3):
        p, m, s = random_law(VOCAB, seed, style), random_law(VOCAB, seed + 10, style), random_law(VOCAB, seed + 20)
        assert distance(p, enumerate_proposals([s, m], (1, 2), "rejection"), "rejection") < EXACT


def test_a_lookup_as_child_changes_nothing(random_law):
    """A level that drafts deterministically is a point mass to the one above, whose tokens follow its own law."""
    p, m = random_law(VOCAB, 1), random_law(VOCAB, 2)
    fixed = {(): 1, (1,): 2}

    def lookup(context):
        return np.eye(VOCAB)[fixed.get(context, 0)]

    assert distance(p, enumerate_proposals([lookup, m], (2, 3), "rejection"), "rejection") < EXACT


def test_what_was_drafted_ahead_follows_its_law_too(random_law):
    """Tokens that were not offered yet follow, after a hit, the same distribution as new ones."""
    m, s = random_law(VOCAB, 2), random_law(VOCAB, 3)
    followed: dict[tuple[int, ...], dict[int, float]] = defaultdict(lambda: defaultdict(float))

    def run(tape: Tape):
        drafter = toy_level(m, ToyChild(s, tape), tape, (1, 1), 1, "rejection", works_ahead=True)
        context = Context(1, 0, list(PROMPT), len(PROMPT), SamplingParams(temperature=1.0))
        drafter.open(context)
        offered = drafter.propose([context], [1])[0].tree.token_ids[1:]
        while drafter.wants_work:
            drafter.work()
        token_ids = (*offered, 2)  # the target accepts and adds token 2, whatever was expected
        drafter.observe(context, Commit(1, 0, len(PROMPT), (1,), token_ids))
        context.extend(token_ids)
        hit = drafter.prepared(context)
        guess = drafter.propose([context], [1])[0]
        return token_ids, hit, guess.tree.token_ids[1], guess.distributions[0]

    hits = 0.0
    for weight, (token_ids, hit, token, distribution) in all_runs(run):
        followed[token_ids][token] += weight
        hits += weight * hit
        assert distribution is not None
        assert dict(zip(distribution.token_ids, distribution.probs, strict=False)) == pytest.approx(
            dict(enumerate(m(token_ids)))
        )
    assert 0.1 < hits < 0.9
    for token_ids, counted in followed.items():
        total = sum(counted.values())
        assert [counted[t] / total for t in range(VOCAB)] == pytest.approx(m(token_ids).tolist(), abs=EXACT)


@pytest.mark.parametrize("rule", ["rejection", "traversal", "kseq", "transport"])
def test_prepared_drafts_whose_length_depends_on_their_tokens_are_exact(random_law, rule):
    """A verdict comes when it comes: how many tokens were prepared by then is how many of the child's were accepted.
    Whether a token was drawn depends on those before it alone, so each still follows the law that goes with it."""
    laws = [random_law(VOCAB, seed) for seed in (1, 2, 3)]
    p, m, s = (lambda context, law=law: law(context) if len(context) > 2 else np.eye(VOCAB)[1] for law in laws)
    hit, lengths, first_tokens = (1, 1, 1), set[int](), defaultdict(list)

    def run(tape: Tape):
        drafter = toy_level(m, ToyChild(s, tape), tape, (2, 2), 1, rule, works_ahead=True)
        context = Context(1, 0, list(PROMPT), len(PROMPT), SamplingParams(temperature=1.0))
        drafter.open(context)
        drafter.propose([context], [2])
        drafter.work()  # the verdict comes before the next step
        drafter.observe(context, Commit(1, 0, len(PROMPT), (1, 2), hit))
        context.extend(hit)
        return drafter.prepared(context), drafter.propose([context], [2])[0]

    proposed = list(all_runs(run))
    for weight, (is_prepared, guess) in proposed:
        assert is_prepared or guess.tree.num_draft_tokens == 2
        lengths.add(guess.tree.num_draft_tokens)
        first_tokens[guess.tree.num_draft_tokens].append((weight, guess.tree.token_ids[1]))
    assert lengths == {1, 2}
    alone = np.array([sum(weight for weight, token in first_tokens[1] if token == one) for one in range(VOCAB)])
    assert np.abs(alone / alone.sum() - m(hit)).max() > 0.1, "lengths do not depend on tokens: the test shows nothing"

    def after(context):
        return p((*hit, *context))

    assert distance(after, [(weight, guess) for weight, (_, guess) in proposed], rule) < EXACT
    chosen = [(weight, guess) for weight, (_, guess) in proposed if guess.tree.num_draft_tokens == 1]
    chosen = [(weight / alone.sum(), guess) for weight, guess in chosen]
    assert distance(after, chosen, rule) > 0.01, "lengths that were chosen by tokens would show"


@pytest.mark.parametrize("rule, keeps", [("coupled", True), ("traversal", False)])
def test_what_a_ratio_rule_has_seen_is_not_offered_again(random_law, rule, keeps):
    """Even where the target's own token equals the offered one: a bottom-up rule has tested everything after it."""
    m = random_law(VOCAB, 2)
    drafter = toy_level(m, ToyChild(m, Tape([])), Tape([]), (1, 3), 1, rule)
    context = Context(1, 0, list(PROMPT), len(PROMPT), SamplingParams(temperature=1.0))
    drafter.open(context)
    token_ids = drafter.propose([context], [3])[0].tree.token_ids[1:]
    drafter.observe(context, Commit(1, 0, len(PROMPT), (), token_ids[:1]))
    context.extend(token_ids[:1])
    drafter.level_stats()
    drafter.propose([context], [2])
    assert (not any(work.num_passes for work in drafter.level_stats())) == keeps


# --- wrong variants ---------------------------------------------------------------------------------------------------


def own_law_after_a_rejection(monkeypatch, models):
    """The level resamples from its own law instead of the residual (as TriForce was released)."""

    class Unsubtracted(Residual):
        def subtract(self, distribution, scale=1.0):
            return 1.0

    monkeypatch.setattr(rejection, "Residual", Unsubtracted)
    return enumerate_proposals(models, (1, 2), "rejection")


def law_of_the_child_level(monkeypatch, models):
    """The law that travels up is the one the tokens were first drawn from."""
    s, _ = models
    return [
        (
            weight,
            Guess(
                guess.tree,
                guess.sampling_kinds,
                tuple(
                    SparseDistribution(tuple(range(VOCAB)), tuple(s(guess.tree.token_ids[1 : node + 1])))
                    for node in range(len(guess.distributions))
                ),
            ),
        )
        for weight, guess in enumerate_proposals(models, (1, 2), "rejection")
    ]


def drop_unlikely_tokens(monkeypatch, models):
    """A drawn token is withheld because of which token it is."""
    proposed = []
    for weight, guess in enumerate_proposals(models, (1, 2), "rejection"):
        kept = 0
        while kept < 2:
            distribution, token = guess.distributions[kept], guess.tree.token_ids[kept + 1]
            assert distribution is not None
            if distribution.probs[distribution.token_ids.index(token)] < 0.3:
                break
            kept += 1
        chain = TokenTree.chain(guess.tree.token_ids[0], guess.tree.token_ids[1 : kept + 1])
        proposed.append((weight, Guess(chain, guess.sampling_kinds[: kept + 1], (*guess.distributions[:kept], None))))
    return proposed


def nucleus_acceptance(monkeypatch, models):
    """The level keeps whatever lies in its nucleus, as if that were a ratio test."""

    def verify(draft, target_row, random_source):
        tree, path, node = draft.tree, [], 0
        while children := tree.children()[node]:
            row = target_row(node)
            likelier = row[row > row[tree.token_ids[children[0]]]].sum()
            if likelier >= 0.7:
                break
            node = children[0]
            path.append(node)
        return tuple(path), random_source.sample(target_row(node), node)

    monkeypatch.setitem(RULES, "rejection", verify)
    return enumerate_proposals(models, (1, 2), "rejection")


def runner_up_first(monkeypatch, models):
    """Siblings in the order of their probability, not in that of their draws."""
    proposed = []
    for weight, guess in enumerate_proposals(models, (1, 2), "rejection", widths=(1, 2)):
        tokens, laws = guess.tree.token_ids, guess.distributions[0]
        assert laws is not None
        chances = dict(zip(laws.token_ids, laws.probs, strict=True))
        first, second = sorted(tokens[1:], key=lambda token: -chances[token])
        proposed.append((weight, Guess(TokenTree((tokens[0], first, second), guess.tree.parents), *_rest(guess))))
    return proposed


def _rest(guess):
    return guess.sampling_kinds, guess.distributions


@pytest.mark.extended
@pytest.mark.parametrize(
    "variant",
    [own_law_after_a_rejection, law_of_the_child_level, drop_unlikely_tokens, nucleus_acceptance, runner_up_first],
)
def test_wrong_variants_are_found(random_law, variant):
    found = []
    for seed in range(4):
        p, m, s = (random_law(VOCAB, 10 * seed + k) for k in (1, 2, 3))
        with pytest.MonkeyPatch.context() as monkeypatch:
            proposed = variant(monkeypatch, [s, m])
        found.append(distance(p, proposed, "rejection"))
    assert np.mean(found) > 0.01 and np.median(found) > 1e-3
