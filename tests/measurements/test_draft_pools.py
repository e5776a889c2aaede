"""`docs/measurements/draft_pools.py`: recorded texts in the simulator of fleets, and the table of what was measured."""

from __future__ import annotations

import argparse
import json

import pytest

from cluster.tools.planning.transcript import CHOICES, RecordedToken, Transcript
from docs.measurements.draft_pools import Recorded, simulated, table

OPTIONS = argparse.Namespace(pipeline="branches", target_ms=60.0, draft_ms=6.0, simulated=False)
COSTS = {"target_ms": 60.0, "draft_ms": 6.0, "host_ms": 0.0}
TEXT = tuple(range(100, 196))


def texts(right: float) -> Recorded:
    """The drafter's first choice is the text's token in this share of the places, and no choice is elsewhere."""
    tokens, log_probs = list[RecordedToken](), tuple(-0.1 - 3 * i for i in range(CHOICES))
    for place, token in enumerate(TEXT):
        is_right = int((place + 1) * right) > int(place * right)
        others = tuple(1000 + i for i in range(CHOICES))
        tokens.append(RecordedToken(token, (token, *others[1:]) if is_right else others, log_probs))
    return Recorded([Transcript(tuple(tokens))])


@pytest.mark.extended
@pytest.mark.parametrize(("right", "tokens_a_pass"), [(1.0, (5.0, 6.0)), (0.5, (1.5, 2.1)), (0.0, (0.9, 1.0))])
def test_the_simulator_s_drafter_is_right_where_the_recorded_one_was(right, tokens_a_pass):
    least, most = tokens_a_pass
    assert least < simulated(OPTIONS, "pool", 1, COSTS, texts(right), seconds=20) * 0.060 <= most


def test_plain_decoding_takes_a_pass_a_token():
    assert simulated(OPTIONS, "plain", 2, COSTS, texts(1.0), seconds=20) * 0.060 == pytest.approx(1.0, abs=0.01)


def test_the_table_has_medians_and_the_costs_that_were_measured(tmp_path):
    lines = [
        {"setting": "plain", "targets": 1, "mean": 16.0, "equal": True, "decode_ms": 61.0},
        *(
            {"setting": "pool", "targets": 1, "mean": mean, "equal": mean < 70, "draft_ms": mean / 10, "host_ms": 1.0}
            for mean in (60.0, 72.0, 66.0)
        ),
    ]
    file = tmp_path / "out.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    options = argparse.Namespace(**vars(OPTIONS) | {"file": file})
    assert table(options).splitlines()[2:] == [
        "| plain | 1 | 16.0 |  |  | 61.00 | yes |",
        "| pool | 1 | 66.0 (60.0 to 72.0) |  |  | 61.00, 6.60, 1.00 | NO |",
    ]
