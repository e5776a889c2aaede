"""The adaptive policy in a world of known costs: single requests, mixed batches, bounds, and what it forgets."""

from __future__ import annotations

import random

import pytest

from actors.policy.decision import Mode
from actors.policy.draft_length import DraftOutcome
from actors.policy.policy import AdaptivePolicy, Policy, RoundObservation, make_policy


class Rounds:
    """Synchronous rounds: a draft token costs `draft_s`, a row of the target `row_s` on top of its 10 ms."""

    def __init__(self, policy, chances: dict[int, float], *, draft_s=0.0015, row_s=0.0, mean_len=100.0, reads=None):
        self.policy, self.chances = policy, chances
        self.draft_s, self.row_s, self.mean_len = draft_s, row_s, mean_len
        self.reads = reads or (lambda i: 0)  # prompt rows of a round, which cost as much as others
        self.draw = random.Random(0)
        self.seconds = self.tokens = 0

    def run(self, count: int, most: int = 8) -> dict[int, list[int]]:
        ordered = {request_id: [] for request_id in self.chances}
        for i in range(count):
            if self.policy.mode is Mode.catch_up:
                self.policy.caught_up()
            lengths = {request_id: self.policy.draft_length(request_id, most) for request_id in self.chances}
            offers = []
            for request_id, length in lengths.items():
                ordered[request_id].append(length)
                kept = 0
                while kept < length and self.draw.random() < self.chances[request_id]:
                    kept += 1
                offers.append(DraftOutcome(request_id, length, range(1, kept + 1), kept + 1 if length else 0))
            draft_s = self.draft_s * max(lengths.values())
            prompt_rows = self.reads(i)
            verify_s = 0.01 + self.row_s * (prompt_rows + sum(1 + length for length in lengths.values()))
            tokens = sum(1 + len(offer.path) for offer in offers)
            size = len(offers)
            self.seconds, self.tokens = self.seconds + draft_s + verify_s, self.tokens + tokens
            self.policy.update(
                RoundObservation(draft_s + verify_s, verify_s, draft_s, size, self.mean_len, size, prompt_rows, offers)
            )
        return ordered


def mean(lengths: list[int]) -> float:
    asked = [length for length in lengths if length]
    return sum(asked) / len(asked)


@pytest.mark.parametrize(("chance", "best"), [(0.3, 1), (0.8, 4), (0.97, 8)])
def test_a_single_request_gets_the_length_that_pays(chance, best):
    rounds = Rounds(AdaptivePolicy("sync", 0, 8), {1: chance})
    rounds.run(100)
    assert mean(rounds.run(400)[1]) == pytest.approx(best, abs=1)


@pytest.mark.extended
@pytest.mark.parametrize("every", [1, 2, 3])
def test_under_steady_traffic_rounds_are_compared_that_read_as_much(every):
    """Every so many rounds read a prompt of their own length, which costs more than drafting does."""
    sizes = random.Random(1)

    def reads(i):
        return sizes.choice([200, 250, 30]) if i % every == 0 else 0

    hopeless = Rounds(
        AdaptivePolicy("sync", 0, 8), dict.fromkeys(range(4), 0.02), draft_s=0.004, row_s=2e-4, reads=reads
    )
    hopeless.run(200)
    ordered = hopeless.run(400)
    assert sum(map(bool, ordered[0])) < 130, "it rests most of the time"
    easy = Rounds(AdaptivePolicy("sync", 0, 8), dict.fromkeys(range(4), 0.9), draft_s=0.001, row_s=1e-4, reads=reads)
    easy.run(200)
    ordered = easy.run(200)
    assert sum(map(bool, ordered[0])) > 180 and mean(ordered[0]) > 4


def test_what_never_passes_gets_next_to_nothing_while_its_neighbours_go_on():
    rounds = Rounds(AdaptivePolicy("sync", 0, 8), {1: 0.9, 2: 0.9, 3: 0.0}, row_s=0.001)
    rounds.run(60)
    ordered = rounds.run(300)
    assert sum(map(bool, ordered[3])) < 15 and mean(ordered[1]) > 2
    rounds.chances[3] = 0.9
    rounds.run(600)
    assert mean(rounds.run(100)[3]) > 1.5, "a request whose drafts pass again is drafted for again"


def test_a_batch_whose_rows_are_dear_is_decoded_plainly():
    rounds = Rounds(AdaptivePolicy("sync", 0, 8), dict.fromkeys(range(8), 0.4), row_s=0.004)
    rounds.run(600)
    plain_s = 600 * (0.01 + 8 * 0.004)
    assert rounds.tokens / rounds.seconds > 0.97 * 600 * 8 / plain_s
    assert rounds.policy.mode is Mode.rest


def test_the_lower_bound_holds_and_rules_out_plain_decoding():
    rounds = Rounds(AdaptivePolicy("sync", 3, 8), dict.fromkeys(range(4), 0.1), row_s=0.004)
    ordered = rounds.run(300)
    assert {length for lengths in ordered.values() for length in lengths} <= set(range(3, 9))
    assert mean(ordered[0][100:]) < 3.5 and rounds.policy.mode is Mode.speculate


def test_nothing_is_kept_of_requests_that_ended():
    policy = AdaptivePolicy("sync", 0, 4)
    for first in range(0, 400, 4):
        ids = range(first, first + 4)
        Rounds(policy, {request_id: 0.2 + 0.2 * (request_id % 4) for request_id in ids}).run(10)
        for request_id in ids:
            policy.release(request_id)
    kept = [
        len(value) for value in [*vars(policy).values(), *vars(policy._lengths).values()] if isinstance(value, dict)
    ]
    assert sum(kept) <= 4, "one load, one context"


def test_it_is_made_as_the_user_chose():
    assert type(make_policy("sync", 0, 5, adaptive=False)) is Policy
    assert type(make_policy("sync", 0, 0, adaptive=True)) is Policy, "there is no drafter"
    assert make_policy("sync", 0, 5, adaptive=False).draft_length(1, 4) == 4
    assert isinstance(make_policy("sync", 0, 5, adaptive=True), AdaptivePolicy)
