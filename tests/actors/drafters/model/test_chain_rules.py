"""Rules that end a chain: what they decide, and that they learn from verdicts."""

from __future__ import annotations

import math
import random

import pytest

from actors.drafters.model.chain_rules import GapRule, ProbabilityRule, ThompsonRule, ThresholdRule


def drafted(rule, chances, step=0, longest=9, request_id=0):
    """Tokens of a draft whose tokens have these probabilities."""
    log_probs = []
    for chance in chances[:longest]:
        log_probs.append(math.log(chance))
        if not rule.continues(request_id, step, log_probs):
            break
    return len(log_probs)


def test_a_chain_ends_with_the_token_that_makes_a_rejection_too_likely():
    assert drafted(ThresholdRule(0.3), [0.9] * 9) == 4, "0.9 ** 3 is above 0.7, 0.9 ** 4 is not; the fourth stays"
    assert drafted(ThresholdRule(0.3), [0.5] * 9) == 1
    assert drafted(ThresholdRule(0.8), [0.5] * 9) == 3


def test_an_overconfident_drafter_drafts_less_in_time():
    rule, draw = ThresholdRule(0.3), random.Random(0)
    before = drafted(rule, [0.95] * 9)
    for _ in range(60):
        length = drafted(rule, [0.95] * 9)
        accepted = next((i for i in range(length) if draw.random() > 0.5), length)
        rule.update(0, accepted)
    assert drafted(rule, [0.95] * 9) <= 2 < before


def test_a_drafter_that_is_right_where_it_doubts_drafts_more_in_time():
    rule = ThresholdRule(0.3)
    before = drafted(rule, [0.6] * 9)
    for _ in range(60):
        rule.update(0, drafted(rule, [0.6] * 9))
    assert drafted(rule, [0.6] * 9) > 5 > before


def test_only_tokens_that_were_tested_teach():
    """What follows a rejected token was not compared with the target."""
    short, long = ThresholdRule(0.999), ThresholdRule(0.999)
    assert drafted(short, [0.9] * 2) == 2 and drafted(long, [0.9] * 9) == 9
    for rule in (short, long):
        rule.update(0, 1)
    assert short._confidence.shift == long._confidence.shift != 0.0


def lengths_of(rule, chance, request_id, rounds, seed=1):
    draw, lengths = random.Random(seed), []
    for step in range(rounds):
        length = drafted(rule, [0.5] * 8, step, request_id=request_id)
        lengths.append(length)
        rule.update(request_id, next((i for i in range(length) if draw.random() > chance), length))
    return lengths


def test_thompson_follows_the_request():
    rule = ThompsonRule()
    easy, hard = (lengths_of(rule, chance, i, 200)[50:] for i, chance in enumerate((0.95, 0.1)))
    assert sum(easy) / len(easy) > 2.5 * sum(hard) / len(hard)
    assert len(set(easy)) > 3, "it tries short drafts too"
    rule.release(0)
    assert not rule._requests.keys() & {0}


def test_thompson_decides_alike_on_every_rank():
    one, other = ThompsonRule(), ThompsonRule()
    assert lengths_of(one, 0.7, 0, 50) == lengths_of(other, 0.7, 0, 50)


def verified(rule, draw, places, chance, longest=9):
    """One draft and its verdict; `places` are the probability or gap of each token, of which `chance` is right."""
    seen = []
    for place in places[:longest]:
        seen.append(place if rule.reads_gaps else math.log(place))
        if not rule.continues(0, 0, seen):
            break
    rule.update(0, next((i for i, one in enumerate(places[: len(seen)]) if draw.random() > chance(one)), len(seen)))
    return len(seen)


def test_the_least_probability_rises_until_nine_of_ten_tokens_are_accepted():
    rule, draw = ProbabilityRule(), random.Random(2)
    assert drafted(rule, [0.9, 0.8, 0.5, 0.9]) == 3, "the token below the threshold stays"
    rule.release(0)
    lax = rule.xi
    for _ in range(800):
        verified(rule, draw, [0.9, 0.65, 0.65, 0.1, 0.1], lambda p: p if p > 0.8 else 0.3)
    assert rule.xi > 0.65 > lax, "tokens of probability 0.65 are accepted too rarely to go on after them"
    for _ in range(2000):
        verified(rule, draw, [0.4] * 9, lambda _: 1.0)
    assert rule.xi < 0.4, "all were accepted, so drafts go on where the drafter doubts"


def test_a_given_least_probability_ends_drafts_and_stays():
    """Kangaroo's second exit: the token below 0.6 is the last one, whatever was accepted before."""
    rule, draw = ProbabilityRule(0.6), random.Random(2)
    for right in (0.0, 1.0):
        for _ in range(100):
            assert verified(rule, draw, [0.9, 0.61, 0.59, 0.9], lambda _, right=right: right) == 3
    assert rule.xi == 0.6


def test_a_draft_that_its_budget_ended_leaves_the_threshold():
    rule = ProbabilityRule()
    before = rule.xi
    assert drafted(rule, [0.95] * 9) == 9
    rule.update(0, 2)
    assert rule.xi == before
    drafted(rule, [0.95, 0.1])
    rule.update(0, 1)
    assert rule.xi > before


def least_gap(rule):
    """The least gap, in hundredths, after which a chain goes on; above it none ends one."""
    goes_on = [rule.continues(9, 0, [i / 100]) for i in range(101)]
    rule.release(9)
    first = goes_on.index(True)
    assert all(goes_on[first:])
    return first / 100


@pytest.mark.parametrize(("threshold", "expected"), [(0.6, 0.466), (0.3, 0.570)])
def test_a_chain_ends_at_gaps_that_are_wrong_too_often(threshold, expected):
    """The gaps of right tokens are Beta(5, 2), those of the others Beta(2, 5), whose densities have the ratio
    (x / (1 - x)) ** 3: they are as 0.4 to 0.6, the published chance, at 0.466, and as 0.7 to 0.3 at 0.570."""
    rule, draw, found = GapRule(threshold), random.Random(3), []
    for drafts in range(1500):
        rights = [draw.random() < 0.6 for _ in range(4)]
        seen = []
        for is_right in rights:
            seen.append(draw.betavariate(*((5, 2) if is_right else (2, 5))))
            rule.continues(0, 0, seen)
        rule.update(0, rights.index(False) if False in rights else 4)
        if drafts > 500 and not drafts % 20:
            found.append(least_gap(rule))
    assert sum(found) / len(found) == pytest.approx(expected, abs=0.03)
    assert 0 not in rule._requests


def test_gaps_behind_a_rejected_token_teach_nothing():
    one, other = GapRule(0.5), GapRule(0.5)
    for rule, behind in ((one, 0.9), (other, 0.1)):
        rule.continues(0, 0, [0.8, 0.4, behind])
        rule.update(0, 1)
        assert rule.least_gap != GapRule(0.5).least_gap
    assert one.least_gap == other.least_gap
