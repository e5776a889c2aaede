"""Cascades shaped like the user's, enumerated: what the levels hand up must be drawn from the law that they report.

The engine's levels run over toy models, every draw and every coin is played, and the proposals go through the target's
rule. What an enumeration cannot see, coins met twice in several rounds, is counted. Beside both stand known mistakes
of drafting in several levels, which must be found out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from actors.drafters.cascade.config import CascadeDrafterConfig, LevelLengths
from actors.drafters.interface import Draft
from actors.options import VerifyRule
from actors.protocol.messages import SamplingKind, SparseDistribution, TokenTree
from cluster.tools.certify.cascade_enumeration import VOCAB, Tape, ToyRunner, distance, guesses
from cluster.tools.certify.exact import EXACT, FOUND_OUT, toy_distribution
from cluster.tools.certify.goodness import detectable_distance
from cluster.tools.certify.rounds import fit_rounds, repeats_every_review
from cluster.tools.certify.rule_enumeration import Law

NUM_MODELS = 4
_DEEPEST = 3
"""Levels of an enumerated cascade; a fourth would do to the third what that does to the second."""
_UNLIKELY = 0.3
_SIGNIFICANCE = 1e-4
_POWER = 0.99

Weighed = list[tuple[float, Draft]]


def check_levels(rule: VerifyRule, drafter: CascadeDrafterConfig, kind: SamplingKind) -> dict[str, object]:
    """As deep as the user's up to three levels, with a tail or a level passed over if it may have one, over a first
    level that draws as `kind`."""
    shapes = [((1, 2), 0), ((2, 3), 0)]
    if len(drafter.levels) >= _DEEPEST:
        shapes.append(((1, 2, 2), 0))
    if any(drafter.tails):
        shapes.append(((1, 3), 1))
    if drafter.lengths is LevelLengths.auto or not all(level.num_draft_tokens for level in drafter.levels):
        shapes.append(((2, 0), 0))
    found = [
        float(distance(target, guesses(distributions, lengths, rule, tail, kind=kind), rule))
        for lengths, tail in shapes
        for target, *distributions in (_models(seed, len(lengths)) for seed in range(NUM_MODELS))
    ]
    controls = {broken.__name__.strip("_"): _found_out(broken) for broken in _BROKEN}
    rounds, repeating = fit_rounds(rule), fit_rounds(rule, repeats_every_review)
    exact = max(found) < EXACT and min(controls.values()) > FOUND_OUT
    return {
        "name": "exact enumeration of levels",
        "passed": exact and repeating.p_value < _SIGNIFICANCE < rounds.p_value,
        "rule": str(rule),
        "num_levels": min(len(drafter.levels), _DEEPEST),
        "draws": [SamplingKind(kind).name],
        "num_enumerations": len(found),
        "largest_distance": max(found),
        "allowed_distance": EXACT,
        "broken_rules_found_at": controls,
        "num_texts_of_rounds": rounds.num_draws,
        "p_value_of_rounds": rounds.p_value,
        "p_value_of_coins_met_twice": repeating.p_value,
        "visible_bias_of_rounds": detectable_distance(rounds.num_draws, rounds.num_cells, _SIGNIFICANCE, _POWER),
    }


def _models(seed: int, num_levels: int) -> list[Law]:
    """A target and its levels, the cheapest first."""
    return [toy_distribution(10 * seed + number) for number in range(1 + num_levels)]


# --- negative controls: a cascade of two levels under the rejection rule ----------------------------------------------


def _found_out(broken: Callable[[Sequence[Law]], Weighed]) -> float:
    """How far from the target's law the mistake shows, at most."""
    models = (
        [toy_distribution(3 * (10 * seed + number)) for number in range(3)] for seed in range(NUM_MODELS)
    )  # no zeros
    return float(
        max(distance(target, broken(distributions), VerifyRule.rejection) for target, *distributions in models)
    )


class _OwnLaw:
    """Coins that replace a rejected token by one from the level's own law, not from what is left of it."""

    def __init__(self, tape: Tape, runner: ToyRunner) -> None:
        self.accept = tape.accept
        self._tape, self._runner = tape, runner

    def sample(self, weights: np.ndarray, node: int) -> int:
        return self._tape.draw(self._runner.scored[node])


_two_levels = partial(guesses, lengths=(1, 2), rule=VerifyRule.rejection)


def _level_resamples_from_its_own_law(distributions: Sequence[Law]) -> Weighed:
    """As TriForce was released."""
    return _two_levels(distributions, coins_of=_OwnLaw)


def _law_of_the_level_beneath_travels_up(distributions: Sequence[Law]) -> Weighed:
    beneath = distributions[0]

    def distribution(draft: Draft, node: int) -> SparseDistribution:
        return SparseDistribution(tuple(range(VOCAB)), tuple(beneath(draft.tree.token_ids[1 : node + 1])))

    return [
        (
            weight,
            Draft(
                draft.tree,
                draft.sampling_kinds,
                tuple(distribution(draft, node) for node in range(len(draft.distributions))),
            ),
        )
        for weight, draft in _two_levels(distributions)
    ]


def _unlikely_tokens_are_dropped(distributions: Sequence[Law]) -> Weighed:
    """Whether a drawn token is handed up depends on which token it is."""
    kept = []
    for weight, draft in _two_levels(distributions):
        token_ids, length = draft.tree.token_ids, 0
        while length < draft.tree.num_draft_tokens:
            distribution = draft.distributions[length]
            if distribution.probs[distribution.token_ids.index(token_ids[length + 1])] < _UNLIKELY:
                break
            length += 1
        chain = TokenTree.chain(token_ids[0], token_ids[1 : length + 1])
        kept.append((weight, Draft(chain, draft.sampling_kinds[: length + 1], (*draft.distributions[:length], None))))
    return kept


_BROKEN = (_level_resamples_from_its_own_law, _law_of_the_level_beneath_travels_up, _unlikely_tokens_are_dropped)
