"""What an earlier run finished stays, and nothing else does."""

from __future__ import annotations

import json
import random

import pytest

from cluster.io.prompts import Prompt
from cluster.io.resume import check_same_settings, drop_unfinished
from tests.damage import damaged_json, tried

PROMPTS = [Prompt(text) for text in ("a", "b", "c", "d")]


def line(index, prompt, reason="length"):
    return json.dumps({"index": index, "prompt": prompt, "finish_reason": reason, "text": "é"})


def test_only_whole_lines_of_finished_requests_count(tmp_path):
    path = tmp_path / "completions.jsonl"
    lines = [line(2, "c", "stop"), line(0, "a"), line(1, "b", "abort"), line(3, "d", "error")]
    lines.append(line(3, "d", "refused"))
    path.write_text("\n".join(lines) + "\n" + line(3, "d")[:20], encoding="utf-8")
    assert drop_unfinished(path, PROMPTS) == {0, 2}
    assert path.read_text(encoding="utf-8").splitlines() == lines[:2]
    assert drop_unfinished(path, PROMPTS) == {0, 2} and list(tmp_path.iterdir()) == [path]


def test_no_file_means_nothing_is_finished(tmp_path):
    assert drop_unfinished(tmp_path / "completions.jsonl", PROMPTS) == set()


@pytest.mark.parametrize("foreign", [line(1, "x"), line(4, "e"), line(7, "a")])
def test_completions_of_other_prompts_are_not_mixed_in(tmp_path, foreign):
    path = tmp_path / "completions.jsonl"
    path.write_text(line(0, "a") + "\n" + foreign + "\n")
    with pytest.raises(ValueError, match=r"^job\.resume=true: .* line 2 answers another list of prompts; choose"):
        drop_unfinished(path, PROMPTS)
    assert len(path.read_text().splitlines()) == 2, "and nothing is lost"


def test_completions_of_other_settings_are_not_mixed_in(tmp_path):
    report, sampling = tmp_path / "report.json", {"temperature": 0.5, "logit_bias": {7: -1.0}, "stop": ("x",)}
    check_same_settings(report, "/models/a", sampling)  # nothing is known of the earlier run
    report.write_text("{}")
    check_same_settings(report, "/models/a", sampling)
    report.write_text(json.dumps({"config": {"target": {"path": "/models/a", "tp": 2}, "sampling": sampling}}))
    check_same_settings(report, "/models/a", sampling)
    with pytest.raises(ValueError, match=r"^job\.resume=true: target\.path=/models/b, but .* says /models/a; choose"):
        check_same_settings(report, "/models/b", sampling)
    with pytest.raises(ValueError, match=r"^job\.resume=true: sampling\.temperature=1\.0, but .* says 0\.5; choose"):
        check_same_settings(report, "/models/a", {**sampling, "temperature": 1.0})


@pytest.mark.parametrize("other", ["3", "[]", '{"index": 1}', '{"index": -1, "prompt": "d", "finish_reason": "stop"}'])
def test_a_line_of_another_program_is_refused_by_number(tmp_path, other):
    path = tmp_path / "completions.jsonl"
    path.write_text(line(0, "a") + "\n" + other + "\n")
    with pytest.raises(ValueError, match=r"^job\.resume=true: .* line 2 is no completion \(.*\); choose"):
        drop_unfinished(path, PROMPTS)
    assert path.read_text().splitlines() == [line(0, "a"), other], "and nothing is lost"


def test_a_line_may_be_cut_off_within_a_character(tmp_path):
    path = tmp_path / "completions.jsonl"
    whole = json.dumps({"index": 1, "prompt": "b", "text": "é", "finish_reason": "stop"}, ensure_ascii=False).encode()
    path.write_bytes(whole + b"\n" + whole[: whole.index("é".encode()) + 1])
    assert drop_unfinished(path, PROMPTS) == {1} and path.read_bytes() == whole + b"\n"


def test_a_damaged_file_is_one_line_or_leaves_whole_completions(tmp_path):
    rng, path = random.Random(0), tmp_path / "completions.jsonl"
    for _ in range(300):
        kind, damaged = damaged_json(line(1, "b"), rng)
        path.write_bytes(line(0, "a").encode() + b"\n" + damaged + b"\n")
        finished, refusal = tried(lambda: drop_unfinished(path, PROMPTS))
        assert finished or str(path) in refusal, kind
        left = [json.loads(each) for each in path.read_text().splitlines()] if finished else []
        assert {each["index"] for each in left} == (finished or set()) and (refusal or 0 in finished), kind
