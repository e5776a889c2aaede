"""Devices that are held: those of the start together, later ones each for itself."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest

from cluster.placement.nodes import over_nodes
from cluster.runtime import ray_reservation
from cluster.runtime.ray_reservation import Reservation
from tests.cluster.placement.test_nodes import GPUS, config_of


class Group:
    """A placement group of a cluster that has this many left to give."""

    left = 10
    made: ClassVar[list[Group]] = []

    def __init__(self, bundles: list[dict[str, float]], strategy: str) -> None:
        self.bundles, self.is_removed = bundles, False
        Group.made.append(self)

    def wait(self, timeout_s: float) -> bool:
        Group.left -= 1
        return Group.left >= 0

    def remove(self) -> None:
        self.is_removed = True


@pytest.fixture
def made(monkeypatch) -> list[Group]:
    monkeypatch.setattr(ray_reservation, "placement_group", Group)
    monkeypatch.setattr(ray_reservation, "remove_placement_group", Group.remove)
    monkeypatch.setattr(Group, "left", 10)
    monkeypatch.setattr(Group, "made", [])
    return Group.made


@pytest.fixture
def layout():
    return over_nodes(config_of(tp=2), GPUS)


def elsewhere(layout):
    return [replace(place, host="10.0.0.9") for place in layout]


def test_what_was_taken_apart_is_given_back_singly_and_the_layout_of_the_start_is_kept(made, layout):
    reservation = Reservation()
    reservation.reserve(layout, 1.0)
    assert [len(group.bundles) for group in made] == [3]
    moved = elsewhere(layout)
    reservation.reserve(moved[:2], 1.0, separately=True)
    reservation.reserve([*layout, *moved[:2]], 1.0)
    assert [len(group.bundles) for group in made] == [3, 1, 1], "nothing is taken twice"
    reservation.give_back(layout[0])
    reservation.give_back(moved[0])
    assert [group.is_removed for group in made] == [False, True, False]
    assert reservation.options(moved[1])["scheduling_strategy"].placement_group is made[2]
    assert reservation.options(layout[2])["scheduling_strategy"].placement_group_bundle_index == 2
    reservation.release()
    assert all(group.is_removed for group in made)


@pytest.mark.parametrize("separately", [False, True])
def test_all_devices_or_none(made, layout, separately):
    reservation = Reservation()
    Group.left = 2 if separately else 0
    asked = r"^cluster: 1 GPU on 10\.0\.0\.1, 1 GPU on .* asked, of which not all is free; end other jobs or ask for"
    with pytest.raises(ValueError, match=asked):
        reservation.reserve(layout, 1.0, separately=separately)
    assert made and all(group.is_removed for group in made)
    Group.left = 10
    reservation.reserve(layout, 1.0)
    assert not made[-1].is_removed


def test_says_what_it_waits_for(made, layout):
    reported, times = [], iter(range(0, 100, 5))
    Group.left = 0
    with pytest.raises(ValueError, match=r"^cluster: "):
        Reservation().reserve(layout, 30.0, reported.append, lambda: float(next(times)))
    assert len(reported) > 1 and reported[0].startswith("waiting for 10 s: 1 GPU on 10.0.0.1, ")


def test_an_interrupt_leaves_nothing_reserved(made, layout, monkeypatch):
    def interrupt(group: Group, timeout_s: float) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(Group, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Reservation().reserve(layout, 30.0, separately=True)
    assert made and all(group.is_removed for group in made)
