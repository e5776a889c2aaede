"""Whether to draft ahead, on scripted rates: the faster way is kept, and the other one is measured ever more rarely."""

from __future__ import annotations

import random
from itertools import groupby

import pytest

from actors.policy.draft_ahead_choice import FIRST_ROUNDS, MAX_INTERVAL, PROBE_ROUNDS, SLOWED, DraftAheadChoice


def run(gain, rounds, noise=0.0, seed=0):
    """Rounds of 10 ms, of 10 / `gain` ms with draft-ahead; (worked ahead, rounds) of each period."""
    draw, choice, ways = random.Random(seed), DraftAheadChoice(), []
    for _ in range(rounds):
        ways.append(choice.works_ahead)
        tokens = 4 * (1 + noise * (2 * draw.random() - 1))
        choice.update(tokens, 0.01 / (gain if choice.works_ahead else 1), SLOWED)
    return choice, [(ahead, len(list(same))) for ahead, same in groupby(ways)]


@pytest.mark.parametrize(("gain", "best"), [(1.2, True), (1.02, True), (0.98, False), (0.8, False)])
def test_the_faster_way_is_kept_and_the_other_measured_ever_more_rarely(gain, best):
    choice, periods = run(gain, 6000)
    assert periods[:2] == [(True, FIRST_ROUNDS), (False, FIRST_ROUNDS + 128 * (not best))]
    assert choice.gain == pytest.approx(gain)
    kept, probes = ([n for ahead, n in periods[2:-1] if ahead is way] for way in (best, not best))
    assert set(probes) == {PROBE_ROUNDS}
    assert kept[-1] == MAX_INTERVAL and kept == sorted(kept)


def test_where_no_pass_is_slower_beside_the_drafter_nothing_else_is_tried():
    choice = DraftAheadChoice()
    for _ in range(500):
        choice.update(4, 0.01, 1.0)
        assert choice.works_ahead
    choice.update(4, 0.01, SLOWED)
    assert not choice.works_ahead


def test_a_machine_that_changes_is_followed():
    choice = DraftAheadChoice()
    for i in range(3000):
        faster = 1.3 if i < 400 else 0.7
        choice.update(4, 0.01 / (faster if choice.works_ahead else 1), SLOWED)
    assert not choice.works_ahead


def test_noise_of_rounds_seldom_decides():
    right = [run(0.85, 1000, noise=0.6, seed=seed)[0].works_ahead for seed in range(10)].count(False)
    assert right >= 8
