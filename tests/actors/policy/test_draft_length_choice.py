"""Which lengths are chosen, against trying all lengths of a draft, and the rule of a batch in closed form."""

from __future__ import annotations

import random

import numpy as np
import pytest

from actors.policy.draft_length import EXPLORE_EVERY, FIRST_LENGTH, FIRST_RETRY, DraftLengths, DraftOutcome
from actors.policy.estimators import RequestAcceptance, RoundCosts, Survival

LONGEST, PLAIN_S = 6, 0.010


def costs_of(draft_s, row_s, mean_share=1.0):
    costs = RoundCosts()
    for length in [1, 2, 3, 4, 5, 6] * 5:
        verify_s = PLAIN_S + row_s * length * mean_share
        costs.update(length, length * mean_share, 0.001 + draft_s * length + verify_s, verify_s, draft_s * length)
    return costs


def accepted(draw, chance, length):
    path = 0
    while path < length and draw.random() < chance:
        path += 1
    return range(1, path + 1)


class Trained:
    """Lengths after some rounds of requests that accept more and less, and a second count of their acceptance."""

    def __init__(self, seed, num_requests, shortest=0):
        self.draw = random.Random(seed)
        self.lengths = DraftLengths(shortest, LONGEST)
        self.survival = Survival(LONGEST)
        self.requests = {i: RequestAcceptance() for i in range(num_requests)}
        chances = [self.draw.choice([0.3, 0.6, 0.95]) for _ in range(num_requests)]
        for _ in range(25):
            outcomes = [
                DraftOutcome(i, ordered := self.draw.randrange(LONGEST + 1), accepted(self.draw, chances[i], ordered))
                for i in range(num_requests)
            ]
            self.lengths.update(outcomes, 0)
            for outcome in outcomes:
                if outcome.num_ordered:
                    self.requests[outcome.request_id].update(outcome.num_ordered, len(outcome.path), self.survival)
                    self.survival.update(outcome.num_ordered, outcome.path)

    def best(self, costs, shortest):
        """Tokens per second of every length, and the fastest of those allowed."""
        slopes = costs.per_token_s(PLAIN_S)
        speeds = np.array(self.survival.expected()) / costs.seconds(LONGEST, slopes)
        least = max(1, shortest)
        return speeds, least + int(speeds[least:].argmax())


@pytest.mark.parametrize("shortest", [0, 2])
@pytest.mark.parametrize("seed", range(8))
def test_a_single_request_gets_the_fastest_length_and_now_and_then_one_beside_it(seed, shortest):
    trained = Trained(seed, 1, shortest)
    lengths, costs = trained.lengths, costs_of(trained.draw.uniform(0.0, 0.01), trained.draw.uniform(0.0, 0.004))
    assert lengths.of(0) == max(shortest, FIRST_LENGTH), "nothing is known of costs"
    lengths.choose(RoundCosts(), PLAIN_S, 1)
    assert lengths.of(0) == max(shortest, FIRST_LENGTH)
    _, best = trained.best(costs, shortest)
    found = []
    for _ in range(4 * EXPLORE_EVERY):
        lengths.choose(costs, PLAIN_S, 1)
        found.append(lengths.of(0))
    shorter = best - 1 if best > max(1, shortest) else min(best + 1, LONGEST)
    beside = [shorter, min(best + 1, LONGEST)] * 2
    expected = [length for other in beside for length in [*[best] * (EXPLORE_EVERY - 1), other]]
    assert found == expected


@pytest.mark.parametrize("shortest", [0, 2])
@pytest.mark.parametrize("seed", range(25))
def test_in_a_batch_a_place_is_drafted_where_it_brings_more_than_its_time_elsewhere(seed, shortest):
    trained = Trained(seed, 5, shortest)
    lengths, size = trained.lengths, 5 + trained.draw.randrange(3)  # some take no part in speculation
    costs = costs_of(trained.draw.choice([0.0, 0.0005, 0.004]), trained.draw.choice([0.0, 0.0005, 0.002]))
    lengths.choose(costs, PLAIN_S, size)
    speeds, best = trained.best(costs, shortest)
    draft_s, verify_s = costs.per_token_s(PLAIN_S)
    places = np.arange(1, LONGEST + 1)
    ratios = np.array([[trained.requests[i].ratio()] for i in trained.requests])
    chances = np.array(trained.survival.chances) * ratios**places
    later = places > shortest
    worth = np.logical_and.accumulate((chances >= speeds[best] * verify_s) | ~later, axis=1)
    gain = (chances * worth).sum(axis=0) - speeds[best] * (draft_s * size + verify_s * worth.sum(axis=0))
    drafted = np.logical_and.accumulate((gain >= 0) | ~later)
    expected = (worth & drafted).sum(axis=1)
    if not expected.any():
        expected[:] = best  # whether to speculate at all is the switch's decision
    assert [lengths.of(i) for i in trained.requests] == expected.tolist()
    if shortest == 0 and expected.any():
        for i in np.flatnonzero(expected == 0):
            assert lengths._retries[i].wait == FIRST_RETRY


def test_a_request_without_drafts_is_tried_again_ever_more_rarely_until_one_is_accepted():
    lengths = DraftLengths(0, LONGEST)
    lengths.update([DraftOutcome(i, 4, range(1, 5 * (i > 0))) for i in range(4)], 0)
    for _ in range(30):
        lengths.update([DraftOutcome(i, 4, range(1, 5) if i else ()) for i in range(4)], 0)
    lengths.choose(costs_of(0.0, 0.002), PLAIN_S, 4)
    tried = []
    for round_ in range(1, 200):
        if lengths.of(0):
            assert lengths.of(0) == 1
            tried.append(round_)
            lengths.update([DraftOutcome(0, 1, ())], 0)
        else:
            lengths.update([DraftOutcome(0, 0, ())], 0)
    assert tried == [17, 50, 115]
    for _ in range(400):
        lengths.update([DraftOutcome(0, 0, ())], 0)
    before = list(lengths._survival.chances)
    lengths.update([DraftOutcome(0, 1, (1,))], 0)
    assert lengths._survival.chances == before, "a single attempt says nothing of the others"
    assert 0 not in lengths._retries and lengths._acceptance[0].ratio() == 1.0
    lengths.release(0)
    assert 0 not in lengths._acceptance and 0 not in lengths._by_request


def test_acceptance_is_kept_apart_by_context_and_starts_from_the_last_one():
    lengths, first, second = DraftLengths(0, 3), Survival(3), None
    for context, path in ((0, (1, 2)), (0, ()), (1, (1, 2, 3)), (0, (1,))):
        lengths.update([DraftOutcome(1, 3, path)], context)
        if context and second is None:
            second = Survival(3, like=first)
        (second if context else first).update(3, path)
        assert lengths._survival.chances == (second if context else first).chances
