"""The coordinator over a target that has rows of earlier texts: tokens, places and counts are right whatever it has.

The scripted target keeps rows in a real pool with a real prefix tree and asserts that what it is asked to feed fits.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from actors.coordinator.scheduler import WORTH_WAITING, Capacity, Scheduler
from actors.coordinator.sequence import BLOCK, Sequence
from actors.options import SchedulerConfig
from actors.protocol.messages import Abort, Request, SamplingParams, VerdictBatch
from tests.actors.scripted_roles import World
from tests.actors.small_language import oracle, requests_of

SYSTEM = tuple(range(2, 11)) * 2


def family(choose: random.Random, count: int) -> list[Request]:
    """Requests of which most begin alike, some are repeated, and some have a salt."""
    requests = [
        replace(one, prompt=SYSTEM[: choose.randint(0, 18)] + one.prompt[:10], cache_salt=choose.choice(["", "", "s"]))
        for one in requests_of(choose, count)
    ]
    return [
        replace(choose.choice(requests[: i + 1]), request_id=i) if choose.random() < 0.3 else one
        for i, one in enumerate(requests)
    ]


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(30))
def test_tokens_do_not_depend_on_hits(seed):
    """Chunks, pressure, aborts, lost roles: the texts are those of plain decoding, and rows are never short."""
    choose = random.Random(seed)
    limits = choose.choice([SchedulerConfig(), SchedulerConfig(3, 20, 6), SchedulerConfig(2, 9, 4)])
    slots, pipeline = choose.choice([42, 60, 200]), choose.choice(["plain", "sync", "tree"])
    world = World(choose, pipeline, ("right", "bushy", "missing"), limits, slots=slots)
    coming = family(choose, 12)
    expected, aborted = {one.request_id: oracle(one) for one in coming}, set()
    while coming:
        if choose.random() < 0.3:
            world.deliver(coming.pop(0))
        elif choose.random() < 0.02:
            aborted.add(victim := choose.randrange(12))
            world.deliver(Abort(victim))
        elif choose.random() < 0.03 and not world.lost:
            world.lose(role := choose.choice(["target", "draft"]))
            world.bring_back(role)
        elif not world.deliver_one():
            world.deliver(coming.pop(0))
    world.settle()
    for request_id, tokens in expected.items():
        got = world.tokens.get(request_id, [])
        assert got == tokens[: len(got)] and (request_id in aborted or got == tokens)


def fed(requests, **options) -> tuple[int, list[int]]:
    """Rows that the target computes when the requests come one after the other, and the tokens each found there."""
    world = World(random.Random(0), options.pop("pipeline", "plain"), ("right",), **options)
    for request in requests:
        world.deliver(request)
        world.settle()
    assert [world.tokens[one.request_id] for one in requests] == [oracle(one) for one in requests]
    ends = [world.ends[one.request_id].stats.num_cached_tokens for one in requests]
    stats = world.coordinator.stats
    assert stats.prefix_cache_hits == sum(ends)
    return world.target.num_fed, ends


def again(count: int, **changes) -> list[Request]:
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    return [Request(i, SYSTEM, sampling, **{name: each[i] for name, each in changes.items()}) for i in range(count)]


@pytest.mark.parametrize("pipeline", ["plain", "sync", "branches", "tree"])
@pytest.mark.parametrize("limits", [SchedulerConfig(), SchedulerConfig(3, 20, 6)], ids=["whole", "chunks"])
def test_a_repeated_prompt_costs_its_last_token(pipeline, limits):
    """As many hits with speculation as without."""
    num_fed, cached = fed(again(3), pipeline=pipeline, limits=limits)
    assert cached == [0, 17, 17]
    num_cold, none = fed(again(3), pipeline=pipeline, limits=replace(limits, prefix_cache=False))
    assert none == [0, 0, 0] and num_cold - num_fed == 34


@pytest.mark.parametrize("pipeline", ["plain", "sync"])
def test_an_answer_is_a_prompt_later(pipeline):
    """All its rows are there but that of the last token, which the target never computed."""
    first = again(1)[0]
    text = first.prompt + tuple(oracle(first))
    _, cached = fed([first, replace(first, request_id=1, prompt=(*text, 5, 6))], pipeline=pipeline)
    assert cached == [0, len(text) - 1]


def test_another_salt_and_another_client_find_nothing():
    assert fed(again(5, cache_salt=["", "a", "a", "", "b"], scope=[0, 0, 0, 1, 0]))[1] == [0, 0, 17, 0, 0]


def test_a_new_target_knows_nothing():
    world = World(random.Random(0), "plain", ("right",))
    for request in again(3):
        if request.request_id == 2:
            world.lose("target")
            world.bring_back("target")
        world.deliver(request)
        world.settle()
    assert [world.ends[i].stats.num_cached_tokens for i in range(3)] == [0, 17, 0]


@pytest.mark.parametrize("hits", [((0, 0),), ((0, 18),), ((9, 1),), ((0, -1),)])
def test_impossible_hits_are_refused(hits):
    world = World(random.Random(0), "plain", ("right",))
    world.deliver(again(1)[0])
    (batch,) = world.answers["target"]
    assert isinstance(batch, VerdictBatch)
    world.coordinator.check(batch)
    with pytest.raises(ValueError, match="not on what the target was given"):
        world.coordinator.check(replace(batch, hits=hits))


def sequence(request_id: int, prompt, *, scope=0, salt="") -> Sequence:
    made = Sequence.start(Request(request_id, tuple(prompt), SamplingParams(), scope=scope, cache_salt=salt), 4096)
    made.shares_rows = made.may_hit = True
    return made


def admitted(scheduler: Scheduler) -> list[int]:
    """The next pass, all rows of which are computed; each new request had no rows."""
    plan = scheduler.plan()
    for one, num_rows, _ in plan.rows:
        one.found(0)
        one.cached_len = min(one.cached_len + num_rows, one.prefix_len - 1)
    return [one.request_id for one in plan.admitted]


PROMPT = [1 + place % 7 for place in range(300)]
LONG = 10 * PROMPT


def test_choices_of_one_prompt_wait_until_it_is_read():
    """Others of their client and of another overtake them; each is admitted once the rows are there."""
    scheduler = Scheduler(SchedulerConfig(prefill_chunk=100), Capacity(4096, 4096))
    other = [9, *PROMPT]
    for one in (*[sequence(i, PROMPT) for i in range(3)], sequence(3, other), sequence(4, PROMPT, salt="s")):
        scheduler.add(one)
    assert [admitted(scheduler) for _ in range(4)] == [[0, 3, 4], [], [], [1, 2]]


@pytest.mark.parametrize("num_common", [WORTH_WAITING - 1, WORTH_WAITING, 250])
def test_few_rows_are_not_waited_for(num_common):
    scheduler = Scheduler(SchedulerConfig(prefill_chunk=100), Capacity(4096, 4096))
    scheduler.add(sequence(0, PROMPT))
    scheduler.add(sequence(1, [*PROMPT[:num_common], 9, 9]))
    assert admitted(scheduler) == ([0, 1] if num_common < WORTH_WAITING else [0])


class Counted(list):
    """Counts the tokens that are read of it."""

    num_read = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        Counted.num_read += len(found) if isinstance(key, slice) else 1
        return found


def test_texts_are_looked_through_once_however_many_requests_wait():
    """A client could otherwise hold up the coordinator with long texts that begin alike."""
    scheduler = Scheduler(SchedulerConfig(prefill_chunk=64), Capacity(4096, 4096))
    for request_id in range(20):
        one = sequence(request_id, LONG)
        one.token_ids = Counted(one.token_ids)
        scheduler.add(one)
    assert [admitted(scheduler) for _ in range(4)] == [[0], [], [], []]
    assert 20 * BLOCK < Counted.num_read < 2 * 20 * len(LONG)


def test_what_a_running_request_has_is_not_waited_for():
    """The system prompt was read: what follows it is read side by side."""
    scheduler = Scheduler(SchedulerConfig(), Capacity(4096, 4096))
    scheduler.add(sequence(0, PROMPT))
    assert admitted(scheduler) == [0]
    for i in range(1, 4):
        scheduler.add(sequence(i, [*PROMPT, *[10 + i] * 90]))
    assert admitted(scheduler) == [1, 2, 3]
