"""The decision on a machine that pauses and changes its speed: rounds of one request, drawn with a seed."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from math import exp

import pytest

from actors.policy.acceptance import DraftOutcome
from actors.policy.policy import AdaptivePolicy, Policy, RoundObservation, make_policy
from tests import matrices

LONGEST, REQUEST_TOKENS, OVERHEAD_S = 8, 200, 2e-4


@dataclass(frozen=True)
class Machine:
    """`slowest`: logarithm of the most by which a phase is slow; `paused`: share of plain rounds with a pause.

    `after_drafts`: how many times as long the first plain pass behind drafts takes.
    """

    acceptance: float
    draft_s: float
    row_s: float = 0.0
    pass_s: float = 2.5e-3
    noise: float = 0.2
    slowest: float = 1.0
    paused: float = 0.0
    after_drafts: float = 1.0

    def tokens_per_s(self, policy: Policy, seed: int, num_tokens: int = 3000) -> float:
        """Runs requests one after the other; acceptance, phases and pauses do not depend on what the policy does."""
        noise, phases, pauses, text = (
            random.Random(f"{seed} {name}") for name in ("noise", "phases", "pauses", "text")
        )
        phase_s, pause_s = 150 * self.pass_s, 1.5 * self.pass_s / max(self.paused, 1e-9)
        clock, done, slow, next_phase, next_pause, drafted = 0.0, 0, 1.0, 0.0, pauses.expovariate(1 / pause_s), 0
        while done < num_tokens:
            request_id, position = divmod(done, REQUEST_TOKENS)
            policy.expect_load(1, samples=False)
            policy.caught_up()
            remaining = REQUEST_TOKENS - position
            length = policy.draft_length(request_id, remaining - 1) if policy.num_followed(1) else 0
            while clock > next_phase:
                slow, next_phase = exp(phases.uniform(0, self.slowest)), next_phase + phases.expovariate(1 / phase_s)
            paused_s = 0.0
            if self.paused and clock > next_pause:
                paused_s, next_pause = pauses.uniform(5e-3, 60e-3), clock + pauses.expovariate(1 / pause_s)
            first = self.after_drafts if drafted and not length else 1.0
            verify_s = (self.pass_s + self.row_s * (1 + length)) * slow * first * exp(noise.gauss(0, self.noise))
            draft_s = self.draft_s * length * slow * exp(noise.gauss(0, self.noise))
            chances = [text.random() for _ in range(LONGEST)]
            accepted = next((i for i, chance in enumerate(chances) if chance > self.acceptance or i == length), LONGEST)
            num_new = min(accepted, remaining - 1) + 1
            seconds = verify_s + paused_s + draft_s + OVERHEAD_S * slow
            outcome = DraftOutcome(request_id, length, range(1, num_new), num_new if length else 0)
            policy.update(RoundObservation(seconds, verify_s + paused_s, draft_s, 1, 100.0 + position, 1, 0, [outcome]))
            clock, done, drafted = clock + seconds, done + num_new, length
            if done // REQUEST_TOKENS > request_id:
                policy.release(request_id)
        return done / clock


def shares(machine: Machine, compared: int, seeds: Iterable[int] = range(3 if matrices.is_whole else 2)) -> list[float]:
    """Speed of the decision, by seed, over that of drafts of a fixed length; 0 for plain decoding."""
    return [
        machine.tokens_per_s(AdaptivePolicy("sync", 0, LONGEST), seed)
        / machine.tokens_per_s(make_policy("sync", compared, compared, adaptive=False), seed)
        for seed in seeds
    ]


@pytest.mark.extended
@pytest.mark.parametrize(
    "machine",
    [
        Machine(0.3, draft_s=1.5e-3, slowest=1.2, paused=0.02, noise=0.25),
        pytest.param(Machine(0.2, draft_s=0.5e-3, row_s=0.35e-3, paused=0.01), marks=pytest.mark.slow),
        Machine(0.4, draft_s=1.2e-3, slowest=0.0, after_drafts=1.8),
    ],
    ids=["pauses", "rows", "after drafts"],
)
def test_drafts_that_do_not_pay_cost_little(machine):
    got = shares(machine, compared=0)
    assert sum(got) / len(got) > 0.975 and min(got) > 0.96


@pytest.mark.parametrize("paused", [pytest.param(0.0, marks=pytest.mark.slow), 0.01])
def test_drafts_that_pay_are_made(paused):
    machine = Machine(0.8, draft_s=0.4e-3, slowest=1.2, paused=paused)
    assert min(shares(machine, compared=0)) > 1.6
    got = shares(machine, compared=4)
    assert sum(got) / len(got) > 0.97 and min(got) > 0.95


@pytest.mark.extended
@pytest.mark.parametrize(("paused", "seed"), [(0.01, 19), (0.02, 19), (0.02, 34)])
def test_a_pause_in_the_first_trial_does_not_end_drafts_that_pay_for_hundreds_of_rounds(paused, seed):
    """The machine pauses in the first rounds with drafts, for up to 25 of them."""
    machine = Machine(0.8, draft_s=0.4e-3, slowest=1.2, paused=paused)
    assert min(shares(machine, 4, [seed])) > 0.94
