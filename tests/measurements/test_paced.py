"""The program that measures pipelines at given times of passes: what it runs, and what it makes of the figures."""

from __future__ import annotations

import json

import pytest

from cluster.config import load_config
from cluster.tools.planning.transcript import RecordedToken, Transcript
from docs.measurements.paced import COMMON, Setting, draw, main, of_ceiling, read_lines, table

LINE = {
    "setting": "branches-5",
    "target_ms": 15.0,
    "draft_ms": 1.5,
    "batch": 1,
    "start": 0,
    "backend": "inprocess",
    "tokens_per_s": 200.0,
    "decode_ms_per_token": 4.0,
    "mean_acceptance_length": 3.5,
    "branch_hit_rate": 0.8,
    "target_busy": 0.9,
    "round_ms": 20.0,
    "round_overhead_ms": 1.5,
    "simulated": 500.0,
    "target_pass_ms": 15.3,
    "ahead_pass_ms": 1.9,
}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "pipeline", "length", "adaptive", "is_attached"),
    [
        ("plain", "plain", 1, False, False),
        ("branches-6", "branches", 6, False, False),
        ("attached-4", "sync", 4, False, True),
        ("sync-8-adaptive", "sync", 8, True, False),
    ],
)
def test_a_setting_is_what_its_name_says(name, pipeline, length, adaptive, is_attached):
    setting = Setting(name, 15.0, 1.5, 2)
    config = load_config([*COMMON, *setting.overrides()])
    assert (config.target.pace_ms, config.drafter.pace_ms) == (15.0, 1.5)
    assert (config.pipeline.name, config.drafter.num_draft_tokens) == (pipeline, length)
    assert config.pipeline.adaptive is adaptive and config.drafter.is_attached(pipeline) is is_attached
    transcript = Transcript((RecordedToken(1, (1, 2), (-0.1, -2.0)),) * 40)
    scenario = setting.scenario(config.drafter, transcript)
    assert (scenario.pipeline, scenario.num_requests, scenario.adaptive) == (pipeline, 2, adaptive)
    assert (scenario.verify(9), scenario.draft(9), scenario.max_tokens) == (0.015, 0.0015, 40)


def test_the_ceiling_hides_all_drafting_but_that_of_misses():
    assert of_ceiling(LINE) == pytest.approx((15 + 0.2 * 1.5) / 20)
    assert of_ceiling(LINE | {"setting": "sync-4", "branch_hit_rate": None}) == pytest.approx((15 + 4 * 1.5) / 20)
    assert of_ceiling(LINE | {"setting": "sync-4-adaptive"}) is None, "its lengths differ"
    assert of_ceiling(LINE | {"setting": "plain", "round_ms": None}) is None


def test_the_table_has_medians_ranges_and_ratios(tmp_path, capsys):
    file = tmp_path / "paced.jsonl"
    lines = [LINE | {"tokens_per_s": speed, "start": at} for at, speed in enumerate((190.0, 210.0, 201.0))]
    lines += [LINE | {"setting": name, "tokens_per_s": speed} for name, speed in (("sync-4", 90.0), ("sync-5", 100.0))]
    lines.append(LINE | {"setting": "sync-8-adaptive", "tokens_per_s": 400.0})
    lines.append(LINE | {"setting": "plain", "round_ms": None, "tokens_per_s": 50.0, "branch_hit_rate": None})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table(read_lines(file)).splitlines()]
    (branches,) = [row for row in rows if row[3] == "branches-5"]
    assert branches[4:8] == ["3", "201 (190 to 210)", "2.01", "0.50"], "over the best fixed length of sync"
    assert rows[0][-1] == "of the ceiling" and branches[-1] == "0.77"
    main([str(file), "--table"])
    assert capsys.readouterr().out == table(read_lines(file)), "without settings nothing is run"
    draw(read_lines(file), tmp_path / "paced.png")
    assert (tmp_path / "paced.png").stat().st_size > 1000
