"""Confidence calibration: probabilities of first choices against the share that the target keeps."""

from __future__ import annotations

import math
import random

import pytest

from actors.drafters.draft_ahead.confidence import ConfidenceCalibration


@pytest.mark.parametrize("drafted, keeps", [(0.4, 0.8), (0.9, 0.6), (0.5, 0.5)])
def test_expected_acceptance_approaches_the_share_kept(drafted, keeps):
    calibration, choose = ConfidenceCalibration(), random.Random(0)
    seen = []
    for _ in range(2000):
        expected = math.exp(calibration.adjust([math.log(drafted), math.log((1 - drafted) / 2)])[0])
        calibration.update(expected, kept=choose.random() < keeps)
        seen.append(expected)
    assert sum(seen[500:]) / 1500 == pytest.approx(keeps, abs=0.03)


def test_the_other_children_share_what_is_left():
    calibration = ConfidenceCalibration()
    assert calibration.adjust([math.log(0.6), math.log(0.3), math.log(0.1)]) == pytest.approx(
        [math.log(0.6), math.log(0.3), math.log(0.1)]
    ), "without verdicts the drafter's probabilities stay"
    calibration.shift = 1.5
    first, *others = (math.exp(value) for value in calibration.adjust([math.log(0.6), math.log(0.3), math.log(0.1)]))
    assert first > 0.8 and first + sum(others) == pytest.approx(1.0) and others[0] == pytest.approx(3 * others[1])


def test_certainty_stays_finite_and_forgettable():
    calibration = ConfidenceCalibration()
    for _ in range(10_000):
        calibration.update(0.0, kept=True)
    values = calibration.adjust([0.0, -40.0, -math.inf])
    assert -1e-6 < values[0] <= 0.0 and values[2] == -math.inf
    for _ in range(200):
        calibration.update(1.0, kept=False)
    assert calibration.shift < -5


@pytest.mark.parametrize("kept", [True, False])
def test_a_verdict_moves_the_log_odds_by_a_tenth_of_what_was_not_expected(kept):
    calibration = ConfidenceCalibration()
    for expected in (0.75, 0.25):
        calibration.update(expected, kept=kept)
    assert calibration.shift == pytest.approx(0.1 if kept else -0.1)
    (first, *_) = calibration.adjust([math.log(0.6), math.log(0.4)])
    assert math.exp(first) == pytest.approx(1 / (1 + 0.4 / 0.6 * math.exp(-calibration.shift)))
    for _ in range(100):
        calibration.update(float(not kept), kept=kept)
    assert calibration.shift == (6.0 if kept else -6.0)
