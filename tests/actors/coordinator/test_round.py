"""The bookkeeping of a round, against the sums that it stands for."""

from __future__ import annotations

import random

import pytest

from actors.coordinator.round import Round
from actors.coordinator.sequence import Sequence
from actors.policy.decision import Mode
from actors.protocol.messages import Request, SamplingParams, VerdictBatch

BATCH = VerdictBatch(1, (), 0.0, 0.1)


def observed(running: list[Sequence], *, may_draft: bool):
    ended = Round(0.0)
    ended.end(BATCH, 1.0, running, Mode.speculate, may_draft=may_draft)
    return ended.observation()


def running_of(draw: random.Random, temperatures: list[float]) -> list[Sequence]:
    return [
        Sequence.start(Request(i, (3,) * draw.randint(1, 9), SamplingParams(temperature=temperature)), 99)
        for i, temperature in enumerate(temperatures)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_the_load_is_the_number_of_sequences_their_mean_length_and_what_most_of_them_are(seed):
    draw = random.Random(seed)
    temperatures = [draw.choice([0.0, 0.0, 0.3, 1.0]) for _ in range(draw.randint(1, 7))]
    running = running_of(draw, temperatures)
    lengths = [len(sequence.token_ids) for sequence in running]
    sampled = [temperature for temperature in temperatures if temperature > 0]
    greedy = [temperature for temperature in temperatures if temperature == 0]
    seen = observed(running, may_draft=True)
    assert (seen.num_running, seen.mean_len) == (len(running), pytest.approx(sum(lengths) / len(lengths)))
    assert seen.samples == (len(sampled) > len(greedy)) and seen.num_may_speculate == len(running)


@pytest.mark.parametrize(
    ("temperatures", "samples"),
    [
        ([], False),
        ([1.0], True),
        ([0.0], False),
        ([0.5, 0.0], False),
        ([0.5, 0.0, 0.1], True),
        ([0.5, 0.0, 0.0], False),
    ],
)
def test_the_policy_learns_from_a_round_whether_most_of_the_load_is_sampled(temperatures, samples):
    running = running_of(random.Random(0), temperatures)
    seen = observed(running, may_draft=False)
    assert (seen.samples, seen.num_running) == (samples, max(1, len(running))) and not seen.num_may_speculate
