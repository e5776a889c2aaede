"""The program of long prompts beside streams: its figures."""

from __future__ import annotations

import pytest

from docs.measurements.arriving_prompts import Turn


def test_figures_are_of_streams_and_prompts():
    turn = Turn(wall_s=4.0, gaps=[0.01] * 98 + [0.2, 0.3], ttft=[0.5, 0.7, 0.9], num_streamed=200)
    turn.answers = {0: (1, 2), 1: (3, 4)}
    found = turn.figures(prompt_tokens=100)
    assert found["longest gap, ms"] == 300 and found["p99"] == 200 and found["p50"] == 10
    assert found["TTFT p50, ms"] == 700 and found["prompts/s"] == 0.5 and found["tokens/s of the streams"] == 50
    assert found["rows/s"] == pytest.approx((200 + 4 + 200) / 4)
