"""What the coordinator passes on to the drafter besides orders, between scripted roles."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from actors.coordinator.port import open_port
from actors.coordinator.sequence import Sequence
from actors.options import PipelineName
from actors.policy.policy import Policy
from actors.protocol.messages import (
    DraftBatch,
    Proposal,
    ProposalBatch,
    Request,
    SamplingParams,
    TokenTree,
    TopTokens,
    VerifyBatch,
)
from tests.actors.scripted_roles import World


class Telling(World):
    """Every verdict brings the top tokens of its pass, numbered by it."""

    def post(self, answers) -> None:
        super().post(answers)
        if any(isinstance(answer, VerifyBatch) for answer in answers):
            queue = self.answers["target"]
            queue[-1] = replace(queue[-1], top_tokens=TopTokens(queue[-1].round, b"", b"", b"", ()))

    def passed_on(self) -> list[int]:
        batches = [batch for batch in self.sent if isinstance(batch, DraftBatch)]
        return [tokens.k for batch in batches for tokens in batch.top_tokens]


def requests_of(num_requests: int, first: int = 0) -> list[Request]:
    sampling = SamplingParams(max_tokens=15, ignore_eos=True)
    return [Request(first + i, (3, 4), sampling) for i in range(num_requests)]


@pytest.mark.parametrize("pipeline", sorted(set(PipelineName) - {"plain"}))
@pytest.mark.parametrize("seed", range(4))
def test_the_top_tokens_of_every_pass_reach_the_drafter_once_and_in_order(pipeline, seed):
    """They leave with the first batch after their verdict; those of the last passes wait for a next one."""
    world = Telling(random.Random(seed), pipeline)
    for request in requests_of(3):
        world.deliver(request)
    world.settle()
    rounds = [batch.round for batch in world.sent if isinstance(batch, VerifyBatch)]
    found = world.passed_on()
    assert len(rounds) > 3 and found == rounds[: len(found)] and len(found) >= len(rounds) - 2
    world.deliver(requests_of(1, first=9)[0])
    world.settle()
    assert world.passed_on()[: len(rounds)] == rounds


@pytest.mark.extended
@pytest.mark.parametrize("pipeline", sorted(set(PipelineName) - {"plain"}))
@pytest.mark.parametrize("seed", range(8))
def test_a_drafter_that_returns_learns_of_passes_from_then_on(pipeline, seed):
    world = Telling(random.Random(seed), pipeline)
    for request in requests_of(3):
        world.deliver(request)
    for _ in range(4 + seed):
        world.deliver_one()
    world.lose("draft")
    while world.coordinator.num_requests:
        world.deliver_one()
    before = {batch.round for batch in world.sent if isinstance(batch, VerifyBatch)}
    num_passed = len(world.passed_on())
    world.bring_back("draft")
    world.deliver(requests_of(1, first=9)[0])
    world.settle()
    later = world.passed_on()[num_passed:]
    assert later and not before & set(later)


def test_a_draft_that_came_before_its_drafter_was_lost_is_not_ordered_again():
    """It remains valid, and the drafter that comes back reads the text alone."""
    port: Any = open_port(Policy("pingpong", 4), 8, drafts=True)
    sequence = Sequence.start(Request(1, (3, 4)), 50)
    sequence.cached_len = sequence.prefix_len - 1

    def orders(round_: int, *proposals: Proposal) -> list[int]:
        """The lengths of the orders of the next batch, which these proposals answer."""
        (batch,) = port.order([sequence], (), round_, 1.0)
        port.receive(ProposalBatch(batch.round, proposals, 0.0, 0.0), {1: sequence}, 1.0)
        return [order.num_draft_tokens for order in batch.orders]

    draft = Proposal.deterministic(*sequence.prefix, TokenTree.chain(4, [5, 6]))
    assert orders(1) == [0] and orders(2, draft) == [4] and sequence.draft.proposal is draft
    port.lose([sequence])
    port.regain(1)
    assert orders(3) == [0] and port.missing_drafts([sequence], ()) == []
    assert sequence.draft.proposal is draft
