"""`verify=transport` reaches the optimum of the linear program; no exact rule accepts more of independent drafts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from actors.options import VerifyRule
from actors.protocol.messages import SamplingKind
from actors.verification.compatibility import is_exact
from actors.verification.distributions import ChildDistribution
from actors.verification.rules import RULES
from actors.verification.transport import Selection
from tests.actors.verification.rule_enumeration import emission, enumerate_drafts, total_variation
from tests.matrices import in_turn

IID = SamplingKind.IID
EXACT = 1e-12


def optimum(p: np.ndarray, q: np.ndarray, num_draws: int) -> float:
    """The value of the linear program by its dual, over all sets H: 1 + min (p(H) - the chance that all drafts are in
    H). Whatever a rule does, the output is a drafted token in H or no draft at all if every draft is in H."""
    sets = itertools.product([False, True], repeat=len(p))
    return 1 + min(float(p[list(chosen)].sum() - q[list(chosen)].sum() ** num_draws) for chosen in sets)


def laws(seed: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """A target's and a draft's distribution, flat or peaked, some with zeros, some equal."""
    rng = np.random.default_rng(seed)
    p, q = (rng.dirichlet([rng.choice([0.2, 1.0, 5.0])] * size) for _ in range(2))
    if seed % 3 == 0:
        q = np.where(np.arange(size) % 3 == seed % 2, 0.0, q)
    if seed % 5 == 0:
        p = np.where(np.arange(size) % 4 == 1, 0.0, p)
    if seed % 11 == 0:
        p = q
    return p / p.sum(), q / q.sum()


def accepted_by(rule: str, p: np.ndarray, q: np.ndarray, num_draws: int) -> float:
    result = emission(RULES[rule], enumerate_drafts(lambda context: q, [(IID,) * num_draws]), lambda context: p, 2)
    assert total_variation(result, lambda context: p, 2) < EXACT
    return result.mean_accepted


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("num_draws", [1, 2, 3])
def test_it_is_exact_and_accepts_as_much_as_the_linear_program_allows(seed, num_draws):
    p, q = laws(seed, 4)
    assert accepted_by("transport", p, q, num_draws) == pytest.approx(optimum(p, q, num_draws), abs=EXACT)


@pytest.mark.filterwarnings("error")
def test_tokens_that_are_hardly_ever_drafted_cost_no_acceptance():
    """As at a low temperature: their mass is below the rounding of the others'."""
    p, q = np.array([2e-19, 2e-23, 0.0194, 0.9806, 1e-15]), np.array([7e-22, 4e-24, 0.0135, 0.9865, 5e-17])
    assert accepted_by("transport", p / p.sum(), q / q.sum(), 3) == pytest.approx(optimum(p, q, 3), abs=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_no_other_rule_accepts_more(seed):
    p, q = laws(seed, 3)
    for num_draws in (1, 2, 3):
        best = optimum(p, q, num_draws)
        for rule in RULES:
            if is_exact(VerifyRule(rule), {IID}) and (num_draws == 1 or rule != "block"):
                assert accepted_by(rule, p, q, num_draws) <= best + EXACT


@pytest.mark.parametrize("num_draws, kseq", [(2, 0.791355), (3, 0.858519)])
def test_golden_numbers(num_draws, kseq):
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    assert optimum(p, q, num_draws) > kseq
    assert accepted_by("transport", p, q, num_draws) == pytest.approx({2: 0.86, 3: 0.988}[num_draws], abs=EXACT)


@pytest.mark.extended
@pytest.mark.parametrize(("seed", "size", "num_draws"), list(in_turn(range(4), [(64, 4), (64, 16), (300, 3)])))
def test_large_distributions(seed, size, num_draws):
    """Exact whatever rounding does, and the optimum by sets of tokens of smallest p / q, which alone bind."""
    p, q = laws(seed, size)
    drawn = np.flatnonzero(q)
    selection = Selection(p, ChildDistribution(drawn, q[drawn], int(drawn[0]), 1), num_draws)
    order = drawn[np.argsort(p[drawn] / q[drawn])]
    inside = np.append(0.0, np.cumsum(p[order])), np.append(0.0, np.cumsum(q[order]))
    residual = selection.residual(p)
    refused = 0.0 if residual is p else residual.sum()
    assert refused == pytest.approx((inside[1] ** num_draws - inside[0]).max(), abs=1e-9)
    rng = np.random.default_rng(seed)
    counts, num_samples = np.zeros(size), 1000
    for drafts in rng.choice(size, (num_samples, num_draws), p=q):
        chances = selection.accepted(drafts.tolist())
        assert min(chances) >= 0 and sum(chances) <= 1 + EXACT
        np.add.at(counts, drafts, chances)
        counts += (1 - sum(chances)) * residual / residual.sum()
    assert abs(counts / num_samples - p).max() < 5 * np.sqrt(0.25 / num_samples)


def test_another_law_costs_acceptance_and_no_exactness(monkeypatch):
    """The mixtures note the law that they really have; the one asked for is that of the first draft."""
    monkeypatch.setattr(Selection, "_best_law", lambda self: self._probs / self._probs.sum())
    p, q = laws(1, 4)
    assert accepted_by("transport", p, q, 2) == pytest.approx(np.minimum(p, q).sum(), abs=EXACT)
    assert optimum(p, q, 2) > np.minimum(p, q).sum() + 0.01


def test_a_wrong_note_of_the_law_is_found(random_law, monkeypatch):
    """As if the first draft were always the one selected."""
    build = Selection._build

    def wrong(self, law):
        build(self, law)
        self._law = self._probs / self._probs.sum()

    monkeypatch.setattr(Selection, "_build", wrong)
    p, q = random_law(4, 1), random_law(4, 2)
    found = total_variation(emission(RULES["transport"], enumerate_drafts(q, [(IID, IID)]), p, 2), p, 2)
    assert found > 1e-3
