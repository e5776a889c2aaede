"""Ranks that die, hang, miss an order or restart: in the end all of them are in the same epoch."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.coordinator.membership import FLOOR_S, MISSED_BEATS, RECALL_LIMIT_S, REPEAT_S, Phase, RoleMembership
from actors.protocol.membership import HEARTBEAT_S, Alive, Join, Ready, Recall, Silent
from actors.protocol.messages import VerdictBatch, VerifyBatch, VerifyItem
from tests.examples import examples


@dataclass
class ScriptedRank:
    """A rank as `actors/worker/rank_loop.py` has it, without its work."""

    rank: int
    incarnation: int = 0
    epoch: int = 0
    waiting: bool = True

    def beat(self) -> Alive:
        return Alive("target", self.rank, self.incarnation, 1, self.epoch, self.waiting)

    def follow(self, order: Recall | Join):
        """Follow an order; returns the records that it sends."""
        if isinstance(order, Join) and order.epoch >= self.epoch and (order.epoch > self.epoch or not self.waiting):
            self.epoch, self.waiting = order.epoch, False
            return [Ready("target", self.rank, {}, order.epoch)]
        if isinstance(order, Recall) and order.epoch > self.epoch and not self.waiting:
            self.waiting = True
            return [self.beat()]
        return []


class RoleUnderLoss:
    """A membership and its ranks; a fraction `loss` of the records is lost, the others arrive in any order."""

    def __init__(self, choose: random.Random, size: int, loss: float) -> None:
        self.choose, self.loss, self.now = choose, loss, 0.0
        self.membership = RoleMembership("target", size)
        self.ranks = [ScriptedRank(rank) for rank in range(size)]
        self.in_flight: list[Alive | Ready] = []

    def step(self, loss: float | None = None) -> None:
        loss = self.loss if loss is None else loss
        self.now += 0.25
        self.in_flight += [rank.beat() for rank in self.ranks if self.choose.random() >= loss]
        self.choose.shuffle(self.in_flight)
        kept = len(self.in_flight) // 3 if loss else 0
        while len(self.in_flight) > kept:
            record = self.in_flight.pop()
            if isinstance(record, Alive):
                self.membership.record_heartbeat(record, self.now)
            else:
                self.membership.record_ready(record)
        for ranks, order in self.membership.orders(5, None, self.now):
            for rank in ranks:
                if self.choose.random() >= loss:
                    self.in_flight += self.ranks[rank].follow(order)

    def kill(self, rank: int, *, reported: bool) -> None:
        dead = self.ranks[rank]
        self.ranks[rank] = ScriptedRank(rank, dead.incarnation + 1)
        if reported:
            self.membership.mark_lost(rank, dead.incarnation, self.now)


@pytest.mark.extended
@settings(max_examples=examples(60, share=8), deadline=None)
@given(choose=st.randoms(use_true_random=False), size=st.integers(1, 4), loss=st.sampled_from([0.0, 0.3, 0.6]))
def test_whatever_happens_all_ranks_end_in_one_epoch(choose, size, loss):
    world = RoleUnderLoss(choose, size, loss)
    for _ in range(40):
        event = choose.random()
        if event < 0.1:
            world.kill(choose.randrange(size), reported=choose.random() < 0.5)
        elif event < 0.2:  # a peer is lost, or a batch
            choose.choice(world.ranks).waiting = True
        elif event < 0.25:
            world.membership.start_new_epoch(world.now)
        world.step()
    for _ in range(20):
        world.step(loss=0.0)
    assert world.membership.serving and len(world.membership.ready()) == size
    assert {(rank.epoch, rank.waiting) for rank in world.ranks} == {(world.membership.epoch, False)}


def serving(size: int = 2) -> RoleMembership:
    membership = RoleMembership("target", size)
    for rank in range(size):
        membership.record_heartbeat(Alive("target", rank, 0, 1), 0.0)
    ((ranks, order),) = membership.orders(5, ("host", 1), 0.0)
    assert ranks == list(range(size)) and order == Join(1, 5, ("host", 1))
    for rank in range(size):
        membership.record_ready(Ready("target", rank, {}, 1))
    assert membership.serving and membership.orders(5, None, 1.0) == []
    return membership


def test_a_rank_that_waited_before_it_joined_has_not_left():
    membership = serving()
    membership.record_heartbeat(Alive("target", 0, 0, 1, epoch=0, waiting=True), 1.0)
    assert membership.serving
    membership.record_heartbeat(Alive("target", 0, 0, 1, epoch=1, waiting=True), 1.0)
    assert membership.phase is Phase.gathering and membership.epoch == 2


def test_an_old_heartbeat_does_not_complete_a_gathering():
    """Rank 0 died unnoticed while it waited for epoch 1: its old heartbeat must not count as waiting for epoch 2."""
    membership = serving()
    membership.record_heartbeat(Alive("target", 1, 0, 1, epoch=1, waiting=True), 1.0)
    membership.record_heartbeat(Alive("target", 0, 0, 1, epoch=0, waiting=True), 1.0)
    assert all(not isinstance(order, Join) for _, order in membership.orders(5, None, 2.0))


def test_records_of_a_replaced_process_are_ignored():
    membership = serving()
    membership.mark_lost(0, 0, 1.0)
    assert not membership.record_heartbeat(Alive("target", 0, 0, 1, epoch=9, waiting=True), 1.0)
    assert membership.links_of([0]) == [] and membership.record_heartbeat(Alive("target", 0, 1, 2), 1.0)
    membership.mark_lost(0, 0, 1.0)
    assert membership.links_of([0]) == ["target-0#1"], "a late report of a death does not mark the successor lost"


def test_the_limit_of_silence_can_be_switched_off():
    membership = serving()
    membership.record_heartbeat(Alive("target", 1, 0, 7, epoch=1, waiting=False), 3.0)
    assert membership.find_hanging(0.0, 99.0) == [] and membership.find_hanging(2.0, 3.5) == [Silent("target", 0, 0, 1)]


def test_a_hanging_rank_is_reported_again_until_its_successor_sends_a_heartbeat():
    """The first report may be lost, and heartbeats of the replaced process are ignored."""
    membership = serving(1)
    assert membership.find_hanging(2.0, 3.0) == [Silent("target", 0, 0, 1)] and membership.find_hanging(2.0, 4.0) == []
    assert not membership.record_heartbeat(Alive("target", 0, 0, 1), 4.5)
    assert membership.find_hanging(2.0, 5.5) == [Silent("target", 0)] and membership.find_hanging(2.0, 6.0) == []
    assert membership.find_hanging(2.0, 8.0) == [Silent("target", 0)]
    membership.record_heartbeat(Alive("target", 0, 1, 2), 9.0)
    assert membership.find_hanging(2.0, 10.5) == []


def test_a_rank_without_any_heartbeat_is_reported_too():
    membership = RoleMembership("target", 2)
    for now in (0.0, 1.0, 2.0, 3.0):
        membership.record_heartbeat(Alive("target", 0, 0, 1), now)
    assert membership.find_hanging(0.0, 3.0) == [] and membership.find_hanging(2.0, 3.0) == [Silent("target", 1)]


LONGEST_ROUND = int(FLOOR_S / HEARTBEAT_S)
"""Heartbeats of the longest round that is no sign of a hanging rank, where a measured one took no time."""


def with_a_measured_round(membership: RoleMembership) -> RoleMembership:
    membership.rounds.ordered(VerifyBatch(1, items=(VerifyItem(1, 1),)), 0.0)
    membership.rounds.answered(VerdictBatch(1, (), 0.0, 0.0), 0.0)
    assert membership.rounds.limit_s == LONGEST_ROUND * HEARTBEAT_S
    return membership


def test_a_round_that_never_ends_is_counted_in_the_heartbeats_of_its_rank():
    membership = with_a_measured_round(serving(1))

    def beats(count, **state):
        for _ in range(count):
            membership.record_heartbeat(Alive("target", 0, 0, 7, epoch=1, waiting=False, **state), 1.0)

    beats(1 + LONGEST_ROUND, round=7, busy=True)
    beats(1 + LONGEST_ROUND, round=8, busy=True)
    assert membership.find_hanging(2.0, 1.0) == [], "two rounds, and none that long"
    beats(1 + LONGEST_ROUND, round=8)
    assert membership.find_hanging(2.0, 1.0) == [], "idle"
    beats(2 + LONGEST_ROUND, round=9, busy=True)
    assert membership.find_hanging(0.0, 1.0) == [], "it is not checked"
    assert membership.find_hanging(2.0, 1.0) == [Silent("target", 0, 0, 7)]


def test_a_rank_that_ignores_a_recall_hangs():
    membership = serving()
    membership.start_new_epoch(10.0)
    late = 10.0 + RECALL_LIMIT_S + 1
    membership.record_heartbeat(Alive("target", 0, 0, 7, epoch=1, waiting=False), late)
    membership.record_heartbeat(Alive("target", 1, 0, 7, epoch=1, waiting=True), late)
    assert membership.find_hanging(2.0, late) == [Silent("target", 0, 0, 7)]


def test_a_missed_batch_is_suspected_after_several_heartbeats_in_one_round():
    membership = serving()
    times = count(0.0, HEARTBEAT_S)
    idle = Alive("target", 0, 0, 7, epoch=1, waiting=False, round=4)
    beats = [membership.suspects_missed_batch(idle, awaited, next(times)) for awaited in (5, 5, 6, 6, None, 6)]
    assert beats == [False] * 5 + [True] and MISSED_BEATS == 3
    answered = Alive("target", 0, 0, 7, epoch=1, waiting=False, round=7)
    found = [membership.suspects_missed_batch(answered, 7, next(times)) for _ in range(3)]
    assert found == [False, False, True], "its answer was lost"
    busy = Alive("target", 1, 0, 7, epoch=1, waiting=False, round=7)
    assert not any(membership.suspects_missed_batch(busy, 7, next(times)) for _ in range(9)), "only the lead answers"


def test_a_rank_that_works_on_an_earlier_batch_has_missed_none_yet():
    """The target may make a pass ahead while the next batch waits to be read."""
    membership, times = serving(), count(0.0, HEARTBEAT_S)
    busy = Alive("target", 0, 0, 7, epoch=1, waiting=False, round=4, busy=True)
    assert not any(membership.suspects_missed_batch(busy, 5, next(times)) for _ in range(9))
    idle = replace(busy, busy=False)
    assert [membership.suspects_missed_batch(idle, 5, next(times)) for _ in range(3)] == [False, False, True]


def test_heartbeats_that_come_at_once_tell_no_more_than_one():
    """They waited for a coordinator that stood still, behind the answer to which it sent the next batch."""
    membership = serving()
    idle = Alive("target", 0, 0, 7, epoch=1, waiting=False, round=4)
    assert not any(membership.suspects_missed_batch(idle, 5, 10.0 + beat * 1e-3) for beat in range(9))
    assert [membership.suspects_missed_batch(idle, 5, 11.0 + beat) for beat in range(2)] == [False, True]


def test_a_successor_starts_without_the_busy_heartbeats_of_its_predecessor():
    """Its first record may arrive long before its first regular heartbeat."""
    membership = with_a_measured_round(serving(1))
    for _ in range(2 + LONGEST_ROUND):
        membership.record_heartbeat(Alive("target", 0, 0, 1, epoch=1, waiting=False, round=7, busy=True), 5.0)
    assert membership.find_hanging(2.0, 5.0) == [Silent("target", 0, 0, 1)]
    membership.record_heartbeat(Alive("target", 0, 1, 2, off_schedule=True), 5.1)
    assert membership.find_hanging(2.0, 5.2) == []


def gathering(size: int = 2) -> RoleMembership:
    """All ranks have left an epoch and run."""
    membership = serving(size)
    for rank in range(size):
        membership.record_heartbeat(Alive("target", rank, 0, 1, epoch=1, waiting=False), 1.0)
    membership.start_new_epoch(10.0)
    return membership


def test_an_order_is_repeated_to_those_that_have_not_followed_it():
    membership = gathering()
    assert membership.orders(5, None, 10.0) == [([0, 1], Recall(2))]
    assert membership.orders(5, None, 10.0 + 0.99 * REPEAT_S) == []
    membership.record_heartbeat(Alive("target", 1, 0, 1, epoch=1, waiting=True), 10.4)
    assert membership.orders(5, None, 10.5) == [([0], Recall(2))]
    membership.record_heartbeat(Alive("target", 0, 0, 1, epoch=1, waiting=True), 10.5)
    join = Join(2, 7, ("host", 1))
    assert membership.orders(7, ("host", 1), 10.5) == [([0, 1], join)], "at once, for it is another order"
    membership.record_ready(Ready("target", 1, {}, 2))
    assert not membership.serving and membership.orders(7, ("host", 1), 10.6) == []
    assert membership.orders(7, ("host", 1), 11.0) == [([0], join)]
    membership.record_ready(Ready("target", 0, {}, 2))
    assert membership.serving and membership.orders(7, None, 12.0) == []


def test_where_no_rank_has_a_process_nothing_is_ordered():
    membership = RoleMembership("target", 1)
    assert membership.orders(0, None, 9.0) == []


def test_a_ready_of_another_epoch_or_of_no_process_is_ignored():
    membership = gathering()
    membership.record_ready(Ready("target", 0, {}, 2))
    assert membership.ready() == [], "it gathers"
    for rank in range(2):
        membership.record_heartbeat(Alive("target", rank, 0, 1, epoch=1, waiting=True), 10.0)
    membership.orders(5, None, 10.0)
    membership.record_ready(Ready("target", 0, {}, 1))
    assert membership.ready() == [] and membership.phase is Phase.joining
    membership.record_ready(Ready("target", 0, {}, 2))
    assert [one.rank for one in membership.ready()] == [0]


@pytest.mark.parametrize(("after_s", "hangs"), [(RECALL_LIMIT_S, False), (RECALL_LIMIT_S + 0.01, True)])
@pytest.mark.parametrize("epoch", [0, 1])
def test_the_limit_of_a_recall_is_for_ranks_that_have_been_in_an_epoch(after_s, hangs, epoch):
    membership = gathering(1)
    membership.record_heartbeat(Alive("target", 0, 0, 7, epoch=epoch, waiting=False), 10.0 + after_s)
    found = membership.find_hanging(0.0, 10.0 + after_s)
    assert found == ([Silent("target", 0, 0, 7)] if hangs and epoch else [])


@pytest.mark.parametrize(("silent_s", "hangs"), [(2.0, False), (2.01, True)])
def test_the_limit_of_silence(silent_s, hangs):
    assert bool(serving(1).find_hanging(2.0, silent_s)) == hangs


def test_heartbeats_off_schedule_measure_no_time():
    membership = with_a_measured_round(serving(1))
    alive = Alive("target", 0, 0, 7, epoch=1, waiting=False, round=3, busy=True, off_schedule=True)
    for beat in range(2 + LONGEST_ROUND):
        membership.record_heartbeat(alive, 1.0)
        assert not membership.suspects_missed_batch(replace(alive, busy=False), 3, float(beat))
    assert membership.find_hanging(2.0, 1.0) == []


def test_what_a_new_process_or_a_loss_changes():
    membership = serving()
    assert membership.links == ["target-0#0", "target-1#0"] and membership.bridge == 0
    membership.record_heartbeat(Alive("target", 0, 0, 1, epoch=1, waiting=False, bridge=4), 1.0)
    assert membership.bridge == 4 and membership.epoch == 1
    membership.record_heartbeat(Alive("target", 1, 1, 2), 1.0)
    assert membership.links == ["target-0#0", "target-1#1"] and membership.epoch == 2 and not membership.serving
    membership.mark_lost(0, 0, 2.0)
    assert membership.links == ["target-1#1"] and membership.bridge == 0
    assert membership.epoch == 2, "it gathers already"


def test_a_missed_batch_is_suspected_only_while_the_role_serves():
    membership = gathering(1)
    idle = Alive("target", 0, 0, 7, epoch=1, waiting=False, round=4)
    assert not any(membership.suspects_missed_batch(idle, 5, float(beat)) for beat in range(9))


def test_a_batch_that_is_worked_on_now_and_then_is_not_missed():
    membership = serving(1)
    idle, busy = (Alive("target", 0, 0, 7, epoch=1, waiting=False, round=5, busy=one) for one in (False, True))
    beats = enumerate((idle, idle, busy, idle, idle, idle))
    found = [membership.suspects_missed_batch(one, 5, float(now)) for now, one in beats]
    assert found == [False] * 5 + [True]
