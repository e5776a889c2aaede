"""Ranks that die, hang, miss their call or come back: in the end all of them are in one epoch, and in no other."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.coordinator.membership import MISSED_BEATS, RECALL_LIMIT_S, Phase, RoleMembership
from actors.protocol.membership import HEARTBEAT_S, Alive, Join, Ready, Recall, Silent


@dataclass
class ScriptedRank:
    """A rank as `actors/worker/rank_loop.py` has it, without its work."""

    rank: int
    incarnation: int = 0
    epoch: int = 0
    waiting: bool = True

    def beat(self) -> Alive:
        return Alive("target", self.rank, self.incarnation, 1, self.epoch, self.waiting)

    def hear(self, order: Recall | Join):
        """Its answers."""
        if isinstance(order, Join) and order.epoch >= self.epoch and (order.epoch > self.epoch or not self.waiting):
            self.epoch, self.waiting = order.epoch, False
            return [Ready("target", self.rank, {}, order.epoch)]
        if isinstance(order, Recall) and order.epoch > self.epoch and not self.waiting:
            self.waiting = True
            return [self.beat()]
        return []


class Barracks:
    """Ranks around a muster; `loss` of what is said is lost, and the rest arrives in any order."""

    def __init__(self, choose: random.Random, size: int, loss: float) -> None:
        self.choose, self.loss, self.now = choose, loss, 0.0
        self.membership = RoleMembership("target", size)
        self.ranks = [ScriptedRank(rank) for rank in range(size)]
        self.said: list[Alive | Ready] = []

    def step(self, loss: float | None = None) -> None:
        loss = self.loss if loss is None else loss
        self.now += 0.25
        self.said += [rank.beat() for rank in self.ranks if self.choose.random() >= loss]
        self.choose.shuffle(self.said)
        kept = len(self.said) // 3 if loss else 0
        while len(self.said) > kept:
            word = self.said.pop()
            if isinstance(word, Alive):
                self.membership.beat(word, self.now)
            else:
                self.membership.joined(word)
        for ranks, order in self.membership.orders(5, None, self.now):
            for rank in ranks:
                if self.choose.random() >= loss:
                    self.said += self.ranks[rank].hear(order)

    def kill(self, rank: int, *, told: bool) -> None:
        dead = self.ranks[rank]
        self.ranks[rank] = ScriptedRank(rank, dead.incarnation + 1)
        if told:
            self.membership.lose(rank, dead.incarnation, self.now)


@settings(max_examples=60, deadline=None)
@given(choose=st.randoms(use_true_random=False), size=st.integers(1, 4), loss=st.sampled_from([0.0, 0.3, 0.6]))
def test_whatever_happens_all_ranks_end_in_one_epoch(choose, size, loss):
    barracks = Barracks(choose, size, loss)
    for _ in range(40):
        event = choose.random()
        if event < 0.1:
            barracks.kill(choose.randrange(size), told=choose.random() < 0.5)
        elif event < 0.2:  # a peer is lost, or a batch
            choose.choice(barracks.ranks).waiting = True
        elif event < 0.25:
            barracks.membership.start_new_epoch(barracks.now)
        barracks.step()
    for _ in range(20):
        barracks.step(loss=0.0)
    assert barracks.membership.serving and len(barracks.membership.ready()) == size
    assert {(rank.epoch, rank.waiting) for rank in barracks.ranks} == {(barracks.membership.epoch, False)}


def serving(size: int = 2) -> RoleMembership:
    membership = RoleMembership("target", size)
    for rank in range(size):
        membership.beat(Alive("target", rank, 0, 1), 0.0)
    ((ranks, call),) = membership.orders(5, ("host", 1), 0.0)
    assert ranks == list(range(size)) and call == Join(1, 5, ("host", 1))
    for rank in range(size):
        membership.joined(Ready("target", rank, {}, 1))
    assert membership.serving and membership.orders(5, None, 1.0) == []
    return membership


def test_a_rank_that_waited_before_it_joined_has_not_left():
    membership = serving()
    membership.beat(Alive("target", 0, 0, 1, epoch=0, waiting=True), 1.0)
    assert membership.serving
    membership.beat(Alive("target", 0, 0, 1, epoch=1, waiting=True), 1.0)
    assert membership.phase is Phase.gathering and membership.epoch == 2


def test_nobody_is_called_by_old_news():
    """Both had waited once; the one that died was never heard of again, and the other has just come back."""
    membership = serving()
    membership.beat(Alive("target", 1, 0, 1, epoch=1, waiting=True), 1.0)
    membership.beat(Alive("target", 0, 0, 1, epoch=0, waiting=True), 1.0)
    assert all(not isinstance(order, Join) for _, order in membership.orders(5, None, 2.0))


def test_the_word_of_a_replaced_process_counts_for_nothing():
    membership = serving()
    membership.lose(0, 0, 1.0)
    assert not membership.beat(Alive("target", 0, 0, 1, epoch=9, waiting=True), 1.0)
    assert membership.links([0]) == [] and membership.beat(Alive("target", 0, 1, 2), 1.0)
    membership.lose(0, 0, 1.0)
    assert membership.links([0]) == ["target-0#1"], "a death that is told of late is not that of the successor"


def test_silence_is_measured_and_can_be_allowed():
    membership = serving()
    membership.beat(Alive("target", 1, 0, 7, epoch=1, waiting=False), 3.0)
    assert membership.silent(0.0, 99.0) == [] and membership.silent(2.0, 3.5) == [Silent("target", 0, 0, 1)]


def test_silence_is_told_again_until_a_successor_beats():
    """The first word may be lost, and nothing that the process still says counts any more."""
    membership = serving(1)
    assert membership.silent(2.0, 3.0) == [Silent("target", 0, 0, 1)] and membership.silent(2.0, 4.0) == []
    assert not membership.beat(Alive("target", 0, 0, 1), 4.5)
    assert membership.silent(2.0, 5.5) == [Silent("target", 0)] and membership.silent(2.0, 6.0) == []
    assert membership.silent(2.0, 8.0) == [Silent("target", 0)]
    membership.beat(Alive("target", 0, 1, 2), 9.0)
    assert membership.silent(2.0, 10.5) == []


def test_who_was_never_heard_is_silent_too():
    membership = RoleMembership("target", 2)
    for now in (0.0, 1.0, 2.0, 3.0):
        membership.beat(Alive("target", 0, 0, 1), now)
    assert membership.silent(0.0, 3.0) == [] and membership.silent(2.0, 3.0) == [Silent("target", 1)]


def test_a_round_that_never_ends_is_counted_in_the_heartbeats_of_its_rank():
    membership = serving(1)

    def beats(count, **state):
        for _ in range(count):
            membership.beat(Alive("target", 0, 0, 7, epoch=1, waiting=False, **state), 1.0)

    beats(9, round=7, busy=True)
    beats(9, round=8, busy=True)
    assert membership.silent(2.0, 1.0, round_limit_s=8 * HEARTBEAT_S) == [], "two rounds, and none that long"
    beats(9, round=8)
    assert membership.silent(2.0, 1.0, round_limit_s=8 * HEARTBEAT_S) == [], "idle"
    beats(10, round=9, busy=True)
    assert membership.silent(2.0, 1.0, round_limit_s=8 * HEARTBEAT_S) == [Silent("target", 0, 0, 7)]


def test_a_rank_that_is_recalled_in_vain_is_stuck():
    membership = serving()
    membership.start_new_epoch(10.0)
    late = 10.0 + RECALL_LIMIT_S + 1
    membership.beat(Alive("target", 0, 0, 7, epoch=1, waiting=False), late)
    membership.beat(Alive("target", 1, 0, 7, epoch=1, waiting=True), late)
    assert membership.silent(2.0, late) == [Silent("target", 0, 0, 7)]


def test_doubts_need_several_beats_about_one_round():
    membership = serving()
    idle = Alive("target", 0, 0, 7, epoch=1, waiting=False, round=4)
    beats = [membership.has_missed(idle, awaited) for awaited in (5, 5, 6, 6, None, 6)]
    assert beats == [False] * 5 + [True] and MISSED_BEATS == 3
    answered = Alive("target", 0, 0, 7, epoch=1, waiting=False, round=7)
    assert [membership.has_missed(answered, 7) for _ in range(3)] == [False, False, True], "its answer was lost"
    busy = Alive("target", 1, 0, 7, epoch=1, waiting=False, round=7)
    assert not any(membership.has_missed(busy, 7) for _ in range(9)), "only the lead answers"


def test_a_successor_is_not_blamed_for_the_round_that_its_forerunner_was_stuck_in():
    """Its first word may come long before its first heartbeat."""
    membership = serving(1)
    for beat in range(20):
        membership.beat(Alive("target", 0, 0, 1, epoch=1, waiting=False, round=7, busy=True), beat * HEARTBEAT_S)
    assert membership.silent(0.0, 5.0, round_limit_s=2.0) == [Silent("target", 0, 0, 1)]
    membership.beat(Alive("target", 0, 1, 2, at_change=True), 5.1)
    assert membership.silent(0.0, 5.2, round_limit_s=2.0) == []
