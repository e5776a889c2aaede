"""Several rounds of a cascade over toy models with the engine's own coins, counted: none may be met twice.

An enumeration replaces the coins, so it cannot see that a level draws with the same ones in two reviews, or again when
it is told of a request anew. Both show as tokens of different rounds that depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from actors.coordinator.outbox import Outbox
from actors.coordinator.sequence import Sequence
from actors.protocol.messages import DraftBatch, DraftOrder, Request, SamplingKind, SamplingParams, Verdict
from actors.roles.draft import DraftRole
from actors.verification.random_source import HashRandomSource, RandomSource
from actors.verification.rules import RULES
from cluster.tools.certify.cascade_enumeration import PROMPT, Sampler, Tape, level
from cluster.tools.certify.goodness import Fit, fit_distribution

NUM_TEXTS = 400
_LENGTH = 4
_TARGET, _LEVEL = np.array([0.5, 0.5, 0.0]), np.array([0.4, 0.6, 0.0])

MakeCoins = Callable[[int, int], RandomSource]


def fit_rounds(rule: str, make_coins: MakeCoins = HashRandomSource) -> Fit:
    """The first tokens of many requests against the target's joint law; every second is told anew before each round."""
    counts = np.zeros([len(_TARGET)] * _LENGTH)
    for seed in range(NUM_TEXTS):
        counts[_text(seed, rule, make_coins, told_anew=seed % 2 == 1)] += 1
    joint = _TARGET
    for _ in range(_LENGTH - 1):
        joint = np.multiply.outer(joint, _TARGET)
    return fit_distribution("a cascade's rounds over toy models", counts.ravel(), joint.ravel())


def repeats_every_review(seed: int, step: int) -> RandomSource:
    """The negative control: coins that do not know how often a level has reviewed."""
    return HashRandomSource(seed, 0)


def _text(seed: int, rule: str, make_coins: MakeCoins, *, told_anew: bool) -> tuple[int, ...]:
    request = Request(1, PROMPT, SamplingParams(temperature=1.0, seed=seed, max_tokens=2 * _LENGTH))
    sequence, outbox, draft = Sequence.start(request, 999), Outbox(), _role(rule, make_coins)
    outbox.admit(sequence)
    while sequence.num_generated < _LENGTH:
        if told_anew and sequence.num_generated:
            draft.forget()
            outbox = Outbox()
            outbox.admit(sequence)
        admits, commits, releases = outbox.flush()
        (answer,) = draft.answer(DraftBatch(1, admits, commits, releases, (DraftOrder(1, 2),)))
        (proposal,) = answer.proposals
        random_source = HashRandomSource(seed, sequence.prefix_len)
        path, token = RULES[rule](
            proposal.tree, proposal.sampling_kinds, proposal.distributions, lambda node: _TARGET, random_source
        )
        verdict = Verdict(1, sequence.epoch, sequence.prefix_len, path, token)
        outbox.commit(sequence.commit(verdict, proposal, frozenset()))
    return tuple(sequence.token_ids[len(PROMPT) : len(PROMPT) + _LENGTH])


def _role(rule: str, make_coins: MakeCoins) -> DraftRole:
    """A level that reviews a lookup."""
    tape = Tape([])
    lookup = Sampler(lambda text: np.array([0.0, 1.0, 0.0]), tape, SamplingKind.DETERMINISTIC)
    return DraftRole(level(lambda text: _LEVEL, lookup, tape, (1, 2), 1, rule, make_coins=make_coins))
