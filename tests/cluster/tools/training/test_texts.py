"""Rows of text with their labels, and which of a user's own texts become prompts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.tools.training.continuations import WINDOW, TextRows, joined, load_rows, prompts_of_text, read_texts


def test_rows_are_kept_joined_and_taken_with_their_labels(tmp_path: Path):
    rows = TextRows(torch.arange(12).view(3, 4), torch.tensor([1, 2, 0]), torch.tensor([3, 4, 1]))
    assert rows.mask().int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 0]] and len(rows) == 3
    rows.save(tmp_path / "rows.pt")
    kept = load_rows(tmp_path / "rows.pt")
    taken = joined([kept, kept]).take(torch.tensor([4, 0]))
    assert taken.tokens.tolist() == [[4, 5, 6, 7], [0, 1, 2, 3]] and taken.tokens.dtype == torch.long
    assert (taken.begins.tolist(), taken.ends.tolist()) == ([2, 1], [4, 3])


def test_texts_of_a_folder_are_read_in_order_and_pictures_left_out(tmp_path: Path):
    (tmp_path / "a.txt").write_text("whole\nfile")
    (tmp_path / "b.png").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "deep").mkdir()
    lines = {"prompt": "p", "text": "ignored"}, {"text": "t"}, {"prompt": None, "text": "u"}
    (tmp_path / "deep" / "c.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert list(read_texts(tmp_path)) == [("text", "whole\nfile"), ("prompt", "p"), ("text", "t"), ("text", "u")]
    with pytest.raises(ValueError, match=r"^job.text=.*/b\.png: is not UTF-8 text; save it as UTF-8$"):
        list(read_texts(tmp_path / "b.png"))
    with pytest.raises(ValueError, match=r"^job.text=.*/no: No such file or directory; give a text file, a JSONL"):
        list(read_texts(tmp_path / "no"))


@pytest.mark.parametrize(("count", "chosen"), [(1, [0]), (2, [0, 4]), (3, [0, 2, 4]), (9, [0, 1, 2, 3, 4])])
def test_prompts_come_before_whole_windows_and_are_chosen_evenly(tmp_path: Path, count: int, chosen: list[int]):
    tokenizer: Any = SimpleNamespace(encode=lambda text: SimpleNamespace(ids=[int(n) for n in text.split()]))

    def numbers(first: int, length: int) -> str:
        return " ".join(str(n) for n in range(first, first + length))

    entries = {"text": numbers(0, 2 * WINDOW)}, {"prompt": "7"}, {"prompt": ""}, {"text": numbers(1000, WINDOW - 1)}
    more = {"text": numbers(5000, WINDOW + 3)}, {"prompt": "8 9"}
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(map(json.dumps, (*entries, *more))))
    found = [[7], [8, 9], *(list(range(first, first + WINDOW)) for first in (0, WINDOW, 5000))]
    assert prompts_of_text(file, tokenizer, count) == [found[i] for i in chosen]
    file.write_text(json.dumps(entries[-1]))
    with pytest.raises(ValueError, match=rf"^job.text={file}: holds no prompt and no text of {WINDOW} tokens; give"):
        prompts_of_text(file, tokenizer, count)
