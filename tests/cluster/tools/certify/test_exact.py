"""The enumeration of a certificate: every rule passes with its own draws, and a broken one is found out."""

from __future__ import annotations

import pytest

from actors.options import VerifyRule
from actors.protocol.messages import SamplingKind
from actors.verification import coupled
from actors.verification.compatibility import EXACT_FOR
from actors.verification.rules import RULES
from cluster.tools.certify import exact
from cluster.tools.certify.exact import check_exactness
from cluster.tools.certify.rule_enumeration import PatchedSource

PAIRS = [(rule, kind) for rule in VerifyRule if rule not in ("coupled", "auto") for kind in sorted(EXACT_FOR[rule][0])]


@pytest.mark.parametrize(("rule", "kind"), [*PAIRS, (VerifyRule.coupled, SamplingKind.DETERMINISTIC)])
def test_a_right_pair_passes(rule, kind):
    check = check_exactness(rule, {kind})
    assert check.passed and check.figures["largest_distance"] < 1e-12
    assert min(check.figures["broken_rules_found_at"].values()) > 0.03


def test_a_rule_that_accepts_everything_fails(monkeypatch):
    def accepts_everything(tree, draws, distributions, target_row, random_source):
        leaf = len(tree.parents) - 1
        return tuple(tree.path_to(leaf)), random_source.sample(target_row(leaf), leaf)

    monkeypatch.setitem(RULES, "rejection", accepts_everything)
    assert not check_exactness(VerifyRule.rejection, {SamplingKind.WITHOUT_REPLACEMENT}).passed


@pytest.mark.parametrize("rule", [VerifyRule.rejection, VerifyRule.traversal, VerifyRule.kseq])
def test_a_rule_whose_siblings_share_a_random_number_fails(monkeypatch, rule):
    right = RULES[rule]

    def shares(tree, draws, distributions, target_row, source):
        shared = PatchedSource(lambda chance, node: source.accept(chance, max(0, tree.parents[node])), source.sample)
        return right(tree, draws, distributions, target_row, shared)

    monkeypatch.setitem(RULES, rule, shares)
    assert not check_exactness(rule, {SamplingKind.IID}).passed


def test_a_coupled_rule_that_keeps_one_token_too_many_fails(monkeypatch):
    right = coupled.verify_coupled

    def overshoots(tree, choices):
        path, next_token = right(tree, choices)
        below = tree.children()[path[-1] if path else 0]
        return ((*path, below[0]), choices[below[0]]) if below else (path, next_token)

    monkeypatch.setattr(coupled, "verify_coupled", overshoots)
    assert not check_exactness(VerifyRule.coupled, set()).passed


def test_a_pair_that_is_biased_by_a_percent_fails():
    """What `EXACT_FOR` forbids: draws without replacement under K-SEQ."""
    assert not check_exactness(VerifyRule.kseq, {SamplingKind.WITHOUT_REPLACEMENT}).passed


def test_an_enumeration_that_cannot_fail_proves_nothing(monkeypatch):
    monkeypatch.setattr(exact, "_broken", lambda rule: {"right": RULES[rule]})
    assert not check_exactness(VerifyRule.rejection, {SamplingKind.IID}).passed
