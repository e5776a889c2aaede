"""What rounds cost, against worlds whose seconds are known, and the machine's speed against one that changes."""

from __future__ import annotations

import random
from copy import deepcopy

import numpy as np
import pytest

from actors.policy.costs import DraftedCosts, LoadCosts, LoadTable, MachineSpeed, MeasuredRound, PlainCosts

PLAIN = MeasuredRound(0.010, 0.001, 0.0, 0, 0.0)
DRAFTED = MeasuredRound(0.014, 0.006, 0.004, 4, 2.0)


def times(verify_s, gap_s, draft_s, length):
    return MeasuredRound(verify_s, gap_s, draft_s, length, length / 2)


# --- seconds by draft length ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("row_s", [0.0, 0.004, 0.05])
def test_the_seconds_of_a_round_are_those_of_its_world(row_s, hidden):
    """Drafting is waited for or hidden; a row of the target's pass costs nothing, something, or nearly all of it."""
    costs, lengths, draft_s, verify_s = DraftedCosts(), [2, 3, 4, 5] * 40, 0.02, 0.01

    def world(length, mean):
        return 0.002 + (0.0 if hidden else draft_s * length), verify_s + row_s * mean

    for length in lengths:
        gap_s, pass_s = world(length, length / 2)
        costs.update(times(pass_s, gap_s, draft_s * length, length))
    slopes = costs.per_token_s(verify_s)
    assert slopes == pytest.approx((0.08 * draft_s if hidden else draft_s, row_s), abs=3e-4)  # 0.08: of the prior
    least_s = max(verify_s, np.mean([world(length, length / 2)[1] for length in lengths]) / 2)
    rounds = [world(length, length) for length in range(7)]
    expected = [gap_s + max(pass_s, least_s) for gap_s, pass_s in rounds]
    assert costs.seconds(6, verify_s) == pytest.approx(expected, rel=0.05, abs=0.3 * draft_s)
    passes = [costs.verify_s(mean, verify_s) for mean in (0, 1.5, 6)]
    assert passes == pytest.approx([max(world(0, mean)[1], least_s) for mean in (0, 1.5, 6)], rel=0.05)


def test_slopes_that_cannot_be_measured_are_those_of_the_parts():
    costs = DraftedCosts()
    assert costs.per_token_s(0.0) == (0.0, 0.0) and costs.verify_s(2.0, 0.0) == 0
    for _ in range(20):
        costs.update(times(0.016, 0.014, 0.012, 4))
    assert costs.per_token_s(0.010) == pytest.approx((0.003, 0.003)), (
        "drafting by its length, the pass by the plain one"
    )
    assert costs.per_token_s(0.020) == pytest.approx((0.003, 0.0))
    assert costs.per_token_s(0.0) == pytest.approx((0.003, 0.0))
    assert costs.seconds(4, 0.010) == pytest.approx([0.002 + 0.010 + k * 0.006 for k in range(5)])
    assert costs.seconds(4, 0.017) == pytest.approx([0.002 + 0.017 + k * 0.003 for k in range(5)]), "as plain at least"
    assert costs.verify_s(3.0, 0.010) == pytest.approx(0.019) and costs.verify_s(3.0, 0.0) == pytest.approx(0.016)


def test_the_share_of_the_batch_that_a_pass_serves_is_all_of_it_until_measured():
    costs = DraftedCosts()
    assert costs.served.mean == 1
    costs.update(MeasuredRound(0.01, 0.0, 0.0, 2, 2.0, 0.5))
    assert costs.served.mean == 0.5
    costs.update(DRAFTED)
    assert costs.served.mean == pytest.approx((0.97 * 0.5 + 1) / 1.97)


def test_plain_rounds_cost_the_mean_of_their_parts_whatever_the_drafts_beside():
    costs = PlainCosts()
    assert costs.seconds == 0 == costs.weight
    for verify_s, gap_s in ((0.010, 0.001), (0.013, 0.003)):
        costs.update(times(verify_s, gap_s, 0.0, 0))
    assert costs.seconds == pytest.approx((0.97 * 0.011 + 0.016) / 1.97) and costs.weight == pytest.approx(1.97)
    assert costs.verify_s(5.0, 1.0) == costs.verify.mean == pytest.approx((0.97 * 0.010 + 0.013) / 1.97)


# --- the speed of the machine -----------------------------------------------------------------------------------------


class World:
    """Rounds on a machine of some slowness; passes vary by `noise`, gaps do not."""

    def __init__(self, seed=0, noise=0.0):
        self.draw, self.noise, self.slowness = random.Random(seed), noise, 1.0
        self.load, self.speed, self.factors = LoadCosts(), MachineSpeed(), []

    def run(self, num_rounds, way=None):
        one = PLAIN if way is None else DRAFTED
        for _ in range(num_rounds):
            noise = self.draw.lognormvariate(-(self.noise**2) / 2, self.noise)
            seen = one.at(1 / self.slowness)
            seen = MeasuredRound(seen.verify_s * noise, seen.gap_s, seen.draft_s, one.longest, one.mean)
            self.load.measure(way, seen, self.speed, is_first=False)
            self.factors.append(self.speed.factor)
        return self

    def costs(self, way):
        return self.load.plain if way is None else self.load.way(way)

    def seconds(self, way=None):
        """Expected of a round now, at the drafts of `DRAFTED`."""
        if way is None:
            return self.speed.factor * self.load.plain.seconds
        costs = self.load.way(way)
        return self.speed.factor * (costs.gap.at(4, 0) + costs.verify_s(2.0, self.load.plain.verify.mean))


def test_a_factor_divides_the_seconds_and_nothing_else():
    assert MeasuredRound(2.0, 4.0, 6.0, 5, 3.0, 0.5).at(2.0) == MeasuredRound(1.0, 2.0, 3.0, 5, 3.0, 0.5)


def test_a_deviation_moves_the_factor_as_far_as_the_estimate_is_known():
    def moved(seconds, expected_s, weight, factor=1.0):
        speed = MachineSpeed(factor)
        speed.update(seconds, expected_s, weight)
        return speed.factor / factor

    assert moved(0.0, 0.010, 30) == moved(0.010, 0.0, 30) == moved(0.012, 0.010, 0) == moved(0.010, 0.010, 30) == 1
    assert moved(0.030, 0.010, 30, factor=3.0) == pytest.approx(1), "the factor is part of what is expected"
    assert moved(0.0101, 0.010, 8) == pytest.approx(1 + 0.01 * 0.25 / 2, abs=1e-5)
    assert moved(0.0101, 0.010, 24) == pytest.approx(1 + 0.01 * 0.25 * 3 / 4, abs=1e-5)
    assert moved(0.0099, 0.010, 24) == pytest.approx(1 - 0.01 * 0.25 * 3 / 4, abs=1e-5)
    assert moved(9.0, 0.010, 24) == moved(0.020, 0.010, 24), "a pause of the machine is no new speed"


@pytest.mark.parametrize("way", [None, "way"])
@pytest.mark.parametrize("slowness", [3.0, 0.4])
def test_a_machine_of_another_speed_is_followed_within_ten_passes_and_back(slowness, way):
    world = World().run(100, way)
    assert world.speed.factor == 1, "rounds alike teach no other speed"
    before_s = world.seconds(way)
    for world.slowness in (slowness, 1.0):
        world.run(12, way)
        assert world.seconds(way) == pytest.approx(before_s * world.slowness, rel=0.2)
        assert world.speed.factor == pytest.approx(world.slowness, rel=0.25), "mostly the machine, not the cost"
        world.run(50, way)
        assert world.seconds(way) == pytest.approx(before_s * world.slowness, rel=0.03)


@pytest.mark.parametrize("way", [None, "way"])
def test_noise_does_not_make_the_speed_drift(way):
    """The factor is no more than a name for what passes have in common: their noise has to leave it where it is."""
    worlds = [World(seed, noise=0.3).run(5000, way) for seed in range(8)]
    assert np.mean([world.factors[500:] for world in worlds]) == pytest.approx(1, abs=0.06)
    early, late = (np.mean([world.factors[i : i + 1500] for world in worlds]) for i in (500, 3500))
    assert late == pytest.approx(early, abs=0.04), "nor over a longer time"
    expected_s = np.mean([world.speed.factor * world.costs(way).verify_s(2.0, 0.0) for world in worlds])
    assert expected_s == pytest.approx((DRAFTED if way else PLAIN).verify_s, rel=0.1), "and passes are as expected"


@pytest.mark.parametrize(("present", "other"), [("way", None), (None, "way"), ("way", "another")])
def test_a_slow_phase_of_one_kind_of_round_moves_the_others_alike(present, other):
    world = World().run(40, None).run(40, other).run(40, present)
    present_s, other_s = world.seconds(present), world.seconds(other)
    world.slowness = 3.0
    world.run(40, present)
    assert world.seconds(present) == pytest.approx(3 * present_s, rel=0.03)
    assert world.seconds(other) == pytest.approx(3 * other_s, rel=0.2), "without one such round in the slow phase"
    world.slowness = 1.0
    world.run(40, present)
    assert world.seconds(other) == pytest.approx(other_s, rel=0.05), "and back"


def test_a_kind_that_costs_more_is_not_a_slow_machine():
    """Passes become dearer from plain rounds to drafted ones: that is what drafts cost, and the factor stays."""
    world = World().run(30)
    for way in ("way", "another"):
        world.run(30, way)
    assert world.speed.factor == pytest.approx(1, abs=1e-6)
    assert world.seconds() == pytest.approx(0.011) and world.seconds("way") == pytest.approx(0.020)


def test_a_machine_that_becomes_faster_as_drafts_begin_does_not_make_them_cheap():
    """Rounds with drafts cost 1.8 plain ones and begin as the machine becomes twice as fast, so they are quicker than
    plain rounds were. A pass over drafts reads what a plain pass reads: what is quicker is the machine."""
    world = World()
    world.slowness = 2.0
    world.run(40)
    world.slowness = 1.0
    for _ in range(12):
        world.run(1, "way")
        assert world.seconds("way") > 1.1 * world.seconds(), "by their estimates"
    assert world.seconds() < 1.8 * 0.011 and world.speed.factor < 0.75


# --- one load ---------------------------------------------------------------------------------------------------------


def slow(one):
    return one.at(1 / 1.5)


@pytest.mark.parametrize("way", [None, "way"])
def test_the_first_round_after_a_change_only_counts_until_the_next_one(way):
    load, speed, one = LoadCosts(), MachineSpeed(), PLAIN if way is None else DRAFTED
    load.measure(way, slow(one), speed, is_first=True)
    costs = load.plain if way is None else load.way(way)

    def mean_s():
        return load.plain.verify.mean if way is None else load.way(way).verify.mean_y

    assert costs.weight == pytest.approx(0.2) and mean_s() == pytest.approx(1.5 * one.verify_s), "better than nothing"
    load.measure(way, one, speed, is_first=False)
    assert costs.weight == pytest.approx(0.97 * 0.2 + 1) and speed.factor == pytest.approx(1, abs=0.01)
    assert mean_s() == pytest.approx(one.verify_s, rel=0.1)
    known = deepcopy(costs)
    load.measure(way, slow(one), speed, is_first=True)
    assert costs == known and speed.factor == pytest.approx(1, abs=0.01), "where there is a measurement, not at all"


def weights(costs):
    parts = (costs.verify, costs.gap) if isinstance(costs, PlainCosts) else (costs.gap, costs.verify, costs.draft_s)
    return [part.weight for part in parts]


def test_estimates_fade_while_rounds_of_other_kinds_run():
    load, speed = LoadCosts(), MachineSpeed()
    for way, one in ((None, PLAIN), ("a", DRAFTED), ("b", DRAFTED)):
        for _ in range(10):
            load.measure(way, one, speed, is_first=False)
    before = deepcopy(load)
    for way, one, is_first in ((None, PLAIN, False), ("b", DRAFTED, False), ("b", slow(DRAFTED), True)):
        load.measure(way, one, speed, is_first=is_first)
    assert weights(load.way("a")) == pytest.approx([weight * 0.99**3 for weight in weights(before.way("a"))])
    assert load.way("a").served.weight == pytest.approx(before.way("a").served.weight * 0.99**3)
    assert load.way("a").seconds(4, 0.010) == pytest.approx(before.way("a").seconds(4, 0.010))
    kept = [(0.97 * weight + 1) * 0.99**2 for weight in weights(before.plain)]
    assert weights(load.plain) == pytest.approx(kept)
    assert weights(load.way("b")) == pytest.approx([0.99 * weight * 0.97 + 1 for weight in weights(before.way("b"))])


def measured(load, *rounds):
    speed = MachineSpeed()
    for way, one, num in rounds:
        for _ in range(num):
            load.measure(way, one, speed, is_first=False)
    return load


def test_a_load_borrows_the_means_of_a_similar_one_as_two_rounds_and_goes_its_own_way():
    load = measured(LoadCosts(), ("rare", DRAFTED, 1), ("often", DRAFTED, 30), (None, PLAIN, 30))
    before, heir = deepcopy(load), LoadCosts()
    for way in (None, "rare", "often"):
        heir.borrow(way, load)
    assert heir.plain.seconds == pytest.approx(0.011) and weights(heir.plain) == pytest.approx([2.0] * 2)
    for way, weight in (("rare", before.way("rare").weight), ("often", 2.0)):
        assert heir.way(way).seconds(6, 0.010) == pytest.approx(load.way(way).seconds(6, 0.010))
        assert weights(heir.way(way)) == pytest.approx([weight] * 3), "no more than it had"
    for _ in range(3):
        measured(heir, (None, slow(PLAIN), 1), ("often", slow(DRAFTED), 1))
    assert load == before, "what the heir learns is its own"
    assert heir.plain.verify.mean > 1.2 * load.plain.verify.mean, "and soon corrects what it took over"


@pytest.mark.parametrize("knows_plain", [False, True])
def test_passes_over_drafts_that_were_not_measured_under_a_load_follow_its_plain_ones(knows_plain):
    """Three times as many requests, whose plain passes are measured before or after drafts are borrowed."""
    load, larger, speed = measured(LoadCosts(), ("way", DRAFTED, 30), (None, PLAIN, 30)), LoadCosts(), MachineSpeed()
    larger.borrow(None, load)
    if not knows_plain:
        larger.borrow("way", load)
    for _ in range(30):
        larger.measure(None, MeasuredRound(0.030, 0.001, 0.0, 0, 0.0), speed, is_first=False)
    if knows_plain:
        larger.borrow("way", load)
    assert speed.factor == pytest.approx(1.0), "another load is no slower machine"
    assert larger.way("way").verify_s(2.0, 0.030) == pytest.approx(3 * 0.014, rel=1e-3)
    larger.way("way").gap.weight = load.way("way").gap.weight
    assert larger.way("way").gap_s(4, 0.030) == pytest.approx(0.006, rel=0.05), "messages take as long"
    kept_s = larger.way("way").verify_s(2.0, 0.0)
    measured(larger, ("way", MeasuredRound(0.050, 0.006, 0.004, 4, 2.0), 1))
    assert kept_s < (own_s := larger.way("way").verify_s(2.0, 0.0)) < 0.050
    measured(larger, (None, slow(PLAIN), 1))
    assert larger.way("way").verify_s(2.0, 0.0) == own_s, "since then they are its own"


def test_a_table_of_loads_fills_what_is_missing_from_the_nearest_that_knows_it():
    table = LoadTable()
    measured(table.of((2, False, 0), ["way"]), (None, PLAIN, 5), ("way", DRAFTED, 5))
    measured(table.of((8, False, 0), []), (None, MeasuredRound(0.020, 0.001, 0.0, 0, 0.0), 5))
    assert table.of((8, False, 0), ["way"]).way("way").verify_s(2.0, 0.0) == pytest.approx(0.028), "twice the pass"
    between = table.of((6, False, 0), ["way", "never"])
    assert between.plain.seconds == pytest.approx(0.021) and between.way("way").weight > 0
    assert not between.way("never").weight
    assert not table.of((2, False, 9), ["way"]).plain.weight, "passes that read prompts are others"
    assert table.of((2, True, 0), ["way"]).plain.weight > 0, "sampling changes little"
    between.forget_drafts()
    assert not between.way("way").weight and table.of((6, False, 0), ["way"]).way("way").weight > 0
