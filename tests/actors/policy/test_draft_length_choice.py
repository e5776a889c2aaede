"""Which lengths are chosen, against trying all lengths of a draft, and the rule of a batch in closed form."""

from __future__ import annotations

import random

import numpy as np
import pytest

from actors.policy.acceptance import AcceptanceModel, DraftOutcome, RelativeAcceptance, Survival
from actors.policy.costs import MeasuredRound, RoundCosts
from actors.policy.draft_length import EXPLORE_EVERY, FIRST_LENGTH, FIRST_RETRY, DraftLengths, Tradeoff

LONGEST, PLAIN_S = 6, 0.010


def costs_of(draft_s, row_s, mean_share=1.0):
    costs = RoundCosts()
    for length in [1, 2, 3, 4, 5, 6] * 5:
        mean = length * mean_share
        costs.update(MeasuredRound(PLAIN_S + row_s * mean, 0.001 + draft_s * length, draft_s * length, length, mean))
    return costs


def accepted(draw, chance, length):
    path = 0
    while path < length and draw.random() < chance:
        path += 1
    return range(1, path + 1)


def tradeoff_of(tokens, costs, shortest=0):
    lines = costs.by_length(PLAIN_S)
    return Tradeoff(tokens, lines.seconds(len(tokens) - 1), lines.draft_s, lines.verify_s, shortest)


class Rounds:
    """Lengths and acceptance as a round moves them."""

    def __init__(self, shortest=0):
        self.shortest = shortest
        self.lengths, self.acceptance = DraftLengths(shortest, LONGEST), AcceptanceModel(LONGEST)

    @property
    def chances(self):
        return self.acceptance.of_class(0).chances

    def update(self, *outcomes):
        self.acceptance.update(0, None, outcomes, self.lengths.retried)
        self.lengths.update(outcomes, self.acceptance)

    def choose(self, costs, request_ids):
        tradeoff = tradeoff_of(1 + np.cumsum([0, *self.chances]), costs, self.shortest)
        self.lengths.choose(tradeoff, request_ids, self.acceptance, self.chances)


class Trained(Rounds):
    """Lengths after some rounds of requests that accept more and less, and a second count of their acceptance."""

    def __init__(self, seed, num_requests, shortest=0):
        super().__init__(shortest)
        self.draw = random.Random(seed)
        self.survival = Survival(LONGEST)
        self.requests = {i: RelativeAcceptance() for i in range(num_requests)}
        chances = [self.draw.choice([0.3, 0.6, 0.95]) for _ in range(num_requests)]
        for _ in range(25):
            outcomes = [
                DraftOutcome(i, ordered := self.draw.randrange(LONGEST + 1), accepted(self.draw, chances[i], ordered))
                for i in range(num_requests)
            ]
            self.update(*outcomes)
            drafted = [outcome for outcome in outcomes if outcome.num_ordered]
            for outcome in drafted:
                lengths = outcome.num_ordered, len(outcome.path)
                self.requests[outcome.request_id].update([lengths], self.survival)
            if drafted:
                self.survival.update([(outcome.num_ordered, outcome.path) for outcome in drafted])

    def best(self, costs, shortest):
        """Tokens per second of every length, and the fastest of those allowed."""
        speeds = (1 + np.cumsum([0, *self.survival.chances])) / costs.by_length(PLAIN_S).seconds(LONGEST)
        least = max(1, shortest)
        return speeds, least + int(speeds[least:].argmax())


@pytest.mark.parametrize("seed", range(8))
def test_the_best_length_has_the_most_tokens_per_second_of_those_allowed(seed):
    draw = random.Random(seed)
    tokens, seconds = ([draw.uniform(1, 5) for _ in range(8)] for _ in range(2))
    for shortest in range(8):
        tradeoff = Tradeoff(tokens, seconds, 0.0, 0.0, shortest)
        speeds = {k: tokens[k] / seconds[k] for k in range(max(1, shortest), 8)}
        assert tradeoff.best == max(speeds, key=lambda k: speeds[k])
        assert tradeoff.speeds[shortest] == pytest.approx(tokens[shortest] / seconds[shortest])


@pytest.mark.parametrize("shortest", [0, 2])
@pytest.mark.parametrize("seed", range(8))
def test_a_single_request_gets_the_fastest_length_and_now_and_then_one_beside_it(seed, shortest):
    trained = Trained(seed, 1, shortest)
    lengths, costs = trained.lengths, costs_of(trained.draw.uniform(0.0, 0.01), trained.draw.uniform(0.0, 0.004))
    assert lengths.of(0) == max(shortest, FIRST_LENGTH), "nothing is known of costs"
    assert [DraftLengths(*bounds).of(0) for bounds in ((0, 1), (5, 6))] == [1, 5]
    _, best = trained.best(costs, shortest)
    found = []
    for _ in range(4 * EXPLORE_EVERY):
        trained.choose(costs, [0])
        found.append(lengths.of(0))
    shorter = best - 1 if best > max(1, shortest) else min(best + 1, LONGEST)
    beside = [shorter, min(best + 1, LONGEST)] * 2
    expected = [length for other in beside for length in [*[best] * (EXPLORE_EVERY - 1), other]]
    assert found == expected


@pytest.mark.parametrize("shortest", [0, 2])
@pytest.mark.parametrize("seed", range(25))
def test_in_a_batch_a_place_is_drafted_where_it_saves_the_request_more_time_than_its_row_takes(seed, shortest):
    trained = Trained(seed, 5, shortest)
    lengths, size = trained.lengths, 5 + trained.draw.randrange(3)  # some take no part in speculation
    costs = costs_of(trained.draw.choice([0.0, 0.0005, 0.004]), trained.draw.choice([0.0, 0.0005, 0.002]))
    trained.choose(costs, range(size))
    speeds, best = trained.best(costs, shortest)
    lines = costs.by_length(PLAIN_S)
    draft_s, verify_s = lines.draft_s, lines.verify_s
    places = np.arange(1, LONGEST + 1)
    ratios = np.array([[trained.requests[i].ratio()] for i in trained.requests])
    chances = np.array(trained.survival.chances) * ratios**places
    later = places > shortest
    chances = np.minimum(chances, 1.0)
    shared_s = lines.seconds(LONGEST)[best] - best * verify_s
    tokens = 1 + np.cumsum(chances, axis=1) - chances  # of the places before
    token_s = (shared_s + (places - 1) * verify_s) / tokens
    if shortest == 0:
        token_s[:, 0] = np.minimum(token_s[:, 0], 1 / speeds[best])
    worth = np.logical_and.accumulate((chances * token_s >= verify_s) | ~later, axis=1)
    gain = (chances * token_s * worth).sum(axis=0) - (draft_s * size + verify_s * worth.sum(axis=0))
    drafted = np.logical_and.accumulate((gain >= 0) | ~later)
    expected = (worth & drafted).sum(axis=1)
    if not expected.any():
        expected[:] = best  # whether to speculate at all is decided elsewhere
    assert [lengths.of(i) for i in trained.requests] == expected.tolist()
    if shortest == 0 and expected.any():
        for i in np.flatnonzero(expected == 0).tolist():
            assert lengths._retries[i].wait == FIRST_RETRY


def test_a_request_without_drafts_is_tried_again_ever_more_rarely_until_one_is_accepted():
    rounds = Rounds()
    lengths, acceptance = rounds.lengths, rounds.acceptance
    for _ in range(31):
        rounds.update(*(DraftOutcome(i, 4, range(1, 5) if i else ()) for i in range(4)))
    rounds.choose(costs_of(0.0, 0.002), range(4))
    assert list(lengths.retried) == [0] and acceptance.of_request(0).ratio() < 0.6
    tried = []
    for round_ in range(1, 200):
        if lengths.of(0):
            assert lengths.of(0) == 1
            tried.append(round_)
            rounds.update(DraftOutcome(0, 1, ()))
        else:
            rounds.update(DraftOutcome(0, 0, ()))
    assert tried == [17, 50, 115]
    for _ in range(400):
        rounds.update(DraftOutcome(0, 0, ()))
    before = list(rounds.chances)
    rounds.update(DraftOutcome(0, 1, (1,)))
    assert rounds.chances == before, "a single attempt says nothing of the others"
    assert not lengths.retried and acceptance.of_request(0).ratio() == 1.0
    rounds.choose(costs_of(0.0, 0.002), range(4))
    assert lengths.of(0) == lengths.of(9) > 1, "and the request is as one that has had no draft yet"
    rounds.update(DraftOutcome(0, 4, ()))
    assert rounds.chances < before, "an order of a request that has drafts counts"
    lengths.release(0)
    lengths.release(1)
    assert not lengths._by_request.keys() & {0, 1}


def test_a_request_that_ended_is_not_tried_again():
    rounds = Rounds()
    for _ in range(31):
        rounds.update(*(DraftOutcome(i, 4, range(1, 5) if i else ()) for i in range(4)))
    rounds.choose(costs_of(0.0, 0.002), range(4))
    assert rounds.lengths.of(0) == 0
    rounds.lengths.release(0)
    assert not rounds.lengths.retried and rounds.lengths.of(0) > 1


def test_requests_without_a_draft_so_far_get_the_best_length_of_all():
    trained = Trained(3, 4)
    costs = costs_of(0.0005, 0.0005)
    trained.choose(costs, range(5))
    assert trained.lengths.of(4) == trained.best(costs, 0)[1]


@pytest.mark.parametrize(("exchange_s", "informative"), [(0.0, 1), (0.004, 2), (0.025, 4)])
def test_a_trial_drafts_as_much_as_costs_hardly_more(exchange_s, informative):
    """The best length after a draft that failed at once is one token; that amortises no exchange, and shows nothing."""
    tokens = [1.0] + [1.0 + 1e-6] * LONGEST
    seconds = [0.010 + exchange_s + 0.0015 * k for k in range(LONGEST + 1)]
    if not exchange_s:
        seconds = [0.001 + 0.010 * k for k in range(LONGEST + 1)]
    tradeoff, lengths = Tradeoff(tokens, seconds, 0.0015, 0.0), DraftLengths(0, LONGEST)
    lengths.choose_for_all(tradeoff.best)
    assert lengths.of(1) == 1
    lengths.choose_for_all(tradeoff.informative())
    assert lengths.of(1) == lengths.longest_ordered == informative
    assert Tradeoff([1.0, 1.5, 2.0, 2.5], [1.0] * 4, 0.0, 0.0).informative() == 3, "never less than the best"
