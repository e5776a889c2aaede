"""The coordinator between scripted roles, in every order in which records can arrive."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.coordinator.outbox import Outbox
from actors.coordinator.sequence import Sequence
from actors.options import PipelineName, SchedulerConfig
from actors.protocol.messages import (
    Abort,
    Commit,
    DraftBatch,
    ProposalBatch,
    ReportOrder,
    Request,
    SamplingParams,
    Tokens,
    VerifyBatch,
)
from tests.actors.scripted_policy import MoodyPolicy
from tests.actors.scripted_roles import World
from tests.actors.small_language import EOS, MAX_MODEL_LEN, oracle, requests_of
from tests.examples import examples

LIMITS = (SchedulerConfig(), SchedulerConfig(3, 20, 6), SchedulerConfig(2, 5, 3))


@settings(max_examples=examples(120), deadline=None)
@given(
    choose=st.randoms(use_true_random=False),
    pipeline=st.sampled_from(sorted(PipelineName)),
    limits=st.sampled_from(LIMITS),
    slots=st.sampled_from([40, 60, 400]),
    duplicates=st.sampled_from([0.0, 0.3]),
    splits=st.sampled_from([0.0, 0.5]),
    previews=st.sampled_from([0.0, 0.7]),
    lateness=st.sampled_from([0.0, 0.4]),
    drafts=st.sampled_from([True, True, True, False]),
    moody=st.booleans(),
    writes_blocks=st.sampled_from([False, False, True]),
    max_source_len=st.sampled_from([0, 0, 20]),
    far=st.sampled_from([False, False, True]),
)
def test_every_interleaving_gives_the_tokens_of_the_language(
    choose,
    pipeline,
    limits,
    slots,
    duplicates,
    splits,
    previews,
    lateness,
    drafts,
    moody,
    writes_blocks,
    max_source_len,
    far,
):
    policy = MoodyPolicy(choose, pipeline) if moody else None
    world = World(
        choose,
        pipeline,
        limits=limits,
        slots=slots + max_source_len,
        drafts=drafts,
        duplicates=duplicates,
        splits=splits,
        previews=previews,
        lateness=lateness,
        policy=policy,
        writes_blocks=writes_blocks,
        far=far and pipeline.works_ahead,
    )
    requests = requests_of(choose, choose.randint(1, 7), max_source_len)
    coming, aborted = list(requests), set()
    while coming:
        action = choose.random()
        if action < 0.4:
            world.deliver(coming.pop(0))
        elif action < 0.45:
            victim = choose.choice(requests).request_id
            if victim in world.tokens and victim not in world.ends:
                aborted.add(victim)
            world.deliver(Abort(victim))
        else:
            world.deliver_one()
    world.settle()

    for request in requests:
        tokens, end, expected = world.tokens[request.request_id], world.ends[request.request_id], oracle(request)
        if end.finish_reason == "abort":
            assert tokens == expected[: len(tokens)]
        else:
            assert request.request_id not in aborted, "an aborted request ended otherwise"
            assert tokens == expected
            assert end.finish_reason == ("stop" if tokens[-1] in (EOS, *request.sampling.stop_token_ids) else "length")
    check_what_roles_received(world, requests)
    check_records_of_a_round(world)
    assert world.coordinator.stats.num_tokens == sum(map(len, world.tokens.values()))


def check_what_roles_received(world: World, requests: list[Request]) -> None:
    """No request is left at the drafter; the target gets the last releases with its next pass."""
    plain = {request.request_id for request in requests if not request.speculates}
    assert not world.drafter.knows.admitted & plain, "a plain request was sent to the drafter"
    assert not world.drafter.knows.texts, "the drafter still holds a request"
    world.deliver(Request(999, (3,), SamplingParams(max_tokens=1), drafter="none"))
    assert set(world.target.knows.texts) == {999}, "the target still holds a request"
    world.settle()


def check_records_of_a_round(world: World) -> None:
    """There is at most one record each way to each role: four. What is ordered in a round is verified in it, or
    later."""
    for kind in (DraftBatch, VerifyBatch):
        rounds = [batch.round for batch in world.sent if isinstance(batch, kind)]
        assert rounds == sorted(set(rounds)), "a round came twice"
    if world.drafter.is_far:
        return  # a lookup drafts without an order
    ordered: dict[int, int] = {}
    batches = [batch for batch in world.sent if not isinstance(batch, Tokens)]
    for batch in sorted(batches, key=lambda batch: (batch.round, isinstance(batch, VerifyBatch))):
        if isinstance(batch, DraftBatch):
            ordered |= {order.request_id: batch.round for order in batch.orders if order.num_draft_tokens}
        if isinstance(batch, VerifyBatch):
            assert all(ordered[item.request_id] <= batch.round for item in batch.items if item.proposal)


class Crowded(World):
    """A pool that is too small for its requests. What a role holds after a batch is what runs."""

    def deliver(self, record) -> None:
        running, num_sent = self.running(), len(self.sent)
        super().deliver(record)
        sent = {type(batch) for batch in self.sent[num_sent:]}
        if DraftBatch in sent:  # it may have left before room was made for this pass
            held = set(self.drafter.knows.texts)
            assert held <= running | self.running(), "the drafter holds a request that waits for room"
        if VerifyBatch in sent:
            assert set(self.target.knows.texts) <= self.running(), "the target holds a request that waits for room"

    def running(self) -> set[int]:
        return {sequence.request_id for sequence in self.coordinator._scheduler.running}


@pytest.mark.extended
@pytest.mark.parametrize("pipeline", sorted(PipelineName))
def test_a_preempted_request_takes_no_memory_at_the_roles(pipeline):
    num_preemptions = 0
    for seed in range(12):
        choose = random.Random(seed)
        world = Crowded(choose, pipeline, slots=40)
        requests = [Request(i, (3, 4, 5), SamplingParams(max_tokens=20, ignore_eos=True)) for i in range(5)]
        for request in requests:
            world.deliver(request)
        world.settle()
        assert all(world.tokens[request.request_id] == oracle(request) for request in requests)
        num_preemptions += world.coordinator.stats.num_preemptions
    assert num_preemptions > 12


@settings(max_examples=examples(40), deadline=None)
@given(choose=st.randoms(use_true_random=False))
def test_a_steady_round_is_four_records(choose):
    world = World(choose)
    world.deliver(Request(1, (3, 4), SamplingParams(max_tokens=25)))
    world.settle()
    batches = [batch for batch in world.sent if not isinstance(batch, Tokens)]
    prompt, steady = batches[:2], batches[2:]
    assert [type(batch) for batch in prompt] == [VerifyBatch, DraftBatch] and prompt[0].round == prompt[1].round
    while len(steady) > 2:
        draft, verify, *steady = steady
        assert isinstance(draft, DraftBatch) and isinstance(verify, VerifyBatch) and draft.round == verify.round


def test_what_is_foreseen_is_verified_before_the_drafter_hears_of_the_verdict():
    """A hit costs no exchange: the pass leaves with the verdict's own news, and ahead of them."""
    request = Request(1, (3, 4), SamplingParams(max_tokens=30, ignore_eos=True))
    world = World(random.Random(1), "branches", answers=("right",), previews=1.0)
    world.deliver(request)
    world.settle()
    assert world.drafter.num_prefetched >= 2 and world.tokens[1] == oracle(request)
    batches = [(i, batch) for i, batch in enumerate(world.sent) if isinstance(batch, DraftBatch)]
    taking = [i for i, batch in batches if any(order.prefetched for order in batch.orders)]
    for i in taking:
        verify, order = world.sent[i - 1], world.sent[i].orders[0]
        assert isinstance(verify, VerifyBatch) and (proposal := verify.items[0].proposal) is not None
        assert proposal.tree == order.prefetched
    stats = world.coordinator.stats
    assert stats.num_branch_hits == stats.num_branch_lookups == len(taking) == world.drafter.num_prefetched


def test_behind_a_draft_that_was_prepared_the_next_one_is_ordered_before_the_drafter_answers():
    """Its answer brings no draft, and is an exchange away: of a far drafter, four passes or more."""
    request = Request(1, (3, 4), SamplingParams(max_tokens=60, ignore_eos=True))
    world = World(random.Random(1), "branches", answers=("right",), previews=1.0)
    world.deliver(request)
    while not world.noted:
        world.deliver_one()
    assert len(world.answers["draft"]) == 2, "the answer, and a preview for the next verdict"
    world.deliver(world.answers["target"].popleft())
    (order,) = [batch for batch in world.sent if isinstance(batch, DraftBatch)][-1].orders
    assert order.prefetched is None and order.num_draft_tokens and len(world.answers["draft"]) > 2
    world.settle()
    assert world.tokens[1] == oracle(request) and world.coordinator.stats.num_stale == 0


@pytest.mark.parametrize("answer", ["right", "wrong", "missing"])
def test_what_a_drafter_is_worth_shows_in_the_counters(answer):
    request = Request(1, (3, 4), SamplingParams(max_tokens=21, ignore_eos=True))
    world = World(random.Random(0), answers=(answer,))
    world.deliver(request)
    world.settle()
    totals, stats = world.coordinator.stats, world.ends[1].stats
    assert totals.num_tokens == 21 and totals.num_requests_finished == 1 and totals.num_prompt_tokens == 2
    if answer == "right":  # one plain token behind the prompt, then five at a time
        assert totals.acceptance_histogram == [0, 0, 0, 0, 4] and totals.num_rounds == 5
        assert totals.num_drafted_per_pos == totals.num_accepted_per_pos == [4] * 4
    elif answer == "wrong":
        assert totals.acceptance_histogram[0] == totals.num_spec_steps == 19 and totals.num_accepted_tokens == 0
    else:
        assert totals.num_spec_steps == 0 and totals.num_rounds == 21
    assert stats.num_spec_steps == totals.num_spec_steps and stats.num_accepted_tokens == totals.num_accepted_tokens


def test_answers_of_other_rounds_are_counted_and_change_nothing():
    world = World(random.Random(0), answers=("right",))
    world.deliver(Request(1, (3, 4), SamplingParams(max_tokens=20)))
    assert world.deliver_one() and world.deliver_one() and world.deliver_one()
    coordinator, before = world.coordinator, dict(world.tokens)
    stale = 0
    for record in list(world.past):
        for other in (record, replace(record, round=record.round + 50)):
            busy = coordinator.stats.draft_busy_s, coordinator.stats.target_busy_s, coordinator.stats.num_rounds
            assert coordinator.on(other, 99.0) == []
            stale += 1
            assert coordinator.stats.num_stale == stale and world.tokens == before
            assert busy == (
                coordinator.stats.draft_busy_s,
                coordinator.stats.target_busy_s,
                coordinator.stats.num_rounds,
            )
    world.settle()
    assert world.tokens[1] == oracle(Request(1, (3, 4), SamplingParams(max_tokens=20)))


def test_an_old_answer_does_not_stand_in_for_the_one_awaited():
    """Were it taken, the target would go ahead without the drafts that are on their way."""
    world = World(random.Random(0), answers=("right",))
    world.deliver(Request(1, (3, 4), SamplingParams(max_tokens=20)))
    while not (world.answers["draft"] and world.answers["draft"][0].proposals):
        world.deliver_one()
    old = [record for record in world.past if isinstance(record, ProposalBatch)][-1]
    assert world.coordinator.on(old, 99.0) == [], "the target must wait"
    world.settle()
    assert world.coordinator.stats.acceptance_histogram[0] == 0


def test_a_request_id_may_come_back_while_its_old_verdict_is_out():
    world = World(random.Random(0), answers=("right",))
    again = Request(1, (5, 6, 7), SamplingParams(max_tokens=9))
    world.deliver(Request(1, (3, 4), SamplingParams(max_tokens=9)))
    world.deliver(Abort(1))
    del world.tokens[1], world.ends[1], world.target.knows.epochs[1], world.drafter.knows.epochs[1]
    world.deliver(again)
    world.settle()
    assert world.tokens[1] == oracle(again) and world.coordinator.stats.num_stale == 1


def test_an_abort_ends_a_request_at_once_wherever_it_is():
    for steps in range(8):
        world = World(random.Random(0), limits=SchedulerConfig(1, 20, 6))
        for request_id in (1, 2):
            world.deliver(Request(request_id, (3,) * 9, SamplingParams(max_tokens=20, ignore_eos=True)))
        for _ in range(steps):
            world.deliver_one()
        for request_id in (1, 2, 3):
            world.deliver(Abort(request_id))
        assert {end.finish_reason for end in world.ends.values()} == {"abort"} and set(world.ends) == {1, 2}
        world.settle()
        assert world.coordinator.num_requests == 0 and not world.drafter.knows.texts


@pytest.mark.parametrize(
    ("generated", "reason"), [((5,) * 12, "length"), ((5, 5, 1), "stop"), ((5, 5, 8), "stop")], ids=str
)
def test_a_request_that_is_complete_is_answered_and_takes_no_seat(generated, reason):
    """Its client has all tokens but missed that they were the last ones."""
    coordinator, sampling = World(random.Random(0)).coordinator, SamplingParams(max_tokens=12, stop_token_ids=(8,))
    for request_id in range(80):
        (answer,) = coordinator.on(Request(request_id, (3, 4), sampling, generated=generated), 0.0)
        assert (answer.position, answer.token_ids, answer.finish_reason) == (len(generated), (), reason)
    assert coordinator.num_requests == 0


def test_refusals_reach_the_client_and_stop_no_other_request():
    world = World(random.Random(0), slots=20)
    good = Request(1, (3, 4), SamplingParams(max_tokens=12))
    world.deliver(good)
    world.deliver(Request(2, (3,) * 20))
    world.deliver(Request(3, (3,), SamplingParams(max_tokens=5), source=(4,) * 15))
    errors: list[Any] = [news for news in world.sent if isinstance(news, Tokens) and news.finish_reason == "error"]
    assert [news.request_id for news in errors] == [2, 3]
    assert errors[0].error.startswith("prompt: ") and errors[1].error.startswith("source: 21 tokens")
    world.settle()
    assert world.tokens[1] == oracle(good)


def test_a_request_without_speculation_makes_no_difference_to_the_others():
    requests = [
        Request(i, (3, 4 + i), SamplingParams(max_tokens=15), drafter=None if i % 2 else "none") for i in range(6)
    ]
    world = World(random.Random(0), answers=("right",))
    for request in requests:
        world.deliver(request)
    world.settle()
    assert {request.request_id: oracle(request) for request in requests} == world.tokens
    assert world.drafter.asked == {1, 3, 5}
    assert all(end.stats.num_spec_steps == 0 for i, end in world.ends.items() if i % 2 == 0)


def test_plain_needs_no_drafter_at_all():
    world = World(random.Random(0), pipeline="plain", drafts=False)
    request = Request(1, (3, 4), SamplingParams(max_tokens=15))
    world.deliver(request)
    world.settle()
    assert world.tokens[1] == oracle(request)
    assert not any(isinstance(record, DraftBatch) for record in world.sent)


def test_a_report_closes_its_window():
    world = World(random.Random(0), answers=("right",))
    world.deliver(Request(1, (3, 4), SamplingParams(max_tokens=10, ignore_eos=True)))
    while 1 not in world.ends:
        world.deliver_one()
    ended_at = world.clock
    world.settle()
    (report,) = world.coordinator.on(ReportOrder(reset=True), world.clock + 5.0)
    assert report.counters["num_tokens"] == 10 and report.counters["window_s"] == world.clock + 5.0
    assert report.counters["active_s"] == ended_at - 1.0, "idle time is not active time"
    assert {span[0] for span in report.spans} == {"draft", "target", "messages"}
    (report,) = world.coordinator.on(ReportOrder(), world.clock + 7.0)
    assert report.counters["num_tokens"] == 0 and report.counters["window_s"] == 2.0 and not report.spans


def test_a_record_for_another_role_is_a_mistake():
    with pytest.raises(TypeError, match="VerifyBatch"):
        World(random.Random(0)).coordinator.on(VerifyBatch(1), 0.0)


class TestOutbox:
    """Everything a role must know, once, in an order it can follow."""

    def sequence(self, request_id: int = 1) -> Sequence:
        return Sequence.start(Request(request_id, (3, 4)), MAX_MODEL_LEN)

    def commit(self, request_id: int = 1) -> Commit:
        return Commit(request_id, 0, 2, (), (5,))

    def test_a_stranger_has_no_commits_and_no_release(self):
        outbox = Outbox()
        outbox.add_commit(self.commit())
        outbox.release(1)
        assert outbox.flush() == ((), (), ()) and not outbox.is_due

    def test_who_came_and_went_between_two_batches_is_never_mentioned(self):
        outbox = Outbox()
        outbox.admit(self.sequence())
        outbox.add_commit(self.commit())
        outbox.release(1)
        assert outbox.flush() == ((), (), ())

    def test_a_release_is_sent_once(self):
        outbox = Outbox()
        outbox.admit(self.sequence())
        outbox.flush()
        outbox.add_commit(self.commit())
        outbox.release(1)
        outbox.release(1)
        assert outbox.is_due and outbox.flush() == ((), (), (1,)) and outbox.flush() == ((), (), ())

    def test_unreported_plain_rounds_are_one_record(self):
        outbox = Outbox()
        outbox.admit(self.sequence())
        outbox.flush()
        outbox.add_commit(Commit(1, 0, 2, (1, 2), (5, 6, 7)))
        for i in range(500):
            outbox.add_commit(Commit(1, 0, 5 + i, (), (i,)))
        assert outbox.flush() == ((), (Commit(1, 0, 2, (1, 2), (5, 6, 7, *range(500))),), ())

    def test_who_comes_back_is_released_first(self):
        outbox = Outbox()
        sequence = self.sequence()
        outbox.admit(sequence)
        outbox.flush()
        sequence.preempt()
        outbox.admit(sequence)
        admits, commits, releases = outbox.flush()
        assert [admit.epoch for admit in admits] == [1] and releases == (1,) and not commits
        outbox.admit(sequence)
        outbox.release(1)
        assert outbox.flush() == ((), (), (1,)), "admitted and released again unheard: one release stands"
