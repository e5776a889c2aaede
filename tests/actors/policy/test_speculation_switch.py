"""The speculation switch on scripted rates: its timetable for every gain, and what it compares."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import groupby

import pytest

from actors.policy.speculation_switch import LATE_ROUNDS, Mode, SpeculationSwitch

SPECULATE, PROBE, REST, CATCH_UP, TRIAL = Mode


def run(
    switch: SpeculationSwitch,
    rounds: int,
    gain: Callable[[int], float],
    *,
    noise: float = 0.0,
    seed: int = 0,
    catch_up: int = 3,
    tokens: int = 10,
) -> list[tuple[Mode, int]]:
    """Rounds of 10 ms: `tokens` in a plain one, `gain(i)` times as many with speculation. Modes and their rounds."""
    draw, modes = random.Random(seed), []
    for i in range(rounds):
        modes.append(switch.mode)
        speculated = switch.speculates
        made = tokens * gain(i) * (1 + noise * (2 * draw.random() - 1)) if speculated else tokens
        switch.update(made, 0.01, speculated=speculated, willing=True)
        assert switch.mode is CATCH_UP or not switch.caught_up()
        if modes[-catch_up:] == catch_up * [CATCH_UP]:
            assert switch.caught_up()
    return [(mode, len(list(same))) for mode, same in groupby(modes)]


def alternating(first: Mode, lengths: list[int], second: Mode, num_rounds: int) -> list[tuple[Mode, int]]:
    return [period for length in lengths for period in ((first, length), (second, num_rounds))]


def resting(lengths: list[int], trial: int, catch_up: int = 3) -> list[tuple[Mode, int]]:
    return [period for length in lengths for period in ((REST, length), (CATCH_UP, catch_up), (TRIAL, trial))]


BEGIN = [(SPECULATE, 6), (PROBE, 2)]
RARER = alternating(SPECULATE, [32, 64, 128, 256, 512, 512], PROBE, 2)


@pytest.mark.parametrize(
    ("gain", "timetable"),
    [
        (1.16, BEGIN + RARER),
        (1.14, BEGIN + alternating(SPECULATE, [32] * 20, PROBE, 2)),
        # A small loss shows after more tokens, and only against plain rounds that are not older than 8 rounds.
        (0.97, [*BEGIN, (SPECULATE, 32), (PROBE, 2), (SPECULATE, 15), (PROBE, 2), *resting([32, 64], 6)]),
        (0.95, [*BEGIN, (SPECULATE, 11), (PROBE, 2), *resting([32, 64, 128, 256, 512, 512], 6)]),
        (0.71, BEGIN + resting([32, 64, 128, 256, 512, 512], 6)),
        (0.69, BEGIN + resting([32, 128, 512, 512], 2)),
    ],
)
def test_the_timetable_of_a_steady_gain(gain, timetable):
    found = run(SpeculationSwitch(), sum(count for _, count in timetable) + 1, lambda i: gain)
    assert found[:-1] == timetable


@pytest.mark.parametrize(("later", "returns"), [(1.03, True), (1.01, False)])
def test_a_trial_that_pays_ends_the_rest_and_halves_the_next(later, returns):
    switch = SpeculationSwitch()
    before = BEGIN + resting([32, 64], 6) + [(REST, 128), (CATCH_UP, 3)]
    steps = sum(count for _, count in before)
    found = run(switch, steps + 7, lambda i: 0.9 if i < steps else later)
    assert found == [*before, (TRIAL, 6), (SPECULATE if returns else REST, 1)]
    assert (switch.interval, switch.rest) == ((32, 64) if returns else (32, 256))


def test_reading_what_was_missed_takes_a_tenth_of_the_rest_at_most():
    assert run(SpeculationSwitch(), 265, lambda i: 0.9, catch_up=20) == [*BEGIN, *resting([32], 6, 20), (REST, 199)]
    switch = SpeculationSwitch()
    run(switch, 8 + 32 + 20 + 6, lambda i: 0.9, catch_up=20)
    assert (switch.mode, switch.rest) == (REST, 200)


def test_the_best_gain_of_a_trial_is_its_own():
    """What speculation measured before the rest does not count against it."""
    switch = SpeculationSwitch()
    run(switch, 8 + 32 + 3 + 6, lambda i: 0.5 if i < 40 else 1.1)
    assert switch.mode is SPECULATE and switch.gain == pytest.approx(1.1)


def test_noise_alone_does_not_make_it_rest():
    for seed in range(5):
        assert REST not in dict(run(SpeculationSwitch(), 1000, lambda i: 1.3, noise=0.5, seed=seed))


@pytest.mark.parametrize("length", [1, 4])
def test_a_machine_that_became_slower_is_not_the_fault_of_speculation(length):
    """Plain decoding is measured anew before speculation ends."""
    switch = SpeculationSwitch()
    for i in range(200):
        slow = 1 if i < 60 else 3
        speculated = switch.speculates
        switch.update(13 if speculated else 10, 0.01 * slow, speculated=speculated, willing=True)
        assert switch.mode in (SPECULATE, PROBE)


def test_rounds_in_which_no_request_may_speculate_are_only_measured():
    switch = SpeculationSwitch()
    for _ in range(100):
        switch.update(10, 0.01, speculated=False, willing=False, skipped_drafts=True)
    assert switch.mode is SPECULATE and switch.plain[0].per_s == pytest.approx(1000)
    assert run(switch, 7, lambda i: 0.7) == [(SPECULATE, 6), (REST, 1)], "what plain decoding costs was known already"


def test_a_load_like_another_starts_with_its_conclusion():
    switch = SpeculationSwitch()
    modes = set()
    for _ in range(60):
        run(switch, 1, lambda i: 0.7, catch_up=1)
        similar = switch.for_similar_load()
        modes.add(switch.mode)
        assert similar.mode is (REST if switch.mode in (REST, CATCH_UP) else SPECULATE)
        assert similar.rest == switch.rest and similar.gain is None
    assert modes >= {SPECULATE, PROBE, REST}


def test_what_it_found_is_told():
    switch = SpeculationSwitch()
    assert switch.findings() == {"mode": "speculate", "plain_tokens_per_s": None, "gain": None}
    run(switch, 100, lambda i: 0.7)
    found = switch.findings()
    assert found["mode"] == "rest" and abs(found["plain_tokens_per_s"] - 1000) < 1 and abs(found["gain"] - 0.7) < 0.01


def test_rounds_are_compared_with_those_that_read_as_many_prompt_rows():
    switch = SpeculationSwitch()
    for _ in range(20):
        switch.update(10, 0.05, speculated=False, willing=False, num_prompt_rows=500)
        switch.update(10, 0.01, speculated=True, willing=False, num_prompt_rows=20)
    assert switch.gain is None, "plain rounds beside long prompts, speculation beside short ones"
    switch.update(10, 0.02, speculated=True, willing=False, num_prompt_rows=400)
    assert switch.gain == pytest.approx(2.5)
    switch.update(30, 0.01, speculated=False, willing=False, num_prompt_rows=20)
    plain_s = 10 / 200 + 10 * sum(0.99**i for i in range(20)) / 3000  # each kind of round by its own plain rate
    assert switch.gain == pytest.approx(plain_s / (0.02 + 0.01 * sum(0.99**i for i in range(20))))


def test_speculation_whose_drafts_always_come_late_ends():
    def late(switch, rounds, skipped=True):
        for _ in range(rounds):
            switch.update(10, 0.01, speculated=False, willing=True, skipped_drafts=skipped)
        return switch.mode

    switch = SpeculationSwitch()
    assert late(switch, LATE_ROUNDS - 1) is SPECULATE
    assert late(switch, 1, skipped=False) is SPECULATE, "the count begins anew"
    assert late(switch, LATE_ROUNDS - 1) is SPECULATE
    assert late(switch, 1) is REST
    late(switch, 33)
    assert switch.caught_up() and late(switch, 5) is TRIAL
    assert late(switch, 1) is REST, "so does a trial in which no round waited for its drafts"
    assert switch.rest == 64
