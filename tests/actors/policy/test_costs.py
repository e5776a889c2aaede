"""What rounds cost, against worlds whose seconds are known, and the machine's speed against one that changes."""

from __future__ import annotations

import random
from copy import deepcopy

import numpy as np
import pytest

from actors.policy.costs import LoadCosts, LoadTable, MachineSpeed, MeasuredRound, RoundCosts
from actors.policy.decision import Decoding

PLAIN, IN_TURN, AHEAD = Decoding.plain, Decoding.in_turn, Decoding.ahead
PLAIN_ROUND = MeasuredRound(0.010, 0.001, 0.0, 0, 0.0)
DRAFTED_ROUND = MeasuredRound(0.014, 0.006, 0.004, 4, 2.0)


def slopes_of(costs, plain_s):
    lines = costs.by_length(plain_s)
    return lines.draft_s, lines.verify_s


def times(verify_s, gap_s, draft_s, length):
    return MeasuredRound(verify_s, gap_s, draft_s, length, length / 2)


# --- seconds by draft length ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("row_s", [0.0, 0.004, 0.05])
def test_the_seconds_of_a_round_are_those_of_its_world(row_s, hidden):
    """Drafting is waited for or hidden; a row of the target's pass costs nothing, something, or nearly all of it."""
    costs, lengths, draft_s, verify_s = RoundCosts(), [2, 3, 4, 5] * 40, 0.02, 0.01

    def world(length, mean):
        return 0.002 + (0.0 if hidden else draft_s * length), verify_s + row_s * mean

    for length in lengths:
        gap_s, pass_s = world(length, length / 2)
        costs.update(times(pass_s, gap_s, draft_s * length, length))
    slopes = slopes_of(costs, verify_s)
    assert slopes == pytest.approx((0.08 * draft_s if hidden else draft_s, row_s), abs=3e-4)  # 0.08: of the prior
    least_s = max(verify_s, np.mean([world(length, length / 2)[1] for length in lengths]) / 2)
    rounds = [world(length, length) for length in range(7)]
    expected = [gap_s + max(pass_s, least_s) for gap_s, pass_s in rounds]
    assert costs.by_length(verify_s).seconds(6) == pytest.approx(expected, rel=0.05, abs=0.3 * draft_s)
    passes = [costs.by_length(verify_s).pass_of(mean) for mean in (0, 1.5, 6)]
    assert passes == pytest.approx([max(world(0, mean)[1], least_s) for mean in (0, 1.5, 6)], rel=0.05)


def test_slopes_that_cannot_be_measured_are_those_of_the_parts():
    costs = RoundCosts()
    assert slopes_of(costs, 0.0) == (0.0, 0.0) and costs.by_length(0.0).pass_of(2.0) == 0
    for _ in range(20):
        costs.update(times(0.016, 0.014, 0.012, 4))
    assert slopes_of(costs, 0.010) == pytest.approx((0.003, 0.003)), "drafting by its length, the pass by the plain one"
    assert slopes_of(costs, 0.020) == pytest.approx((0.003, 0.0))
    assert slopes_of(costs, 0.0) == pytest.approx((0.003, 0.0))
    assert costs.by_length(0.010).seconds(4) == pytest.approx([0.002 + 0.010 + k * 0.006 for k in range(5)])
    assert costs.by_length(0.017).seconds(4) == pytest.approx([0.002 + 0.017 + k * 0.003 for k in range(5)]), (
        "as plain at least"
    )
    assert costs.by_length(0.010).pass_of(3.0) == pytest.approx(0.019) and costs.by_length(0.0).pass_of(
        3.0
    ) == pytest.approx(0.016)


def test_the_share_of_the_batch_that_a_pass_serves_is_all_of_it_until_measured():
    costs = RoundCosts()
    assert costs.served.mean == 1
    costs.update(MeasuredRound(0.01, 0.0, 0.0, 2, 2.0, 0.5))
    assert costs.served.mean == 0.5
    costs.update(DRAFTED_ROUND)
    assert costs.served.mean == pytest.approx((0.97 * 0.5 + 1) / 1.97)


def test_plain_rounds_cost_the_mean_of_their_parts():
    costs = RoundCosts()
    assert costs.mean_s == 0 == costs.weight
    for verify_s, gap_s in ((0.010, 0.001), (0.013, 0.003)):
        costs.update(times(verify_s, gap_s, 0.0, 0))
    assert costs.mean_s == pytest.approx((0.97 * 0.011 + 0.016) / 1.97) and costs.weight == pytest.approx(1.97)
    assert costs.by_length(0.0).pass_of(0.0) == costs.verify.mean_y == pytest.approx((0.97 * 0.010 + 0.013) / 1.97)


# --- the speed of the machine -----------------------------------------------------------------------------------------


class World:
    """Rounds on a machine of some slowness; passes vary by `noise`, gaps do not."""

    def __init__(self, seed=0, noise=0.0):
        self.draw, self.noise, self.slowness = random.Random(seed), noise, 1.0
        self.load, self.speed, self.factors = LoadCosts(), MachineSpeed(), []

    def run(self, num_rounds, way=PLAIN):
        one = PLAIN_ROUND if way is PLAIN else DRAFTED_ROUND
        for _ in range(num_rounds):
            noise = self.draw.lognormvariate(-(self.noise**2) / 2, self.noise)
            seen = one.at(1 / self.slowness)
            seen = MeasuredRound(seen.verify_s * noise, seen.gap_s, seen.draft_s, one.longest, one.mean)
            self.load.measure(way, seen, self.speed, is_first=False)
            self.factors.append(self.speed.factor)
        return self

    def seconds(self, way=PLAIN):
        """Expected of a round now, at the drafts of `DRAFTED_ROUND`."""
        if way is PLAIN:
            return self.speed.factor * self.load.plain.mean_s
        costs = self.load.by_choice[way]
        return self.speed.factor * (costs.gap.at(4, 0) + costs.by_length(self.load.plain.verify.mean_y).pass_of(2.0))


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


@pytest.mark.parametrize("way", [PLAIN, IN_TURN])
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


@pytest.mark.extended
@pytest.mark.parametrize("way", [PLAIN, IN_TURN])
def test_noise_does_not_make_the_speed_drift(way):
    """The factor is no more than a name for what passes have in common: their noise has to leave it where it is."""
    worlds = [World(seed, noise=0.3).run(5000, way) for seed in range(5)]
    assert np.mean([world.factors[500:] for world in worlds]) == pytest.approx(1, abs=0.06)
    early, late = (np.mean([world.factors[i : i + 1500] for world in worlds]) for i in (500, 3500))
    assert late == pytest.approx(early, abs=0.04), "nor over a longer time"
    expected_s = np.mean(
        [world.speed.factor * world.load.by_choice[way].by_length(0.0).pass_of(2.0) for world in worlds]
    )
    assert expected_s == pytest.approx((DRAFTED_ROUND if way.drafts else PLAIN_ROUND).verify_s, rel=0.1), (
        "and passes are as expected"
    )


@pytest.mark.parametrize(("present", "other"), [(IN_TURN, PLAIN), (PLAIN, IN_TURN), (IN_TURN, AHEAD)])
def test_a_slow_phase_of_one_kind_of_round_moves_the_others_alike(present, other):
    world = World().run(40, PLAIN).run(40, other).run(40, present)
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
    for way in (IN_TURN, AHEAD):
        world.run(30, way)
    assert world.speed.factor == pytest.approx(1, abs=1e-6)
    assert world.seconds() == pytest.approx(0.011) and world.seconds(IN_TURN) == pytest.approx(0.020)


def test_a_machine_that_becomes_faster_as_drafts_begin_does_not_make_them_cheap():
    """Rounds with drafts cost 1.8 plain ones and begin as the machine becomes twice as fast, so they are quicker than
    plain rounds were. A pass over drafts reads what a plain pass reads: what is quicker is the machine."""
    world = World()
    world.slowness = 2.0
    world.run(40)
    world.slowness = 1.0
    for _ in range(12):
        world.run(1, IN_TURN)
        assert world.seconds(IN_TURN) > 1.1 * world.seconds(), "by their estimates"
    assert world.seconds() < 1.8 * 0.011 and world.speed.factor < 0.75


def test_a_first_pass_over_more_rows_than_were_measured_is_no_slow_machine():
    """A trial drafts for few requests. The first drafts for all take three times as long: that is what they cost."""
    world = World().run(30)
    for mean, verify_s, num in ((0.25, 0.011, 3), (8.0, 0.030, 6)):
        for _ in range(num):
            world.load.measure(IN_TURN, MeasuredRound(verify_s, 0.006, 0.004, 8, mean), world.speed, is_first=False)
    assert world.speed.factor == pytest.approx(1, abs=0.04)
    assert world.load.by_choice[IN_TURN].by_length(0.010).pass_of(8.0) == pytest.approx(0.030, rel=0.1)


# --- one load ---------------------------------------------------------------------------------------------------------


def slow(one):
    return one.at(1 / 1.5)


@pytest.mark.parametrize("way", [PLAIN, IN_TURN])
def test_the_first_round_after_a_change_only_counts_until_the_next_one(way):
    load, speed, one = LoadCosts(), MachineSpeed(), PLAIN_ROUND if way is PLAIN else DRAFTED_ROUND
    load.measure(way, slow(one), speed, is_first=True)
    costs = load.by_choice[way]

    def mean_s():
        return load.by_choice[way].verify.mean_y

    assert costs.weight == pytest.approx(0.2) and mean_s() == pytest.approx(1.5 * one.verify_s), "better than nothing"
    load.measure(way, one, speed, is_first=False)
    assert costs.weight == pytest.approx(0.97 * 0.2 + 1) and speed.factor == pytest.approx(1, abs=0.01)
    assert mean_s() == pytest.approx(one.verify_s, rel=0.1)
    known = deepcopy(costs)
    load.measure(way, slow(one), speed, is_first=True)
    assert costs == known and speed.factor == pytest.approx(1, abs=0.01), "where there is a measurement, not at all"


def weights(costs):
    return [line.weight for line in (costs.gap, costs.verify, costs.draft_s)]


def test_estimates_fade_while_rounds_of_other_kinds_run():
    load, speed = LoadCosts(), MachineSpeed()
    for way, one in ((PLAIN, PLAIN_ROUND), (IN_TURN, DRAFTED_ROUND), (AHEAD, DRAFTED_ROUND)):
        for _ in range(10):
            load.measure(way, one, speed, is_first=False)
    before = deepcopy(load)
    for way, one, is_first in (
        (PLAIN, PLAIN_ROUND, False),
        (AHEAD, DRAFTED_ROUND, False),
        (AHEAD, slow(DRAFTED_ROUND), True),
    ):
        load.measure(way, one, speed, is_first=is_first)
    assert weights(load.by_choice[IN_TURN]) == pytest.approx(
        [weight * 0.99**3 for weight in weights(before.by_choice[IN_TURN])]
    )
    assert load.by_choice[IN_TURN].served.weight == pytest.approx(before.by_choice[IN_TURN].served.weight * 0.99**3)
    assert load.by_choice[IN_TURN].by_length(0.010).seconds(4) == pytest.approx(
        before.by_choice[IN_TURN].by_length(0.010).seconds(4)
    )
    kept = [(0.97 * weight + 1) * 0.99**2 for weight in weights(before.plain)]
    assert weights(load.plain) == pytest.approx(kept)
    assert weights(load.by_choice[AHEAD]) == pytest.approx(
        [0.99 * weight * 0.97 + 1 for weight in weights(before.by_choice[AHEAD])]
    )


def measured(load, *rounds):
    speed = MachineSpeed()
    for way, one, num in rounds:
        for _ in range(num):
            load.measure(way, one, speed, is_first=False)
    return load


def test_a_load_borrows_the_means_of_a_similar_one_as_two_rounds_and_goes_its_own_way():
    load = measured(LoadCosts(), (AHEAD, DRAFTED_ROUND, 1), (IN_TURN, DRAFTED_ROUND, 30), (PLAIN, PLAIN_ROUND, 30))
    before, heir = deepcopy(load), LoadCosts()
    for way in (PLAIN, AHEAD, IN_TURN):
        heir.borrow(way, load)
    assert heir.plain.mean_s == pytest.approx(0.011) and weights(heir.plain) == pytest.approx([2.0] * 3)
    for way, weight in ((AHEAD, before.by_choice[AHEAD].weight), (IN_TURN, 2.0)):
        assert heir.by_choice[way].by_length(0.010).seconds(6) == pytest.approx(
            load.by_choice[way].by_length(0.010).seconds(6)
        )
        assert weights(heir.by_choice[way]) == pytest.approx([weight] * 3), "no more than it had"
    for _ in range(3):
        measured(heir, (PLAIN, slow(PLAIN_ROUND), 1), (IN_TURN, slow(DRAFTED_ROUND), 1))
    assert load == before, "what the heir learns is its own"
    assert heir.plain.verify.mean_y > 1.2 * load.plain.verify.mean_y, "and soon corrects what it took over"


@pytest.mark.parametrize("knows_plain", [False, True])
def test_passes_over_drafts_that_were_not_measured_under_a_load_follow_its_plain_ones(knows_plain):
    """Three times as many requests, whose plain passes are measured before or after drafts are borrowed."""
    load, larger, speed = (
        measured(LoadCosts(), (IN_TURN, DRAFTED_ROUND, 30), (PLAIN, PLAIN_ROUND, 30)),
        LoadCosts(),
        MachineSpeed(),
    )
    larger.borrow(PLAIN, load)
    if not knows_plain:
        larger.borrow(IN_TURN, load)
    for _ in range(30):
        larger.measure(PLAIN, MeasuredRound(0.030, 0.001, 0.0, 0, 0.0), speed, is_first=False)
    if knows_plain:
        larger.borrow(IN_TURN, load)
    assert speed.factor == pytest.approx(1.0), "another load is no slower machine"
    assert larger.by_choice[IN_TURN].by_length(0.030).pass_of(2.0) == pytest.approx(0.030 + 0.004, rel=1e-3)
    larger.by_choice[IN_TURN].gap.weight = load.by_choice[IN_TURN].gap.weight
    assert larger.by_choice[IN_TURN].by_length(0.030).gap_of(4) == pytest.approx(0.006, rel=0.05), (
        "messages take as long"
    )
    kept_s = larger.by_choice[IN_TURN].by_length(0.0).pass_of(2.0)
    measured(larger, (IN_TURN, MeasuredRound(0.050, 0.006, 0.004, 4, 2.0), 1))
    assert kept_s < (own_s := larger.by_choice[IN_TURN].by_length(0.0).pass_of(2.0)) < 0.050, "corrected from then on"
    measured(larger, (PLAIN, slow(PLAIN_ROUND), 1))
    assert larger.by_choice[IN_TURN].by_length(0.0).pass_of(2.0) == own_s, "since then they are its own"


def test_passes_that_read_more_prompts_are_expected_to_take_longer_by_these_and_never_less_than_without():
    """Four requests without prompts, and beside about 48 rows of them; row cost 0.4 ms."""
    row_s, table, speed = 0.4e-3, LoadTable(), MachineSpeed()
    for num_rows in (400, 30, 120, 7):
        table.saw_plain_pass(num_rows, 0.010 + row_s * num_rows)
    for prompts, pass_s in ((0, 0.0116), (6, 0.0116 + 48 * row_s)):
        for _ in range(10):
            times = MeasuredRound(pass_s, 0.001, 0.0, 0, 0.0)
            table.of((4, False, prompts), [IN_TURN]).measure(PLAIN, times, speed, is_first=False)
    assert table.of((4, False, 8), [IN_TURN]).plain.verify.mean_y == pytest.approx(0.0116 + 192 * row_s, rel=0.02)
    assert table.of((4, False, 2), [IN_TURN]).plain.verify.mean_y == pytest.approx(0.0116 + 3 * row_s, rel=0.02)
    for _ in range(40):  # a pass over long prompts was slow
        times = MeasuredRound(0.012, 0.001, 0.0, 0, 0.0)
        table.of((4, False, 9), [IN_TURN]).measure(PLAIN, times, speed, is_first=False)
    assert table.of((4, False, 7), [IN_TURN]).plain.verify.mean_y >= 0.0116


def test_a_table_of_loads_fills_what_is_missing_from_the_nearest_that_knows_it():
    table = LoadTable()
    measured(table.of((2, False, 0), [IN_TURN]), (PLAIN, PLAIN_ROUND, 5), (IN_TURN, DRAFTED_ROUND, 5))
    measured(table.of((8, False, 0), []), (PLAIN, MeasuredRound(0.020, 0.001, 0.0, 0, 0.0), 5))
    assert table.of((8, False, 0), [IN_TURN]).by_choice[IN_TURN].by_length(0.0).pass_of(2.0) == pytest.approx(0.024), (
        "as much beyond a plain pass"
    )
    between = table.of((6, False, 0), [IN_TURN, AHEAD])
    assert between.plain.mean_s == pytest.approx(0.021) and between.by_choice[IN_TURN].weight > 0
    assert not between.by_choice[AHEAD].weight
    assert not table.of((2, False, 9), [IN_TURN]).plain.weight, "passes that read prompts are others"
    assert table.of((2, True, 0), [IN_TURN]).plain.weight > 0, "sampling changes little"
    between.forget_drafts()
    assert not between.by_choice[IN_TURN].weight and table.of((6, False, 0), [IN_TURN]).by_choice[IN_TURN].weight > 0


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("there", "here"), [(0, 8), (8, 4), (8, 0)])
@pytest.mark.parametrize("is_measured", [False, True])
def test_passes_of_another_batch_are_expected_to_take_longer_or_shorter_by_their_rows(there, here, is_measured):
    """One, four or sixteen requests, drafts of one and of four tokens; prompts have shown what a row takes. Plain
    decoding may have been measured in the other batch too, where it takes 3 ms more than its rows say."""
    row_s, table, speed = 0.4e-3, LoadTable(), MachineSpeed()
    for num_rows in (400, 30, 120, 7):
        table.saw_plain_pass(num_rows, 0.010 + row_s * num_rows)

    def measure(load, *lengths, beside_s=0.0):
        num_requests = 2 ** (load / 2)
        for length in lengths:
            pass_s = 0.010 + row_s * num_requests * (1 + length) + beside_s
            times = MeasuredRound(pass_s, 0.001, 0.0, length, length)
            way = IN_TURN if length else PLAIN
            table.of((load, False, 0), [IN_TURN]).measure(way, times, speed, is_first=False)

    measure(there, *[0] * 20, *[1, 4] * 10)
    beside_s = 0.003 * is_measured
    if is_measured:
        measure(here, *[0] * 20, beside_s=beside_s)
    found = table.of((here, False, 0), [IN_TURN])
    for length in (0, 1, 4, 8):
        lines = found.by_length(IN_TURN if length else PLAIN)
        expected_s = 0.010 + row_s * 2 ** (here / 2) * (1 + length) + beside_s
        assert lines.pass_of(length) == pytest.approx(expected_s, rel=0.03)


def large_batch(row_s, prompts=(448, 120)):
    """Costs of 64 requests where a row of a pass takes so long, after prompts of so many rows and three rounds."""
    table, speed = LoadTable(), MachineSpeed()

    def pass_s(num_rows):
        return 0.015 + row_s * num_rows

    for num_rows in (*(64 + one for one in prompts), 64, 64, 64):
        table.saw_plain_pass(num_rows, pass_s(num_rows))
    load = table.of((12, False, 0), [IN_TURN])
    for _ in range(3):
        load.measure(PLAIN, MeasuredRound(pass_s(64), 0.001, 0.0, 0, 0.0), speed, is_first=False)
    return load, speed, pass_s


@pytest.mark.parametrize("paused_s", [0.0, 1.0])
@pytest.mark.parametrize(("prompts", "is_known"), [((448, 120), True), ((), False)])
def test_a_first_pass_over_many_drafts_is_a_pause_only_beside_what_its_rows_take(prompts, is_known, paused_s):
    """Four draft tokens for each of 64 requests take 3.2 plain passes, where rows are dear; prompts have shown it."""
    load, speed, pass_s = large_batch(0.3e-3, prompts)
    load.measure(IN_TURN, MeasuredRound(pass_s(320) + paused_s, 0.006, 0.004, 4, 4.0), speed, is_first=False)
    most_s = 2 * pass_s(320 if is_known else 64)
    counted_s = load.by_choice[IN_TURN].by_length(pass_s(64)).pass_of(4.0)
    assert counted_s == pytest.approx(min(most_s, pass_s(320) + paused_s), rel=1e-3)


@pytest.mark.parametrize(("paused_s", "most_s"), [(0.0, 1.0), (1.0, 2.0)])
def test_a_pass_over_long_drafts_is_a_pause_only_beside_what_short_ones_show_of_rows(paused_s, most_s):
    """Seven draft tokens for each of 64 requests take 3.2 times as long as one; no prompts showed what rows take."""
    load, speed, pass_s = large_batch(0.3e-3, ())
    load.measure(IN_TURN, MeasuredRound(pass_s(128), 0.006, 0.001, 1, 1.0), speed, is_first=False)
    assert pass_s(512) > 3 * pass_s(128)
    load.measure(IN_TURN, MeasuredRound(pass_s(512) + paused_s, 0.012, 0.007, 7, 7.0), speed, is_first=False)
    lines = load.by_choice[IN_TURN].by_length(pass_s(64))
    assert lines.pass_of(7.0) == pytest.approx(most_s * pass_s(512), rel=0.01)
    if not paused_s:
        assert lines.seconds(8)[2:] == pytest.approx([0.005 + 0.001 * k + pass_s(64 + 64 * k) for k in range(2, 9)])


@pytest.mark.parametrize("row_s", [0.0, 0.3e-3])
def test_drafts_for_few_requests_tell_what_drafts_for_all_take(row_s):
    """Two tokens for eight of 64 requests, in a pass that is 5 % slower than usual; a fifth of a pass over all."""
    load, speed, pass_s = large_batch(row_s)
    load.measure(IN_TURN, MeasuredRound(1.05 * pass_s(80), 0.006, 0.004, 2, 0.25), speed, is_first=False)
    expected = load.by_choice[IN_TURN].by_length(pass_s(64)).seconds(4)
    assert expected[4] - 0.006 == pytest.approx(1.05 * pass_s(80) + row_s * 240, rel=0.2 if row_s else 1.0)


def test_long_prompts_do_not_count_as_outliers_among_plain_passes():
    table = LoadTable()
    for num_rows in (128, 64, 64, 64, 64, 64, 64, 640):
        table.saw_plain_pass(num_rows, 0.015 + 0.3e-3 * num_rows)
    assert table.of((12, False, 0), [IN_TURN]).by_choice[IN_TURN].rows_s == pytest.approx(64 * 0.3e-3, rel=1e-3)
