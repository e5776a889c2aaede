"""Roles die and come back at any moment, records are lost, doubled, swapped and late: the tokens stay the same."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.options import PipelineName, SchedulerConfig
from actors.policy.decision import Mode
from actors.policy.policy import Policy
from actors.protocol.messages import Abort, DraftPreviewBatch, ReportOrder, Request, SamplingParams, VerifyBatch
from tests.actors.scripted_policy import MoodyPolicy
from tests.actors.scripted_roles import World
from tests.actors.small_language import oracle, requests_of
from tests.examples import examples

LIMITS = (SchedulerConfig(), SchedulerConfig(3, 20, 6))


class Storm(World):
    """A world in which whatever can be lost is lost now and then."""

    def blow(self) -> None:
        action = self.choose.random()
        role = self.choose.choice([*self.answers])
        queue = self.answers[role]
        if role in self.lost:
            self.bring_back(role)
        elif action < 0.5:
            self.lose(role)
        elif action < 0.7 and queue:  # an answer lost on the way: the role is there, and has to be asked anew
            queue.popleft()
            self.lose(role)
            self.bring_back(role)
        elif action < 0.85 and len(queue) > 1 and role != "target":
            self.past.append(queue.popleft())  # the second part of an answer overtakes the first
        elif action < 0.85 and len(queue) > 1:  # the first part, with the verdicts, is lost
            self.past.append(queue.popleft())
            self.deliver(queue.popleft())
            assert self.coordinator.awaits("target"), "the pass has no verdicts"
            self.lose(role)
            self.bring_back(role)
        elif queue:
            record = corrupted(self.choose, queue[0])
            self.senders[id(record)] = role
            self.deliver(record)
            self.past.append(record)  # it keeps its identity

    def calm(self) -> None:
        for role in sorted(self.lost, reverse=True):  # a bridge needs the target
            self.bring_back(role)


def corrupted(choose, answer):
    """An answer that names another round or text, as one that is torn or of another life would. No round to come: it
    is repeated later, and the service refuses verdicts on a text that the batch of their round does not have."""
    if isinstance(answer, DraftPreviewBatch):
        return DraftPreviewBatch(tuple(replace(one, prefix_hash=one.prefix_hash ^ 1) for one in answer.previews))
    return replace(answer, round=answer.round + choose.choice((-1, 1_000_000)))


@settings(max_examples=examples(150, share=8), deadline=None)
@given(
    choose=st.randoms(use_true_random=False),
    pipeline=st.sampled_from(sorted(set(PipelineName) - {"plain"})),
    limits=st.sampled_from(LIMITS),
    slots=st.sampled_from([40, 400]),
    splits=st.sampled_from([0.0, 0.5]),
    previews=st.sampled_from([0.0, 0.5]),
    lateness=st.sampled_from([0.0, 0.3]),
    moody=st.booleans(),
    bridged=st.booleans(),
    num_seats=st.sampled_from([1, 1, 2, 3]),
    far=st.booleans(),
)
def test_losses_at_any_moment_change_no_token(
    choose, pipeline, limits, slots, splits, previews, lateness, moody, bridged, num_seats, far
):
    """Nor with `bridged`, which ends whenever a role does, what a drafter needs that reads hidden states; nor where
    several pools lend their drafters; nor with one that is never waited for."""
    far = far and pipeline.works_ahead and not bridged
    num_seats = 1 if bridged or far else num_seats
    policy = MoodyPolicy(choose, pipeline) if moody else None
    chances = {"duplicates": 0.3, "splits": splits, "previews": previews, "lateness": lateness}
    kind = {"bridged": bridged, "num_seats": num_seats, "far": far}
    storm = Storm(choose, pipeline, limits=limits, slots=slots, policy=policy, **kind, **chances)
    requests = requests_of(choose, choose.randint(1, 6))
    coming, left = list(requests), 60
    while coming or left:
        action = choose.random()
        if coming and action < 0.2:
            storm.deliver(coming.pop(0))
        elif left and action < 0.5:
            left -= 1
            storm.blow()
        elif not storm.deliver_one() and not coming:
            left = max(0, left - 1)
    storm.calm()
    storm.settle()
    for request in requests:
        assert storm.tokens[request.request_id] == oracle(request)
    assert storm.coordinator.stats.num_tokens == sum(map(len, storm.tokens.values()))


@settings(max_examples=examples(200, share=2), deadline=None)
@given(choose=st.randoms(use_true_random=False), limits=st.sampled_from(LIMITS), slots=st.sampled_from([40, 400]))
def test_verdicts_that_leave_before_their_drafts_are_committed_whatever_is_lost(choose, limits, slots):
    """Requests come, are aborted, and the target is lost between the two parts of an answer."""
    storm = Storm(choose, limits=limits, slots=slots, drafts=False, parts=0.6, duplicates=0.3)
    requests = requests_of(choose, choose.randint(1, 6))
    coming, aborted = list(requests), set()
    for _ in range(60):
        action = choose.random()
        if coming and action < 0.3:
            storm.deliver(coming.pop(0))
        elif action < 0.35 and (alive := [*(storm.tokens.keys() - storm.ends)]):
            aborted.add(victim := choose.choice(sorted(alive)))
            storm.deliver(Abort(victim))
        elif action < 0.5:
            storm.blow()
        else:
            storm.deliver_one()
    storm.calm()
    for request in coming:
        storm.deliver(request)
    storm.settle()
    for request in requests:
        tokens, expected = storm.tokens[request.request_id], oracle(request)
        assert tokens == (expected[: len(tokens)] if request.request_id in aborted else expected)
    assert storm.coordinator.stats.num_tokens == sum(map(len, storm.tokens.values()))


@settings(max_examples=examples(80, share=8), deadline=None)
@given(choose=st.randoms(use_true_random=False), pipeline=st.sampled_from(sorted(PipelineName)))
def test_a_dead_coordinator_is_replaced_by_what_its_client_holds(choose, pipeline):
    """Every request is asked again, with the tokens its client got; the last of them may have been lost on the way."""
    requests = requests_of(choose, choose.randint(1, 5))
    world = World(choose, pipeline, previews=0.5)
    for request in requests:
        world.deliver(request)
    held: dict[int, list[int]] = {}
    for _ in range(choose.randint(1, 3)):
        for _ in range(choose.randint(0, 30)):
            world.deliver_one()
        ended = set(world.ends)
        for request in requests:
            got = world.tokens.get(request.request_id, [])
            held[request.request_id] = got if request.request_id in ended else got[: choose.randint(0, len(got))]
        world = World(choose, pipeline, previews=0.5)
        world.tokens = held | {}
        world.ends = dict.fromkeys(ended)
        for request in requests:
            if request.request_id not in ended:
                world.deliver(replace(request, generated=tuple(held[request.request_id])))
    world.settle()
    assert world.tokens == {request.request_id: oracle(request) for request in requests}


def steady(pipeline: str = "sync") -> tuple[World, Request]:
    """A request that is in the middle of its text."""
    request = Request(1, (3, 4), SamplingParams(max_tokens=25, ignore_eos=True))
    world = World(random.Random(0), pipeline, answers=("right",))
    world.deliver(request)
    while len(world.tokens.get(1, [])) < 6:
        world.deliver_one()
    return world, request


@pytest.mark.parametrize("pipeline", sorted(set(PipelineName) - {"plain"}))
def test_without_a_drafter_the_target_goes_on_at_once(pipeline):
    world, request = steady(pipeline)
    while not world.answers["draft"]:
        world.deliver_one()
    before = len(world.sent)
    world.lose("draft")
    if not world.answers["target"]:
        assert any(isinstance(record, VerifyBatch) for record in world.sent[before:]), "a lost role is still waited for"
    drafted = world.coordinator.stats.num_spec_steps
    for _ in range(3):
        world.deliver_one()
    assert world.coordinator.stats.num_spec_steps <= drafted + 1, "only what was proposed before may still be verified"
    world.bring_back("draft")
    world.settle()
    assert world.tokens[1] == oracle(request)
    assert world.coordinator.stats.num_spec_steps > drafted + 1, "speculation resumes"


def verifying_a_draft() -> tuple[World, Request]:
    """The target verifies a draft, all of which is right."""
    world, request = steady("pingpong")
    while not (world.answers["target"] and world.answers["target"][0].verdicts[0].path):
        world.deliver_one()
    return world, request


def test_a_drafter_that_came_back_is_not_sent_the_path_of_a_draft_it_never_made():
    """It has read the text meanwhile, where both roles work at once."""
    world, request = verifying_a_draft()
    world.lose("draft")
    world.bring_back("draft")
    assert world.drafter.knows.texts[1] == [3, 4, *world.tokens[1]]
    world.settle()  # the drafter sees to it
    assert world.tokens[1] == oracle(request)


def test_without_a_target_requests_wait_and_lose_nothing():
    world, request = steady()
    world.lose("target")
    held = list(world.tokens[1])
    while world.deliver_one():
        pass
    assert world.tokens[1] == held and world.coordinator.num_requests == 1
    world.bring_back("target")
    (admit,) = world.sent[-1].admits if isinstance(world.sent[-1], VerifyBatch) else world.sent[-2].admits
    assert list(admit.token_ids) == [3, 4, *held] and admit.epoch == 1 and admit.prompt_len == 2
    world.settle()
    assert world.tokens[1] == oracle(request)


def test_a_late_verdict_of_the_lost_target_is_recognised():
    world, request = steady()
    while not world.answers["target"]:
        world.deliver_one()
    (late,) = world.answers["target"]
    world.lose("target")
    world.bring_back("target")
    stale, held = world.coordinator.stats.num_stale, list(world.tokens[1])
    world.deliver(late)
    assert world.coordinator.stats.num_stale == stale + 1 and world.tokens[1] == held
    world.settle()
    assert world.tokens[1] == oracle(request)


def test_a_request_may_be_aborted_while_there_is_no_target():
    world, _ = steady()
    world.lose("target")
    world.deliver(Abort(1))
    assert world.ends[1].finish_reason == "abort"
    world.bring_back("target")
    world.settle()


def test_what_is_asked_twice_is_answered_with_what_was_missed():
    world, request = steady()
    held = list(world.tokens[1])
    again = replace(request, generated=tuple(held[:2]))
    answers = world.coordinator.on(again, 50.0)
    (missed,) = [news for news in answers if getattr(news, "position", None) is not None]
    assert (missed.position, list(missed.token_ids), missed.finish_reason) == (2, held[2:], None)
    assert world.coordinator.on(replace(request, generated=tuple(held)), 51.0) == []
    world.settle()
    assert world.tokens[1] == oracle(request)


def test_losses_and_times_are_counted():
    world, _ = steady()
    coordinator = world.coordinator
    world.lose("draft")
    lost_at = world.clock
    world.bring_back("draft")
    while not coordinator.stats.resume_s:
        world.deliver_one()
    assert coordinator.stats.num_role_losses == {"draft": 1}
    assert coordinator.stats.resume_s == {"draft": [world.clock - lost_at]}
    assert coordinator.stats.no_drafter_s == world.clock - lost_at
    world.lose("target")
    world.clock += 100
    world.bring_back("target")
    world.settle()
    (report,) = coordinator.on(ReportOrder(), world.clock)
    assert report.counters["num_role_losses"] == {"draft": 1, "target": 1}
    assert report.counters["resume_s"]["target"][0] > 100


def test_a_role_that_comes_back_to_an_idle_engine_has_resumed():
    world = World(random.Random(0))
    world.lose("target")
    world.clock += 7
    world.bring_back("target")
    assert world.coordinator.stats.resume_s == {"target": [8.0]}


def test_decoding_falls_back_while_none_of_several_drafters_is_there():
    world = World(random.Random(0), answers=("right",), num_seats=2)
    for i in (1, 2):
        world.deliver(Request(i, (3, i), SamplingParams(max_tokens=30, ignore_eos=True)))
    stats = world.coordinator.stats

    def until_resumed(number: int) -> float:
        while sum(map(len, stats.resume_s.values())) < number:
            world.deliver_one()
        return world.clock

    world.lose("draft")
    world.deliver_one()
    world.bring_back("draft")
    until_resumed(1)
    assert [*stats.resume_s] == ["draft"] and stats.no_drafter_s == 0, "the other one drafts"
    world.lose("draft@1")
    world.deliver_one()
    world.lose("draft")
    lost_at = world.clock
    world.deliver_one()
    world.bring_back("draft@1")
    assert until_resumed(2) - lost_at == stats.no_drafter_s > 0, "from the second loss"
    world.bring_back("draft")
    world.settle()
    assert [len(stats.resume_s[role]) for role in ("draft", "draft@1")] == [2, 1]
    assert stats.no_drafter_s < stats.resume_s["draft@1"][0]


class Resting(Policy):
    """Decodes plainly because that is faster."""

    weighs_waiting = True

    mode = Mode.rest

    def draft_length(self, request_id: int, most: int) -> int:
        return 0

    def num_followed(self, num_requests: int) -> int:
        return 0


def test_of_a_drafter_that_is_back_and_not_asked_no_time_is_counted_twice():
    """From then on it is the policy that chooses plain decoding."""
    world = World(random.Random(0), policy=Resting("sync", 4))
    world.deliver(Request(1, (3, 4), SamplingParams(max_tokens=12, ignore_eos=True)))
    for _ in range(3):
        world.deliver_one()
    world.lose("draft")
    lost_at = world.clock
    for _ in range(3):
        world.deliver_one()
    world.bring_back("draft")
    back_at, stats = world.clock, world.coordinator.stats
    world.settle()
    assert world.clock > back_at + 3
    (resumed_s,) = stats.resume_s["draft"]
    assert back_at - lost_at - 1 <= resumed_s <= back_at - lost_at and stats.no_drafter_s == resumed_s
    assert resumed_s + stats.seconds_by_mode["rest"] <= world.clock


def test_what_is_awaited_is_known():
    world, _ = steady()
    coordinator = world.coordinator
    while not world.answers["target"]:
        world.deliver_one()
    assert coordinator.awaits("target") and coordinator.last_round("target") == world.answers["target"][0].round
    world.lose("target")
    assert not coordinator.awaits("target")
    assert coordinator.on(ReportOrder(), 0.0), "and nothing is awaited of it any more"
