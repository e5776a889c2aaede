"""The rule in use, enumerated: on tiny vocabularies every draft and every random choice, the output compared exactly.

Broken variants of the same rule are enumerated too. If the bias of one does not show, the check fails.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from actors.options import VerifyRule
from actors.protocol.messages import SamplingKind, TokenTree
from actors.verification import coupled
from actors.verification.compatibility import EXACT_FOR, DraftTrait
from actors.verification.distributions import TargetRow
from actors.verification.random_source import RandomSource
from actors.verification.rules import RULES
from cluster.tools.certify.certificate import Check
from cluster.tools.certify.rule_enumeration import (
    ConditionalDistribution,
    PatchedSource,
    Rule,
    coupled_outcomes,
    emission,
    enumerate_drafts,
    ratio_outcomes,
    total_variation,
)

EXACT = 1e-10
"""Rounding of a few thousand float64 products."""
FOUND_OUT = 1e-3
"""A broken variant must be at least this far from the target's distribution."""
VOCAB_SIZE = 3
"""Two would hide mistakes with duplicates."""
NUM_MODELS = 6
CHAIN, LONG_CHAIN, TREE, SIBLINGS = (1, 1), (1, 1, 1), (2, 1), (3,)
"""Children per level. Three siblings, since the second of two independent draws is hardly ever left to chance."""


@dataclass(frozen=True, slots=True)
class Enumeration:
    """Total variation of every enumeration under `rule`, and the largest of each broken variant by its name."""

    rule: VerifyRule
    kinds: Collection[SamplingKind]
    distances: Sequence[float]
    controls: Mapping[str, float]

    @property
    def passed(self) -> bool:
        return max(self.distances) < EXACT and min(self.controls.values()) > FOUND_OUT

    @property
    def findings(self) -> str:
        return (
            f"{self.rule}, {len(self.distances)} enumerations: largest distance {max(self.distances):.0e}; "
            f"broken rules found out at {min(self.controls.values()):.2f} and above"
        )

    @property
    def figures(self) -> dict[str, object]:
        return {
            "rule": str(self.rule),
            "draws": [SamplingKind(kind).name for kind in sorted(self.kinds)],
            "num_enumerations": len(self.distances),
            "largest_distance": max(self.distances),
            "allowed_distance": EXACT,
            "broken_rules_found_at": self.controls,
        }


def check_exactness(rule: VerifyRule, kinds: Collection[SamplingKind]) -> Check:
    """Enumerate `rule` for drafts of these sampling kinds (deterministic if none is given)."""
    drawn = sorted(kinds) or [SamplingKind.DETERMINISTIC]
    shapes = (CHAIN, TREE, SIBLINGS) if DraftTrait.BRANCHES in EXACT_FOR[rule][1] else (CHAIN, LONG_CHAIN)
    schemes = [[(kind,) * width for width in shape] for kind in drawn for shape in shapes]
    # Looked up at the call, so that the check runs the function that the engine calls.
    in_use = coupled.verify_coupled if rule is VerifyRule.coupled else RULES[rule]
    controls = {name: max(_distances(rule, broken, schemes)) for name, broken in _broken(rule).items()}
    found = Enumeration(rule, kinds, _distances(rule, in_use, schemes), controls)
    return Check("exact enumeration", found.passed, found.findings, found.figures)


def _distances(rule: VerifyRule, function: Rule, schemes: Sequence[Sequence[Sequence[SamplingKind]]]) -> list[float]:
    """Total variation for every scheme and toy model."""
    outcomes = coupled_outcomes if rule is VerifyRule.coupled else ratio_outcomes
    found = []
    for scheme in schemes:
        for seed in range(NUM_MODELS):
            p, q = toy_distribution(seed), toy_distribution(seed + NUM_MODELS)
            length = len(scheme) + 1
            emitted = emission(function, enumerate_drafts(q, scheme), p, length, outcomes)
            found.append(total_variation(emitted, p, length))
    return found


def toy_distribution(seed: int) -> ConditionalDistribution:
    """A model of three tokens: one random row per context, every third model with zeros in it."""

    @cache
    def distribution(context: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([seed, *context])
        row = rng.dirichlet(np.ones(VOCAB_SIZE))
        if seed % 3 == 2:
            row[rng.integers(VOCAB_SIZE)] = 0.0
        return row / row.sum()

    return distribution


# --- negative controls ------------------------------------------------------------------------------------------------


def _broken(rule: VerifyRule) -> dict[str, Rule]:
    if rule is VerifyRule.coupled:
        return {"accepts_the_first_child": _accept_first_child, "repeats_the_first_choice": _repeat_first_choice}
    return {name: partial(_with_source, RULES[rule], patch) for name, patch in _PATCHES.items()}


def _with_source(function: Rule, patch: Callable[..., RandomSource], *inputs: Any) -> tuple[tuple[int, ...], int]:
    *draft, target_row, random_source = inputs
    return function(*draft, target_row, patch(random_source, target_row))


_PATCHES: dict[str, Callable[[RandomSource, TargetRow], RandomSource]] = {
    "accepts_everything": lambda source, _row: PatchedSource(lambda _probability, _node: True, source.sample),
    "corrects_from_the_target": lambda source, row: PatchedSource(
        source.accept, lambda _weights, node: source.sample(row(node), node)
    ),
    "tests_all_with_one_random_number": lambda source, _row: PatchedSource(
        lambda probability, _node: source.accept(probability, 0), source.sample
    ),
}


def _accept_first_child(tree: TokenTree, choices: Sequence[int]) -> tuple[tuple[int, ...], int]:
    children, path = tree.children(), []
    node = 0
    while children[node]:
        node = children[node][0]
        path.append(node)
    return tuple(path), choices[node]


def _repeat_first_choice(tree: TokenTree, choices: Sequence[int]) -> tuple[tuple[int, ...], int]:
    path, _ = coupled.verify_coupled(tree, choices)
    return path, choices[0]
