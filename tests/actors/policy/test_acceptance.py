"""Acceptance against its definitions: products of chances, weighted counts, and sums over places and requests."""

from __future__ import annotations

import random

import numpy as np
import pytest

from actors.policy.acceptance import AcceptanceModel, DraftOutcome, RelativeAcceptance, Survival
from actors.policy.estimators import Ewma


def accepted(draw: random.Random, chance: float, length: int) -> range:
    """The path of a chain whose tokens are each accepted with `chance`."""
    kept = 0
    while kept < length and draw.random() < chance:
        kept += 1
    return range(1, kept + 1)


def every(length, chance=1.0):
    """Chances of a chain of so many tokens that are each accepted with `chance`, well known."""
    survival, likely = Survival(length), random.Random(0)
    for _ in range(1 if chance == 1.0 else 2000):
        survival.update([(length, accepted(likely, chance, length))])
    return survival


# --- chances by place -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chance", [0.3, 0.8])
def test_survival_of_a_chain_is_that_of_its_tokens(chance):
    draw, survival = random.Random(0), Survival(4)
    means = np.zeros(4)
    for _ in range(4000):
        survival.update([(4, accepted(draw, chance, 4))])
        means += np.array(survival.chances) / 4000
    assert means == pytest.approx([chance**i for i in (1, 2, 3, 4)], abs=0.02)
    assert survival.expected_accepted(3) == pytest.approx(
        sum(p / q for p, q in zip(survival.chances[:3], [1.0, *survival.chances], strict=False))
    )


def test_about_the_last_fifty_drafts_count_less_where_rounds_passed_without_drafts():
    survival, paths = Survival(2), [range(1, 1 + n % 3) for n in range(40)]
    for path in paths:
        survival.update([(2, path)])
    ages = 0.98 ** np.arange(40)[::-1]
    counted = [ages @ [place in path for path in paths] / ages.sum() for place in (1, 2)]
    assert survival.chances == pytest.approx(counted) and survival.weight == pytest.approx(ages.sum())
    survival.fade(0.25)
    assert survival.chances == pytest.approx(counted) and survival.weight == pytest.approx(ages.sum() / 4)
    survival.update([(2, [])])
    assert survival.chances == pytest.approx(np.array(counted) * (1 - 1 / (0.98 * ages.sum() / 4 + 1)))


def test_survival_before_anything_was_measured():
    survival = Survival(3)
    assert survival.chances == pytest.approx([0.7, 0.49, 0.343]) and survival.weight == 0
    assert survival.expected_accepted(2) == pytest.approx(1.4)
    survival.update([(3, [1])])
    assert survival.chances == pytest.approx([1, 1e-6, 1e-6]), "the first observation replaces what was expected"
    survival.update([(1, [1])])
    assert survival.expected_accepted(3) == pytest.approx(1 + survival.chances[1] + 1, rel=0.05)
    like = Survival(9, like=every(3), weight=3.0)
    assert like.chances == every(3).chances and like.weight == 3
    like.update([(3, [1])])
    assert like.chances == pytest.approx([1, *[1 - 1 / (0.98 * 3 + 1)] * 2]), "what is taken over counts as three"


def test_places_that_are_not_offered_follow_those_that_are():
    survival = Survival(6)
    for _ in range(300):
        survival.update([(6, range(1, 7))])
    draw = random.Random(0)
    for _ in range(600):
        survival.update([(2, accepted(draw, 0.5, 2))])
    step = survival.chances[1] ** 0.5
    assert survival.chances[2:] == pytest.approx([survival.chances[1] * step**i for i in (1, 2, 3, 4)], rel=0.5)
    assert survival.chances[5] < 0.15, "an old estimate outlived the text it was made on"
    for _ in range(600):
        survival.update([(2, range(1, 3))])
    assert survival.chances[5] > 0.8, "and a longer draft is worth a try again"


# --- one request against the average ----------------------------------------------------------------------------------


def test_a_request_weighs_as_much_as_the_average_after_sixteen_tokens_tested():
    average = every(16)
    assert RelativeAcceptance().ratio() == 1
    for num_ordered, num_accepted, own in ((16, 15, 15 / 16), (16, 16, 1.0)):
        request = RelativeAcceptance()
        request.update([(num_ordered, num_accepted)], average)
        assert request.ratio() == pytest.approx((1 + own) / 2), "midway between the average and its own"
    request = RelativeAcceptance()
    request.update([(4, 3)], average)  # a quarter of the tokens
    assert request.ratio() == pytest.approx((4 * 1 + 3 / 4) / 5)


def test_the_tokens_tested_are_those_accepted_and_the_first_rejected():
    average = Survival(4)  # expects 0.7 of each token tested
    for num_ordered, num_accepted, num_tested in ((4, 0, 1), (4, 2, 3), (4, 4, 4), (1, 1, 1), (1, 0, 1)):
        request = RelativeAcceptance()
        request.update([(num_ordered, num_accepted)], average)
        assert request.ratio() == pytest.approx((16 + num_accepted) / (16 + 0.7 * num_tested))


@pytest.mark.parametrize("chance", [0.2, 0.6, 0.95])
def test_a_ratio_counts_accepted_and_expected_tokens_by_their_age(chance):
    draw, average, request = random.Random(1), every(5, 0.6), RelativeAcceptance()
    survival = [1.0, *average.chances]
    total, expected = 0.0, 0.0
    for _ in range(100):
        ordered = draw.randint(1, 5)
        num = len(accepted(draw, chance, ordered))
        request.update([(ordered, num)], average)
        total = 0.97 * total + num
        expected *= 0.97
        expected += sum(survival[i + 1] / survival[i] for i in range(ordered) if i <= num)
    assert request.ratio() == pytest.approx(min(1.25, (16 + total) / (16 + expected)))
    assert (request.ratio() < 1) is (chance < 0.6)


def test_a_request_is_at_most_a_quarter_over_the_average():
    average, request = Survival(4), RelativeAcceptance()
    for _ in range(200):
        request.update([(4, 4)], average)
    assert request.ratio() == 1.25


# --- classes, requests and ways to draft ------------------------------------------------------------------------------


def test_classes_are_learned_apart_and_a_new_one_starts_from_the_latest():
    acceptance, first, second = AcceptanceModel(3), Survival(3), None
    for key, path in (("a", (1, 2)), ("a", ()), ("b", (1, 2, 3)), ("a", (1,)), ("b", ())):
        if key == "b" and second is None:
            assert acceptance.of_class("b").chances == first.chances, "the latest, which has no weight here"
            assert acceptance.of_class("b").weight == 0
            second = Survival(3, like=first)
        acceptance.update(key, None, [DraftOutcome(1, 3, path)], ())
        (second if key == "b" and second else first).update([(3, path)])
        assert acceptance.of_class("a").chances == first.chances
        assert second is None or acceptance.of_class("b").chances == second.chances
    assert acceptance.of_class("b").chances != first.chances
    assert acceptance.of_class("c").chances == acceptance.of_class("b").chances, "the class of the last drafts"
    acceptance.update("a", None, [DraftOutcome(1, 3, (1, 2, 3))], ())
    assert acceptance.of_class("d").chances == acceptance.of_class("a").chances != acceptance.of_class("c").chances


def test_requests_without_drafts_and_those_left_out_say_nothing_of_the_others():
    acceptance = AcceptanceModel(3)
    acceptance.update(0, "way", [DraftOutcome(1, 3, (1, 2))], ())
    average, expected = acceptance.of_class(0).chances, acceptance.expected(0, (), "way")
    acceptance.update(0, "way", [DraftOutcome(2, 3, ()), DraftOutcome(3, 0, ())], [2])
    assert acceptance.of_class(0).chances == average and acceptance.expected(0, (), "way") == expected
    assert acceptance.of_request(2).ratio() < 1 == acceptance.of_request(3).ratio()
    assert [acceptance.of_request(i).num_drafts for i in (1, 2, 3)] == [1, 1, 0]
    acceptance.update(0, "way", [DraftOutcome(2, 3, ())], [2])
    assert acceptance.of_request(2).num_drafts == pytest.approx(1.97)
    acceptance.release(2)
    assert acceptance.of_request(2).ratio() == 1 and acceptance.of_request(2).num_drafts == 0
    acceptance.release(2)


@pytest.mark.parametrize("num_requests", [1, 16, 64])
def test_a_large_batch_remembers_more_drafts_and_no_more_rounds_than_one_request(num_requests):
    """A change is seen within fifty drafts or eight rounds; before it, an estimate of a batch hardly moves."""
    draw, survival = random.Random(0), Survival(1)
    means = []
    for round_ in range(240):
        chance = 0.8 if round_ < 200 else 0.2
        survival.update([(1, accepted(draw, chance, 1)) for _ in range(num_requests)])
        means += survival.chances
    num_followed = 39 if num_requests == 1 else 8
    assert np.std(means[100:200]) < (0.1 if num_requests == 1 else 0.05)
    assert means[199 + num_followed] < 0.55 < means[199 + num_followed // 4]


@pytest.mark.parametrize("seed", range(6))
def test_expected_tokens_are_the_sum_over_places_of_the_mean_over_requests(seed):
    """Requests and ways that accept more and less, against counts of their own in the order of the rounds."""
    draw, acceptance = random.Random(seed), AcceptanceModel(4)
    chances = {request_id: draw.choice([0.2, 0.6, 0.95]) for request_id in range(4)}
    average = Survival(4)
    ways = {way: RelativeAcceptance(Ewma(0.99), Ewma(0.99)) for way in ("ahead", "in turn")}  # texts share their ways
    requests = {request_id: RelativeAcceptance() for request_id in chances}
    for _ in range(40):
        way = draw.choice(list(ways))
        outcomes = []
        for request_id, chance in chances.items():
            path = accepted(draw, chance * (0.5 if way == "ahead" else 1.0), 4)
            outcomes.append(DraftOutcome(request_id, 4, path))
            requests[request_id].update([(4, len(path))], average)
        ways[way].update([(4, len(one.path)) for one in outcomes], average)
        average.update([(4, one.path) for one in outcomes])
        acceptance.update("text", way, outcomes, ())
    assert ways["ahead"].ratio() < 0.95 and ways["in turn"].ratio() > 1.02
    asked = draw.sample(range(6), 3)  # 4 and 5 never got a draft
    for way in (None, "ahead", "in turn", "never used"):
        of_way = ways[way].ratio() if way in ways else 1.0
        tokens = acceptance.expected("text", asked, way)
        assert tokens[0] == 1 and len(tokens) == 5
        for place, chance in enumerate(average.chances, 1):
            each = [of_way * (requests[one].ratio() if one in requests else 1.0) for one in asked]
            brought = np.mean([min(1.0, chance * ratio**place) for ratio in each])
            assert tokens[place] - tokens[place - 1] == pytest.approx(brought)
        of_all = np.minimum(1, np.array(average.chances) * of_way ** np.arange(1, 5))
        assert acceptance.expected("text", (), way) == pytest.approx(np.cumsum([1, *of_all]))
    ordered = [DraftOutcome(one, length, ()) for one, length in zip(asked, (0, 2, 4), strict=True)]
    brought = 0.0
    for outcome in ordered:
        ratio = requests[outcome.request_id].ratio() if outcome.request_id in requests else 1.0
        brought += 1 + sum(min(1.0, average.chances[i] * ratio ** (i + 1)) for i in range(outcome.num_ordered))
    assert acceptance.expected_of("text", ordered) == pytest.approx(brought / 3)


def test_no_draft_is_expected_to_bring_more_tokens_than_it_has():
    acceptance = AcceptanceModel(3)
    for _ in range(100):  # 2 accepts more than the average of both
        acceptance.update(0, None, [DraftOutcome(1, 3, ()), DraftOutcome(2, 3, (1, 2, 3))], ())
    for _ in range(300):
        acceptance.update(0, None, [DraftOutcome(3, 3, (1, 2, 3))], ())
    assert acceptance.of_request(2).ratio() > 1.1
    assert acceptance.expected(0, [2]) == pytest.approx([1, 2, 3, 4], rel=1e-3)
    assert max(np.diff(acceptance.expected(0, [2]))) <= 1


def test_what_is_known_of_the_mean_of_requests_grows_with_their_number():
    model = AcceptanceModel(4)
    for _ in range(9):
        model.update("text", None, [DraftOutcome(i, 2, (1,), 2) for i in range(4)], ())
    known = model.of_request(0).num_drafts
    assert 6 < known < 9 and model.num_drafts_of_mean([0]) == pytest.approx(known)
    assert model.num_drafts_of_mean([99]) == 0, "a new one"
    assert model.num_drafts_of_mean(range(4)) == pytest.approx(4 * (1 + known) - 1)
    assert known < model.num_drafts_of_mean([0, 1, 2, 99]) < model.num_drafts_of_mean(range(4))


def test_one_draft_is_learned_from_as_a_round_of_it():
    alone, in_round, draw = Survival(6), Survival(6), random.Random(1)
    for _ in range(50):
        num_offered = draw.randint(1, 6)
        path = sorted(draw.sample(range(1, num_offered + 1), draw.randint(0, num_offered)))
        alone.update_one(num_offered, path)
        in_round.update([(num_offered, path)])
    assert alone.chances == in_round.chances and alone.weight == in_round.weight
