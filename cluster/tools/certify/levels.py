"""Cascades shaped like the user's over toy models: proposals enumerated, and several rounds counted.

The enumeration runs the engine's levels with every draw and every random choice, and the proposals go through the
target's rule: what a level proposes must be drawn from the distribution that it reports. An enumeration sees a single
proposal. It cannot see that a level uses the random numbers of one proposal again for a later one, or when a request is
admitted again. Both make tokens of different rounds depend on each other, so rounds with the engine's own random source
are counted. Known mistakes of drafting in several levels are run beside both and must be found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from functools import partial, reduce

import numpy as np

from actors.coordinator.outbox import Outbox
from actors.coordinator.sequence import Sequence
from actors.drafters.cascade.config import CascadeDrafterConfig, LevelLengths
from actors.drafters.interface import Draft
from actors.options import VerifyRule
from actors.protocol.messages import (
    DraftBatch,
    DraftOrder,
    Request,
    SamplingKind,
    SamplingParams,
    SparseDistribution,
    TokenTree,
    Verdict,
)
from actors.roles.draft import DraftRole
from actors.verification.random_source import HashRandomSource, RandomSource
from actors.verification.rules import RULES
from cluster.tools.certify.cascade_enumeration import (
    PROMPT,
    VOCAB,
    ToyChild,
    ToyRunner,
    distance,
    enumerate_proposals,
    toy_level,
)
from cluster.tools.certify.certificate import Check
from cluster.tools.certify.exact import Enumeration, toy_distribution
from cluster.tools.certify.goodness import GoodnessOfFit, detectable_distance, fit_distribution
from cluster.tools.certify.rule_enumeration import ConditionalDistribution, PatchedSource, Tape

NUM_MODELS = 4
NUM_TEXTS = 400
_DEEPEST = 3
"""Levels of an enumerated cascade; a fourth is to the third what the third is to the second."""
_UNLIKELY = 0.3
_SIGNIFICANCE = 1e-4
_POWER = 0.99
_LENGTH = 4
_TARGET, _LEVEL = np.array([0.5, 0.5, 0.0]), np.array([0.4, 0.6, 0.0])

Models = SequenceOf[ConditionalDistribution]
"""Toy models of the levels, the cheapest first."""
Proposals = list[tuple[float, Draft]]
"""Proposals and their probabilities."""


def check_levels(rule: VerifyRule, drafter: CascadeDrafterConfig, kind: SamplingKind) -> Check:
    """As deep as the user's cascade, three levels at most, with a tail, a skipped level or a tree if it may have one.

    The first level draws by `kind`.
    """
    shapes: list[tuple[tuple[int, ...], int, tuple[int, ...]]] = [((1, 2), 0, ()), ((2, 3), 0, ())]
    if len(drafter.levels) >= _DEEPEST:
        shapes.append(((1, 2, 2), 0, ()))
    if any(drafter.tails):
        shapes.append(((1, 3), 1, ()))
    if drafter.lengths is LevelLengths.auto or not all(level.num_draft_tokens for level in drafter.levels):
        shapes.append(((2, 0), 0, ()))
    all_widths = [drafter.width(level) for level in range(len(drafter.levels))]
    if all_widths[-1] > 1:
        shapes.append(((1, 2), 0, (1, 2)))
    if max(all_widths[:-1]) > 1:
        shapes.append(((1, 2, 2), 0, (1, 2, 1)))
    found = [
        float(distance(target, enumerate_proposals(models, lengths, rule, tail, kind=kind, widths=widths), rule))
        for lengths, tail, widths in shapes
        for target, *models in (
            [toy_distribution(10 * seed + number) for number in range(1 + len(lengths))] for seed in range(NUM_MODELS)
        )
    ]
    controls = {name: _largest_distance(propose) for name, propose in _BROKEN.items()}
    levels = Enumeration(rule, [kind], found, controls)
    rounds, repeating = fit_rounds(rule), fit_rounds(rule, repeats_every_verification)
    return Check(
        "exact enumeration of levels",
        levels.passed and repeating.p_value < _SIGNIFICANCE < rounds.p_value,
        f"{levels.findings}; {rounds.num_draws} texts of several rounds: "
        f"p-value {rounds.p_value:.2f}, {repeating.p_value:.0e} with repeated random numbers",
        {
            **levels.figures,
            "num_levels": min(len(drafter.levels), _DEEPEST),
            "num_texts_of_rounds": rounds.num_draws,
            "p_value_of_rounds": rounds.p_value,
            "p_value_of_coins_met_twice": repeating.p_value,
            "visible_bias_of_rounds": detectable_distance(rounds.num_draws, rounds.num_cells, _SIGNIFICANCE, _POWER),
        },
    )


# --- rounds, counted --------------------------------------------------------------------------------------------------


def fit_rounds(rule: str, random_source: Callable[[int, int], RandomSource] = HashRandomSource) -> GoodnessOfFit:
    """The first tokens of many requests against the target's joint distribution.

    Every second request is admitted again before each round.
    """
    counts = np.zeros([len(_TARGET)] * _LENGTH)
    for seed in range(NUM_TEXTS):
        counts[_text(seed, rule, random_source, readmitted=seed % 2 == 1)] += 1
    joint = reduce(np.multiply.outer, [_TARGET] * _LENGTH)
    return fit_distribution("a cascade's rounds over toy models", counts.ravel(), joint.ravel())


def repeats_every_verification(seed: int, _step: int) -> RandomSource:
    """The negative control: random numbers that do not depend on the number of earlier verifications."""
    return HashRandomSource(seed, 0)


def _text(
    seed: int, rule: str, random_source: Callable[[int, int], RandomSource], *, readmitted: bool
) -> tuple[int, ...]:
    request = Request(1, PROMPT, SamplingParams(temperature=1.0, seed=seed, max_tokens=2 * _LENGTH))
    sequence, outbox, draft = Sequence.start(request, 999), Outbox(), _role(rule, random_source)
    outbox.admit(sequence)
    while sequence.num_generated < _LENGTH:
        if readmitted and sequence.num_generated:
            draft.forget()
            outbox = Outbox()
            outbox.admit(sequence)
        admits, commits, releases = outbox.flush()
        (answer,) = draft.answer(DraftBatch(1, admits, commits, releases, (DraftOrder(1, 2),)))
        (proposal,) = answer.proposals
        own_source = HashRandomSource(seed, sequence.prefix_len)
        path, token = RULES[rule](
            proposal.tree, proposal.sampling_kinds, proposal.distributions, lambda _node: _TARGET, own_source
        )
        verdict = Verdict(1, sequence.epoch, sequence.prefix_len, path, token)
        outbox.commit(sequence.commit(verdict, proposal, frozenset()))
    return tuple(sequence.token_ids[len(PROMPT) : len(PROMPT) + _LENGTH])


def _role(rule: str, random_source: Callable[[int, int], RandomSource]) -> DraftRole:
    """A level that verifies a lookup."""
    tape = Tape([])
    lookup = ToyChild(lambda _text: np.array([0.0, 1.0, 0.0]), tape, SamplingKind.DETERMINISTIC)
    return DraftRole(toy_level(lambda _text: _LEVEL, lookup, tape, (1, 2), 1, rule, make_random_source=random_source))


# --- negative controls: a cascade of two levels under the rejection rule ----------------------------------------------


def _largest_distance(propose: Callable[[Models], Proposals]) -> float:
    """Largest bias of the mistake, over toy models without zeros."""
    found = []
    for seed in range(NUM_MODELS):
        target, *models = (toy_distribution(3 * (10 * seed + number)) for number in range(3))
        found.append(float(distance(target, propose(models), VerifyRule.rejection)))
    return max(found)


_two_levels = partial(enumerate_proposals, lengths=(1, 2), rule=VerifyRule.rejection)


def _resample_from_own_distribution(models: Models) -> Proposals:
    """A level replaces a rejected token from its own distribution, not from the residual, as TriForce was released."""

    def of_own(source: RandomSource, runner: ToyRunner) -> RandomSource:
        return PatchedSource(source.accept, lambda _weights, node: source.sample(runner.scored[node], node))

    return _two_levels(models, source_of=of_own)


def _report_child_distribution(models: Models) -> Proposals:
    def distributions(draft: Draft) -> Iterator[SparseDistribution]:
        for node in range(len(draft.distributions)):
            yield SparseDistribution(tuple(range(VOCAB)), tuple(models[0](draft.tree.token_ids[1 : node + 1])))

    return [
        (weight, Draft(draft.tree, draft.sampling_kinds, tuple(distributions(draft))))
        for weight, draft in _two_levels(models)
    ]


def _drop_unlikely_tokens(models: Models) -> Proposals:
    """Whether a drawn token is proposed depends on which token it is."""
    kept = []
    for weight, draft in _two_levels(models):
        token_ids, length = draft.tree.token_ids, 0
        for token, distribution in zip(token_ids[1:], draft.distributions, strict=False):
            if distribution is None or distribution.probs[distribution.token_ids.index(token)] < _UNLIKELY:
                break
            length += 1
        chain = TokenTree.chain(token_ids[0], token_ids[1 : length + 1])
        kept.append((weight, Draft(chain, draft.sampling_kinds[: length + 1], (*draft.distributions[:length], None))))
    return kept


_BROKEN: dict[str, Callable[[Models], Proposals]] = {
    "level_resamples_from_its_own_law": _resample_from_own_distribution,
    "law_of_the_child_level_travels_up": _report_child_distribution,
    "unlikely_tokens_are_dropped": _drop_unlikely_tokens,
}
