"""Training rows: labels end with the text, a killed run goes on, and a user's text becomes prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from cluster import pocket
from cluster.io.text import load_tokenizer
from cluster.tools.training import continuations
from cluster.tools.training.continuations import load_rows, prompts_of_text, write_rows, written_rows
from cluster.tools.training.models import drafter_config, initialised


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(pocket.TARGET)


def test_labels_begin_behind_the_prompt_and_end_with_the_end_of_text():
    tokens = torch.tensor([[5, 0, 7, 0, 9, 9], [5, 6, 7, 8, 9, 9]])
    rows = written_rows(tokens, prompt_length=2, end_ids=[0])
    assert rows.mask().int().tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]]
    assert rows.take(torch.tensor([1])).tokens.tolist() == [[5, 6, 7, 8, 9, 9]]


def test_a_killed_run_writes_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(continuations, "BATCH", 2)
    model, prompts = (
        initialised(drafter_config(64), 0, "cpu"),
        [[1, 2, 3], [4, 5, 6], [7, 8, 9, 10], [3, 2, 1, 4], [5, 6, 7, 8, 9]],
    )

    def write(folder: Path) -> torch.Tensor:
        return write_rows(model, prompts, 12, 1.0, [0], 0, folder, lambda _: None).tokens

    whole = write(tmp_path / "whole")
    assert whole.shape == (5, 12)
    write(tmp_path / "killed")
    kept = (tmp_path / "killed" / "1.pt").stat().st_mtime_ns
    (tmp_path / "killed" / "2.pt").unlink()
    (tmp_path / "killed" / "2.pt.part").write_bytes(b"half")
    assert torch.equal(write(tmp_path / "killed"), whole)
    assert (tmp_path / "killed" / "1.pt").stat().st_mtime_ns == kept
    assert load_rows(tmp_path / "killed" / "2.pt").tokens.tolist() == whole[4:5].tolist()


@pytest.mark.extended
def test_every_group_of_prompts_is_continued_by_draws_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(continuations, "BATCH", 1)
    model = initialised(drafter_config(64), 0, "cpu")
    rows = write_rows(model, [[1, 2, 3]] * 4, 16, 1.0, [0], 0, tmp_path, lambda _: None).tokens
    assert len({tuple(row) for row in rows.tolist()}) == 4
    other = write_rows(model, [[1, 2, 3]] * 4, 16, 1.0, [0], 1, tmp_path / "other", lambda _: None).tokens
    assert not torch.equal(rows, other)


def test_prompts_of_the_users_own_text(tmp_path: Path, tokenizer: Tokenizer):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "def f():"}) + "\n\n")
    (tmp_path / "notes.txt").write_text("a quiet line of prose\n" * 60)
    (tmp_path / "picture.bin").write_bytes(b"\xff\xfe\x00\xff")
    prompts = prompts_of_text(tmp_path, tokenizer, 3)
    assert prompts[0] == tokenizer.encode("def f():").ids
    assert [len(prompt) for prompt in prompts[1:]] == [64, 64]


@pytest.mark.parametrize(("content", "wrong"), [('{"answer": 1}\n', "line 1"), ("too short", "64 tokens")])
def test_unusable_text_is_named(tmp_path: Path, tokenizer: Tokenizer, content: str, wrong: str):
    file = tmp_path / ("a.jsonl" if content.startswith("{") else "a.txt")
    file.write_text(content)
    with pytest.raises(ValueError, match=rf"job.text=.*{wrong}"):
        prompts_of_text(file, tokenizer, 3)
