"""The decision where requests come and go: batches that fill with prompts and empty one by one, drawn with a seed."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from statistics import mean

import pytest

from actors.policy.acceptance import DraftOutcome
from actors.policy.policy import AdaptivePolicy, Policy, RoundObservation, make_policy

LONGEST, PROMPT_ROWS, JOIN_AT_ONCE = 8, 120, 4


@dataclass(frozen=True)
class Batches:
    """`num_requests`, `at_once` at a time, of up to `tokens` tokens each; seconds of a pass, and of every row of it.

    `read_s`: what the drafter takes for the text of one request, beside the rounds. The acceptance of requests differs;
    the first `num_hard` tokens of a text are accepted a quarter as often. `scored_s`: what drafts without a pass take.
    """

    acceptance: float
    at_once: int
    num_requests: int
    row_s: float = 0.5e-3
    read_s: float = 1e-3
    tokens: int = 96
    pass_s: float = 20e-3
    draft_s: float = 0.3e-3
    num_hard: int = 0
    scored_s: float = 0.2e-3

    def tokens_per_s(self, policy: Policy, seed: int, *, drafts: bool = True) -> float:
        noise, text, kinds = (random.Random(f"{seed} {name}") for name in ("noise", "text", "kinds"))
        first = seed * self.num_requests
        waiting = [(first + i, int(self.tokens * kinds.uniform(0.5, 1))) for i in range(self.num_requests)]
        lengths_of = dict(waiting)
        chances = {i: min(0.95, max(0.02, kinds.gauss(self.acceptance, 0.1))) for i, _ in waiting}
        running, read, clock, done = Counter[int](), set[int](), 0.0, sum(length for _, length in waiting)
        while waiting or running:
            joining = waiting[: min(JOIN_AT_ONCE, self.at_once - len(running))]
            del waiting[: len(joining)]
            running.update(dict(joining))
            if joining:
                policy.expect_load(len(running), samples=False)
            followed = list(running)[: policy.num_followed(len(running))] if drafts else []
            beside_s = self.read_s * len(set(followed) - read)
            if drafts and not beside_s:
                policy.caught_up()
            lengths = {i: policy.draft_length(i, running[i] - 1) if i in read and i in followed else 0 for i in running}
            read |= set(followed)
            ages = {i: lengths_of[i] - left for i, left in running.items()}

            def accepted(i: int, length: int, ages: dict[int, int] = ages) -> int:
                chance = chances[i] / (4 if ages[i] < self.num_hard else 1)
                return next((k for k in range(length) if text.random() > chance), length)

            scored, scored_s = [], 0.0
            if drafts and policy.may_score:
                policy.begin_scoring()
                tested = [(i, min(policy.longest_draft, left - 1)) for i, left in running.items()]
                scored = [DraftOutcome(i, n, range(1, (k := accepted(i, n)) + 1), k + 1) for i, n in tested if n]
                scored_s = self.scored_s * len(tested)
            rows = len(running) + sum(lengths.values()) + PROMPT_ROWS / 2 * len(joining)
            verify_s = (self.pass_s + self.row_s * rows) * (1 + abs(noise.gauss(0, 0.1)))
            draft_s = self.draft_s * (max(lengths.values()) + sum(lengths.values()) / 6)
            outcomes = []
            for i, length in lengths.items():
                num_accepted = accepted(i, length)
                num_new = min(num_accepted + 1, running[i])
                outcomes.append(DraftOutcome(i, length, range(1, num_accepted + 1), num_new if length else 0))
                running[i] -= num_new
            size, seconds = len(running), verify_s + draft_s + 1e-3
            numbers = size, 200.0, size if drafts else 0, PROMPT_ROWS * len(joining)
            beside = {"unused_s": beside_s, "scored": scored, "scored_s": scored_s}
            policy.update(RoundObservation(seconds, verify_s, draft_s, *numbers, outcomes, **beside))
            for i in [i for i, left in running.items() if not left]:
                del running[i]
                policy.release(i)
            clock += seconds + beside_s + scored_s
        return done / clock

    def shares(self, seed: int, num_runs: int) -> list[float]:
        """Speed over that of plain decoding, in runs of one policy, between which the requests are decoded plainly."""
        policy, shares = AdaptivePolicy("sync", 0, LONGEST), []
        for run in range(num_runs):
            plain = self.tokens_per_s(make_policy("sync", 0, 0, adaptive=False), 9 * seed + run, drafts=False)
            shares.append(self.tokens_per_s(policy, 9 * seed + run) / plain)
            self.tokens_per_s(policy, 9 * seed + run + 1000, drafts=False)
        return shares


@pytest.mark.extended
@pytest.mark.parametrize(
    ("at_once", "num_requests", "read_s"),
    [
        (64, 64, 1e-3),
        pytest.param(64, 64, 10e-3, marks=pytest.mark.slow),
        pytest.param(64, 256, 1e-3, marks=pytest.mark.slow),
        pytest.param(16, 64, 1e-3, marks=pytest.mark.slow),
    ],
)
def test_drafts_that_do_not_pay_in_a_batch_cost_little_however_its_size_changes(at_once, num_requests, read_s):
    """They pay for the last few requests of a batch, at the most. Texts that take ten drafts' time to read cost more:
    those that are read while drafts go on are not charged."""
    reads_long = read_s > 5e-3
    seeds, num_runs = (range(3), 4) if num_requests > 64 or at_once < 64 else (range(2), 2)
    seeds, num_runs = (range(6), 3) if reads_long else (seeds, num_runs)
    batches = Batches(0.3, at_once, num_requests, read_s=read_s)
    runs = [batches.shares(seed, num_runs) for seed in seeds]
    assert mean(first for first, *_ in runs) > (0.92 if reads_long else 0.97)
    assert mean(share for _, *later in runs for share in later) > (0.965 if reads_long else 0.98)
    assert min(min(later) for _, *later in runs) > (0.91 if reads_long else 0.97)


@pytest.mark.parametrize(("at_once", "pays"), [(16, 1.6), pytest.param(64, 1.2, marks=pytest.mark.slow)])
def test_drafts_that_pay_in_a_batch_are_made(at_once, pays):
    assert mean(Batches(0.8, at_once, 2 * at_once, row_s=0.15e-3).shares(0, 3)) > pays


@pytest.mark.parametrize("runs_passes", [False, True])
def test_drafts_that_begin_to_pay_as_texts_grow_are_noticed_without_a_trial(runs_passes):
    """Drafts bring 1.3 tokens a round to texts that are new and 6 to older ones, and rounds with them take 4.6 plain
    ones, so that a trial is dear. Drafts which no pass verifies show it; without them decoding stays plain."""
    batches = Batches(0.93, 16, 32, row_s=1e-3, num_hard=32)
    fixed = {longest: make_policy("sync", 0, longest, adaptive=False) for longest in (0, LONGEST)}
    found = {False: 0.0, True: 0.0}
    for seed in range(3):
        better = max(batches.tokens_per_s(policy, seed, drafts=longest > 0) for longest, policy in fixed.items())
        for scores in found:
            kind = {"longest_only": True, "scores": scores, "runs_passes": runs_passes}
            policy = AdaptivePolicy("sync", 0, LONGEST, **kind)
            found[scores] += batches.tokens_per_s(policy, seed) / better / 3
    assert found[True] > 1.03 and found[True] > 1.04 * found[False]
