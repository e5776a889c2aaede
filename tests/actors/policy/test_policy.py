"""Policies: bounds of orders and waits, and which rounds the adaptive policy learns which costs from."""

from __future__ import annotations

import random
from math import log2

import pytest

from actors.policy.draft_length import DraftLengths, DraftOutcome
from actors.policy.estimators import Ewma, RoundCosts
from actors.policy.policy import PIPELINES, AdaptivePolicy, Policy, RoundObservation, make_policy
from actors.policy.speculation_switch import CREDIT, Mode

LONGEST = 6


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_orders_are_within_their_bounds(pipeline):
    policy, order = Policy(pipeline, LONGEST), PIPELINES[pipeline]
    lengths = [policy.draft_length(1, remaining) for remaining in range(10)]
    assert lengths == [0] * 10 if not order.drafts else lengths == [0, 0, 1, 2, 3, 4, 5, 6, 6, 6]
    halves = [0, 1, 1, 2, 2, 3] if order.alternates else range(6)
    assert [policy.num_orders(num_running) for num_running in range(6)] == list(halves)
    assert policy.wait_s(0, 3, 1, has_first_part=False) == 0.0, "no request expects a draft"
    assert (policy.wait_s(1, 1, 0, has_first_part=False) == 0.0) == order.alternates, "the other half is ready"
    assert policy.wait_s(1, 0, 1, has_first_part=False) > 0
    assert policy.mode is Mode.speculate and policy.switch is None


def test_a_wait_is_learned_from_passes_and_from_drafts_that_were_verified():
    policy = Policy("sync", 3)
    for num_tokens in (0, 2, 0, 2):
        outcomes = [DraftOutcome(1, 3, (), num_tokens)]
        policy.update(RoundObservation(0.3, 0.1 + num_tokens, 0.0, 1, 1, 10.0, 1, num_tokens, outcomes))
    prefill_s, verify_s = policy.wait._prefill_s, policy.wait._verify_s.mean
    assert (prefill_s, verify_s) == (2.1, pytest.approx(0.1)), "passes over prompts count apart"
    assert policy.wait._acceptance_len.mean == pytest.approx((4 * 0.81 + 2 * 0.9 + 2) / (0.81 + 0.9 + 1))


def kind_of(num_running, mean_len):
    """Batch sizes in steps of a half more, contexts in steps of twice as much from 512 tokens on."""
    context = 0 if mean_len < 512 else 1 + int(log2(mean_len / 512))
    return round(2 * log2(num_running)), context


class ShadowPolicy:
    """The measurements of every kind of load, kept apart for rounds that read prompts."""

    def __init__(self, shortest):
        self.shortest, self.after_prompt = shortest, False
        self.plain, self.drafted, self.kinds = {}, {}, []

    def update(self, seen):
        kind = kind_of(seen.num_running, seen.mean_len)
        if kind not in self.kinds:
            self.kinds.append(kind)
        reads = seen.num_prompt_rows > 0
        lengths = [outcome.num_ordered for outcome in seen.outcomes]
        plain = self.plain.setdefault((kind, reads), Ewma(0.8))
        drafted = self.drafted.setdefault((kind, reads), RoundCosts())
        if not any(lengths):
            plain.update(seen.verify_s)
        elif not (self.shortest and (reads or self.after_prompt)):  # the first draft also read the prompt
            mean = sum(lengths) / len(lengths)
            drafted.update(max(lengths), mean, seen.seconds, seen.verify_s, seen.draft_s)
        self.after_prompt = reads
        return drafted, plain.mean, len(lengths)


@pytest.mark.parametrize("shortest", [0, 2])
@pytest.mark.parametrize("seed", range(8))
def test_costs_are_learned_by_load_and_apart_where_prompts_were_read(monkeypatch, seed, shortest):
    chosen = []
    monkeypatch.setattr(DraftLengths, "choose", lambda self, *arguments: float(chosen.append(arguments) or 0))
    draw, policy, shadow = random.Random(seed), AdaptivePolicy("sync", shortest, LONGEST), ShadowPolicy(shortest)
    switches = {}
    for _ in range(60):
        num_running, mean_len = draw.choice([1, 2, 3, 8]), draw.choice([100.0, 600.0, 1024.0, 5000.0])
        lengths = [draw.choice([0, draw.randrange(LONGEST)]) for _ in range(num_running)]
        outcomes = [DraftOutcome(i, length, (), length) for i, length in enumerate(lengths)]
        draft_s, verify_s = draw.uniform(0.01, 0.02), draw.uniform(0.1, 0.12)
        numbers = num_running, num_running, mean_len, draw.randrange(2), draw.choice([0, 0, 50])
        seen = RoundObservation(draft_s + verify_s, verify_s, draft_s, *numbers, outcomes)
        policy.update(seen)
        assert chosen.pop() == shadow.update(seen)
        switch = switches.setdefault(kind_of(num_running, mean_len), policy._load.switch)
        assert policy._load.switch is switch and policy.switch is (None if shortest else switch)
        policy.expect_load(num_running, mean_len, False)
        assert policy._load.switch is switch
    policy.update(RoundObservation(0.1, 0.1, 0.0, 0, 1, 10.0, 0, 5, []))
    assert not chosen, "a round without verdicts says nothing of drafts"


@pytest.mark.parametrize("shortest", [0, 2])
def test_where_plain_decoding_is_ruled_out_drafts_are_always_ordered(shortest):
    policy = AdaptivePolicy("sync", shortest, LONGEST)
    for _ in range(100):  # drafts that cost ten passes and bring nothing
        if policy.mode is Mode.catch_up:
            policy.caught_up()
        length = policy.draft_length(1, 100)
        outcomes = [DraftOutcome(1, length, (), 1)]
        seconds = 0.01 + 0.1 * length
        policy.update(RoundObservation(seconds, 0.01, seconds - 0.01, 1, 1, 10.0, 1, 0, outcomes))
    assert (policy.draft_length(1, 100) == 0) == (shortest == 0)
    assert (policy.mode is Mode.rest) == (shortest == 0) and policy.weighs_waiting == (shortest == 0)
    assert [policy.draft_length(1, remaining) for remaining in (1, 2)] == [0, min(1, shortest)]


def played(policy, num_running, num_rounds, gains_of, *, samples=False):
    """Rounds of 10 ms; a draft token costs `gains_of` (cost, chance): more seconds, and accepted so often. Modes."""
    cost_s, chance = gains_of
    draw, modes = random.Random(1), []
    for _ in range(num_rounds):
        policy.expect_load(num_running, 100.0, samples)
        if policy.mode is Mode.catch_up:
            policy.caught_up()
        modes.append(policy.mode)
        drafted = policy.num_followed(num_running) if policy.mode in (Mode.trial, Mode.speculate) else 0
        lengths = [policy.draft_length(i, 100) if i < drafted else 0 for i in range(num_running)]
        outcomes = []
        for i, length in enumerate(lengths):
            accepted = next((place for place in range(length) if draw.random() >= chance), length)
            outcomes.append(DraftOutcome(i, length, tuple(range(1, accepted + 1)), accepted + 1 if length else 0))
        verify_s, draft_s = 0.01 + cost_s * sum(lengths) / num_running, cost_s * max(lengths)
        num_tokens = sum(len(outcome.path) + 1 for outcome in outcomes)
        load = num_running, 100.0, num_running, 0
        policy.update(
            RoundObservation(verify_s + draft_s, verify_s, draft_s, num_tokens, *load, outcomes, False, samples)
        )
    return modes


@pytest.mark.parametrize("num_running", [1, 16, 64])
def test_a_poor_drafter_rests_after_two_rounds_of_drafts(num_running):
    policy = AdaptivePolicy("sync", 0, LONGEST)
    modes = played(policy, num_running, 16, (1.5e-3, 0.02), samples=True)
    assert modes.count(Mode.trial) <= 2 and Mode.speculate not in modes and modes[-1] is Mode.rest
    assert policy.switch is not None and policy.switch.balance > 0


@pytest.mark.parametrize("num_running", [1, 16, 64])
def test_a_good_drafter_is_used_after_two_rounds_of_drafts(num_running):
    modes = played(AdaptivePolicy("sync", 0, LONGEST), num_running, 20, (5e-4, 0.9))
    assert modes.count(Mode.speculate) >= 14 and Mode.rest not in modes


def test_sampled_and_greedy_requests_are_judged_apart_and_other_batch_sizes_anew():
    policy = AdaptivePolicy("sync", 0, LONGEST)
    played(policy, 16, 14, (1.5e-3, 0.02), samples=True)
    for (num_running, samples), mode in {
        (16, True): Mode.rest,
        (20, True): Mode.rest,
        (16, False): Mode.catch_up,
        (1, True): Mode.catch_up,
    }.items():
        policy.expect_load(num_running, 100.0, samples)
        assert policy.mode is mode
    assert policy.switch is not None and policy.switch.balance == CREDIT


def test_a_smaller_batch_that_loses_is_found_in_two_rounds():
    """Requests end one after the other: what plain rounds of the smaller batch take is known before any was made."""
    policy = AdaptivePolicy("sync", 0, LONGEST)
    good, bad = (5e-4, 0.9), (2e-3, 0.02)
    assert played(policy, 16, 30, good)[-1] is Mode.speculate
    assert set(played(policy, 11, 6, good)) == {Mode.speculate}
    modes = played(policy, 8, 6, bad)
    assert modes == [Mode.speculate] * 2 + [Mode.probe] * 2 + [Mode.rest] * 2


def test_delays_from_before_a_rest_are_forgotten_at_its_trial():
    policy = AdaptivePolicy("sync", 0, LONGEST)
    policy.wait.update_delay(9.0, is_rest=False)
    policy.caught_up()
    assert policy.wait._first_s, "no plain round was measured"
    outcomes = [DraftOutcome(1, 0, (), 0)]
    for _ in range(2):
        policy.update(RoundObservation(0.01, 0.01, 0.0, 1, 1, 10.0, 1, 0, outcomes))
        policy.caught_up()
    assert policy.mode is Mode.trial and not policy.wait._first_s


def test_a_drafter_that_chooses_lengths_is_ordered_the_longest():
    """Whatever was accepted of it, and in a trial too."""
    tried, ordered = {}, {}
    for longest_only in (True, False):
        policy = make_policy("sync", 0, LONGEST, adaptive=True, longest_only=longest_only)
        assert isinstance(policy, AdaptivePolicy)
        while policy.mode is not Mode.trial:
            played(policy, 1, 1, (4e-4, 0.4))
        tried[longest_only] = policy.draft_length(0, 99)
        assert played(policy, 1, 40, (4e-4, 0.4))[-1] is Mode.speculate
        ordered[longest_only] = policy.draft_length(0, 99)
    assert tried[True] == LONGEST > tried[False]
    assert ordered[True] == LONGEST > ordered[False]
