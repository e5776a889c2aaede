"""What an earlier run finished stays, and nothing else does."""

from __future__ import annotations

import json

import pytest

from cluster.io.prompts import Prompt
from cluster.io.resume import drop_unfinished

PROMPTS = [Prompt(text) for text in ("a", "b", "c", "d")]


def line(index, prompt, reason="length"):
    return json.dumps({"index": index, "prompt": prompt, "finish_reason": reason, "text": "é"})


def test_only_whole_lines_of_finished_requests_count(tmp_path):
    path = tmp_path / "completions.jsonl"
    lines = [line(2, "c", "stop"), line(0, "a"), line(1, "b", "abort"), line(3, "d", "error")]
    path.write_text("\n".join(lines) + "\n" + line(3, "d")[:20], encoding="utf-8")
    assert drop_unfinished(path, PROMPTS) == {0, 2}
    assert path.read_text(encoding="utf-8").splitlines() == lines[:2]
    assert drop_unfinished(path, PROMPTS) == {0, 2} and list(tmp_path.iterdir()) == [path]


def test_no_file_means_nothing_is_finished(tmp_path):
    assert drop_unfinished(tmp_path / "completions.jsonl", PROMPTS) == set()


@pytest.mark.parametrize("foreign", [line(1, "x"), line(7, "a")])
def test_completions_of_other_prompts_are_not_mixed_in(tmp_path, foreign):
    path = tmp_path / "completions.jsonl"
    path.write_text(line(0, "a") + "\n" + foreign + "\n")
    with pytest.raises(ValueError, match=r"^job\.resume=true: .* line 2 answers another list of prompts; choose"):
        drop_unfinished(path, PROMPTS)
    assert len(path.read_text().splitlines()) == 2, "and nothing is lost"
