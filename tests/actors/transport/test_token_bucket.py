"""A bucket never gives more than its burst and what its rate has brought since, and its debts are paid in time."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.transport.token_bucket import TokenBucket


def test_it_is_filled_again_up_to_its_burst_and_owes_as_much_at_most():
    bucket = TokenBucket(0.5, 4.0, 100.0)
    bucket.spend(5.0)
    assert bucket.wait_s(100.0) == 2.0 and bucket.wait_s(101.0) == 1.0 and bucket.wait_s(102.0) == 0.0
    assert bucket.wait_s(102.0, least=1.5) == 3.0
    bucket.wait_s(1000.0)
    bucket.spend(4.5)
    assert bucket.wait_s(1000.0) == 1.0
    bucket.spend(1e9)
    assert bucket.wait_s(1000.0) == 8.0


def test_without_a_rate_it_is_never_filled_again():
    bucket = TokenBucket(0.0, 1.0, 0.0)
    bucket.spend(1.0)
    assert bucket.wait_s(1e9) == 0.0
    bucket.spend(0.1)
    assert bucket.wait_s(1e9) == inf


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 1)), max_size=60))
def test_what_it_lets_be_spent_keeps_to_the_rate(steps):
    """Spent only while nothing is owed: at most the burst, the rate times the time, and one cost."""
    rate, burst, now, spent, last = 0.25, 1.0, 0.0, 0.0, 0.0
    bucket = TokenBucket(rate, burst, now)
    for pause_s, cost in steps:
        now += pause_s
        if bucket.wait_s(now) == 0.0:
            bucket.spend(cost)
            spent, last = spent + cost, max(last, cost)
        assert spent <= burst + rate * now + last + 1e-9
    assert bucket.wait_s(now + bucket.wait_s(now)) == pytest.approx(0.0, abs=1e-9)
