"""Orders that are left out: those that gain less than they cost the others, and never all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.pool.order_choice import (
    LEAST_GAIN,
    MOST_LEFT_OUT,
    CallCost,
    OrderHistory,
    WaitingOrder,
    choose_orders,
)


def cost(pass_s: float, per_request: float, *, by_pass: bool = False) -> CallCost:
    found = CallCost(by_pass)
    for num_requests in (1, 2, 4, 8) * 8:
        found.update(num_requests, 5, 5 * (pass_s + per_request * num_requests))
    return found


FLAT, BY_ROWS = cost(1.5e-3, 0.0), cost(0.5e-3, 1e-3)
FLAT_BY_PASS, ROWS_BY_PASS = cost(1.5e-3, 0.0, by_pass=True), cost(0.5e-3, 1e-3, by_pass=True)
GOOD = WaitingOrder(1, 5, 3.5, 15e-3)
BAD = WaitingOrder(4, 5, 0.4, 15e-3)
"""Four requests of which every tenth has one token accepted."""


def test_what_passes_cost_is_measured():
    assert FLAT.seconds([GOOD], GOOD) == pytest.approx(7.5e-3)
    assert FLAT.seconds([GOOD, BAD], GOOD) == pytest.approx(7.5e-3)
    assert BY_ROWS.seconds([GOOD, BAD], BAD) == pytest.approx(5 * 5.5e-3, rel=0.1)
    longer = WaitingOrder(1, 8, 0.5, 15e-3)
    assert [FLAT.seconds([GOOD, longer], one) for one in (GOOD, longer)] == pytest.approx([12e-3, 12e-3])
    assert [FLAT_BY_PASS.seconds([GOOD, longer], one) for one in (GOOD, longer)] == pytest.approx([7.5e-3, 12e-3])


def test_an_order_that_gains_little_is_left_out_where_its_rows_delay_the_others():
    assert choose_orders([GOOD, BAD, GOOD], BY_ROWS) == [0, 2]
    assert choose_orders([GOOD, GOOD, GOOD], BY_ROWS) == [0, 1, 2]
    assert choose_orders([GOOD, BAD, GOOD], ROWS_BY_PASS) == [0, 2]
    assert choose_orders([BAD, GOOD, BAD], ROWS_BY_PASS, num_begun=1) == [0, 1], "what was begun goes on"


def test_none_is_left_out_of_passes_that_cost_the_same():
    assert choose_orders([GOOD, BAD, GOOD], FLAT) == [0, 1, 2]


def test_a_long_order_that_gains_little_delays_short_ones_at_any_cost():
    longer = WaitingOrder(1, 40, 0.5, 15e-3)
    assert choose_orders([GOOD, longer, GOOD], FLAT) == [0, 2]
    assert choose_orders([GOOD, longer, GOOD], FLAT_BY_PASS) == [0, 1, 2], "each is answered after its own passes"
    assert choose_orders([GOOD, WaitingOrder(1, 6, 4.0, 15e-3)], FLAT) == [0, 1]


def test_the_last_order_stays():
    assert choose_orders([BAD], BY_ROWS) == [0]
    assert len(choose_orders([BAD] * 4, BY_ROWS)) >= 1


def test_nothing_is_left_out_before_costs_and_acceptance_are_known():
    assert choose_orders([GOOD, BAD], CallCost()) == [0, 1]
    unknown = OrderHistory().order([5, 5, 5, 5])
    assert choose_orders([GOOD, unknown, GOOD], BY_ROWS) == [0, 1, 2]


def test_an_engine_is_drafted_for_again_after_a_while():
    history = OrderHistory()
    for _ in range(30):
        history.accepted(20, 1)
        history.rest_s.update(15e-3)
    drafted = []
    for _ in range(2 * MOST_LEFT_OUT + 2):
        is_drafted = 1 in choose_orders([GOOD, history.order([5] * 4), GOOD], BY_ROWS)
        history.num_left_out = 0 if is_drafted else history.num_left_out + 1
        drafted.append(is_drafted)
    assert drafted == ([False] * MOST_LEFT_OUT + [True]) * 2


def total(orders: list[WaitingOrder], chosen: list[int], cost: CallCost) -> float:
    """Tokens per second of all engines."""
    return cost.tokens_per_s([orders[i] for i in chosen]) + sum(
        order.plain_tokens_per_s for i, order in enumerate(orders) if i not in chosen
    )


ORDERS = st.lists(
    st.builds(WaitingOrder, st.integers(1, 6), st.integers(1, 8), st.floats(0.0, 6.0), st.floats(5e-3, 50e-3)),
    min_size=1,
    max_size=5,
)


@pytest.mark.extended
@given(ORDERS, st.sampled_from([FLAT, BY_ROWS, FLAT_BY_PASS, ROWS_BY_PASS]))
def test_leaving_orders_out_never_loses_tokens(orders, cost):
    everything = list(range(len(orders)))
    chosen = choose_orders(orders, cost)
    assert chosen and sorted(set(chosen)) == chosen
    least = total(orders, everything, cost)
    assert total(orders, chosen, cost) >= least * (1 if chosen == everything else 1 + LEAST_GAIN / 2)
