"""Accepted tokens per round on context-free laws, known exactly: a change of a rule that stays lossless shows here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from actors.protocol.messages import SamplingKind
from actors.verification.distributions import ChildDistribution
from actors.verification.kseq import discount
from actors.verification.rules import RULES
from tests.actors.verification.rule_enumeration import emission, enumerate_drafts, total_variation

P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
IID, WOR = SamplingKind.IID, SamplingKind.WITHOUT_REPLACEMENT

# tree: rejection and traversal without replacement, both with replacement, exact match on the draws w/o replacement
TABLE = {
    (2,): (0.820000, 0.820000, 0.760000, 0.760000, 0.613214),
    (2, 1): (1.394000, 1.454000, 1.292000, 1.352000, 0.791046),
    (2, 2): (1.492400, 1.528400, 1.337600, 1.385600, 0.989246),
    (3,): (1.000000, 1.000000, 0.808000, 0.808000, 1.000000),
}
COLUMNS = (("rejection", WOR), ("traversal", WOR), ("rejection", IID), ("traversal", IID))


def mean_accepted(rule: str, kind: SamplingKind, widths: tuple[int, ...], p=P, q=Q) -> float:
    drafts = enumerate_drafts(lambda context: q, [(kind,) * width for width in widths])
    result = emission(RULES[rule], drafts, lambda context: p, len(widths) + 1)
    assert total_variation(result, lambda context: p, len(widths) + 1) < 1e-12
    return result.mean_accepted


@pytest.mark.extended
@pytest.mark.parametrize("widths", TABLE)
@pytest.mark.parametrize("column", range(4))
def test_trees(widths, column):
    rule, kind = COLUMNS[column]
    assert mean_accepted(rule, kind, widths) == pytest.approx(TABLE[widths][column], abs=1e-9)


@pytest.mark.parametrize("widths", TABLE)
@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_exact_match_is_what_remains_when_drawn_tokens_are_read_as_one_hot(widths, rule):
    drafts = (
        replace(
            draft, sampling_kinds=(SamplingKind.ROOT,) + (SamplingKind.DETERMINISTIC,) * draft.tree.num_draft_tokens
        )
        for draft in enumerate_drafts(lambda context: Q, [(WOR,) * width for width in widths])
    )
    result = emission(RULES[rule], drafts, lambda context: P, len(widths) + 1)
    assert total_variation(result, lambda context: P, len(widths) + 1) < 1e-12
    assert result.mean_accepted == pytest.approx(TABLE[widths][4], abs=5e-7)


def test_chains():
    assert mean_accepted("rejection", IID, (1, 1, 1)) == pytest.approx(1.533, abs=1e-9)
    for rule in ("block", "traversal"):
        assert mean_accepted(rule, IID, (1, 1, 1)) == pytest.approx(1.695, abs=1e-9)


def test_the_example_of_the_block_verification_paper():
    p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    assert mean_accepted("rejection", IID, (1, 1), p, q) == pytest.approx(10 / 9, abs=1e-12)
    for rule in ("block", "traversal"):
        assert mean_accepted(rule, IID, (1, 1), p, q) == pytest.approx(11 / 9, abs=1e-12)


@pytest.mark.parametrize("k, rho, accepted", [(2, 1.456776, 0.791355), (3, 1.792593, 0.858519)])
def test_kseq(k, rho, accepted):
    found, beta = discount(P, ChildDistribution(np.arange(3), Q, 0, 1), k)
    assert found == pytest.approx(rho, abs=1e-6)
    assert 1 - (1 - beta) ** k == pytest.approx(found * beta, abs=1e-12)
    assert mean_accepted("kseq", IID, (k,)) == pytest.approx(accepted, abs=1e-6)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_the_discount_of_kseq_is_the_least_that_leaves_a_residual(k):
    rho, _ = discount(P, ChildDistribution(np.arange(3), Q, 0, 1), k)

    def least_of_residual(rho: float) -> float:
        accepted = np.minimum(P / rho, Q)
        beta = accepted.sum()
        return float((P - accepted * (1 - (1 - beta) ** k) / beta).min())

    assert least_of_residual(rho) >= -1e-15
    assert least_of_residual(rho - 1e-6) < 0


def test_a_single_draft_needs_no_discount():
    assert discount(P, ChildDistribution(np.arange(3), Q, 0, 1), 1)[0] == 1.0
