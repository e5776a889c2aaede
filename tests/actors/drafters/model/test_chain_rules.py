"""Rules that end a chain: what they decide, and that they learn from verdicts."""

from __future__ import annotations

import math
import random

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


def test_a_chain_ends_at_gaps_that_were_wrong_too_often():
    rule, draw = GapRule(0.3), random.Random(3)
    for _ in range(300):
        gaps = [draw.random() for _ in range(6)]
        verified(rule, draw, gaps, lambda gap: 0.95 if gap > 0.3 else 0.4)
    assert rule.continues(1, 0, [0.35]), "a calibrated drafter would be wrong here more often than 0.3"
    assert not rule.continues(1, 0, [0.9, 0.15])
    rule.release(1)
    assert 1 not in rule._drafts
