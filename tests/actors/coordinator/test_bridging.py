"""When the ends of a bridge get their orders, and what ends a bridge: only ever an epoch of the drafter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.coordinator.bridging import MEETING_LIMIT_S, Bridging
from actors.coordinator.membership import REPEAT_S, RoleMembership
from actors.protocol.membership import Alive, Bridge, Join, Ready

STORE = ("127.0.0.1", 7)


class Roles:
    """Two roles that do what their membership orders; the leads show the bridge that the test says they are at."""

    def __init__(self, draft_size=2, gpus=("", "")) -> None:
        self.now = 0.0
        self.roles = {role: RoleMembership(role, size) for role, size in (("target", 1), ("draft", draft_size))}
        self.bridging = Bridging(self.roles["target"], self.roles["draft"])
        self.gpus = dict(zip(self.roles, gpus, strict=True))
        self.states: dict[tuple[str, int], Alive] = {}
        for role, membership in self.roles.items():
            for rank in range(membership.size):
                self.beat(role, rank)

    def beat(self, role, rank=0, **changes) -> None:
        state = self.states.get((role, rank), Alive(role, rank, 0, 7))
        self.states[role, rank] = replace(state, **changes)
        self.roles[role].record_heartbeat(self.states[role, rank], self.now)

    def gather(self, *roles) -> None:
        for role in roles or self.roles:
            membership = self.roles[role]
            for rank in range(membership.size):
                self.beat(role, rank, waiting=True, epoch=membership.epoch - 1, bridge=0)
            self.now += REPEAT_S
            ((_, order),) = membership.orders(0, STORE, self.now)
            assert isinstance(order, Join)
            for rank in range(membership.size):
                self.beat(role, rank, waiting=False, epoch=order.epoch)
                membership.record_ready(Ready(role, rank, {"gpu": self.gpus[role]}, order.epoch))

    def follow(self, after=0.0):
        self.now += after
        return self.bridging.follow(STORE, self.now)

    def meet(self) -> None:
        ((_, order),) = self.follow(REPEAT_S)
        for role in self.roles:
            self.beat(role, bridge=order.number)
        assert self.follow() == [] and self.bridging.stands

    @property
    def epochs(self):
        return [membership.epoch for membership in self.roles.values()]


def test_the_order_is_repeated_until_both_leads_are_at_the_bridge():
    roles = Roles()
    assert roles.follow() == []
    roles.gather("draft")
    assert roles.follow() == [], "the target is not there yet"
    roles.gather("target")
    order = [(["target-0#0", "draft-0#0"], Bridge(1, STORE))]
    assert roles.follow() == order and roles.follow(0.1) == [] and roles.follow(REPEAT_S) == order
    roles.beat("draft", bridge=1)
    assert roles.follow(REPEAT_S) == order and not roles.bridging.stands
    roles.beat("target", bridge=1)
    assert roles.follow(REPEAT_S) == [] and roles.bridging.stands and roles.epochs == [1, 1]


@pytest.mark.parametrize("lost", ["target", "draft"])
def test_a_bridge_ends_with_the_epoch_of_either_role_and_the_next_has_another_number(lost):
    roles = Roles()
    roles.gather()
    roles.meet()
    roles.roles[lost].start_new_epoch(roles.now)
    assert not roles.bridging.stands
    assert roles.follow() == [] and roles.epochs == ([2, 2] if lost == "target" else [1, 2])
    roles.gather(*(["target", "draft"] if lost == "target" else ["draft"]))
    assert not roles.bridging.stands
    roles.meet()
    assert roles.epochs[1] == 2


@pytest.mark.parametrize("role", ["target", "draft"])
def test_an_end_that_is_lost_within_its_epochs_costs_an_epoch_of_the_drafter_alone(role):
    roles = Roles()
    roles.gather()
    roles.meet()
    roles.beat(role, bridge=0)
    assert roles.follow() == [] and not roles.bridging.stands and roles.epochs == [1, 2]


def test_ends_that_do_not_meet_are_given_another_number_after_a_while():
    roles = Roles()
    roles.gather()
    roles.follow(REPEAT_S)
    assert roles.follow(MEETING_LIMIT_S - 1) and roles.epochs == [1, 1]
    assert roles.follow(1.1) == [] and roles.epochs == [1, 2]
    roles.gather("draft")
    ((_, order),) = roles.follow()
    assert order.number == 2


@pytest.mark.parametrize(("gpus", "by_nccl"), [(("a", "b"), True), (("a", "a"), False), (("a", ""), False)])
def test_tensors_go_by_nccl_between_two_gpus(gpus, by_nccl):
    roles = Roles(gpus=gpus)
    roles.gather()
    ((_, order),) = roles.follow(REPEAT_S)
    assert order.by_nccl is by_nccl
