"""The enumeration of a certificate's cascade: right levels pass under every ratio rule, broken ones are found out."""

from __future__ import annotations

from functools import partial

import pytest

from actors.drafters.cascade.config import CascadeDrafterConfig, LevelLengths
from actors.drafters.cascade.level import CascadeDrafter
from actors.drafters.model.config import ModelDrafterConfig, Strategy
from actors.options import VerifyRule
from actors.protocol.messages import SamplingKind, SparseDistribution
from actors.verification import rejection
from actors.verification.distributions import Residual
from actors.verification.random_source import HashRandomSource
from cluster.tools.certify import levels
from cluster.tools.certify.goodness import GoodnessOfFit
from cluster.tools.certify.levels import check_levels, repeats_every_verification

MODEL = ModelDrafterConfig()
TWO = CascadeDrafterConfig(levels=[MODEL] * 2)
TAIL = CascadeDrafterConfig(levels=[MODEL] * 2, tails=[0, 2])
THREE = CascadeDrafterConfig(levels=[MODEL] * 3)
CHOSEN = CascadeDrafterConfig(levels=[MODEL] * 2, lengths=LevelLengths.auto)
TREE = ModelDrafterConfig(strategy=Strategy.tree)
TREES = CascadeDrafterConfig(levels=[MODEL, TREE, TREE])


@pytest.fixture(autouse=True)
def rounds_counted_before(monkeypatch):
    """Counts do not depend on the enumeration: `test_rounds.py` tests them."""
    found = {HashRandomSource: 0.5, repeats_every_verification: 1e-9}
    counted = partial(GoodnessOfFit, "rounds", 400, 16, 0.0, 0.05)
    monkeypatch.setattr(
        levels, "fit_rounds", lambda rule, random_source=HashRandomSource: counted(found[random_source])
    )


@pytest.mark.parametrize(
    ("rule", "drafter", "kind"),
    [
        (VerifyRule.rejection, TAIL, SamplingKind.DETERMINISTIC),
        (VerifyRule.rejection, TAIL, SamplingKind.WITHOUT_REPLACEMENT),
        (VerifyRule.rejection, THREE, SamplingKind.DETERMINISTIC),
        (VerifyRule.traversal, TAIL, SamplingKind.DETERMINISTIC),
        (VerifyRule.kseq, CHOSEN, SamplingKind.IID),
        (VerifyRule.rejection, TREES, SamplingKind.DETERMINISTIC),
    ],
)
def test_right_levels_pass(rule, drafter, kind):
    check = check_levels(rule, drafter, kind)
    assert check.passed and check.figures["largest_distance"] < 1e-12
    assert (
        len(check.figures["broken_rules_found_at"]) == 3 and min(check.figures["broken_rules_found_at"].values()) > 0.01
    )


def test_a_level_that_resamples_from_its_own_law_fails(monkeypatch):
    """Under k-SEQ levels verify by rejection and the target does not: only they are broken."""

    class Unsubtracted(Residual):
        def subtract(self, distribution, scale=1.0):
            return 1.0

    monkeypatch.setattr(rejection, "Residual", Unsubtracted)
    check = check_levels(VerifyRule.kseq, TWO, SamplingKind.IID)
    assert not check.passed and check.figures["largest_distance"] > 1e-3


def test_a_wrong_law_that_travels_up_fails(monkeypatch):
    right = CascadeDrafter._offer

    def offer(self, *arguments):
        draft = right(self, *arguments)
        flat = SparseDistribution((0, 1, 2), (1 / 3, 1 / 3, 1 / 3))
        return type(draft)(
            draft.tree, draft.sampling_kinds, tuple(distribution and flat for distribution in draft.distributions)
        )

    monkeypatch.setattr(CascadeDrafter, "_offer", offer)
    check = check_levels(VerifyRule.rejection, TWO, SamplingKind.IID)
    assert not check.passed and check.figures["largest_distance"] > 1e-3


def test_an_enumeration_that_cannot_fail_proves_nothing(monkeypatch):
    def right(models):
        return levels._two_levels(models)

    monkeypatch.setattr(levels, "_BROKEN", {"right": right})
    assert not check_levels(VerifyRule.rejection, TWO, SamplingKind.IID).passed


def test_coins_that_are_met_twice_fail(monkeypatch):
    monkeypatch.setattr(
        levels,
        "fit_rounds",
        lambda rule, random_source=HashRandomSource: GoodnessOfFit("rounds", 400, 16, 0.0, 0.3, 1e-9),
    )
    assert not check_levels(VerifyRule.rejection, TWO, SamplingKind.IID).passed
