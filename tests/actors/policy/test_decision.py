"""The decision on scripted estimates: what it tries, what a trial may lose, when it returns, and what it reports."""

from __future__ import annotations

import random
from itertools import groupby
from math import exp, log

import pytest

from actors.policy.decision import (
    CREDIT,
    EXPLORED_SHARE,
    FULL_WEIGHT,
    MOST_BUDGET,
    MOST_LOST,
    NEW_COST,
    PROBE_ROUNDS,
    SETTLE_ROUNDS,
    Decision,
    Decoding,
    Estimate,
    Mode,
)

PLAIN, IN_TURN, AHEAD = Decoding.plain, Decoding.in_turn, Decoding.ahead
ROUND_S = 0.01


class World:
    """Rounds of the decision: plain ones of 10 ms and one token; with drafts of `costs` as many and `tokens`.

    Estimates are exact from the first measured round on, and lose a hundredth of their weight in each round of others.
    """

    def __init__(self, decision: Decision, tokens: float = 2.0, *, noise: float = 0.0, **costs: float) -> None:
        self.decision, self.tokens, self.noise = decision, tokens, noise
        self.costs = {PLAIN: 1.0} | {Decoding(name): cost for name, cost in costs.items()}
        self.weights = dict.fromkeys(self.costs, 0.0)
        self.draw, self.lost, self.rounds, self.seconds = random.Random(0), 0.0, [], 0.0

    def speed(self, choice: Decoding) -> float:
        return (self.tokens if choice.drafts else 1.0) / self.costs[choice]

    def estimates(self) -> dict[Decoding, Estimate]:
        drafts = sum(weight for choice, weight in self.weights.items() if choice.drafts)
        return {
            choice: Estimate(
                self.tokens if choice.drafts else 1.0, cost * ROUND_S, choice.drafts, self.weights[choice], drafts, 0.0
            )
            for choice, cost in self.costs.items()
        }

    def run(self, num_rounds: int, *, reads: bool = True) -> World:
        for _ in range(num_rounds):
            if self.decision.mode is Mode.catch_up and reads:
                self.decision.caught_up()
            choice = self.decision.choice
            self.rounds.append((self.decision.mode, choice))
            tokens, seconds = self.tokens if choice.drafts else 1.0, self.costs[choice] * ROUND_S
            self.weights = {one: weight * (0.97 if one is choice else 0.99) for one, weight in self.weights.items()}
            if self.decision.is_settled or not self.weights[choice]:
                self.weights[choice] += 1
            self.decision.count(tokens, seconds, seconds * exp(self.draw.gauss(0, self.noise)))
            self.lost += max(0.0, seconds / ROUND_S - tokens * self.costs[PLAIN])
            self.seconds += seconds
            self.decision.decide(self.estimates())
        return self

    @property
    def modes(self) -> list[tuple[Mode, int]]:
        return [(mode, len(list(same))) for mode, same in groupby(mode for mode, _ in self.rounds)]

    def share(self, choice: Decoding, last: int = 400) -> float:
        return sum(one is choice for _, one in self.rounds[-last:]) / len(self.rounds[-last:])


# --- whatever is explored --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cost", [2.1, 2.5, 4.0, 20.0])
@pytest.mark.parametrize("num_rounds", [25, 100, 1000])
def test_exploration_loses_at_most_its_credit_its_share_and_one_trial(cost, num_rounds):
    """Losses count in plain rounds; the last trial may go below zero by its own two rounds at most."""
    world = World(Decision(PLAIN), in_turn=cost).run(num_rounds)
    share = EXPLORED_SHARE * world.seconds / ROUND_S
    assert 0 < world.lost <= CREDIT + share + 2 * (cost - world.tokens) + 1e-9


def test_the_budget_is_bounded():
    world = World(Decision(PLAIN), in_turn=50.0).run(5000)
    assert max(0.0, world.decision.budget) <= MOST_BUDGET
    world.decision.charge(1e9)
    assert world.run(1).decision.budget > -100, "one pause is not the end of exploration"


def test_a_pause_costs_a_trial_no_budget_but_what_its_rounds_are_expected_to_take_does():
    known = {PLAIN: Estimate(1.0, ROUND_S, 0, 2.0), IN_TURN: Estimate(2.0, 1.9 * ROUND_S)}
    decision = Decision(PLAIN, awaited=IN_TURN, estimates=known)
    assert decision.caught_up() and decision.mode is Mode.trial
    decision.count(2.0, 1.9 * ROUND_S, 1.9 * ROUND_S)
    before = decision.budget
    decision.count(2.0, 1.9 * ROUND_S, 50 * ROUND_S)
    assert decision.budget > before
    decision.count(2.0, 2.5 * ROUND_S, 1.0 * ROUND_S)
    assert decision.budget < before - 0.4


def test_what_the_first_round_of_a_change_takes_beyond_others_is_charged_up_to_a_round():
    known = {PLAIN: Estimate(1.0, ROUND_S, 0, 2.0), IN_TURN: Estimate(2.0, ROUND_S, 1, 2.0)}
    for seconds, charged in ((0.9, 0.0), (1.8, 0.8), (50.0, 1.0)):
        decision = Decision(PLAIN, budget=0.0, estimates=known)
        decision.best = PLAIN
        decision._rounds = 0
        decision.count(1.0, ROUND_S, seconds * ROUND_S)
        assert decision.budget == pytest.approx(EXPLORED_SHARE - charged)


def test_the_first_draft_of_a_process_alone_is_not_charged():
    known = {PLAIN: Estimate(1.0, ROUND_S, 0, 2.0), IN_TURN: Estimate(3.0, ROUND_S, 8)}
    decision = Decision(PLAIN, awaited=IN_TURN, estimates=known)
    assert decision.caught_up() and decision.mode is Mode.trial
    before = decision.budget
    decision.count(1.0, 4 * ROUND_S, 4 * ROUND_S)
    assert decision.budget == before
    decision.count(1.0, 4 * ROUND_S, 4 * ROUND_S)
    assert decision.budget == pytest.approx(before - 3 + 4 * EXPLORED_SHARE), "as unknown as before, and charged"


def test_a_text_that_was_read_for_a_trial_that_succeeds_is_not_charged():
    for cost, charged in ((1.5, False), (2.5, True)):
        budgets = []
        for unpaid in (0.0, 10.0):
            world = World(Decision(PLAIN, awaited=IN_TURN), in_turn=cost)
            world.decision._has_drafted = True  # a later trial
            world.decision.charge(unpaid)
            budgets.append(world.run(20).decision.budget)
        assert (budgets[1] < budgets[0] - 4) is charged


# --- what is explored ------------------------------------------------------------------------------------------------


def test_plain_decoding_is_measured_then_drafts_are_tried_and_kept_where_they_pay():
    world = World(Decision(PLAIN), in_turn=1.5).run(400)
    assert world.modes[:2] == [(Mode.rest, 1), (Mode.catch_up, PROBE_ROUNDS - 1)]
    assert world.modes[2][0] is Mode.trial
    assert world.share(IN_TURN) > 0.97
    assert world.decision.gain == pytest.approx(2 / 1.5)
    assert {mode for mode, _ in world.modes[3:]} == {Mode.speculate, Mode.probe}


@pytest.mark.extended
def test_what_costs_more_is_tried_more_rarely():
    trials = [
        sum(mode is Mode.trial for mode, _ in World(Decision(PLAIN), in_turn=cost).run(3000).modes)
        for cost in (2.2, 2.6, 4.0)
    ]
    assert trials[0] > trials[1] > trials[2] > 0


def test_drafts_that_begin_to_pay_are_found_and_drafts_that_cease_to_pay_are_left():
    world = World(Decision(PLAIN), in_turn=2.6).run(600)
    assert world.share(PLAIN) > 0.95
    world.costs[IN_TURN] = 1.2
    world.weights[IN_TURN] = 0.0  # as where the text of a new request is another
    assert world.run(800).share(IN_TURN) > 0.95
    world.costs[IN_TURN] = 3.0
    assert world.run(100).share(IN_TURN, 80) < 0.1, "its own rounds show it"


def test_plain_decoding_that_becomes_faster_is_noticed_by_probes():
    world = World(Decision(PLAIN), in_turn=1.7).run(300)
    real = world.estimates

    def as_measured():
        """The estimate of plain decoding changes once plain rounds are measured again."""
        old = real() | {PLAIN: Estimate(1.0, ROUND_S, 0, world.weights[PLAIN])}
        return old if world.weights[PLAIN] < 1 else real()

    world.costs[PLAIN] = 0.5
    world.estimates = as_measured
    assert world.run(1500).share(PLAIN) > 0.9


def test_probes_become_due_with_the_doubt_and_are_rarer_where_more_would_be_lost():
    gaps = []
    for cost in (1.8, 1.2):
        world = World(Decision(PLAIN), in_turn=cost).run(4000)
        probes = [count for mode, count in world.modes if mode is Mode.probe]
        assert set(probes) == {SETTLE_ROUNDS + PROBE_ROUNDS}
        gaps.append(4000 / len(probes))
    assert gaps[1] > 1.5 * gaps[0]


def test_of_two_ways_to_draft_the_faster_is_found_but_not_tried_where_neither_pays():
    assert World(Decision(PLAIN), ahead=1.5, in_turn=1.2).run(600).share(IN_TURN, 300) > 0.9
    assert World(Decision(PLAIN), ahead=1.2, in_turn=1.5).run(600).share(AHEAD, 300) > 0.9
    assert {choice for _, choice in World(Decision(PLAIN), ahead=3.0, in_turn=2.9).run(600).rounds} == {PLAIN, AHEAD}


def test_a_way_that_was_never_tried_waits_until_its_cost_is_saved_up():
    world = World(Decision(AHEAD), ahead=1.5, in_turn=1.3)
    for _ in range(200):
        budget = world.decision.budget
        if world.run(1).decision.choice is IN_TURN:
            assert budget + 2 * EXPLORED_SHARE >= NEW_COST > CREDIT
            return
    raise AssertionError("never tried")


def test_no_plain_round_is_made_to_learn_what_is_known():
    """An estimate of full weight has no error that more rounds could remove: the better choice is taken."""
    known = {
        PLAIN: Estimate(1.0, ROUND_S, 0, FULL_WEIGHT),
        IN_TURN: Estimate(2.0, 1.96 * ROUND_S, 1, FULL_WEIGHT, FULL_WEIGHT, FULL_WEIGHT),
    }
    decision = Decision(IN_TURN, budget=MOST_BUDGET)
    for _ in range(20):
        decision.count(2.0, 1.96 * ROUND_S, 1.96 * ROUND_S)
        decision.decide(known)
        assert decision.choice is IN_TURN


@pytest.mark.parametrize(
    ("seconds", "num_drafts", "stays"), [(0.0205, 20, True), (0.023, 20, False), (0.0205, 60, False)]
)
def test_a_choice_that_is_hardly_slower_goes_on_without_a_budget_until_it_is_well_known(seconds, num_drafts, stays):
    """Leaving it and trying it again would cost more; where its tokens are known it is left at once."""
    decision = Decision(IN_TURN, budget=-1.0, best=IN_TURN)
    plain, drafted = Estimate(1.0, ROUND_S, 0, 30.0), Estimate(2.0, seconds, 4, 20.0, num_drafts, num_drafts)
    for _ in range(4):
        decision.count(2.0, seconds, seconds)
        decision.decide({PLAIN: plain, IN_TURN: drafted})
    assert decision.best is PLAIN or seconds < 0.0204
    assert decision.choice is (IN_TURN if stays else PLAIN)


def test_what_else_is_explored_is_taken_from_the_same_budget():
    decision = Decision(IN_TURN, budget=0.5, best=IN_TURN)
    assert not Decision(IN_TURN, budget=0.5, best=PLAIN).spend(0.3), "a trial has costs of its own"
    assert not Decision(PLAIN, budget=0.5, best=PLAIN).spend(0.3), "at rest there are no drafts"
    assert decision.spend(0.3) and not decision.spend(0.3) and decision.budget == pytest.approx(0.2)


def test_nothing_else_is_explored_while_a_probe_is_saved_up_for():
    """Plain decoding could be, by the error of its estimate, the fastest; the budget does not cover its rounds yet."""
    decision = Decision(IN_TURN, budget=0.05, best=IN_TURN)
    plain, drafted = Estimate(1.0, ROUND_S, 0, 0.5), Estimate(2.2, 2 * ROUND_S, 4, 20.0, 20.0, 20.0)
    for _ in range(3):
        decision.count(2.2, 2 * ROUND_S, 2 * ROUND_S)
        decision.decide({PLAIN: plain, IN_TURN: drafted})
    assert decision.choice is IN_TURN and not decision.spend(0.01)
    decision.budget = 2.0
    decision.decide({PLAIN: plain, IN_TURN: drafted})
    assert decision.choice is PLAIN


def test_drafts_that_are_late_end_speculation_until_the_budget_allows_a_trial():
    world = World(Decision(PLAIN), in_turn=1.5).run(100)
    world.decision.give_up()
    assert world.decision.mode is Mode.rest and world.decision.choice is PLAIN
    world.decision.budget = -1.0
    world.weights[IN_TURN] = 0.0
    rested = world.run(40).rounds[-40:]
    assert {choice for _, choice in rested} == {PLAIN}


def test_pauses_of_a_drafter_whose_drafts_pay_add_up_to_no_long_rest():
    world = World(Decision(PLAIN), in_turn=1.5).run(100)
    for _ in range(40):
        world.decision.charge(3.0)
        world.run(1)
    assert world.decision.mode is Mode.speculate and world.decision.budget == pytest.approx(-MOST_BUDGET, abs=0.1)
    world.decision.give_up()
    world.run(round((MOST_BUDGET + NEW_COST) / EXPLORED_SHARE) + 10)
    assert world.decision.choice is IN_TURN


def test_one_freeze_of_a_drafter_whose_drafts_have_paid_keeps_no_trial_from_following():
    """Its pass waited as long as eight rounds in vain; drafts had saved more."""
    world, rests = World(Decision(PLAIN), in_turn=1.5).run(100), []
    for _ in range(2):
        world.run(3).decision.charge(8.0)
        world.run(1)
        world.decision.give_up()
        world.weights[IN_TURN], rested = 0.0, 0
        while world.run(1).decision.choice is PLAIN:
            rested += 1
            assert rested < 400
        rests.append(rested)
    assert rests[0] < 20, "what drafts had saved pays for it"
    assert rests[1] > 200, "a drafter that freezes again at once is left alone"


@pytest.mark.parametrize("is_far", [False, True])
@pytest.mark.parametrize("num_drafts", [1.0, 30.0])
def test_a_far_drafter_is_tried_only_where_drafts_beside_plain_decoding_say_that_it_pays(is_far, num_drafts):
    decision = Decision(PLAIN, is_far=is_far)
    for speed in (0.8, 1.2):
        estimates = {
            PLAIN: Estimate(1.0, ROUND_S, 0, 10.0),
            IN_TURN: Estimate(5 * speed, 5 * ROUND_S, 8, 2.0, num_drafts, num_drafts),
        }
        decision.budget = MOST_BUDGET
        for _ in range(3):
            decision.count(1.0, ROUND_S, ROUND_S)
            decision.decide(estimates)
        begins = decision.awaited is IN_TURN
        assert begins is (speed > 1 and num_drafts > 1 if is_far else speed > 1 or num_drafts == 1.0)


@pytest.mark.parametrize("is_too_far", [False, True])
def test_a_drafter_so_far_that_none_of_its_drafts_is_worth_the_wait_is_never_tried(is_too_far):
    decision = Decision(PLAIN, is_far=True, is_too_far=is_too_far)
    for _ in range(3):
        decision.count(1.0, ROUND_S, ROUND_S)
        decision.decide(
            {PLAIN: Estimate(1.0, ROUND_S, 0, 10.0), IN_TURN: Estimate(9.0, 5 * ROUND_S, 8, 2.0, 30.0, 30.0)}
        )
    assert (decision.awaited is None) is is_too_far


def begin_far(decision: Decision, tokens: float) -> dict[Decoding, Estimate]:
    """Drafts of a far drafter begin, and are expected to bring so many tokens in five plain rounds."""
    estimates = {
        PLAIN: Estimate(1.0, ROUND_S, 0, 10.0),
        IN_TURN: Estimate(tokens, 5 * ROUND_S, 8, 10.0, 30.0, 30.0),
    }
    while decision.choice is PLAIN:
        decision.count(1.0, ROUND_S, ROUND_S)
        decision.decide(estimates)
        decision.caught_up()
    decision.count(tokens, 5 * ROUND_S, 5 * ROUND_S, estimates, tokens)  # the first of a process is paid by none
    return estimates


def test_what_drafts_of_a_far_drafter_have_lost_is_paid_in_full_and_the_next_ones_need_twice_the_proof():
    """They look faster to the end, so no round of them is exploration; and each brings a token instead of six."""
    decision = Decision(PLAIN, is_far=True)
    estimates = begin_far(decision, 6.0)
    before, lost = decision.budget, 0.0
    while decision.choice is IN_TURN:
        decision.decide(estimates)
        if decision.choice is IN_TURN:
            decision.count(6.0, 5 * ROUND_S, 5 * ROUND_S, estimates, 1.0)
            lost += 4.0
    assert MOST_LOST < lost < MOST_LOST + 8, "it ends, whatever is expected"
    assert decision.mode is Mode.rest and decision.budget < before - lost + 2
    tokens = {1.1: False, 1.2: False, 1.4: True}  # times as fast as plain decoding, of which an error of 0.11 is known
    for speed, begins in tokens.items():
        decision.decide(estimates | {IN_TURN: Estimate(5 * speed, 5 * ROUND_S, 8, 10.0, 30.0, 30.0)})
        for _ in range(3):
            decision.count(1.0, ROUND_S, ROUND_S)
            decision.decide(estimates | {IN_TURN: Estimate(5 * speed, 5 * ROUND_S, 8, 10.0, 30.0, 30.0)})
        assert (decision.awaited is IN_TURN) is begins
    rested = Decision(PLAIN, is_far=True)
    for _ in range(3):
        rested.count(1.0, ROUND_S, ROUND_S)
        rested.decide(estimates | {IN_TURN: Estimate(5 * 1.2, 5 * ROUND_S, 8, 10.0, 30.0, 30.0)})
    assert rested.awaited is IN_TURN, "a negative control: where nothing was lost once is enough"


def test_drafts_of_a_far_drafter_that_pay_leave_the_budget_as_it_is():
    decision = Decision(PLAIN, is_far=True)
    estimates = begin_far(decision, 8.0)
    before = decision.budget
    for _ in range(20):
        decision.decide(estimates)
        decision.count(8.0, 5 * ROUND_S, 5 * ROUND_S, estimates, 8.0)
    for _ in range(3):
        decision.decide(estimates | {IN_TURN: Estimate(2.0, 5 * ROUND_S, 8, 10.0, 30.0, 30.0)})
    assert decision.choice is PLAIN and decision.budget >= before


def test_plain_rounds_that_wait_for_the_proof_of_a_far_drafter_are_no_exploration():
    """They are slower than drafts are expected to be, and were charged: below 0, the budget forbade every trial."""
    decision = Decision(PLAIN, is_far=True)
    known = {PLAIN: Estimate(1.0, ROUND_S, 0, 10.0)}
    for _ in range(40):
        decision.decide({**known, IN_TURN: Estimate(8.0, 2 * ROUND_S, 8, 2.0, 0.1, 0.0)})
        decision.count(1.0, ROUND_S, ROUND_S)
        assert decision.mode is Mode.rest and decision.best is IN_TURN
    decision.decide({**known, IN_TURN: Estimate(8.0, 2 * ROUND_S, 8, 2.0, 4.0, 4.0)})
    assert decision.awaited is IN_TURN


@pytest.mark.parametrize("is_first", [True, False])
def test_what_is_read_for_a_trial_but_the_first_delays_the_next_one_and_ends_none(is_first):
    """The drafter reads the text before the trial, which takes as long as ten plain rounds."""
    trials = []
    for unpaid in (0.0, 10.0):
        world = World(Decision(PLAIN, awaited=IN_TURN), in_turn=2.3)
        world.decision._has_drafted = not is_first
        world.decision.charge(unpaid)
        trials.append([count for mode, count in world.run(400).modes if mode is Mode.trial])
    assert trials[0][0] == trials[1][0] and len(trials[0]) > 1
    assert trials[0] == trials[1] if is_first else len(trials[1]) == 1


def test_drafts_made_behind_the_verdict_that_ended_speculation_are_not_charged():
    world = World(Decision(PLAIN), in_turn=1.2).run(100)
    world.costs[IN_TURN] = 3.0
    while world.run(1).decision.mode is not Mode.rest:
        pass
    before = world.decision.budget
    world.decision.charge(3.0)
    assert world.run(1).decision.budget > before
    world.decision.charge(3.0)
    assert world.run(1).decision.budget < before - 2


def test_a_trial_waits_until_the_drafter_has_read_the_text():
    world = World(Decision(PLAIN), in_turn=1.5).run(50, reads=False)
    assert world.modes == [(Mode.rest, 1), (Mode.catch_up, 49)]
    assert world.decision.caught_up() and world.decision.mode is Mode.trial
    assert not Decision(PLAIN).caught_up(), "nothing was wanted"


def test_the_gain_is_unknown_until_both_sides_are_measured():
    decision = Decision(PLAIN)
    assert decision.gain is None
    plain = Estimate(1.0, ROUND_S, 0, 2.0)
    decision.decide({PLAIN: plain, IN_TURN: Estimate(3.0, ROUND_S)})
    assert decision.gain is None
    decision.decide({PLAIN: plain, IN_TURN: Estimate(3.0, ROUND_S, 2, 1.0, 1.0)})
    assert log(decision.gain or 0) == pytest.approx(log(3))


def test_the_next_round_may_be_the_last_one_only_in_a_trial_or_before_a_probe():
    world = World(Decision(PLAIN), in_turn=1.3)
    for _ in range(800):
        may_end = world.decision.may_end
        before = world.decision.choice
        world.run(1)
        if before.drafts and not world.decision.choice.drafts:
            assert may_end
    assert sum(choice.drafts for _, choice in world.rounds) > 700


@pytest.mark.parametrize("slower", [0.1, 20.0])
def test_a_round_is_counted_in_rounds_of_its_own_load(slower):
    """A plain round while drafts, which bring twice as much, are best: it loses half a round, whatever came before."""

    def under(load):
        return {Decoding.plain: Estimate(1.0, load, 0, 9.0), Decoding.in_turn: Estimate(2.0, load, 2, 9.0, 9.0)}

    decision = Decision(Decoding.plain, best=Decoding.in_turn, estimates=under(1.0))
    decision.count(1.0, slower, slower, under(slower))
    assert decision.budget == pytest.approx(CREDIT - 0.5 + EXPLORED_SHARE)
    decision.count(1.0, slower, slower, {})
    assert decision.budget == pytest.approx(CREDIT - 0.5 + EXPLORED_SHARE), "nothing is compared in this round"
