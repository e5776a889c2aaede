"""The guard on scripted rates: when it rests, when it returns, and what its looking around costs."""

from __future__ import annotations

import random

from actors.policy.speculation_switch import (
    LATE_ROUNDS,
    MAX_REST,
    MIN_REST,
    PROBE_ROUNDS,
    TRIAL_ROUNDS,
    Mode,
    SpeculationSwitch,
)


def run(guard: SpeculationSwitch, rounds: int, gain, *, noise: float = 0.0, seed: int = 0) -> dict[Mode, int]:
    """Rounds of 10 ms; a plain one brings 10 tokens, one with speculation `gain(i)` times as many."""
    draw, modes = random.Random(seed), dict.fromkeys(Mode, 0)
    for i in range(rounds):
        speculated = guard.mode in (Mode.speculate, Mode.trial)
        tokens = 10 * gain(i) * (1 + noise * (2 * draw.random() - 1)) if speculated else 10
        modes[guard.mode] += 1
        guard.update(tokens, 0.01, speculated=speculated, willing=True)
        if guard.mode is Mode.catch_up:
            guard.caught_up()
    return modes


def test_speculation_that_pays_goes_on_and_is_looked_at_ever_more_rarely():
    modes = run(SpeculationSwitch(), 2000, lambda i: 1.5, noise=0.3)
    assert modes[Mode.rest] == 0
    assert 0 < modes[Mode.probe] <= 8 * PROBE_ROUNDS


def test_speculation_that_does_not_pay_ends_after_the_first_look():
    guard = SpeculationSwitch()
    modes = run(guard, 300, lambda i: 0.7)
    assert modes[Mode.speculate] <= 8 and guard.mode is Mode.rest
    lost = (modes[Mode.speculate] + modes[Mode.trial]) * 0.3
    assert lost / 300 < 0.03, "the guard lets too much be lost"


def test_trials_become_rarer_but_never_stop():
    guard = SpeculationSwitch()
    modes = run(guard, 20_000, lambda i: 0.7)
    assert guard.rest == MAX_REST
    assert TRIAL_ROUNDS <= modes[Mode.trial] <= 46 * TRIAL_ROUNDS


def test_it_returns_when_it_pays_again_and_rests_again_when_it_does_not():
    guard = SpeculationSwitch()
    run(guard, 100, lambda i: 0.7)
    assert guard.mode is Mode.rest
    run(guard, 2 * 4 * MIN_REST, lambda i: 1.6)
    assert guard.mode in (Mode.speculate, Mode.probe)
    run(guard, 200, lambda i: 0.6)
    assert guard.mode is Mode.rest


def test_noise_alone_does_not_make_it_rest():
    assert all(run(SpeculationSwitch(), 1000, lambda i: 1.3, noise=0.5, seed=seed)[Mode.rest] == 0 for seed in range(5))


def test_rounds_in_which_nobody_wants_drafts_only_teach():
    guard = SpeculationSwitch()
    for _ in range(100):
        guard.update(10, 0.01, speculated=False, willing=False)
    assert guard.mode is Mode.speculate and guard.plain[0].per_s > 0
    run(guard, 7, lambda i: 0.7)
    assert guard.mode is Mode.rest, "what plain decoding costs was known already"


def test_a_load_like_another_starts_with_its_conclusion():
    guard = SpeculationSwitch()
    run(guard, 100, lambda i: 0.7)
    assert guard.for_similar_load().mode is Mode.rest and SpeculationSwitch().for_similar_load().mode is Mode.speculate


def test_what_it_found_is_told():
    guard = SpeculationSwitch()
    assert guard.findings() == {"mode": "speculate", "plain_tokens_per_s": None, "gain": None}
    run(guard, 100, lambda i: 0.7)
    found = guard.findings()
    assert found["mode"] == "rest" and abs(found["plain_tokens_per_s"] - 1000) < 1 and abs(found["gain"] - 0.7) < 0.01


def test_rounds_are_compared_with_those_that_read_as_much():
    """Plain rounds are seen beside long prompts, speculation beside short ones: nothing follows from that."""
    guard = SpeculationSwitch()
    for _ in range(20):
        guard.update(10, 0.05, speculated=False, willing=False, num_prompt_rows=500)
        guard.update(10, 0.01, speculated=True, willing=False, num_prompt_rows=20)
    assert guard.gain is None
    guard.update(10, 0.02, speculated=True, willing=False, num_prompt_rows=400)
    assert abs(guard.gain - 2.5) < 0.01


def test_speculation_in_name_only_ends():
    guard = SpeculationSwitch()
    for _ in range(LATE_ROUNDS - 1):
        guard.update(10, 0.01, speculated=False, willing=True, skipped_drafts=True)
    assert guard.mode is Mode.speculate
    guard.update(10, 0.01, speculated=False, willing=True, skipped_drafts=True)
    assert guard.mode is Mode.rest
