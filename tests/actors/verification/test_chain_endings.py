"""Which way of ending a chain early is exact: over all drafts and random numbers of chains of three."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.protocol.messages import SamplingKind, TokenTree
from actors.verification.rules import RULES
from tests.actors.verification.rule_enumeration import emission, enumerate_drafts, total_variation

VOCAB, LENGTH = 3, 4


def ended(draft, q, *, keeps: bool):
    """The draft up to the first token that the drafter gave less than a third: with it, or without."""
    tokens, count = draft.tree.token_ids, 1
    for node in range(1, len(tokens)):
        count = node + 1
        if float(q(tokens[1:node])[tokens[node]]) < 1 / 3:
            count = node + 1 if keeps else node
            break
    distributions = (*draft.distributions[: count - 1], None)
    tree = TokenTree(tokens[:count], draft.tree.parents[:count])
    return replace(draft, tree=tree, sampling_kinds=draft.sampling_kinds[:count], distributions=distributions)


def distance(random_law, rule, kind, *, keeps):
    worst = 0.0
    for seed in range(3):
        p, q = random_law(VOCAB, seed), random_law(VOCAB, seed + 50)
        drafts = (ended(draft, q, keeps=keeps) for draft in enumerate_drafts(q, [(kind,)] * 3))
        worst = max(worst, total_variation(emission(RULES[rule], drafts, p, LENGTH), p, LENGTH))
    return worst


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ("rejection", SamplingKind.WITHOUT_REPLACEMENT),
        ("block", SamplingKind.WITHOUT_REPLACEMENT),
        ("traversal", SamplingKind.WITHOUT_REPLACEMENT),
        ("kseq", SamplingKind.IID),
        ("transport", SamplingKind.IID),
    ],
)
def test_ending_after_a_token_that_stays_is_exact_and_dropping_it_is_not(random_law, rule, kind):
    assert distance(random_law, rule, kind, keeps=True) < 1e-12
    assert distance(random_law, rule, kind, keeps=False) > 1e-2
