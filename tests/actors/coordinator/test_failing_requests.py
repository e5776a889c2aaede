"""Requests with which every pass of the target raises: they end, the others get their tokens, after few failures."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.options import PipelineName, SchedulerConfig
from actors.policy.policy import Policy, RoundObservation
from actors.protocol.membership import PassFailed
from actors.protocol.messages import Request, SamplingParams, VerifyBatch, VerifyItem
from tests.actors.scripted_roles import World
from tests.actors.small_language import oracle, requests_of
from tests.examples import examples

LIMITS = (SchedulerConfig(), SchedulerConfig(3, 20, 6), SchedulerConfig(2, 5, 3))


class Fragile(World):
    """A world whose target raises in a pass that `breaks`; the news of it come before or after that of its loss."""

    def __init__(self, choose, pipeline="sync", *, breaks: Callable[[VerifyItem], bool], **options) -> None:
        super().__init__(choose, pipeline, **options)
        self.breaks, self.num_failures = breaks, 0
        self.broken: PassFailed | None = None

    def post(self, answers) -> None:
        super().post(answers)
        for batch in answers:
            if isinstance(batch, VerifyBatch) and any(map(self.breaks, batch.items)):
                self.broken = PassFailed("target", 0, 0, batch.round, "RuntimeError: lost its device")

    def deliver_one(self) -> bool:
        if self.broken is None:
            return super().deliver_one()
        failed, self.broken = self.broken, None
        self.num_failures += 1
        self.answers["target"].clear()
        comes_first = self.choose.random() < 0.5
        for _ in range(self.choose.randint(0, 2) if comes_first else 0):  # one from every rank
            self.deliver(failed)
        self.lose("target")
        self.deliver(failed)
        self.bring_back("target")
        self.deliver(failed)
        return True


def serve(world: Fragile, requests: list[Request]) -> None:
    for request in requests:
        world.deliver(request)
    world.settle()


def check(world: Fragile, requests: list[Request], culprits: set[int]) -> None:
    for request in requests:
        tokens, end = world.tokens[request.request_id], world.ends[request.request_id]
        if request.request_id in culprits:
            assert end.finish_reason == "error" and tokens == oracle(request)[: len(tokens)]
            assert "failed (RuntimeError: lost its device); see its log" in end.error
        else:
            assert (tokens, end.error) == (oracle(request), None)


@pytest.mark.extended
@settings(max_examples=examples(100), deadline=None)
@given(
    choose=st.randoms(use_true_random=False),
    pipeline=st.sampled_from(sorted(PipelineName)),
    limits=st.sampled_from(LIMITS),
    slots=st.sampled_from([40, 60, 400]),
    num_culprits=st.integers(1, 2),
)
def test_a_request_that_fails_every_pass_ends_and_its_neighbours_do_not(choose, pipeline, limits, slots, num_culprits):
    requests = requests_of(choose, choose.randint(3, 7))
    culprits = {request.request_id for request in choose.sample(requests, num_culprits)}
    world = Fragile(
        choose, pipeline, breaks=lambda item: item.request_id in culprits, limits=limits, slots=slots, previews=0.5
    )
    serve(world, requests)
    check(world, requests, culprits)
    assert world.num_failures <= 2 * num_culprits, "one in company and one alone, for each"


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(10))
def test_a_request_whose_drafts_fail_the_pass_ends_too(seed):
    """Alone its first pass succeeds, since that has no draft."""
    choose = random.Random(seed)
    requests = [Request(i, (3, 4 + i), SamplingParams(max_tokens=25, ignore_eos=True)) for i in range(5)]
    world = Fragile(choose, breaks=lambda item: item.request_id == 2 and item.proposal is not None, splits=0.0)
    serve(world, requests)
    check(world, requests, {2} if 2 in world.ends and world.ends[2].error else set())
    assert world.num_failures <= 3


def test_a_request_that_is_alone_is_tried_twice():
    failures = iter([True, False])
    world = Fragile(random.Random(0), breaks=lambda _: next(failures, False))
    requests = [Request(1, (3, 4), SamplingParams(max_tokens=9))]
    serve(world, requests)
    check(world, requests, set())
    assert world.num_failures == 1


def failing_at(*passes: int) -> Callable[[VerifyItem], bool]:
    """The passes with request 0 that raise, by their number."""
    count = itertools.count()
    return lambda item: item.request_id == 0 and next(count) in passes


def test_a_target_that_fails_by_itself_now_and_then_ends_no_request():
    requests = [Request(i, (3, 4 + i), SamplingParams(max_tokens=30, ignore_eos=True)) for i in range(4)]
    world = Fragile(random.Random(0), "plain", breaks=failing_at(5, 20))
    serve(world, requests)
    check(world, requests, set())
    assert world.num_failures == 2


def test_while_one_is_tested_passes_hold_it_alone_and_then_all_share_them_again():
    requests = [Request(i, (3, 4 + i), SamplingParams(max_tokens=30, ignore_eos=True)) for i in range(4)]
    world = Fragile(random.Random(0), "plain", breaks=failing_at(2))
    serve(world, requests)
    sizes = [len(batch.items) for batch in world.sent if isinstance(batch, VerifyBatch)]
    assert sizes[:16] == [1, 4, 4, *[1] * 12, 4], "three verdicts each"
    check(world, requests, set())


def test_no_round_of_a_test_tells_the_policy_what_rounds_cost():
    """The last one neither, after whose verdict the request is tested no longer."""
    requests = [Request(i, (3, 4 + i), SamplingParams(max_tokens=25, ignore_eos=True)) for i in range(3)]
    policy, seen = Policy("plain", 4), list[RoundObservation]()
    policy.update = seen.append
    world = Fragile(random.Random(0), "plain", breaks=failing_at(4), policy=policy)
    serve(world, requests)
    check(world, requests, set())
    assert world.num_failures == 1
    assert len(seen) > 20 and all(len(one.outcomes) == one.num_running for one in seen)


def test_the_death_of_a_process_that_reported_nothing_suspects_no_request():
    world = World(random.Random(0), "plain")
    requests = [Request(i, (3, 4 + i), SamplingParams(max_tokens=12, ignore_eos=True)) for i in range(3)]
    for request in requests:
        world.deliver(request)
    for _ in range(8):
        world.deliver_one()
        world.lose("target")
        world.bring_back("target")
    world.settle()
    assert {len(batch.items) for batch in world.sent if isinstance(batch, VerifyBatch)} == {1, 3}
    assert world.tokens == {request.request_id: oracle(request) for request in requests}
