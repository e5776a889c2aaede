"""Several rounds of a cascade with the production coins, as enumeration cannot see them: no coin is met twice.

A request that is admitted again in the same epoch starts without state, and its noise must differ from before.
Both ways of meeting a coin twice are made on purpose too, and must be found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors.coordinator.outbox import Outbox
from actors.coordinator.sequence import Sequence
from actors.drafters.cascade.child import ChildLevel, LocalChild
from actors.drafters.cascade.draft_lengths import PassedLengths
from actors.drafters.cascade.level import CascadeDrafter, LevelSpec
from actors.drafters.config import ModelOptions
from actors.drafters.interface import Capabilities, Context, Draft
from actors.protocol.messages import DraftBatch, DraftOrder, Request, SamplingParams, TokenTree, Verdict
from actors.roles.draft import DraftRole
from actors.verification.distributions import DrawnTree
from actors.verification.random_source import HashRandomSource, RandomSource
from actors.verification.rules import RULES
from tests.actors.verification.cascade_enumeration import ToyRunner

VOCAB, LENGTH, COUNT = 2, 4, 400
TARGET, LEVEL = np.array([0.5, 0.5]), np.array([0.4, 0.6])


class Lookup:
    """Drafts the same token every time."""

    capabilities = Capabilities()

    def open(self, context) -> None: ...

    def observe(self, context, commit) -> None: ...

    def release(self, request_id) -> None: ...

    def propose(self, contexts, budgets) -> list[Draft]:
        return [
            Draft.chosen(TokenTree.chain(context.token_ids[-1], [1] * budget))
            for context, budget in zip(contexts, budgets, strict=True)
        ]


def role(rule: str, make_random_source: Callable[[int, int], RandomSource], width: int) -> DraftRole:
    level = CascadeDrafter(
        ToyRunner(lambda text: LEVEL, VOCAB, 1).as_runner(),
        ChildLevel(LocalChild(Lookup()), "0", 1),
        LevelSpec(1, "1", width=width),
        ModelOptions(rule, VOCAB, (), 99),
        PassedLengths((1, 2 * width)),
        make_random_source,
    )
    return DraftRole(level)


def text(
    seed: int, rule: str, *, forgets: bool, keyed_by_admission: bool, make_random_source, width: int
) -> tuple[int, ...]:
    """The first tokens of one request; with `forgets` the role admits it again before every round."""
    request = Request(1, (0,), SamplingParams(temperature=1.0, seed=seed, max_tokens=99))
    sequence, outbox, draft = Sequence.start(request, 999), Outbox(), role(rule, make_random_source, width)
    outbox.admit(sequence)
    for round_ in range(1, LENGTH + 1):
        if forgets and round_ > 1:
            draft.forget()
            outbox = Outbox()
            outbox.admit(sequence)
        admits, commits, releases = outbox.flush()
        if not keyed_by_admission:
            admits = tuple(replace(admit, admission=0) for admit in admits)
        (answer,) = draft.answer(DraftBatch(round_, admits, commits, releases, (DraftOrder(1, 2 * width),)))
        (proposal,) = answer.proposals
        random_source = HashRandomSource(seed, sequence.prefix_len)
        drawn = DrawnTree(proposal.tree, proposal.sampling_kinds, proposal.distributions)
        path, token = RULES[rule](drawn, lambda node: TARGET, random_source)
        verdict = Verdict(1, sequence.epoch, sequence.prefix_len, path, (token,))
        outbox.add_commit(sequence.commit(verdict, proposal))
        if sequence.num_generated >= LENGTH:
            break
    return tuple(sequence.token_ids[1 : LENGTH + 1])


def excess(
    rule: str,
    *,
    forgets: bool = False,
    keyed_by_admission: bool = True,
    make_random_source: Callable[[int, int], RandomSource] = HashRandomSource,
    width: int = 1,
) -> float:
    """Chi-square of the joint of all tokens, in standard deviations above its mean."""
    settings: dict[str, Any] = dict(forgets=forgets, keyed_by_admission=keyed_by_admission)
    settings |= dict(make_random_source=make_random_source, width=width)
    counts = Counter(text(seed, rule, **settings) for seed in range(COUNT))
    cells, expected = VOCAB**LENGTH, COUNT / VOCAB**LENGTH
    missed = (cells - len(counts)) * expected
    squares = sum((count - expected) ** 2 / expected for count in counts.values()) + missed
    return (squares - (cells - 1)) / (2 * (cells - 1)) ** 0.5


@pytest.mark.extended
@pytest.mark.parametrize(
    "rule, forgets",
    [("rejection", False), pytest.param("traversal", False, marks=pytest.mark.slow), ("traversal", True)],
)
def test_rounds_emit_the_targets_joint_law(rule, forgets):
    assert abs(excess(rule, forgets=forgets)) < 4


@pytest.mark.parametrize("rule", ["rejection", "traversal", "kseq", "transport"])
@pytest.mark.slow
def test_runners_up_are_drawn_with_numbers_of_their_own(rule):
    used = []

    class Recorded(HashRandomSource):
        def sample(self, weights, node):
            used.append((self.seed, self.step, node))
            return super().sample(weights, node)

    for seed in range(20):
        text(seed, rule, forgets=False, keyed_by_admission=True, make_random_source=Recorded, width=3)
    assert len(used) == len(set(used)) > 100
    assert abs(excess(rule, width=3)) < 4


@pytest.mark.extended
def test_coins_that_every_review_meets_again_are_found():
    assert excess("traversal", make_random_source=lambda seed, step: HashRandomSource(seed, 0)) > 6


@pytest.mark.extended
def test_noise_that_repeats_when_a_request_is_admitted_again_is_found():
    assert excess("traversal", forgets=True, keyed_by_admission=False) > 6


def test_a_child_level_that_came_back_draws_with_new_noise():
    """The upper level admits the same text again in the same epoch, and the coordinator the same request."""
    steps = {
        Context(1, 0, [0, 0], 1, SamplingParams(), admission=admission, num_cuts=cuts).step
        for admission in range(4)
        for cuts in range(3)
    }
    assert len(steps) == 12
