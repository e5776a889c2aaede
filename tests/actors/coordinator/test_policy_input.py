"""What the coordinator gives its policy to learn from, against the records: loads, delays, rounds and ends."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from actors.options import SchedulerConfig
from actors.policy.draft_wait import DraftWait
from actors.policy.policy import Policy
from actors.protocol.messages import (
    Abort,
    DraftBatch,
    ProposalBatch,
    Request,
    SamplingParams,
    VerdictBatch,
    VerifyBatch,
)
from tests.actors.scripted_roles import World
from tests.actors.small_language import requests_of


class HeardWait(DraftWait):
    """Keeps the delays that it is given."""

    delays: list[tuple[float, bool]] = []  # noqa: RUF012  one of each policy, set below

    def update_delay(self, seconds, *, is_rest):
        self.delays.append((seconds, is_rest))
        super().update_delay(seconds, is_rest=is_rest)


class RecordingPolicy(Policy):
    """Fixed lengths; keeps what it is given, in order."""

    def __init__(self, pipeline):
        super().__init__(pipeline, 4)
        self.wait = HeardWait(self.weighs_waiting, 4)
        self.wait.delays = []
        self.loads, self.seen, self.released = [], [], []
        self.asked: dict[int, int] = {}

    def expect_load(self, num_running, samples):
        self.loads.append((num_running, samples))

    def update(self, *rounds):
        self.seen += rounds
        super().update(*rounds)
        self.most_unlearned = type(self).most_unlearned  # as each test has it

    def draft_length(self, request_id, most):
        self.asked[request_id] = most
        return super().draft_length(request_id, most)

    def release(self, request_id):
        self.released.append(request_id)


class Listened(World):
    """Records come at uneven times; what the policy must be given is written down from them."""

    def __init__(self, choose, pipeline, limits, policy):
        super().__init__(choose, pipeline, ("right", "bushy", "missing"), limits, policy=policy, splits=0.4)
        self.policy = policy
        self.requests: dict[int, Request] = {}
        self.loads, self.delays = [], []
        self.asked_at, self.has_first_part = None, False
        self.began, self.waited_s, self.pass_of = 0.0, 0.0, None
        self.ordered: dict[int, int] = {}

    def length(self, request_id):
        return len(self.requests[request_id].prompt) + len(self.tokens.get(request_id, ()))

    def is_sampled(self, request_id):
        return self.requests[request_id].sampling.temperature > 0

    def post(self, answers) -> None:
        for answer in answers:
            if isinstance(answer, DraftBatch):
                orders = {order.request_id: order.num_draft_tokens for order in answer.orders if order.num_draft_tokens}
                self.ordered |= orders
                self.asked_at, self.has_first_part = (self.clock if orders else None), False
        super().post(answers)
        for answer in answers:
            if isinstance(answer, VerifyBatch):
                self.pass_of = answer
                if answer.admits:
                    texts = self.target.knows.texts
                    num_sampled = sum(self.is_sampled(request_id) for request_id in texts)
                    self.loads.append((len(texts), 2 * num_sampled > len(texts)))

    def deliver(self, record) -> None:
        self.tick_s = self.choose.randint(1, 32) / 32
        now, held = self.clock + self.tick_s, set(self.target.knows.texts) - self.ends.keys()
        ordered, ordered_for = self.pass_of, dict(self.ordered)
        if isinstance(record, Request):
            if len(self.requests) == len(self.ends) and self.pass_of is None:
                self.began, self.waited_s = now, 0.0
            self.requests[record.request_id] = record
        if isinstance(record, ProposalBatch):
            if self.asked_at is not None:
                self.delays.append((now - self.asked_at, self.has_first_part))
                self.asked_at, self.has_first_part = (now, True) if record.num_missing else (None, False)
            self.waited_s += (record.finished - record.started) * (self.pass_of is None)
        if isinstance(record, VerdictBatch):
            self.pass_of = None
            for verdict in record.verdicts:
                self.ordered.pop(verdict.request_id, None)
        num_rounds, before = len(self.policy.seen), {i: len(tokens) for i, tokens in self.tokens.items()}
        super().deliver(record)
        if isinstance(record, VerdictBatch):
            assert len(self.policy.seen) == num_rounds + 1
            self.check_round(self.policy.seen[-1], record, ordered, ordered_for, now, held, before)
            self.began, self.waited_s = now, 0.0

    def check_round(self, seen, record, ordered, ordered_for, now, held, before) -> None:
        new = {i: len(self.tokens[i]) - before.get(i, 0) for i in held if i in self.tokens}
        drafted = {item.request_id: item.proposal for item in ordered.items if item.proposal}
        judged = [one for one in record.verdicts if new.get(one.request_id)]
        running = held - self.ends.keys()
        assert (seen.seconds, seen.verify_s, seen.draft_s) == (now - self.began, 0.5, self.waited_s)
        assert seen.num_running == max(1, len(running), len(judged))
        assert seen.mean_len == pytest.approx(sum(map(self.length, running)) / max(1, len(running)))
        assert seen.num_may_speculate == sum(self.requests[i].speculates for i in running)
        sizes = {i: proposal.tree.num_draft_tokens for i, proposal in drafted.items()}
        rows = sum(1 + sizes.get(one.request_id, 0) for one in record.verdicts)  # also on requests that ended meanwhile
        assert seen.num_prompt_rows == record.num_tokens - rows
        assert [one.request_id for one in seen.outcomes] == [one.request_id for one in judged]
        for one, verdict in zip(seen.outcomes, judged, strict=True):
            num_new, was_drafted = new[one.request_id], sizes.get(one.request_id, 0) > 0
            assert one.path == verdict.path[: len(one.path)] and len(verdict.path) - len(one.path) <= 1 + 4 - num_new
            assert one.num_tokens == num_new * was_drafted and one.num_ordered == ordered_for.get(one.request_id, 0)
        assert seen.samples == (2 * sum(map(self.is_sampled, running)) > max(1, len(running)))
        assert (seen.unused_s, seen.serves_drafts) == (0.0, False), "of attached drafters"


@pytest.mark.parametrize("seed", [pytest.param(i, marks=[pytest.mark.slow] * (i % 2)) for i in range(16)])
def test_a_policy_hears_of_every_load_delay_round_and_end(seed):
    choose = random.Random(seed)
    pipeline = choose.choice(["sync", "pearl", "tree", "plain"])
    limits = choose.choice([SchedulerConfig(), SchedulerConfig(3, 20, 6)])
    policy = RecordingPolicy(pipeline)
    world = Listened(choose, pipeline, limits, policy)
    coming = [
        replace(one, sampling=replace(one.sampling, temperature=choose.choice([0.0, 0.7])))
        for one in requests_of(choose, 6)
    ]
    while coming:
        if choose.random() < 0.3:
            world.deliver(coming.pop(0))
        elif choose.random() < 0.03:
            world.deliver(Abort(choose.randrange(6)))
        elif not world.deliver_one():
            world.deliver(coming.pop(0))
    world.settle()
    assert policy.loads == world.loads
    assert policy.wait.delays == world.delays
    assert set(policy.released) == {*world.ends} and len(world.ends) == 6
    assert pipeline == "plain" or policy.asked


@pytest.mark.parametrize(("pipeline", "name"), [("plain", "decode"), ("sync", "verify")])
def test_what_was_verified_of_a_request_that_ended_meanwhile_is_no_prompt(pipeline, name):
    """As where its client has found a stop string: the pass is over a root or a draft, and has read no text."""
    policy = RecordingPolicy(pipeline)
    world = World(random.Random(1), pipeline, answers=("right",), policy=policy)
    world.deliver(Request(0, (1, 2, 3), SamplingParams(max_tokens=30, ignore_eos=True)))
    while len(policy.seen) < 2 or not world.answers["target"]:
        world.deliver_one()
    world.deliver(Abort(0))
    verdicts: VerdictBatch = world.answers["target"].popleft()
    world.deliver(replace(verdicts, num_tokens=1 + 4 * (pipeline == "sync")))
    assert policy.seen[-1].num_prompt_rows == 0 and not policy.seen[-1].outcomes
    assert [span[1] for span in world.coordinator.stats.spans if span[0] == "target"][-1] == name


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("calls", [False, True])
def test_a_round_is_learned_before_the_next_pass_or_beside_it(later, calls):
    """Once, and before anything else is decided, whether or not the caller finds the time in between."""
    policy = type("Policy", (RecordingPolicy,), {"most_unlearned": int(later)})("plain")
    world = World(random.Random(1), "plain", policy=policy)
    world.post(world.coordinator.on(Request(0, (1, 2, 3), SamplingParams(max_tokens=4)), 0.0))
    for number in range(3):
        answers = world.coordinator.on(world.answers["target"].popleft(), 1.0)
        assert any(isinstance(answer, VerifyBatch) for answer in answers)
        assert len(policy.seen) == number + (not later), "what came before was learned"
        if calls:
            world.coordinator.learn()
            world.coordinator.learn()
            assert len(policy.seen) == number + 1
        world.post(answers)


@pytest.mark.parametrize(
    ("most_unlearned", "counts"),
    [(3, [0, 0, 3, 3, 5]), (1, [1, 2, 3, 4, 5]), (0, [1, 2, 3, 4, 5])],
)
def test_rounds_are_learned_from_at_once_while_one_choice_goes_on(most_unlearned, counts):
    """As many as the policy allows, and all that are left when the last request has ended."""
    policy = type("Policy", (RecordingPolicy,), {"most_unlearned": most_unlearned})("plain")
    world = World(random.Random(1), "plain", policy=policy)
    world.post(world.coordinator.on(Request(0, (1, 2, 3), SamplingParams(max_tokens=5, ignore_eos=True)), 0.0))
    found = []
    for _ in counts:
        world.post(world.coordinator.on(world.answers["target"].popleft(), 1.0))
        world.coordinator.learn()
        found.append(len(policy.seen))
    assert found == counts and {*policy.released} == {0}
