"""An answer of the target in two parts: first tokens leave at once, and the next pass waits for their drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from actors.coordinator.port import open_port
from actors.coordinator.scheduler import Capacity, Scheduler
from actors.coordinator.state_machine import Coordinator
from actors.options import SchedulerConfig
from actors.policy.policy import Policy
from actors.protocol.membership import PassFailed, RoleBack, RoleLost
from actors.protocol.messages import (
    HASH_SEED,
    Abort,
    Proposal,
    ProposalBatch,
    Request,
    SamplingParams,
    Tokens,
    TokenTree,
    Verdict,
    VerdictBatch,
    VerifyBatch,
    extend_hash,
)

PROMPT = (5,) * 50
FIRST = 6


@pytest.fixture
def coordinator() -> Any:
    port = open_port(Policy("sync", 3), 64, drafts=False, attached=True)
    return Coordinator(Scheduler(SchedulerConfig(), Capacity(400, 256)), Policy("sync", 3), [], port)


def request(request_id: int, max_tokens: int = 9) -> Request:
    return Request(request_id, PROMPT, SamplingParams(max_tokens=max_tokens))


def answers_to(batch: VerifyBatch, epoch: int = 0) -> tuple[VerdictBatch, VerdictBatch]:
    """Both parts of the answer to a pass over the whole prompts of its requests."""
    numbers = [item.request_id for item in batch.items]
    verdicts = tuple([Verdict(number, epoch, len(PROMPT), (), (FIRST,)) for number in numbers])
    first = VerdictBatch(batch.round, verdicts, 0.1, 0.5, len(PROMPT), drafts_follow=True)
    after, digest = len(PROMPT) + 1, extend_hash(HASH_SEED, (*PROMPT, FIRST))
    tree = TokenTree.chain(FIRST, (7, 8))
    drafts = [Proposal.deterministic(number, epoch, after, digest, tree) for number in numbers]
    made = ProposalBatch(batch.round, tuple(drafts), 0.5, 0.8)
    return first, replace(first, verdicts=(), drafts=made, drafts_follow=False, follows_verdicts=True)


def test_first_tokens_leave_at_once_and_the_next_pass_waits_for_their_drafts(coordinator):
    """The verdict of a prompt comes first, its draft in a second record, which may not repeat the verdict."""
    (batch,) = coordinator.on(request(1), 0.0)
    assert batch.items[0].num_draft_tokens == 3
    first, rest = answers_to(batch)
    coordinator.check(first)
    (token,) = coordinator.on(first, 0.6)
    assert (token.position, token.token_ids) == (0, (FIRST,)) and coordinator.awaits("target")
    for wrong in (first, replace(rest, follows_verdicts=False), replace(rest, verdicts=first.verdicts)):
        with pytest.raises(ValueError, match="not on what the target was given"):
            coordinator.check(wrong)  # its verdicts are committed
    coordinator.check(rest)
    (following,) = coordinator.on(rest, 0.9)
    assert rest.drafts is not None
    (draft,) = rest.drafts.proposals
    assert following.items[0].proposal == draft and following.commits[0].token_ids == (FIRST,)
    stats = coordinator.stats
    assert (stats.num_rounds, stats.num_tokens, stats.num_stale) == (1, 1, 0)
    assert (stats.target_busy_s, stats.draft_busy_s) == (pytest.approx(0.4), pytest.approx(0.3))


def test_drafts_whose_verdicts_were_lost_end_no_round(coordinator):
    """The pass stays unanswered, so the target starts anew, and the text is read again."""
    (batch,) = coordinator.on(request(1), 0.0)
    _, rest = answers_to(batch)
    coordinator.check(rest)
    assert coordinator.on(rest, 0.9) == [] and coordinator.awaits("target") and coordinator.stats.num_stale == 1
    assert coordinator.on(RoleLost("target"), 1.0) == []
    (again,) = coordinator.on(RoleBack("target", 2), 1.1)
    assert again.items[0].num_tokens == len(PROMPT) and len(again.admits) == 1
    first, _ = answers_to(again, epoch=1)
    (token,) = coordinator.on(first, 1.6)
    assert (token.position, token.token_ids) == (0, (FIRST,))


@pytest.mark.parametrize("ends_by", ["abort", "length"])
def test_a_request_that_ends_between_the_parts_leaves_a_stale_draft_alone(coordinator, ends_by):
    """One that comes meanwhile is read by the next pass, which begins behind the drafts."""
    (batch,) = coordinator.on(request(1, max_tokens=9 if ends_by == "abort" else 1), 0.0)
    first, rest = answers_to(batch)
    tokens = [*coordinator.on(first, 0.6)]
    if ends_by == "abort":
        tokens += coordinator.on(Abort(1), 0.7)
    assert [type(one) for one in tokens] == [Tokens] * len(tokens)
    assert tokens[-1].finish_reason == ends_by and coordinator.num_requests == 0
    assert coordinator.on(request(2), 0.75) == [], "the target still drafts"
    coordinator.check(rest)
    (following,) = coordinator.on(rest, 0.9)
    assert [item.request_id for item in following.items] == [2] and following.releases == (1,)
    assert coordinator.stats.num_stale == 1 and coordinator.stats.num_rounds == 1


def test_a_target_that_fails_between_the_parts_reads_the_text_with_its_first_token_again(coordinator):
    """The report of what failed may come behind the news that the target is lost."""
    (batch,) = coordinator.on(request(1), 0.0)
    first, rest = answers_to(batch)
    (token,) = coordinator.on(first, 0.6)
    assert token.token_ids == (FIRST,)
    assert coordinator.on(RoleLost("target"), 0.7) == []
    assert coordinator.on(PassFailed("target", 0, 0, batch.round, "the drafter's error"), 0.8) == []
    assert coordinator.on(rest, 0.9) == []
    (again,) = coordinator.on(RoleBack("target", 2), 1.0)
    assert again.admits[0].token_ids == (*PROMPT, FIRST) and again.items[0].num_tokens == len(PROMPT) + 1
    assert coordinator._sequences[1].num_failures == 1, "it is tested by itself"
    assert coordinator.stats.num_tokens == 1
