"""The rule in use, enumerated: on tiny vocabularies every draft and every coin is played and the law compared exactly.

Beside it stand two broken variants made of the same rule. They must be found out, or the enumeration proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import numpy as np

from actors.options import VerifyRule
from actors.protocol.messages import SamplingKind, TokenTree
from actors.verification import coupled
from actors.verification.rules import RULES
from cluster.tools.certify.rule_enumeration import (
    Law,
    Rule,
    emission,
    enumerate_drafts,
    matching_emission,
    total_variation,
)

EXACT = 1e-10
"""Rounding of a few thousand float64 products."""
FOUND_OUT = 1e-3
"""A broken variant must be at least this far from the target's law."""
VOCAB_SIZE = 3
"""Two would hide mistakes with duplicates."""
NUM_MODELS = 6
SHAPES = ((1, 1), (2, 1))
"""Children per level: a chain, and a tree that branches."""


def check_exactness(rule: VerifyRule, kinds: Iterable[SamplingKind]) -> dict[str, object]:
    """Enumerate `rule` for drafts drawn in these ways (chosen without randomness if none is named)."""
    schemes = [
        [(kind,) * width for width in shape]
        for kind in sorted(kinds) or [SamplingKind.DETERMINISTIC]
        for shape in SHAPES
    ]
    distance = _worst(rule, _in_use(rule), schemes)
    controls = {broken.__name__.strip("_"): _worst(rule, broken, schemes) for broken in _broken(rule)}
    return {
        "name": "exact enumeration",
        "passed": distance < EXACT and min(controls.values()) > FOUND_OUT,
        "rule": str(rule),
        "draws": [SamplingKind(kind).name for kind in sorted(kinds)],
        "num_enumerations": len(schemes) * NUM_MODELS,
        "largest_distance": distance,
        "allowed_distance": EXACT,
        "broken_rules_found_at": controls,
    }


def _in_use(rule: VerifyRule) -> Rule:
    """The function the engine calls, looked up when it is asked for."""
    return coupled.verify_coupled if rule is VerifyRule.coupled else RULES[rule]


def _worst(rule: VerifyRule, function: Rule, schemes: Sequence[Sequence[Sequence[SamplingKind]]]) -> float:
    """Largest total variation over toy models and schemes."""
    emitted = matching_emission if rule is VerifyRule.coupled else emission
    found = []
    for scheme in schemes:
        for seed in range(NUM_MODELS):
            p, q = toy_distribution(seed), toy_distribution(seed + NUM_MODELS)
            length = len(scheme) + 1
            drafts = enumerate_drafts(q, scheme)
            found.append(total_variation(emitted(function, drafts, p, length), p, length))
    return max(found)


def toy_distribution(seed: int) -> Law:
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


def _broken(rule: VerifyRule) -> list[Callable[..., tuple[tuple[int, ...], int]]]:
    if rule is VerifyRule.coupled:
        return [_accepts_the_first_child, _repeats_the_first_choice]
    function = RULES[rule]

    def accepts_everything(tree, draws, distributions, target_row, random_source):
        return function(
            tree, draws, distributions, target_row, _Coins(random_source, accept=lambda probability, node: True)
        )

    def corrects_from_the_target(tree, draws, distributions, target_row, random_source):
        def sample(weights: np.ndarray, node: int) -> int:
            return random_source.sample(target_row(node), node)

        return function(tree, draws, distributions, target_row, _Coins(random_source, sample=sample))

    return [accepts_everything, corrects_from_the_target]


class _Coins:
    """Coins of which one verb lies."""

    def __init__(self, random_source, *, accept=None, sample=None) -> None:
        self.accept = accept or random_source.accept
        self.sample = sample or random_source.sample


def _accepts_the_first_child(tree: TokenTree, choices: Sequence[int]) -> tuple[tuple[int, ...], int]:
    children, path = tree.children(), []
    node = 0
    while children[node]:
        node = children[node][0]
        path.append(node)
    return tuple(path), choices[node]


def _repeats_the_first_choice(tree: TokenTree, choices: Sequence[int]) -> tuple[tuple[int, ...], int]:
    path, _ = coupled.verify_coupled(tree, choices)
    return path, choices[0]
