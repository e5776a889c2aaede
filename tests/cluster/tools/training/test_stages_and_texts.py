"""What the stages of a pair train on, row by row, and which of a user's own texts become prompts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.config.jobs import TrainConfig
from cluster.tools.training import stages
from cluster.tools.training.continuations import WINDOW, TextRows, joined, load_rows, prompts_of_text, read_texts
from cluster.tools.training.trainer import StepOutcome

CONFIG = TrainConfig(sequence_length=8, batch_tokens=20, target_minutes=3.0, target_steps=5, compile=False, seed=4)


def test_the_target_begins_with_sequences_of_half_the_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fitted: dict[str, Any] = {}
    seen: list[Any] = []
    model = SimpleNamespace(device="cpu")

    def fit(place: Any, trained: Any, step_loss: Any, source: Any, budget: Any, role: str) -> str:
        fitted.update(step_loss=step_loss, trained=trained, role=role, progress=budget.progress(5))
        return "record"

    def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append((tuple(inputs.shape), bool((labels == inputs + 1).all())))
        return torch.zeros(())

    monkeypatch.setattr(stages, "initialised", lambda config, seed, device: model if seed == 4 else None)
    monkeypatch.setattr(stages, "load_tokenizer", lambda folder: folder)
    monkeypatch.setattr(stages, "pack", lambda tokenizer, sources: torch.arange(300))
    monkeypatch.setattr(stages, "cross_entropy", lambda trained: loss)
    monkeypatch.setattr(stages, "_fit", fit)
    monkeypatch.setattr(stages, "save_model", lambda trained, folder: fitted.update(saved=folder))
    corpus: Any = SimpleNamespace(training=[])
    place = stages.Workplace(CONFIG, corpus, tmp_path / "out", tmp_path / "work")
    assert stages.make_target(place) == "record"
    outcomes = [fitted["step_loss"](0, progress) for progress in (0.0, 0.699, 0.7, 1.0)]
    assert seen == [((5, 4), True)] * 2 + [((2, 8), True)] * 2, "twenty tokens a step at most"
    assert [outcome.tokens for outcome in outcomes] == [20, 20, 16, 16] and isinstance(outcomes[0], StepOutcome)
    assert (fitted["role"], fitted["saved"], fitted["trained"]) == ("target", tmp_path / "out" / "target", model)
    assert fitted["progress"] == 1.0, "five steps are the limit"


def test_a_stage_is_fitted_in_a_folder_of_its_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given: dict[str, Any] = {}
    monkeypatch.setattr(stages, "fit", lambda *asked, **options: given.update(asked=asked, **options) or "record")
    config = TrainConfig(resume=True, device="cpu:0")
    corpus: Any = None
    place = stages.Workplace(config, corpus, tmp_path, tmp_path / "work")
    parts: list[Any] = ["model", "loss", "source", "budget"]
    assert stages._fit(place, parts[0], parts[1], parts[2], parts[3], "drafter") == "record"
    assert given == {
        "asked": ("model", "loss", stages.RECIPE, "budget", tmp_path / "work" / "drafter"),
        "device": "cpu",
        "sources": ["source"],
        "resume": True,
    }


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
