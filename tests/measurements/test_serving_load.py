"""The load program against a server in this process: what it counts, and what it makes of refusals."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from docs.measurements.serving import Answered, drive, figures, quantile, table
from tests.cluster.serving.conftest import serving

BODY = {"prompt": "a b", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def answered(*chunks_at: float, sent_at: float = 0.0, num_tokens: int = 0, status: int = 200) -> Answered:
    return Answered("a", sent_at, status, list(chunks_at), "x", num_tokens)


def test_figures_are_of_what_was_served():
    answers = [answered(1.0, 1.5, 3.0, num_tokens=5), answered(2.0, 2.5, num_tokens=2), answered(status=429)]
    found = figures(answers, wall_s=7.0)
    assert found["tokens_per_s"] == 1.0 and found["num_refused"] == 1 and found["acceptance_length"] is None
    assert (found["ttft_ms_p50"], found["ttft_ms_p99"]) == (1000, 2000)
    assert (found["itl_ms_p50"], found["itl_ms_p99"]) == (500, 500)
    assert (found["gap_ms_p50"], found["gap_ms_p99"]) == (500, 1500)


@pytest.mark.parametrize(("share", "wanted"), [(0.5, 2), (0.99, 4), (0.01, 1), (0.75, 3)])
def test_a_quantile_is_a_value_that_was_measured(share, wanted):
    assert quantile([3, 1, 4, 2], share) == wanted


@pytest.mark.extended
def test_every_body_is_served_though_some_are_refused(tiny_checkpoint):
    """Four places and none to wait in: the others are refused, and come again."""
    path = tiny_checkpoint("Llama")
    with serving(path, path, pace_ms=60, keys=(), max_waiting=0) as server:
        answers = asyncio.run(drive(server.url, [BODY] * 10, 10, retry_s=0.05))
        once = asyncio.run(drive(server.url, [BODY], 1))
    served = [one for one in answers if one.status == 200]
    assert len(served) == 10 and {one.status for one in answers} == {200, 429}
    assert {(one.text, one.num_tokens) for one in [*served, *once]} == {(once[0].text, 12)}
    assert all(one.chunks_at and one.speculation["num_spec_steps"] for one in served)


def test_a_table_has_medians_of_each_setting(tmp_path: Path):
    rows = [
        {"streams": 2, "start": start, "tokens_per_s": 100.0 + start, "texts_equal": start != 1} for start in range(3)
    ]
    file = tmp_path / "out.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    last = table(file).splitlines()[-1].split(" | ")
    assert last[:2] == ["| 2", "101"] and last[-1] == "NO |"
