"""Policies: bounds of orders and waits, and which rounds the adaptive policy learns which costs from."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest

from actors.options import PipelineName
from actors.policy.acceptance import DraftOutcome
from actors.policy.costs import LoadCosts
from actors.policy.decision import Decoding, Mode
from actors.policy.draft_length import DraftLengths
from actors.policy.policy import LATE_ROUNDS, AdaptivePolicy, Policy, RoundObservation, make_policy
from actors.protocol.messages import MeasuredCosts

LONGEST = 6


@pytest.mark.parametrize("pipeline", PipelineName)
def test_orders_are_within_their_bounds(pipeline):
    policy = Policy(pipeline, LONGEST)
    lengths = [policy.draft_length(1, most) for most in range(10)]
    assert lengths == [0] * 10 if not pipeline.drafts else lengths == [0, 1, 2, 3, 4, 5, 6, 6, 6, 6]
    halves = [0, 1, 1, 2, 2, 3] if pipeline.alternates else range(6)
    assert [policy.num_orders(num_running) for num_running in range(6)] == list(halves)
    assert policy.wait.wait_s(1, 0, 1) > 0
    assert policy.mode is Mode.speculate and policy.findings() is None and not policy.may_end


def test_a_wait_is_learned_from_passes_and_from_drafts_that_were_verified():
    policy = Policy("sync", 3)
    for num_tokens in (0, 2, 0, 2):
        outcomes = [DraftOutcome(1, 3, (), num_tokens)]
        policy.update(RoundObservation(0.3, 0.1 + num_tokens, 0.0, 1, 10.0, 1, num_tokens, outcomes))
    prefill_s, verify_s = policy.wait._prefill_s, policy.wait._verify_s.mean
    assert (prefill_s, verify_s) == (2.1, pytest.approx(0.1)), "passes over prompts count apart"
    assert policy.wait._acceptance_len.mean == pytest.approx((4 * 0.81 + 2 * 0.9 + 2) / (0.81 + 0.9 + 1))


@pytest.mark.parametrize("longest_only", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_no_times_of_rounds_end_the_coordinator(longest_only, seed):
    """Batches and prompts of any size, passes and waits of any length: each choice keeps a speed above 0."""
    draw = random.Random(seed)
    policy = AdaptivePolicy("sync", 0, LONGEST, longest_only=longest_only, scores=True)
    for _ in range(80):
        num_requests, prompt_rows = draw.choice([1, 2, 4, 16]), draw.choice([0, 13, 100, 500])
        if draw.random() < 0.7:
            policy.caught_up()
        outcomes = []
        for i in range(num_requests):
            length = policy.draft_length(i, 50)
            num_accepted = draw.randint(0, length)
            outcomes.append(DraftOutcome(i, length, range(1, num_accepted + 1), num_accepted + 1 if length else 0))
        verify_s, gap_s = 10 ** draw.uniform(-3, -0.5) * (1 + prompt_rows / 100), 10 ** draw.uniform(-4, 0)
        numbers = num_requests, 100.0, num_requests, prompt_rows
        policy.update(RoundObservation(verify_s + gap_s, verify_s, 0.0, *numbers, outcomes))
        assert all(one.seconds > 0 for one in policy._decision.estimates.values())


class Measured:
    """Which costs a round was put down to: (batch class, sampled, class of prompt rows, way), or None."""

    def __init__(self, monkeypatch):
        self.calls = []
        monkeypatch.setattr(
            LoadCosts, "measure", lambda load, way, times, speed, is_first: self.calls.append((load, way, times))
        )

    def after(self, policy, seen) -> Any:
        self.calls.clear()
        policy.update(seen)
        assert len(self.calls) <= 1
        return self.calls[0] if self.calls else None


def observation(lengths, *, draft_s=0.02, verify_s=0.1, mean_len=100.0, prompt_rows=0, **others):
    outcomes = [DraftOutcome(i, length, (), 1) for i, length in enumerate(lengths)]
    size = len(lengths)
    numbers = size, mean_len, size, prompt_rows
    return RoundObservation(draft_s + verify_s, verify_s, draft_s, *numbers, outcomes, **others)


def test_costs_are_kept_apart_by_batch_size_sampling_and_prompt_rows(monkeypatch):
    policy, measured = AdaptivePolicy("sync", 2, LONGEST), Measured(monkeypatch)
    loads = {}
    for size in (1, 2, 3, 4, 8):
        for samples in (False, True):
            for prompt_rows in (0, 60, 40, 500):
                policy._last_read_prompt = False
                load, way, _ = measured.after(policy, observation([2] * size, samples=samples, prompt_rows=prompt_rows))
                assert way is Decoding.in_turn
                loads.setdefault((size, samples, prompt_rows.bit_length()), set()).add(id(load))
    assert all(len(same) == 1 for same in loads.values()), "40 and 60 rows are one class"
    assert len({next(iter(same)) for same in loads.values()}) == len(loads)
    again, _, _ = measured.after(policy, observation([2] * 8, mean_len=9000.0))
    assert id(again) in loads[8, False, 0], "longer contexts are in the machine's speed"
    policy.expect_load(3, True)
    assert id(policy._load) in loads[3, True, 0]


def test_the_times_of_a_round_are_those_of_its_parts(monkeypatch):
    policy, measured = AdaptivePolicy("sync", 2, LONGEST), Measured(monkeypatch)
    found = measured.after(policy, observation([1, 4, 4], draft_s=0.02, verify_s=0.1))
    times = found[2]
    assert (times.verify_s, times.gap_s, times.draft_s) == pytest.approx((0.1, 0.02, 0.02))
    assert (times.longest, times.mean, times.served) == (4, 3.0, 1.0)
    half = observation([1, 4, 4], draft_s=0.02)
    half = RoundObservation(half.seconds, half.verify_s, half.draft_s, 6, 100.0, 6, 0, half.outcomes)
    assert measured.after(policy, half)[2].served == 0.5


def test_rounds_that_show_no_cost_are_not_measured(monkeypatch):
    policy, measured = AdaptivePolicy("sync", 0, LONGEST), Measured(monkeypatch)
    plain = observation([0], draft_s=0.0)
    assert measured.after(policy, plain)[1] is Decoding.plain
    assert measured.after(policy, observation([0], draft_s=0.0, serves_drafts=True)) is None
    assert measured.after(policy, observation([0], draft_s=0.0, prompt_rows=30)) is not None
    assert measured.after(policy, plain) is None, "it is the first after a prompt"
    assert measured.after(policy, plain) is not None
    assert measured.after(policy, RoundObservation(0.1, 0.1, 0.0, 1, 10.0, 0, 5, [])) is None
    for _ in range(40):
        measured.after(policy, observation([0], draft_s=0.0, prompt_rows=30))
    assert measured.after(policy, plain) is not None, "there are hardly any others"


@pytest.mark.parametrize("shortest", [0, 2])
def test_where_plain_decoding_is_ruled_out_drafts_are_always_ordered(shortest):
    policy = AdaptivePolicy("sync", shortest, LONGEST)
    for _ in range(100):  # drafts that cost ten passes and bring nothing
        if policy.mode is Mode.catch_up:
            policy.caught_up()
        length = policy.draft_length(1, 100)
        outcomes = [DraftOutcome(1, length, (), 1)]
        seconds = 0.01 + 0.1 * length
        policy.update(RoundObservation(seconds, 0.01, seconds - 0.01, 1, 10.0, 1, 0, outcomes))
    assert (policy.draft_length(1, 100) == 0) == (shortest == 0)
    assert (policy.mode is Mode.rest) == (shortest == 0) and policy.weighs_waiting == (shortest == 0)
    assert [policy.draft_length(1, most) for most in (0, 1)] == [0, min(1, shortest)]


def played(policy, num_running, num_rounds, gains_of, *, samples=False):
    """Rounds of 10 ms; a draft token costs `gains_of` (cost, chance): more seconds, and accepted so often. Modes."""
    cost_s, chance = gains_of
    draw, modes = random.Random(1), []
    for _ in range(num_rounds):
        policy.expect_load(num_running, samples)
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
        load = num_running, 100.0, num_running, 0
        policy.update(RoundObservation(verify_s + draft_s, verify_s, draft_s, *load, outcomes, False, samples))
    return modes


@pytest.mark.parametrize("num_running", [1, 16, 64])
def test_a_poor_drafter_rests_after_a_few_rounds_of_drafts(num_running):
    policy = AdaptivePolicy("sync", 0, LONGEST)
    modes = played(policy, num_running, 16, (1.5e-3, 0.02), samples=True)
    assert 1 <= modes.count(Mode.trial) <= 5 and Mode.speculate not in modes and modes[-1] is Mode.rest
    assert policy._decision.budget > -1.5


def test_a_rest_computes_no_draft_lengths(monkeypatch):
    policy = AdaptivePolicy("sync", 0, LONGEST)
    played(policy, 32, 20, (1.5e-3, 0.0))
    assert policy.mode is Mode.rest
    monkeypatch.setattr(DraftLengths, "choose", lambda *_: pytest.fail("no draft is ordered"))
    assert {*played(policy, 32, 20, (1.5e-3, 0.0))} == {Mode.rest}


@pytest.mark.parametrize("num_running", [1, 16, 64])
def test_a_good_drafter_is_used_after_two_rounds_of_drafts(num_running):
    modes = played(AdaptivePolicy("sync", 0, LONGEST), num_running, 20, (5e-4, 0.9))
    assert modes.count(Mode.speculate) >= 14 and Mode.rest not in modes[1:]


def test_a_load_never_seen_begins_with_the_costs_of_the_most_similar_one():
    """What the full batch found out holds for its last requests too."""
    policy = AdaptivePolicy("sync", 0, LONGEST)
    good, bad = (5e-4, 0.9), (4e-3, 0.02)
    assert played(policy, 16, 30, good)[-1] is Mode.speculate
    assert set(played(policy, 11, 6, good)) == {Mode.speculate}
    assert Mode.rest in played(policy, 8, 30, bad)
    policy.expect_load(2, False)
    assert policy._load.plain.weight == pytest.approx(2.0), "of another load, so little"


def test_acceptance_is_learned_apart_by_context_and_sampling():
    policy = AdaptivePolicy("sync", 0, LONGEST)
    played(policy, 1, 40, (5e-4, 0.9))
    tokens = policy._acceptance.of_class(policy._text_class).chances
    played(policy, 1, 40, (5e-4, 0.2), samples=True)
    sampled = policy._acceptance.of_class(policy._text_class).chances
    assert sampled[0] < 0.5 < tokens[0]
    policy.update(observation([0], draft_s=0.0))
    assert policy._acceptance.of_class(policy._text_class).chances == tokens


@pytest.mark.parametrize("num_ordered", [0, 2])
def test_drafts_that_always_come_late_end_speculation(num_ordered):
    """Whether they are ordered anew in each round, or still awaited from an earlier one."""
    policy = AdaptivePolicy("sync", 0, LONGEST)
    played(policy, 1, 40, (5e-4, 0.9))
    late = observation([0], draft_s=0.0, verify_s=0.01, skipped_drafts=True)
    late = replace(late, outcomes=[DraftOutcome(0, num_ordered, ())])
    for _ in range(LATE_ROUNDS - 1):
        policy.update(late)
        assert policy.mode is Mode.speculate
    policy.update(late)
    assert not policy._decision.choice.drafts and policy.draft_length(0, 100) == 0
    assert played(policy, 1, 60, (5e-4, 0.9))[-1] is Mode.speculate
    for _ in range(LATE_ROUNDS - 1):
        policy.update(late)
    policy.update(observation([2], draft_s=1e-3, verify_s=0.01))
    for _ in range(LATE_ROUNDS - 1):
        policy.update(late)
    assert policy._decision.choice.drafts, "the count begins anew"


def test_a_trial_whose_drafts_are_waited_for_in_vain_ends_after_its_rounds():
    policy = AdaptivePolicy("sync", 0, LONGEST)
    while policy.mode is not Mode.trial:
        policy.update(observation([0], draft_s=0.0, verify_s=0.01))
        policy.caught_up()
    in_vain = [DraftOutcome(0, 2, (), 0)]
    late = RoundObservation(0.024, 0.01, 0.0, 1, 100.0, 1, 0, in_vain, skipped_drafts=True)
    for _ in range(2):
        assert policy.mode is Mode.trial
        policy.update(late)
    assert policy.mode is Mode.rest


def test_drafts_that_did_not_come_do_not_make_long_drafts_look_cheap(monkeypatch):
    """A pass that leaves without its drafts takes as long as a plain one, and shows nothing of what they cost."""
    policy, measured = AdaptivePolicy("sync", 2, LONGEST), Measured(monkeypatch)
    outcomes = [DraftOutcome(0, 4, (1,), 2), DraftOutcome(1, 6, (), 0)]
    _, _, times = measured.after(policy, replace(observation([4, 6]), outcomes=outcomes))
    assert (times.longest, times.mean, times.arrived) == (6, 2.0, 0.4)
    late = replace(observation([4, 6]), outcomes=outcomes, skipped_drafts=True)
    assert measured.after(policy, late)[2].arrived == 1.0, "the next pass may wait for them"


def test_a_lookup_that_mostly_finds_nothing_is_not_expected_to_fill_every_pass():
    """Of 16 requests two get drafts, which bring a quarter more tokens and take a tenth more time. Drafts for all would
    take four fifths more."""
    policy, finds = AdaptivePolicy("sync", 0, 8, longest_only=True), {0, 8}
    for _ in range(60):
        if policy.mode is Mode.catch_up:
            policy.caught_up()
        ordered = [policy.draft_length(i, 99) for i in range(policy.num_followed(16))]
        ordered += [0] * (16 - len(ordered))
        came = {i for i in finds if ordered[i]}
        outcomes = [
            DraftOutcome(i, k, range(1, 3) if i in came else (), 3 if i in came else 0) for i, k in enumerate(ordered)
        ]
        verify_s, numbers = 0.01 * (1 + 0.05 * len(came)), (16, 100.0, 16, 0)
        policy.update(RoundObservation(verify_s, verify_s, 0.0, *numbers, outcomes))
    assert policy.mode is Mode.speculate


@pytest.mark.parametrize("field", ["unused_s", "read_s"])
def test_what_was_done_for_drafts_outside_of_rounds_is_charged_before_a_trial(field):
    """But texts that are read while drafts go on are no exploration."""
    policy = AdaptivePolicy("sync", 0, LONGEST)
    while policy.mode is not Mode.catch_up:
        policy.update(observation([0], draft_s=0.0, verify_s=0.01))
    policy.update(observation([0], draft_s=0.0, verify_s=0.01, **{field: 0.05}))
    assert policy._decision._unpaid == pytest.approx(5), "in plain rounds"
    played(policy, 1, 60, (5e-4, 0.9))
    before = policy._decision.budget
    policy.update(observation([3], draft_s=2e-3, verify_s=0.01, **{field: 0.05}))
    assert policy._decision.budget > before - 0.1 and policy.mode is Mode.speculate


@pytest.mark.parametrize(("num_ordered", "num_came", "is_late"), [(0, 0, True), (2, 0, True), (2, 1, False)])
def test_what_a_pass_waited_for_drafts_that_did_not_come_is_charged_while_drafts_go_on_too(
    num_ordered, num_came, is_late
):
    policy = AdaptivePolicy("sync", 0, LONGEST)
    played(policy, 1, 60, (5e-4, 0.9))
    assert policy.mode is Mode.speculate
    policy._decision._gained = 0.0  # from which it is taken first
    before = policy._decision.budget
    late = observation([0], draft_s=0.05, verify_s=0.01, skipped_drafts=True)
    policy.update(replace(late, outcomes=[DraftOutcome(0, num_ordered, (), num_came)]))
    assert (policy._decision.budget < before - 0.5) is is_late


def test_a_charge_is_in_rounds_of_its_own_load():
    """A batch of 16, of which only a pass over prompts was seen: its plain rounds take four times as long as one of a
    single request, which is all that is known of them."""
    policy = AdaptivePolicy("sync", 0, LONGEST)
    played(policy, 1, 20, (5e-3, 0.0))
    policy._decision.mode = Mode.catch_up
    policy.update(observation([0] * 16, draft_s=0.0, verify_s=0.04, prompt_rows=100, unused_s=0.04))
    assert policy._decision._unpaid == pytest.approx(1)


def test_a_text_that_is_read_before_a_draft_is_no_price_of_drafts():
    """Sixteen texts take as long as five rounds: the drafts that follow cost what they cost."""
    seconds = []
    for read_s in (0.0, 0.05):
        policy = AdaptivePolicy("sync", 0, LONGEST)
        played(policy, 16, 20, (5e-4, 0.9))
        policy.update(observation([3] * 16, draft_s=2e-3 + read_s, verify_s=0.01, read_s=read_s))
        seconds.append(policy._load.by_length(Decoding.in_turn).seconds(LONGEST))
    assert seconds[0] == pytest.approx(seconds[1])


def test_no_request_joins_a_trial():
    """Its text would have to be read first: a trial is one of all before the texts are read, or not at all."""
    policy = AdaptivePolicy("sync", 0, LONGEST)
    policy._should_try_all = lambda *_: True
    followed = []
    while policy.mode is not Mode.trial:
        policy.update(observation([0] * 16, draft_s=0.0, verify_s=0.01))
        if policy.mode is Mode.catch_up:
            policy.caught_up()
            followed.append(policy.num_followed(16))
    assert followed[-1] == 16
    policy._tries_all = False
    policy.update(observation([2, 2, *[0] * 14], draft_s=2e-3, verify_s=0.01))
    assert policy.mode is not Mode.trial or policy.num_followed(16) == 2


def test_a_pass_that_becomes_slower_does_not_favour_a_choice():
    """The machine runs at a third of its speed: speculation that pays goes on without a plain round."""
    policy = AdaptivePolicy("sync", 0, LONGEST)
    played(policy, 1, 60, (5e-4, 0.8))
    modes = []
    for _ in range(60):
        length = policy.draft_length(0, 100)
        outcomes = [DraftOutcome(0, length, tuple(range(1, length)), max(1, length))]
        draft_s, verify_s = 3 * 5e-4 * length, 3 * (0.01 + 5e-4 * length)
        policy.update(RoundObservation(draft_s + verify_s, verify_s, draft_s, 1, 100.0, 1, 0, outcomes))
        modes.append(policy.mode)
    assert set(modes) == {Mode.speculate}
    assert policy._speed.factor == pytest.approx(3, rel=0.25)


def test_delays_from_before_a_rest_are_forgotten_at_its_trial():
    policy = AdaptivePolicy("sync", 0, LONGEST)
    policy.wait.update_delay(9.0, is_rest=False)
    policy.caught_up()
    assert policy.wait._first_s, "no plain round was measured"
    outcomes = [DraftOutcome(1, 0, (), 0)]
    for _ in range(2):
        policy.update(RoundObservation(0.01, 0.01, 0.0, 1, 10.0, 1, 0, outcomes))
        policy.caught_up()
    assert policy.mode is Mode.trial and not policy.wait._first_s


def test_a_drafter_that_chooses_lengths_is_ordered_the_longest():
    """Whatever was accepted of it, and in a trial too."""
    tried, ordered = {}, {}
    for longest_only in (True, False):
        policy = make_policy("sync", 0, LONGEST, adaptive=True, longest_only=longest_only)
        assert isinstance(policy, AdaptivePolicy)
        while policy.mode is not Mode.trial:
            played(policy, 1, 1, (4e-4, 0.6))
        tried[longest_only] = policy.draft_length(0, 99)
        assert played(policy, 1, 40, (4e-4, 0.6))[-1] is Mode.speculate
        ordered[longest_only] = policy.draft_length(0, 99)
    assert tried[True] == LONGEST > tried[False]
    assert ordered[True] == LONGEST > ordered[False]


def test_what_a_row_costs_is_learned_from_rows_that_were_verified_and_prices_the_others():
    """The drafter drops every other token of a batch of 16: a row costs 0.2 ms, whatever was ordered."""
    policy, draw, size, row_s = AdaptivePolicy("sync", 0, LONGEST), random.Random(0), 16, 2e-4
    assert policy.costs == Policy("sync", LONGEST).costs == MeasuredCosts(), "nothing is known of costs"
    speeds = []
    for round_ in range(120):
        policy.caught_up()
        lengths = [policy.draft_length(i, 99) if i < policy.num_followed(size) else 0 for i in range(size)]
        dropped = [length // 2 * (policy.mode is Mode.speculate) for length in lengths]
        counts = [
            next((k for k in range(a - b) if draw.random() > 0.8), a - b) for a, b in zip(lengths, dropped, strict=True)
        ]
        found = enumerate(zip(lengths, counts, dropped, strict=True))
        outcomes = [DraftOutcome(i, k, range(1, n + 1), n + 1 if k > off else 0, off) for i, (k, n, off) in found]
        verify_s, draft_s = 0.01 + row_s * (size + sum(lengths) - sum(dropped)), 2e-4 * max(lengths)
        seen = (verify_s + draft_s, verify_s, draft_s, size, 100.0, size, 0, outcomes)
        policy.update(RoundObservation(*seen))
        if round_ >= 60:
            speeds.append((sum(counts) + size) / (verify_s + draft_s))
            assert (policy.costs.least_chance > 0.0) is (policy.mode is Mode.speculate)
    assert policy.mode is Mode.speculate
    costs = policy.costs
    assert costs.least_chance == pytest.approx(row_s * mean(speeds), rel=0.15)
    assert costs.row_s == pytest.approx(row_s, rel=0.1)
    assert costs.round_s == pytest.approx(0.01 + row_s * size, rel=0.05)


def test_requests_that_join_find_the_lengths_of_their_load():
    """Rows cost much in a batch of 16 and nothing for one request: as 15 more join, each is ordered a short draft."""
    policy, draw = AdaptivePolicy("sync", 1, LONGEST), random.Random(0)

    def rounds(size: int, row_s: float) -> int:
        for _ in range(60):
            lengths = [policy.draft_length(i, 99) for i in range(size)]
            counts = [next((k for k in range(one) if draw.random() > 0.8), one) for one in lengths]
            outcomes = [
                DraftOutcome(i, k, range(1, n + 1), n + 1) for i, (k, n) in enumerate(zip(lengths, counts, strict=True))
            ]
            verify_s, draft_s = 0.1 + row_s * sum(lengths), 0.001 * max(lengths)
            seen = (verify_s + draft_s, verify_s, draft_s, size, 100.0, size, 0, outcomes)
            policy.update(RoundObservation(*seen))
        return max(policy.draft_length(i, 99) for i in range(size))

    many, one = rounds(16, 0.01), rounds(1, 0.0)
    assert many < 4 < one
    policy.expect_load(16, False)
    assert max(policy.draft_length(i, 99) for i in range(16)) <= many


def test_rounds_in_which_nothing_may_be_drafted_earn_nothing_to_explore_with():
    """Requests that are decoded plainly at their own wish, however many, do not pay for trials of others."""
    policies = [AdaptivePolicy("sync", 0, LONGEST) for _ in range(2)]
    for policy in policies:
        for _ in range(30):
            policy.update(observation([0] * 4))
            policy._decision.budget = min(policy._decision.budget, 0.0)
    before = policies[0]._decision.budget
    for _ in range(100):
        policies[0].update(replace(observation([0] * 4), num_may_speculate=0))
        policies[1].update(observation([0] * 4))
    assert policies[0]._decision.budget == before < policies[1]._decision.budget


def test_prompts_that_are_read_in_every_round_do_not_hide_what_drafts_cost():
    """Reading takes nine tenths of each pass whatever is chosen; drafts that double the rest of it do not pay."""
    policy = AdaptivePolicy("sync", 0, LONGEST)
    for prompt_rows in (0, 500):
        for _ in range(60):
            given_s = 0.9 if prompt_rows else 0.0
            policy.update(observation([0] * 8, draft_s=0.0, verify_s=0.1 + given_s, prompt_rows=prompt_rows))
    for _ in range(60):
        policy.update(observation([1] * 8, draft_s=0.0, verify_s=1.0 + 0.1, prompt_rows=500))
    one = policy._decision.estimates[Decoding.in_turn]
    assert one.seconds == pytest.approx(0.2, rel=0.1)
    assert policy._decision.estimates[Decoding.plain].seconds == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("num_running", [1, 16])
def test_rounds_that_are_learned_from_together_are_decided_for_once(monkeypatch, num_running):
    """At rest four rounds teach and earn what they do one by one, and what follows from them is computed once."""
    policies, decided = {}, []
    for number in (1, 4):
        policy = policies[number] = AdaptivePolicy("sync", 0, LONGEST, scores=True)
        played(policy, num_running, 20, (1.5e-3, 0.0))
        assert policy.mode is Mode.rest and policy.most_unlearned
        policy._decision.budget = -50.0  # no trial begins within the rounds below
        decide = policy._decide
        monkeypatch.setattr(
            policy, "_decide", lambda *given, decide=decide: (decided.append(given[-1]), decide(*given))
        )
        for _ in range(40 // number):
            outcomes = [DraftOutcome(i, 0, ()) for i in range(num_running)]
            load = num_running, 100.0, num_running, 0
            policy.update(*[RoundObservation(0.01, 0.01, 0.0, *load, outcomes) for _ in range(number)])
    assert decided == [1] * 40 + [4] * 10
    one, four = policies[1], policies[4]
    assert one.mode is four.mode is Mode.rest
    assert one._decision.budget == pytest.approx(four._decision.budget, abs=0.02)
    assert one._load.plain.mean_s == pytest.approx(four._load.plain.mean_s)
    assert one._until_scoring == four._until_scoring
