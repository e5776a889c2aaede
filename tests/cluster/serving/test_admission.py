"""Bounds on what is in flight, by number and by the time that the next one would wait, with a clock of their own."""

from __future__ import annotations

import pytest

from cluster.serving.admission import InFlightLimit
from cluster.serving.errors import ApiError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limit(clock: Clock) -> InFlightLimit:
    return InFlightLimit(1000, 30.0, clock)


def begin(limit: InFlightLimit, clock: Clock, num: int, every_s: float) -> None:
    """So many leave and as many that waited begin."""
    for _ in range(num):
        clock.now += every_s
        limit.leave(1, num_waiting=0)
        limit.began()


def refusal(limit: InFlightLimit, num: int = 1) -> tuple[int, int]:
    with pytest.raises(ApiError) as caught:
        limit.enter(num)
    return caught.value.status_code, int((caught.value.headers or {})["retry-after"])


def start(limit: InFlightLimit, running: int, waiting: int) -> None:
    limit.enter(running + waiting)
    for _ in range(running):
        limit.began()


def test_a_wait_that_would_be_too_long_is_refused_with_the_time_until_it_is_not(limit, clock):
    """One every two seconds: 15 that wait take 30 s."""
    start(limit, 8, 100)
    begin(limit, clock, 84, 2.0)
    assert refusal(limit) == (429, 2)  # 16 wait
    begin(limit, clock, 1, 2.0)
    limit.enter(1)
    assert refusal(limit) == (429, 2)


def test_how_fast_they_begin_is_that_of_the_latest_ones(limit, clock):
    start(limit, 8, 300)
    begin(limit, clock, 100, 0.01)
    limit.enter(1)
    begin(limit, clock, 64, 1.0)
    assert refusal(limit) == (429, 60), "the longest"


def test_time_in_which_none_begins_counts(limit, clock):
    start(limit, 64, 40)
    limit.enter(1)
    clock.now += 60.0
    assert refusal(limit)[0] == 429


@pytest.mark.parametrize("num_before", [0, 100])
def test_a_burst_after_a_quiet_time_is_admitted(limit, clock, num_before):
    """Neither a time without requests nor that of the first ones says how long those of the burst wait."""
    start(limit, num_before, 0)
    clock.now += 3600
    limit.leave(num_before, num_waiting=0)
    clock.now += 3600
    for _ in range(300):
        limit.enter(1)
    assert limit.num == 300


def test_what_leaves_without_a_token_waits_no_more(limit, clock):
    start(limit, 20, 200)
    begin(limit, clock, 20, 1.0)
    assert refusal(limit)[0] == 429
    limit.leave(180, num_waiting=180)
    limit.enter(1)
    assert limit.num == 21


def test_beyond_the_bound_the_time_is_that_in_which_enough_begin(clock):
    limit = InFlightLimit(100, 1e9, clock)
    start(limit, 50, 50)
    assert refusal(limit) == (429, 1), "nothing is known yet"
    begin(limit, clock, 20, 3.0)
    limit.enter(20)
    assert refusal(limit, 10)[1] > 5


def test_a_request_that_never_fits_is_refused_for_good(limit):
    with pytest.raises(ApiError) as caught:
        limit.enter(1001)
    assert caught.value.status_code == 400 and limit.num == 0
