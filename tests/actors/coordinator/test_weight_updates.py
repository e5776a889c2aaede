"""The coordinator while the target's weights are replaced: between which passes, what is read again, and which version
each token has, in every order in which records arrive and roles die."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.coordinator.membership import RoleRounds
from actors.coordinator.sequence import Sequence
from actors.options import PipelineName, SchedulerConfig
from actors.policy.policy import AdaptivePolicy
from actors.protocol.membership import Weights
from actors.protocol.messages import Request, Tokens, UpdateWeights, VerdictBatch, VerifyBatch, WeightsUpdated
from tests.actors.coordinator.test_lost_roles import Storm
from tests.actors.scripted_roles import ScriptedTarget
from tests.actors.small_language import oracle, requests_of
from tests.examples import examples


class LoadingTarget(ScriptedTarget):
    """Notes with which weights it made each token, by request and position, and refuses some weights."""

    def __init__(self, num_slots: int, choose: random.Random) -> None:
        super().__init__(num_slots)
        self.choose = choose
        self.version = 0
        self.made: dict[tuple[int, int], int] = {}

    def answer(self, batch: VerifyBatch) -> VerdictBatch:
        answer = super().answer(batch)
        for verdict in answer.verdicts:
            for place in range(len(verdict.path) + len(verdict.token_ids)):
                self.made[verdict.request_id, verdict.prefix_len + place] = self.version
        if batch.weights is None:
            return answer
        assert not batch.items and not self.knows.texts, "rows of the weights before are left"
        self.pool.forget_texts()
        if self.choose.random() < 0.3:
            return replace(answer, refusal="damaged")
        self.version = batch.weights.version
        return answer


class LoadingWorld(Storm):
    def __init__(self, choose, *arguments, **options) -> None:
        super().__init__(choose, *arguments, **options)
        self.target = LoadingTarget(self.target.pool.num_slots, choose)
        self.served = self.ordered = self.ended = 0
        self.updates: list[WeightsUpdated] = []
        self.versions: dict[int, list[int]] = {}

    def order_weights(self) -> None:
        """Another one, or once more the one that is not answered."""
        self.ordered += self.ordered == self.ended
        self.deliver(UpdateWeights(Weights(f"step-{self.ordered}", self.ordered)))

    def post(self, answers) -> None:
        for answer in answers:
            if isinstance(answer, WeightsUpdated):
                assert answer.version == self.ordered > self.ended, "one answer to each order"
                self.ended = answer.version
                self.served = self.served if answer.refusal else answer.version
                self.updates.append(answer)
        super().post(answers)

    def bring_back(self, role: str) -> None:
        if role == "target":
            self.target.version = self.served  # as `Join` says
        super().bring_back(role)

    def receive(self, news: Tokens) -> None:
        super().receive(news)
        own = self.versions.setdefault(news.request_id, [])
        for _ in news.token_ids:
            own.append(max([one for one in news.versions if one[0] <= len(own)], default=(0, 0))[1])


@pytest.mark.extended
@settings(max_examples=examples(100), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    pipeline=st.sampled_from(sorted(PipelineName)),
    limits=st.sampled_from([SchedulerConfig(), SchedulerConfig(3, 20, 6)]),
    loses=st.sampled_from([0.0, 0.1]),
    previews=st.sampled_from([0.0, 0.7]),
)
def test_each_token_has_the_version_of_the_weights_that_made_it(seed, pipeline, limits, loses, previews):
    choose = random.Random(seed)
    world = LoadingWorld(choose, pipeline, limits=limits, slots=400, duplicates=0.3, splits=0.3, previews=previews)
    requests = requests_of(choose, choose.randint(1, 6))
    coming = list(requests)
    while coming or choose.random() < 0.97:
        action = choose.random()
        if coming and action < 0.2:
            world.deliver(coming.pop(0))
        elif action < 0.3:
            world.order_weights()
        elif action < 0.3 + loses:
            world.blow()
        else:
            world.deliver_one()
    world.calm()
    world.settle()
    assert world.ended == world.ordered, "every order is answered"
    for request in requests:
        assert world.tokens[request.request_id] == oracle(request)
        start = len(request.prompt)
        made = [world.target.made[request.request_id, start + place] for place in range(len(oracle(request)))]
        assert world.versions[request.request_id] == made
    if not loses:
        assert not any(update.is_lost for update in world.updates)


def order(version: int) -> UpdateWeights:
    return UpdateWeights(Weights(f"step-{version}", version))


def test_weights_wait_for_the_verdict_and_requests_for_the_weights():
    world = LoadingWorld(random.Random(1), "plain", drafts=False)
    world.target.choose = random.Random(2)  # whose first number is no refusal
    first, second, *_ = [request for request in requests_of(random.Random(2), 9) if len(oracle(request)) > 3]
    world.deliver(first)
    world.order_weights()
    assert world.sent[-1].items, "its pass goes on"
    world.deliver_one()
    batch = world.sent[-2] if isinstance(world.sent[-1], Tokens) else world.sent[-1]
    assert isinstance(batch, VerifyBatch) and batch.weights == Weights("step-1", 1)
    assert batch.releases == (first.request_id,) and not batch.items
    num_sent = len(world.sent)
    world.deliver(second)
    assert len(world.sent) == num_sent, "the target loads"
    world.deliver_one()
    news = world.sent[num_sent:]
    assert WeightsUpdated(1) in news
    (batch,) = [record for record in news if isinstance(record, VerifyBatch)]
    assert {admit.request_id for admit in batch.admits} == {first.request_id, second.request_id}
    assert world.coordinator.on(order(1), world.clock) == [WeightsUpdated(1)], "these are served: the answer was lost"


def test_spans_of_versions_are_those_of_the_tokens_that_are_sent():
    sequence = Sequence.start(Request(1, (5, 6)), 100)
    sequence.note_version(0)
    sequence.token_ids += [7, 8]
    assert sequence.versions_from(0) == ()
    sequence.note_version(1)
    sequence.token_ids += [9]
    sequence.note_version(1)
    sequence.token_ids += [9]
    sequence.note_version(4)
    sequence.token_ids += [9]
    assert sequence.versions_from(0) == ((2, 1), (4, 4))
    assert sequence.versions_from(3) == ((2, 1), (4, 4))
    assert sequence.versions_from(4) == ((4, 4),)
    assert [news.versions for news in sequence.tokens_since(4)] == [((4, 4),)]


def test_no_time_is_too_long_for_weights_and_none_is_measured():
    timeout = RoleRounds()
    timeout.ordered(VerifyBatch(1), 0.0)
    timeout.answered(VerdictBatch(1, (), 0.0, 1.0), 1.0)
    limit_s = timeout.limit_s
    timeout.ordered(VerifyBatch(2, weights=Weights("step-1", 1)), 2.0)
    assert timeout.limit_s == float("inf")
    timeout.answered(VerdictBatch(2, (), 0.0, 500.0), 502.0)
    assert timeout.limit_s == limit_s


@pytest.mark.parametrize("pipeline", ["sync", "branches"])
def test_what_is_known_of_acceptance_is_forgotten_and_costs_are_not(pipeline):
    policy = AdaptivePolicy(pipeline, 0, 4)
    before, costs = policy._acceptance, policy._loads
    policy.forget_acceptance()
    assert policy._acceptance is not before and policy._loads is costs
