"""How many bytecodes `AdaptivePolicy.update` takes for four rounds of one request: it runs beside a pass, but holds
Python's lock. Run as `pytest -s tests/actors/policy/test_path_of_an_update.py` it prints the count.
"""

from __future__ import annotations

import random

import pytest

from actors.policy.acceptance import DraftOutcome
from actors.policy.policy import AdaptivePolicy, RoundObservation
from tests.actors.coordinator.test_path_of_a_verdict import Crossed

ROUNDS = 4
MOST = 22_000


def round_of(num_ordered, num_accepted):
    path = tuple(range(1, num_accepted + 1))
    outcome = DraftOutcome(1, num_ordered, path, num_accepted + 1 if num_ordered else 0)
    draft_s = 0.0006 if num_ordered else 0.0
    seconds, verify_s = 0.003 + 0.0002 * num_ordered, 0.002 + 0.0001 * num_ordered
    return RoundObservation(seconds, verify_s, draft_s, 1, 300.0, 1, outcomes=[outcome])


@pytest.mark.extended
def test_four_rounds_are_learned_from_with_few_bytecodes():
    policy, draw = AdaptivePolicy("sync", 0, 8, longest_only=True, rounds_at_once=ROUNDS), random.Random(0)
    policy.expect_load(1, samples=False)
    for _ in range(300):
        length = policy.draft_length(1, 8)
        policy.update(round_of(length, draw.randint(0, length)))
        policy.caught_up()
    assert policy.most_unlearned == ROUNDS, "drafts go on"
    seen = [round_of(8, draw.randint(0, 8)) for _ in range(ROUNDS)]
    with Crossed() as crossed:
        policy.update(*seen)
    print(f"{ROUNDS} rounds: {crossed.num_bytecodes} bytecodes")
    assert 0 < crossed.num_bytecodes <= MOST
