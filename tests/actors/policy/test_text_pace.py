"""How many rows of prompts a pass reads beside decoding requests, on machines whose passes cost what a line says."""

from __future__ import annotations

import random

import pytest

from actors.policy.policy import Policy, RoundObservation
from actors.policy.text_pace import LEAST_ROWS, MOST_PLAIN, TextPace


def settled(plain_s: float, row_s: float, *, pass_s: float = 0.1, noise: float = 0.0, slower: float = 1.0):
    """Seconds of passes over prompts of any length, after the first of 2,048 rows; half of the way the machine is
    `slower`."""
    choose, pace, seconds = random.Random(0), TextPace(), list[float]()
    num_rows, factor = 2048, 1.0
    for number in range(80):
        factor = slower if number >= 40 else 1.0
        seconds.append((plain_s + row_s * num_rows) * factor * (1 + noise * choose.random()))
        pace.saw_pass(seconds[-1], num_rows, plain_s * factor)
        most = pace.most_rows(pass_s, plain_s * factor)
        assert most is not None
        num_rows = min(2048, most)
    return seconds, num_rows


@pytest.mark.parametrize(
    ("plain_s", "row_s", "pass_s"),
    [(0.002, 0.001, 0.1), (0.002, 0.001, 0.3), (0.030, 0.001, 0.1), (0.010, 0.00004, 0.1)],
)
def test_a_pass_takes_what_is_asked_for_or_eight_plain_ones(plain_s, row_s, pass_s):
    seconds, num_rows = settled(plain_s, row_s, pass_s=pass_s)
    if num_rows == 2048:
        assert seconds[-1] < pass_s, "a fast machine reads as much as fits"
    else:
        assert seconds[1:] == [pytest.approx(max(pass_s, MOST_PLAIN * plain_s), rel=0.05)] * 79


def test_it_follows_the_machine():
    for slower in (0.3, 3.0):
        seconds, _ = settled(0.002, 0.0004, noise=0.3, slower=slower)
        assert sum(seconds[20:40]) / 20 == pytest.approx(0.1, rel=0.1)
        assert sum(seconds[60:]) / 20 == pytest.approx(0.1, rel=0.1)


def test_few_rows_are_read_in_any_case():
    assert settled(0.002, 0.1)[1] == LEAST_ROWS


def test_there_is_no_bound_without_a_time_and_before_anything_is_known():
    pace = TextPace()
    assert pace.most_rows(0.1, 0.01) is None
    pace.saw_pass(5.0, 10, 0.01)
    assert pace.most_rows(0.1, 0.01) is None, "so few rows show nothing"
    pace.saw_pass(1.01, 1000, 0.01)
    assert pace.most_rows(0.101, 0.001) == 100 and pace.most_rows(0.0, 0.001) is None


def test_a_policy_learns_from_passes_with_and_without_prompts():
    policy = Policy("plain", 0)
    for seconds, num_prompt_rows in ((2.0, 2000), (0.02, 0), (0.02, 0)):
        policy.update(RoundObservation(seconds, seconds, 0.0, 1, 10.0, 0, num_prompt_rows, ()))
    assert policy.most_text(0.5) == 480  # of 1 ms each, beside a plain pass of 20 ms
    assert policy.most_text(0.1) == 140  # eight plain passes take longer
