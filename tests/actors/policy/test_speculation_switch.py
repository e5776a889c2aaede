"""The speculation switch on scripted rates: its timetable for every gain, and what it compares."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import groupby

import pytest

from actors.policy.estimators import Rate
from actors.policy.speculation_switch import (
    CREDIT,
    FIRST_PROBE,
    LATE_ROUNDS,
    MAX_CREDIT,
    TRIAL_TAX,
    Mode,
    SpeculationSwitch,
)

SPECULATE, PROBE, REST, CATCH_UP, TRIAL = Mode


def run(
    switch: SpeculationSwitch,
    rounds: int,
    gain: Callable[[int], float],
    *,
    noise: float = 0.0,
    seed: int = 0,
    catch_up: int = 1,
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
            switch.caught_up()
    return [(mode, len(list(same))) for mode, same in groupby(modes)]


def alternating(first: Mode, lengths: list[int], second: Mode, num_rounds: int) -> list[tuple[Mode, int]]:
    return [period for length in lengths for period in ((first, length), (second, num_rounds))]


def resting(lengths: list[int], trial: int, catch_up: int = 1) -> list[tuple[Mode, int]]:
    return [period for length in lengths for period in ((REST, length), (CATCH_UP, catch_up), (TRIAL, trial))]


BEGIN = [(CATCH_UP, 2)]  # two plain rounds are measured
SUCCESS = [*BEGIN, (TRIAL, 2)]
RARER = alternating(SPECULATE, [32, 64, 128, 256, 512, 512], PROBE, 2)


@pytest.mark.parametrize(
    ("gain", "timetable"),
    [
        (1.16, SUCCESS + RARER),
        (1.14, SUCCESS + alternating(SPECULATE, [32] * 20, PROBE, 2)),
        (0.97, [*BEGIN, (TRIAL, 6), *resting([16, 32, 64, 128, 128], 6)]),
        (0.91, [*BEGIN, (TRIAL, 6), *resting([16, 32, 64, 128, 128], 6)]),
        (0.89, [*BEGIN, (TRIAL, 2), *resting([16, 32, 64, 128, 128], 2)]),
        (0.69, [*BEGIN, (TRIAL, 2), *resting([16, 64, 128, 128], 2)]),
    ],
)
def test_the_timetable_of_a_steady_gain(gain, timetable):
    found = run(SpeculationSwitch(), sum(count for _, count in timetable) + 1, lambda i: gain)
    assert found[:-1] == timetable


def test_one_round_that_uses_the_credit_up_ends_a_trial():
    switch, rounds = SpeculationSwitch(), []
    for _ in range(120):
        rounds.append(switch.mode)
        switch.update(1, 0.03 if switch.speculates else 0.01, speculated=switch.speculates, willing=True)
        switch.caught_up()
    assert rounds[2:5] == [TRIAL, REST, REST]
    assert rounds[4:].index(TRIAL) > 0.9 / TRIAL_TAX, "a share of the time pays for the next one"


@pytest.mark.parametrize("tokens", [1, 16, 64])
@pytest.mark.parametrize("gain", [0.1, 0.5, 0.8, 0.9, 0.97])
@pytest.mark.parametrize("outside", [0.0, 0.5, 6.0])
def test_a_loss_is_bounded_by_the_credit_and_a_small_share_of_the_time(gain, tokens, outside):
    """Plain rounds lost: the credit, one trial's first round and what is done for it outside of its rounds, and what a
    fiftieth of the time paid for. `outside`: plain rounds in which text is read before a trial, and in which drafts are
    made that the end of the trial leaves unused."""
    switch, lost, drafted = SpeculationSwitch(), 0.0, False
    for i in range(1, 600):
        speculated, reads = switch.speculates, switch.mode is CATCH_UP
        unused = outside * (reads or (drafted and not speculated))
        seconds, draft_s = (0.01 / gain, 0.01 / gain - 0.01) if speculated else (0.01, 0.0)
        switch.update(tokens, seconds, speculated=speculated, willing=True, draft_s=draft_s, unused_s=unused / 100)
        switch.caught_up()
        lost += unused + speculated * (1 / gain - 1)
        drafted = speculated
        assert lost <= CREDIT + (1 / gain - 1) + 4 * outside + TRIAL_TAX * i


def test_what_was_done_outside_of_the_rounds_is_paid_back_before_the_next_trial():
    """And does not count against drafts: the first trial has all its rounds."""
    switch, modes = SpeculationSwitch(), []
    for _ in range(400):
        modes.append(switch.mode)
        unused_s = 0.03 if switch.mode is CATCH_UP else 0.0
        switch.update(
            9.5 if switch.speculates else 10, 0.01, speculated=switch.speculates, willing=True, unused_s=unused_s
        )
        switch.caught_up()
    periods = [(mode, len(list(same))) for mode, same in groupby(modes)]
    assert periods[:2] == [(CATCH_UP, 2), (TRIAL, 6)]
    assert periods[2][1] > 5 / TRIAL_TAX, "six plain rounds of reading and a third of one, less the credit"


def test_a_plain_round_that_serves_drafts_is_no_measure_of_plain_decoding():
    switch = SpeculationSwitch()
    run(switch, 60, lambda i: 0.8)
    plain, balance = switch.findings()["plain_tokens_per_s"], switch.balance
    switch.update(10, 0.03, speculated=False, willing=True, serves_drafts=True)
    assert switch.findings()["plain_tokens_per_s"] == plain
    assert switch.balance == pytest.approx(balance - 2)


def test_many_good_rounds_do_not_hide_that_speculation_has_become_slow():
    """The mean of a hundred rounds is above that of plain decoding for long after; the balance is not."""
    switch = SpeculationSwitch()
    run(switch, 200, lambda i: 3.0, tokens=16)
    assert switch.mode is SPECULATE and switch.balance == MAX_CREDIT
    found = run(switch, 100, lambda i: 0.5, tokens=16)
    assert sum(count for mode, count in found if mode is SPECULATE) < 20, "a round of it costs a plain one"


def test_speculation_that_no_longer_pays_ends():
    switch = SpeculationSwitch()
    found = run(switch, 100, lambda i: 1.3 if i < 40 else 0.5, tokens=16)
    assert [mode for mode, _ in found][:4] == [CATCH_UP, TRIAL, SPECULATE, PROBE] and switch.mode in (REST, CATCH_UP)
    assert sum(count for mode, count in found[2:] if mode is SPECULATE) < 60


@pytest.mark.parametrize(("later", "returns"), [(1.03, True), (1.01, False)])
def test_a_trial_that_pays_ends_the_rest_and_halves_the_next(later, returns):
    switch = SpeculationSwitch()
    before = [*BEGIN, (TRIAL, 2), *resting([16, 32, 64], 2), (REST, 128), (CATCH_UP, 1)]
    steps = sum(count for _, count in before)
    found = run(switch, steps + 7, lambda i: 0.8 if i < steps else later)
    assert found == [*before, (TRIAL, 2), (SPECULATE, 5)] if returns else [*before, (TRIAL, 6), (REST, 1)]
    assert (switch.interval, switch.rest) == ((32, 64) if returns else (32, 128))


def test_what_longer_drafts_would_bring_counts_in_a_trial():
    switch = SpeculationSwitch()
    for _ in range(3):
        switch.update(10, 0.01, speculated=False, willing=True)
        switch.caught_up()
    for _ in range(2):
        assert switch.mode is TRIAL
        switch.update(9, 0.01, speculated=True, willing=True, prospect=120.0)
    assert switch.mode is SPECULATE


def test_a_trial_is_with_a_few_requests():
    switch = SpeculationSwitch()
    assert [switch.num_followed(count) for count in (1, 2, 8, 16, 64)] == [1, 2, 2, 2, 8]
    for mode, count in ((SPECULATE, 64), (PROBE, 64), (TRIAL, 8), (REST, 0)):
        switch.mode = mode
        assert switch.num_followed(64) == count


def test_reading_what_was_missed_takes_a_tenth_of_the_rest_at_most():
    found = run(SpeculationSwitch(), 300, lambda i: 0.8, catch_up=20)
    assert found[:6] == [(CATCH_UP, 20), (TRIAL, 2), (REST, 16), (CATCH_UP, 20), (TRIAL, 2), (REST, 200)]


def test_the_best_gain_of_a_trial_is_its_own():
    """What speculation measured before the rest does not count against it."""
    switch = SpeculationSwitch()
    run(switch, 200, lambda i: 0.5 if i < 20 else 1.1)
    assert switch.mode is SPECULATE and switch.gain == pytest.approx(1.1)


def test_noise_alone_does_not_make_it_rest():
    for seed in range(5):
        established = SpeculationSwitch(SPECULATE, balance=MAX_CREDIT)
        assert REST not in dict(run(established, 1000, lambda i: 1.3, noise=0.5, seed=seed))


@pytest.mark.parametrize("length", [1, 4])
def test_a_machine_that_became_slower_is_not_the_fault_of_speculation(length):
    """Plain decoding is measured anew before speculation ends."""
    switch = SpeculationSwitch(SPECULATE, balance=MAX_CREDIT)
    for i in range(200):
        slow = 1 if i < 60 else 3
        speculated = switch.speculates
        switch.update(13 if speculated else 10, 0.01 * slow, speculated=speculated, willing=True)
        assert switch.mode in (SPECULATE, PROBE)


def test_rounds_in_which_no_request_may_speculate_are_only_measured():
    switch = SpeculationSwitch()
    for _ in range(100):
        switch.update(10, 0.01, speculated=False, willing=False, skipped_drafts=True)
    assert switch.mode is CATCH_UP and switch.plain[0].per_s == pytest.approx(1000)
    assert switch.caught_up() and switch.mode is TRIAL, "what plain decoding costs was known already"


def test_the_first_round_after_prompts_is_not_measured():
    switch = SpeculationSwitch()
    switch.update(1, 0.1, speculated=False, willing=True, num_prompt_rows=100)
    switch.update(1, 0.1, speculated=False, willing=True)
    assert 0 not in switch.plain
    switch.update(1, 0.01, speculated=False, willing=True)
    assert switch.plain[0].per_s == pytest.approx(100)


def test_a_load_like_another_starts_with_its_conclusion():
    switch = SpeculationSwitch()
    modes, concluded = set(), False
    for _ in range(60):
        run(switch, 1, lambda i: 0.7, catch_up=1)
        similar = switch.for_similar_load()
        modes.add(switch.mode)
        concluded |= switch.mode is REST
        assert similar.mode is (REST if concluded else CATCH_UP) and similar.gain is None
        assert similar.balance == switch.balance, "what may be lost before a conclusion is lost once"
        assert similar.rest <= 64
    assert modes >= {CATCH_UP, TRIAL, REST}
    assert SpeculationSwitch(PROBE, _is_concluded=True).for_similar_load().mode is SPECULATE


@pytest.mark.parametrize(("expected_s", "plain_s", "speculates"), [(0.01, 0.01, False), (0.01, 0.03, True)])
def test_a_load_that_expects_faster_plain_rounds_measures_them_at_once(expected_s, plain_s, speculates):
    """Rounds of speculation bring 10 tokens in 0.02 s; plain decoding is measured after the second of them."""
    expected = Rate()
    expected.update(10, expected_s)
    switch = SpeculationSwitch(SPECULATE, _is_concluded=True).for_similar_load(expected)
    modes = []
    for _ in range(5):
        modes.append(switch.mode)
        speculated = switch.speculates
        switch.update(10, 0.02 if speculated else plain_s, speculated=speculated, willing=True)
    assert modes == [SPECULATE, SPECULATE, PROBE, PROBE, SPECULATE if speculates else REST]
    assert switch.plain[0].per_s == pytest.approx(10 / plain_s), "the expectation is replaced by measurements"


def test_a_load_that_expects_slower_plain_rounds_speculates_until_the_usual_probe():
    expected = Rate()
    expected.update(10, 0.03)
    switch = SpeculationSwitch(SPECULATE, _is_concluded=True).for_similar_load(expected)
    for _ in range(FIRST_PROBE):
        assert switch.mode is SPECULATE
        switch.update(10, 0.02, speculated=True, willing=True)
    assert switch.mode is PROBE


def test_findings_are_reported():
    switch = SpeculationSwitch()
    assert switch.findings() == {"mode": "catch_up", "plain_tokens_per_s": None, "gain": None}
    run(switch, 2 + 2 + 10, lambda i: 0.7)
    found = switch.findings()
    assert found["mode"] == "rest" and abs(found["plain_tokens_per_s"] - 1000) < 1 and abs(found["gain"] - 0.7) < 0.01


def test_rounds_are_compared_with_those_that_read_as_many_prompt_rows():
    switch = SpeculationSwitch(SPECULATE)
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

    switch = SpeculationSwitch(SPECULATE, _is_concluded=True)
    assert late(switch, LATE_ROUNDS - 1) is SPECULATE
    assert late(switch, 1, skipped=False) is SPECULATE, "the count begins anew"
    assert late(switch, LATE_ROUNDS - 1) is SPECULATE
    assert late(switch, 1) is REST
    late(switch, 17)
    assert switch.caught_up() and late(switch, 5) is TRIAL
    assert late(switch, 1) is REST, "so does a trial in which no round waited for its drafts"
    assert switch.rest == 32
