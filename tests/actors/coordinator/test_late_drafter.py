"""A drafter that is late, or never answers: waited for while it pays; then the target goes on, and asks it again."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from actors.options import PipelineName
from actors.policy.draft_length import FIRST_LENGTH
from actors.policy.draft_wait import HANG_S, JITTER_S, DraftWait
from actors.policy.policy import AdaptivePolicy, Policy
from actors.protocol.messages import (
    DraftBatch,
    ProposalBatch,
    Report,
    ReportOrder,
    Request,
    SamplingParams,
    Verdict,
    VerdictBatch,
    VerifyBatch,
)
from tests.actors.scripted_roles import World
from tests.actors.service_harness import Stage
from tests.actors.small_language import oracle

DRAFTING = sorted(set(PipelineName) - {"plain"})
REQUEST = Request(1, (3, 4), SamplingParams(max_tokens=30, ignore_eos=True))
PLAIN = Request(2, (5, 6), SamplingParams(max_tokens=5, ignore_eos=True), drafter="none")


class Quick(World):
    """Records arrive at once, beside passes of half a second."""

    tick_s = 1e-3


class Weighing(Policy):
    """Always full drafts, but waits only while that pays."""

    weighs_waiting = True


def silent(pipeline: str, policy: Policy) -> World:
    """A world whose drafter has an order and says nothing, while the target waits for it."""
    world = Quick(random.Random(0), pipeline, answers=("right",), policy=policy)
    world.deliver(REQUEST)
    while len(world.tokens.get(1, [])) < 6 or world.answers["target"]:
        world.deliver_one()
    assert world.answers["draft"] and world.coordinator.wait_until is not None
    return world


def serve_target(world: World) -> None:
    while world.answers["target"]:
        world.deliver(world.answers["target"].popleft())


@pytest.mark.parametrize("pipeline", DRAFTING)
@pytest.mark.parametrize("make", [Weighing, lambda name, most: AdaptivePolicy(name, 0, most), Policy])
def test_behind_a_silent_drafter_tokens_go_on_for_everybody(pipeline, make):
    world = silent(pipeline, make(pipeline, 4))
    orders = sum(isinstance(record, DraftBatch) for record in world.sent)
    world.deliver(PLAIN)
    assert not world.answers["target"], "a moment's wait pays"
    world.stop_waiting()
    admitted = [admit.request_id for admit in world.sent[-1].admits]
    assert isinstance(world.sent[-1], VerifyBatch) and admitted == [2], "who wants no drafts is held up no longer"
    serve_target(world)
    assert world.tokens == {1: oracle(REQUEST), 2: oracle(PLAIN)}
    assert sum(isinstance(record, DraftBatch) for record in world.sent) == orders, "one that is late is asked nothing"


@pytest.mark.parametrize("pipeline", DRAFTING)
def test_a_drafter_that_was_late_is_asked_again(pipeline):
    world = silent(pipeline, Weighing(pipeline, 4))
    world.stop_waiting()
    for _ in range(3):
        world.deliver(world.answers["target"].popleft())
    before = world.coordinator.stats.num_spec_steps
    world.settle()
    assert world.tokens[1] == oracle(REQUEST)
    assert world.coordinator.stats.num_spec_steps > before, "and its drafts are verified again"
    assert world.coordinator.stats.num_stale >= 1, "the late one was of no use"


class Changing(Policy):
    """No drafts for the request `resting`."""

    resting: int | None = 2

    def draft_length(self, request_id: int, most: int) -> int:
        return 0 if request_id == self.resting else super().draft_length(request_id, most)


def test_once_time_is_up_no_draft_is_ordered_of_a_text_that_is_verified_next():
    """Of two pools one is silent, and drafts from the other begin to pay just then."""
    policy = Changing("branches", 4)
    world = Quick(random.Random(0), "branches", answers=("right",), policy=policy, num_seats=2)
    other = replace(REQUEST, request_id=2, prompt=(5, 6))
    world.deliver(REQUEST)
    world.deliver(other)
    silent, lively = world.answers["draft"], ("target", "draft@1")
    while queue := next((world.answers[role] for role in lively if world.answers[role]), None) or silent:
        if queue is silent and silent[0].proposals and len(world.tokens.get(2, [])) > 2:
            break
        world.deliver(queue.popleft())
    assert world.coordinator.wait_until is not None and not world.answers["draft@1"]
    policy.resting = None
    world.stop_waiting()
    (batch,) = [one for one in world.sent[-2:] if isinstance(one, VerifyBatch)]
    assert {item.request_id for item in batch.items} == {1, 2} and not world.answers["draft@1"]
    world.settle()
    assert world.tokens == {1: oracle(REQUEST), 2: oracle(other)} and world.ends[2].stats.num_spec_steps > 0


def test_of_two_pools_that_are_late_neither_is_waited_for_again():
    world = Quick(random.Random(0), "branches", answers=("right",), policy=Weighing("branches", 4), num_seats=2)
    other = replace(REQUEST, request_id=2, prompt=(5, 6))
    world.deliver(REQUEST)
    world.deliver(other)
    pools = [world.answers[role] for role in ("draft", "draft@1")]
    while world.coordinator.wait_until is None or not all(queue and queue[0].proposals for queue in pools):
        reading = [queue for queue in pools if queue and not queue[0].proposals]
        world.deliver(next(filter(None, [*reading, world.answers["target"], *pools])).popleft())
    world.stop_waiting()
    assert world.coordinator._round.skipped_drafts
    serve_target(world)
    assert world.tokens == {1: oracle(REQUEST), 2: oracle(other)}, "a moment was given to both at once"


@pytest.mark.parametrize(("make", "waits_s"), [(Weighing, 4 * 0.5), (Policy, HANG_S)])
def test_how_long_it_waits_follows_from_what_a_draft_may_bring(make, waits_s):
    """Four tokens, each worth a pass of half a second; where nothing is weighed, until it must be a hang."""
    world = Quick(random.Random(0), answers=("right",), policy=make("sync", 4))
    world.deliver(REQUEST)
    while not (world.answers["draft"] and world.answers["draft"][0].proposals):
        world.deliver_one()
    coordinator, asked_at = world.coordinator, world.clock
    assert coordinator.wait_until == asked_at + waits_s
    assert coordinator.stop_waiting(asked_at + 0.99 * waits_s) == []
    assert [type(one) for one in coordinator.stop_waiting(asked_at + waits_s)] == [VerifyBatch]


@pytest.mark.parametrize("pipeline", ["sync", "branches"])
def test_running_requests_do_not_wait_while_the_drafter_reads_a_prompt(pipeline):
    world = silent(pipeline, Weighing(pipeline, 4))
    coming = Request(3, tuple(range(2, 11)) * 2, SamplingParams(max_tokens=10, ignore_eos=True))
    world.deliver(coming)
    reading = 0
    while not reading or not world.answers["draft"]:
        world.deliver_one()
        batch = [record for record in world.sent if isinstance(record, DraftBatch)][-1]
        reading = any(admit.request_id == 3 for admit in batch.admits)
    assert not any(order.num_draft_tokens for order in batch.orders), "drafts do not stand behind a prompt"
    serve_target(world)
    assert world.tokens[1] == oracle(REQUEST) and world.tokens[3] == oracle(coming), "the target went on"


def test_long_texts_are_read_in_pieces_between_drafts():
    world = silent("sync", Weighing("sync", 4))
    world.coordinator._drafter._read_chunk = 5
    world.deliver(Request(3, tuple(range(2, 11)) * 2, SamplingParams(max_tokens=10, ignore_eos=True)))
    world.settle()
    batches = [record for record in world.sent if isinstance(record, DraftBatch)]
    read = [batch for batch in batches if any(order.num_draft_tokens == 0 for order in batch.orders)][1:]
    pieces = [admit.token_ids for batch in read for admit in batch.admits]
    pieces += [commit.token_ids for batch in read for commit in batch.commits if commit.request_id == 3]
    assert [len(piece) for piece in pieces][:3] == [5, 5, 5] and sum(map(len, pieces)) >= 18
    assert world.ends[3].stats.num_spec_steps > 0, "and then it is drafted for"


class TestDraftWait:
    """When waiting pays: passes of 10 ms, at most four draft tokens."""

    def after(self, *delays: float, length: int = 3) -> DraftWait:
        wait = DraftWait(weighs=True, longest_draft=4)
        wait.update_pass(2.0, reads_prompt=True)
        for _ in range(50):
            wait.update_pass(0.01, reads_prompt=False)
            wait.update_acceptance(length)
        for delay in delays:
            wait.update_delay(delay, is_rest=False)
        return wait

    def test_no_wait_for_drafts_that_could_not_pay_if_all_were_accepted(self):
        assert self.after(0.039).wait_s(1) and not self.after(0.041).wait_s(1)

    def test_what_is_late_is_given_as_long_as_drafts_are_worth_lately(self):
        assert self.after(0.001).wait_s(1) == pytest.approx(0.02, rel=0.01)
        assert self.after(0.03).wait_s(1) == pytest.approx(0.04, rel=0.01), "they always take that long"
        assert self.after(0.001, length=1).wait_s(1) >= JITTER_S

    def test_others_tokens_are_what_a_wait_costs(self):
        wait = self.after(0.02)
        assert wait.wait_s(2) and not wait.wait_s(2, num_plain=4)
        assert not wait.wait_s(2, num_ready=2)
        assert self.after(0.001).wait_s(1, num_plain=3) < self.after(0.001).wait_s(1)

    def test_one_late_answer_is_forgiven_many_are_not_and_both_are_forgotten(self):
        assert self.after(*[0.005] * 4, 9.0).wait_s(1)
        late = self.after(*[0.005] * 4, *[9.0] * 5)
        assert not late.wait_s(1)
        for _ in range(5):
            late.update_delay(0.005, is_rest=False)
        assert late.wait_s(1)

    def test_the_rest_of_an_answer_has_to_pay_by_what_drafts_bring_lately(self):
        wait = self.after()
        wait.update_delay(0.03, is_rest=True)
        assert not wait.wait_s(1, has_first_part=True) and wait.wait_s(1)

    def test_where_nothing_is_weighed_the_first_part_is_awaited(self):
        assert DraftWait(weighs=False, longest_draft=1).wait_s(1, num_plain=50) == HANG_S


def draft_busy_s(stage):
    stage.send("client", ReportOrder())
    while not isinstance(record := stage.receive("client"), Report):
        pass
    return record.counters["draft_busy_s"]


@pytest.mark.parametrize("near", [False, True])
def test_the_loop_tells_when_time_is_up(near):
    """No further record arrives, and the target is sent a pass."""
    stage: Any = Stage(adaptive=True, near=near)
    try:
        stage.get_ready()
        stage.send("client", Request(1, (3, 4), SamplingParams(max_tokens=20)))
        first, reading = stage.receive("target-0"), stage.receive("draft-0")
        stage.send("draft-0", ProposalBatch(reading.round, (), 0.0, 0.001))
        while not draft_busy_s(stage):  # two links are not read in the order in which they were written
            pass
        verify = first
        for length in range(2, 6):  # plain rounds are measured before the first trial
            rows = 2 if length == 2 else 1  # the first pass reads the prompt
            stage.send("target-0", VerdictBatch(verify.round, (Verdict(1, 0, length, (), (7,)),), 0.0, 0.001, rows))
            if length < 5:
                verify = stage.receive("target-0")
        assert stage.receive("draft-0").orders[0].num_draft_tokens == FIRST_LENGTH
        assert stage.receive("target-0").items[0].proposal is None
    finally:
        stage.stop()
