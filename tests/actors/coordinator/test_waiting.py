"""Turns of clients: against a plain model of them, and the bound on how long a request can wait for others'."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.coordinator.sequence import AGEING_S, LONGER_S, Sequence
from actors.coordinator.waiting import WaitingQueue
from actors.protocol.messages import Request, SamplingParams


def sequence_of(number: int, scope: int) -> Sequence:
    return Sequence.start(Request(number, (5,), scope=scope), 64)


def filled(*scopes: int) -> WaitingQueue:
    """Requests 1, 2, ... of these clients, in this order."""
    queue = WaitingQueue()
    for number, scope in enumerate(scopes, start=1):
        queue.add(sequence_of(number, scope))
    return queue


def pop(queue: WaitingQueue, full: Collection[int] = ()) -> Sequence:
    sequence = queue.first(full)
    assert sequence is not None
    queue.take(sequence)
    return sequence


def drained(queue: WaitingQueue) -> list[int]:
    return [pop(queue).request_id for _ in range(len(queue))]


def test_the_requests_of_one_client_are_served_as_they_came():
    assert drained(filled(7, 7, 7, 7)) == [1, 2, 3, 4]


def test_a_client_with_many_delays_another_by_one_for_each_of_its_own():
    assert drained(filled(*[0] * 5, 1, 1, 2)) == [1, 6, 8, 2, 7, 3, 4, 5]


def test_a_client_that_comes_again_takes_no_turn_twice():
    queue = filled(0, 0, 1)
    assert pop(queue).request_id == 1
    queue.add(sequence_of(4, 2))
    assert pop(queue).request_id == 3
    queue.add(sequence_of(5, 1))
    assert drained(queue) == [2, 4, 5]


def test_what_lost_its_place_comes_before_everything_the_oldest_first():
    queue = filled(0, 1, 2)
    first, second = pop(queue), pop(queue)
    queue.put_back([first, second])
    queue.add(sequence_of(9, 9))
    assert [sequence.request_id for sequence in queue] == [1, 2, 3, 9]
    queue.remove(first)
    assert drained(queue) == [2, 3, 9] and not len(queue)


def test_clients_that_have_their_share_are_passed_over_and_keep_their_turn():
    queue = filled(0, 0, 1, 2)
    queue.put_back([pop(queue)])
    assert queue.counts == {0: 2, 1: 1, 2: 1}
    assert pop(queue, {0}).request_id == 3 and queue.first({0, 2}) is None
    assert drained(queue) == [1, 4, 2]


ACTIONS = st.lists(st.tuples(st.sampled_from(["add", "add", "pop", "remove", "put back"]), st.integers(0, 3)))


@pytest.mark.extended
@given(ACTIONS)
def test_the_queue_does_what_plain_lists_would(actions):
    queue, number = WaitingQueue(), 0
    returned: list[Sequence] = []
    turns: deque[tuple[int, list[Sequence]]] = deque()
    out: list[Sequence] = []

    def served() -> list[Sequence]:
        order, rest = [*returned], deque((scope, [*waiting]) for scope, waiting in turns)
        while rest:
            scope, waiting = rest.popleft()
            order.append(waiting.pop(0))
            if waiting:
                rest.append((scope, waiting))
        return order

    def take_out(sequence: Sequence) -> None:
        if sequence in returned:
            returned.remove(sequence)
            return
        (place,) = (i for i, (_, waiting) in enumerate(turns) if sequence in waiting)
        turns[place][1].remove(sequence)
        if not turns[place][1]:
            del turns[place]

    for action, choice in actions:
        order = served()
        if action == "add":
            number += 1
            sequence = sequence_of(number, choice)
            queue.add(sequence)
            known = [waiting for scope, waiting in turns if scope == choice]
            known[0].append(sequence) if known else turns.append((choice, [sequence]))
        elif action == "pop" and (eligible := [one for one in order if one.request.scope != choice]):
            assert queue.first() is order[0] and pop(queue, {choice}) is eligible[0]
            if eligible[0] in returned:
                returned.remove(eligible[0])
            else:
                (turn,) = (turn for turn in turns if eligible[0] in turn[1])
                turns.remove(turn)
                if turn[1][1:]:
                    turns.append((turn[0], turn[1][1:]))
            out.append(eligible[0])
        elif action == "remove" and order:
            sequence = order[choice % len(order)]
            queue.remove(sequence)
            queue.remove(sequence)
            take_out(sequence)
        elif action == "put back" and out:
            back, out = out[-choice - 1 :], out[: -choice - 1]
            queue.put_back(back)
            returned = back + returned
        assert [*queue] == served() and len(queue) == len(served())


@pytest.mark.extended
@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.data())
def test_none_starves_though_the_others_send_without_end(scopes, data):
    """At most k requests of each other client are served before the k-th of a client."""
    queue, served = filled(*scopes), Counter()
    number = data.draw(st.integers(1, len(scopes)))
    scope, late = scopes[number - 1], itertools.count(1000)
    while (first := pop(queue)).request_id != number:
        served[first.request.scope] += 1
        for other in {0, 1, 2, 3, 4} - {scope}:
            queue.add(sequence_of(next(late), other))
    place = scopes[:number].count(scope)
    assert served[scope] == place - 1 and max(served.values(), default=0) <= place


# --- priorities, on a virtual clock -----------------------------------------------------------------------------------


def arrived(number: int, priority: int = 0, at: float = 0.0, scope: int = 0) -> Sequence:
    sequence = Sequence.start(Request(number, (5,), scope=scope, priority=priority), 64)
    sequence.arrived_at = at
    return sequence


def test_a_lower_priority_comes_first_and_equal_ones_as_they_came():
    queue = WaitingQueue()
    for number, priority in enumerate((5, 0, -3, 0, 5, -3), start=1):
        queue.add(arrived(number, priority))
    assert drained(queue) == [3, 6, 2, 4, 1, 5]


def test_a_priority_is_no_claim_on_the_turns_of_another_client():
    queue = WaitingQueue()
    queue.add(arrived(1, scope=1, priority=3))
    for number in (2, 3):
        queue.add(arrived(number, scope=2, priority=-100))
    assert drained(queue) == [1, 2, 3]


def long_of(number: int, expected_tokens: int, at: float = 0.0, scope: int = 0) -> Sequence:
    sampling = SamplingParams(max_tokens=200)
    request = Request(number, (5,), sampling, scope=scope, expected_tokens=expected_tokens)
    sequence = Sequence.start(request, 64)
    sequence.arrived_at = at
    return sequence


def test_the_longest_comes_first_and_none_for_more_than_it_may_have():
    queue = WaitingQueue()
    for number, expected in enumerate((0, 30, 10**6, 200, 31), start=1):
        queue.add(long_of(number, expected))
    assert drained(queue) == [3, 4, 5, 2, 1]


def test_waiting_makes_up_for_a_length_and_a_length_is_no_claim_on_the_turns_of_another_client():
    queue = WaitingQueue()
    for number, (expected, at) in enumerate(((0, 0.0), (100, 100 * LONGER_S + 0.1), (100, 100 * LONGER_S - 0.1)), 1):
        queue.add(long_of(number, expected, at))
    queue.add(long_of(4, 0, scope=1))
    assert drained(queue) == [3, 4, 1, 2]


@pytest.mark.extended
@given(st.integers(-100, 100), st.integers(-100, 100))
def test_waiting_makes_up_for_a_priority(low, high):
    """Urgent requests come as fast as they are served; the other is served after the time that makes up."""
    queue, now, number = WaitingQueue(), 0.0, 0
    queue.add(arrived(0, low, at=now))
    while True:
        number += 1
        queue.add(arrived(number, high, at=now))
        if pop(queue).request_id == 0:
            break
        now += 1.0
    longest = AGEING_S * max(0, low - high)
    assert longest - 1 <= now <= longest + 1


def test_one_that_ends_while_it_waits_leaves_the_others_in_order():
    queue = WaitingQueue()
    waiting = [arrived(number, number % 2) for number in range(1, 7)]
    for sequence in waiting:
        queue.add(sequence)
    queue.remove(waiting[2])
    queue.remove(waiting[2])
    assert len(queue) == 5 and drained(queue) == [2, 4, 6, 1, 5]
