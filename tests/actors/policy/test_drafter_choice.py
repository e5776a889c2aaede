"""The choice among drafters: the best of all assignments, bounded exploration, and the bonus that explores nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from actors.policy.decision import EXPLORED_SHARE, MOST_BUDGET
from actors.policy.drafter_choice import (
    CREDIT,
    NO_DRAFTER,
    PRIOR_LENGTH,
    DrafterAcceptance,
    DrafterChoice,
    Offer,
    RoundTimes,
    assign,
    saved_s,
)

LOOKUP, MODEL = 0, 1
PASS_S, REST_S, ROW_S = 0.001, 0.010, 0.0002
TIMES = RoundTimes(lambda drafter, _: (0.0, PASS_S if drafter == MODEL else 0.0), REST_S, ROW_S)
OF_THREE = replace(TIMES, per_row_s=ROW_S / 3, num_requests=3)


def offer(drafter, chance, longest):
    return Offer(
        drafter, range(1, longest + 1), [sum(chance**i for i in range(1, k + 1)) for k in range(1, longest + 1)]
    )


def best_by_trying(offers, times):
    """Tokens per second of the best of all assignments."""
    options = [
        [
            (NO_DRAFTER, 0, 0.0),
            *((one.drafter, *pair) for one in request for pair in zip(one.lengths, one.expected, strict=True)),
        ]
        for request in offers
    ]
    return max(
        (len(picks) + sum(value for *_, value in picks)) / times.seconds([(drafter, k) for drafter, k, _ in picks])
        for picks in product(*options)
    )


@pytest.mark.parametrize("seed", range(20))
def test_one_request_gets_the_best_of_all_drafters_and_lengths(seed):
    draw = random.Random(seed)
    costs = [0.0, *(draw.uniform(0, 0.004) for _ in range(2))]
    times = RoundTimes(lambda drafter, _: (0.0, costs[drafter]), REST_S, draw.choice([0.0, ROW_S, 0.002]))
    offers = [[offer(drafter, draw.random(), draw.randint(1, 6)) for drafter in range(3)]]
    assert assign(offers, times).speed == pytest.approx(best_by_trying(offers, times))


@pytest.mark.parametrize("seed", range(8))
def test_a_batch_comes_close_to_the_best_of_all_assignments(seed):
    """A pass of a model is shared by the requests that use it, so choosing for each by itself would not be enough."""
    draw = random.Random(seed)
    offers = [[offer(LOOKUP, draw.choice([0.1, 0.9]), 3), offer(MODEL, 0.7, 3)] for _ in range(3)]
    found = assign(offers, OF_THREE)
    assert found.speed == pytest.approx(found.tokens / OF_THREE.seconds(found.picks))
    assert found.speed > 0.97 * best_by_trying(offers, OF_THREE)


def test_a_drafter_that_is_dear_for_many_drafts_for_few():
    """A token takes as long as there are requests to draft it for: only one of eight is worth that."""
    times = RoundTimes(lambda drafter, users: (0.0, 0.0006 * users if drafter == MODEL else 0.0), REST_S, 0.0, 8)
    offers = [[offer(MODEL, 0.9 if row == 3 else 0.1, 4)] for row in range(8)]
    found = assign(offers, times)
    assert [drafter for drafter, _ in found.picks] == [MODEL if row == 3 else NO_DRAFTER for row in range(8)]
    assert found.seconds == pytest.approx(REST_S + 0.0006 * found.picks[3][1])


def test_lengths_that_bring_nothing_hide_no_longer_one():
    """Those are the best at no price of a token, so a batch is offered only what lies on the hull."""
    offers = [[Offer(MODEL, range(1, 4), (0.0, 0.0, 3.0))]] * 2
    assert assign(offers, TIMES).picks == [(MODEL, 3)] * 2
    assert assign([[Offer(MODEL, range(1, 4), (1.0, 1.0, 1.1))]] * 2, TIMES).picks == [(MODEL, 1)] * 2


def test_a_tree_is_taken_whole_or_not_at_all():
    tree = Offer(LOOKUP, (9,), (2.0,))
    assert assign([[tree]], TIMES).picks == [(LOOKUP, 9)]
    dear = RoundTimes(lambda *_: (0.0, 0.0), REST_S, 0.003)
    assert assign([[tree]], dear).picks == [(NO_DRAFTER, 0)]


def test_what_a_drafter_costs_decides():
    dear = RoundTimes(lambda drafter, _: (0.0, 0.004 if drafter == MODEL else 0.0), REST_S, 0.0)
    offers = [[offer(LOOKUP, 0.5, 8), offer(MODEL, 0.8, 8)]]
    assert assign(offers, TIMES).picks[0][0] == MODEL
    assert assign(offers, dear).picks[0][0] == LOOKUP


# --- a scripted world: a lookup whose acceptance is known at once, a model that is scored only where it drafted -------


class World:
    """Rounds of one request; `chances` of the model by round, and what it really accepts."""

    def __init__(self, seed=0, lookup_chance=0.5, model_chance=lambda _: 0.9, pass_s=PASS_S):
        self.draw = random.Random(seed)
        self.choice = DrafterChoice([6, 6], [True, False])
        self.lookup_chance, self.model_chance = lookup_chance, model_chance
        self.times = RoundTimes(lambda drafter, _: (0.0, pass_s if drafter == MODEL else 0.0), REST_S, 0.0)
        self.seconds, self.tokens, self.used = 0.0, 0, []

    def accepted(self, chance, length):
        count = 0
        while count < length and self.draw.random() < chance:
            count += 1
        return count

    def run(self, num_rounds):
        for round_ in range(num_rounds):
            lookup = self.accepted(self.lookup_chance, 6)
            acceptance = self.choice.acceptance
            offers = [
                [
                    Offer(i, range(1, 7), acceptance[i].expected(0, (0, 0), 6), error=i * acceptance[i].error(0))
                    for i in (LOOKUP, MODEL)
                ]
            ]
            found = self.choice.choose(offers, self.times)
            ((drafter, length),) = found.picks
            acceptance[LOOKUP].update(0, (0, 0), 6, lookup)
            taken = min(lookup, length)
            if drafter == MODEL:
                taken = self.accepted(self.model_chance(round_), length)
                acceptance[MODEL].update(0, (0, 0), length, taken)
            self.tokens += 1 + taken
            self.seconds += self.times.seconds(found.picks)
            self.used.append(drafter)
        return self


def unlucky_start(world, num_drafts=12):
    """The model's first drafts were rejected, as those of a hard beginning."""
    for _ in range(num_drafts):
        world.choice.acceptance[MODEL].update(0, (0, 0), 6, 0)
    world.choice.acceptance[MODEL].release(0)
    return world


def test_a_drafter_that_began_badly_is_tried_again_and_wins():
    world = unlucky_start(World()).run(400)
    assert world.used[-100:].count(MODEL) > 80


def test_without_the_error_of_its_estimate_it_is_never_tried_again(monkeypatch):
    """A bonus by the count of all drafters, as in the released code of BanditSpec, is one for all: no exploration."""
    monkeypatch.setattr(DrafterAcceptance, "error", lambda *_: 0.0)
    world = unlucky_start(World()).run(400)
    assert world.used.count(MODEL) == 0


def test_a_drafter_that_became_better_is_found():
    world = World(model_chance=lambda round_: 0.05 if round_ < 300 else 0.95).run(900)
    assert world.used[150:300].count(MODEL) < 25
    assert world.used[-150:].count(MODEL) > 100


def test_exploring_costs_no_more_than_its_share():
    """Trying a hopeless, dear model loses at most the share of the time, and what was saved at the start."""
    world = World(model_chance=lambda _: 0.0, pass_s=0.003, lookup_chance=0.3).run(1000)
    tries = world.used.count(MODEL)
    lost_s = world.seconds - 1000 * REST_S
    assert tries > 2, "a drafter that was never tried could not be found when it becomes good"
    assert lost_s < (EXPLORED_SHARE * 1000 + 2 * MOST_BUDGET) * REST_S * 1.5


# --- text that a drafter has yet to read ------------------------------------------------------------------------------


def unread_model(chance, read_s):
    return [[offer(LOOKUP, 0.2, 6), offer(MODEL, chance, 6)._replace(read_s=read_s)]]


def test_reading_pays_if_the_request_goes_on_for_long_enough():
    choice = DrafterChoice([6, 6], [True, False])
    saved, tokens = saved_s(unread_model(0.9, 0.1)[0][:1], unread_model(0.9, 0.1)[0][1], TIMES)
    assert saved > 0
    worth = PRIOR_LENGTH * saved / tokens
    for read_s, num_generated, pays in ((0.9 * worth, 0, True), (1.1 * worth, 0, False), (0.9 * worth, 64, False)):
        ((_, weighed),) = choice.weigh_reading([0], [num_generated], unread_model(0.9, read_s), TIMES)
        assert weighed.read_s == (0.0 if pays else read_s)


def test_reading_does_not_pay_for_a_drafter_that_brings_nothing():
    choice = DrafterChoice([6, 6], [True, False])
    ((_, weighed),) = choice.weigh_reading([0], [0], unread_model(0.1, 1e-6), TIMES)
    assert weighed.read_s


def test_what_reading_saves_is_learned_by_request():
    """Lookups are good at request 0 and bad at request 1; one that arrives is expected to be as the average."""
    choice = DrafterChoice([6, 6], [True, False])
    offers = [[offer(LOOKUP, chance, 6), offer(MODEL, 0.9, 6)._replace(read_s=0.1)] for chance in (0.95, 0.2)]
    for _ in range(20):
        choice.weigh_reading([0, 1], [0, 0], offers, TIMES)
    good, bad, unknown = (choice.reading[MODEL].saves_s(i, 2, 100) for i in (0, 1, 2))
    assert good < unknown < bad


def test_what_reading_saves_one_of_many_is_its_part_of_the_round():
    """Learned of one request at a time: a text that is read for it is not read for each of 16, until their own rounds
    tell otherwise."""
    choice = DrafterChoice([6, 6], [True, False])
    for request_id in range(20):
        choice.weigh_reading([request_id], [0], unread_model(0.9, 0.1), TIMES)
    read_s = 0.5 * choice.reading[MODEL].saves_s(99, 1, PRIOR_LENGTH)
    assert choice.should_read(MODEL, 99, 1, 0, read_s) and not choice.should_read(MODEL, 99, 16, 0, read_s)
    dear = replace(TIMES, rest_s=20 * REST_S, num_requests=16)
    for _ in range(40):
        choice.weigh_reading([*range(16)], [0] * 16, unread_model(0.9, 0.1) * 16, dear)
    assert choice.should_read(MODEL, 99, 16, 0, read_s)


@pytest.mark.parametrize("read_s", [0.0, 0.02, 0.2])
def test_exploration_of_a_drafter_that_has_to_read_is_saved_up_for(read_s):
    choice = DrafterChoice([6, 6], [True, False])
    for _ in range(12):
        choice.acceptance[MODEL].update(0, (0, 0), 6, 0)
    rounds = 1

    def offers():
        lookup, model = unread_model(0.0, read_s)[0]
        return [[lookup, model._replace(error=choice.acceptance[MODEL].error(0))]]

    while choice.choose(offers(), TIMES).picks[0][0] != MODEL:
        rounds += 1
        assert rounds < 10_000
    assert rounds > (read_s / REST_S - CREDIT) / EXPLORED_SHARE


def test_long_matches_are_distinguished_from_short_ones():
    """Kinds of drafts are learned apart: one that is good is taken, one that is bad is not, of the same drafter."""
    acceptance = DrafterAcceptance(8)
    for _ in range(30):
        acceptance.update(0, "long", 8, 8)
        acceptance.update(0, "short", 2, 0)
    assert acceptance.expected(0, "long", 8)[-1] > 6
    assert acceptance.expected(0, "short", 2)[-1] < 0.3


def test_a_request_is_distinguished_from_the_others():
    acceptance = DrafterAcceptance(4)
    for _ in range(20):
        acceptance.update(0, None, 4, 3)
        acceptance.update(1, None, 4, 0)
    easy, hard, unknown = (acceptance.expected(i, None, 4)[-1] for i in (0, 1, 2))
    assert easy > unknown > hard
    acceptance.release(1)
    assert acceptance.expected(1, None, 4)[-1] == unknown
