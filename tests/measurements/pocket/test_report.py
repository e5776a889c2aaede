"""The report and the README of a pair: every figure is that of the right model, rows and depth."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from docs.measurements.pocket import report as module
from docs.measurements.pocket.config import PairConfig

CONFIG = PairConfig(
    vocab_size=300,
    sequence_length=8,
    held_out_tokens=16,
    num_prompt_tokens=40,
    continuation_length=24,
    continuation_prompts=11,
    distillation_tokens=2_500_000,
    batch_tokens=96,
    seed=6,
)


def test_a_report_measures_both_models_on_what_was_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    models = {
        name: SimpleNamespace(name=name, num_parameters=lambda name=name: len(name)) for name in ("target", "drafter")
    }
    opened: list[tuple[Path, str]] = []
    matches = {2: [True] * 33 + [False] * 7, 3: [False] * 40}
    measured: list[Any] = []

    def note(kind: str, value: float) -> Any:
        def taken(*given: Any) -> float:
            measured.append((kind, *(one.name for one in given[:-1]), tuple(given[-1].shape)))
            return value

        return taken

    (tmp_path / "prompts.jsonl").write_text('{"prompt": "ab"}\n{"prompt": "abc"}\n')
    tokenizer = SimpleNamespace(encode=lambda text: SimpleNamespace(ids=list(range(len(text)))))
    monkeypatch.setattr(module, "load_tokenizer", lambda folder: tokenizer if folder == tmp_path / "target" else None)
    monkeypatch.setattr(module, "load_model", lambda path, device: opened.append((path, device)) or models[path.name])
    monkeypatch.setattr(module, "pack", lambda tokens, sources: torch.arange(100) if sources == "held out" else None)
    monkeypatch.setattr(module, "mean_loss", lambda model, rows: {"target": 1.0, "drafter": 2.0}[model.name])
    monkeypatch.setattr(module, "agreement_rate", note("agreement", 0.5))
    monkeypatch.setattr(module, "overlap", note("overlap", 0.25))
    asked: list[Any] = []
    monkeypatch.setattr(
        module,
        "greedy_matches",
        lambda one, two, prompt, n: asked.append((one.name, two.name, n)) or matches[len(prompt)],
    )
    monkeypatch.setattr(
        module, "acceptance_length", lambda found, depth: depth + sum(map(sum, found)) / 100 + len(found[0]) / 1000
    )
    corpus: Any = SimpleNamespace(held_out="held out")
    found = module.measure(CONFIG, corpus, tmp_path)
    assert opened == [(tmp_path / "target", "cpu"), (tmp_path / "drafter", "cpu")]
    assert asked == [("target", "drafter", 40)] * 2
    assert measured == [("agreement", "target", "drafter", (2, 9)), ("overlap", "target", "drafter", (2, 9))]
    lengths = found.pop("acceptance_length")
    assert lengths == pytest.approx({depth: depth + 0.33 + 0.04 for depth in range(1, 9)})
    assert found.pop("acceptance_length_at_start") == pytest.approx(5 + 0.32 + 0.032), "of the first 32 tokens"
    assert found == {
        "held_out_loss": {"target": 1.0, "drafter": 2.0},
        "held_out_perplexity": {"target": math.e, "drafter": math.exp(2)},
        "held_out_tokens": 16,
        "agreement_on_held_out_text": 0.5,
        "agreement_on_continuations": 33 / 80,
        "acceptance_rate_when_sampling": 0.25,
        "num_prompts": 2,
        "parameters": {"target": 6, "drafter": 7},
    }


def test_a_run_is_described_by_its_corpus_and_the_records_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sources = [SimpleNamespace(text="é" * 500_000), SimpleNamespace(text="x" * 500_000)]
    corpus: Any = SimpleNamespace(fingerprint=lambda: "abc", training=sources)
    monkeypatch.setattr(module, "load_tokenizer", lambda folder: folder.relative_to(tmp_path / "out"))
    monkeypatch.setattr(module, "pack", lambda tokenizer, given: [0] * 7 if given is sources else [])
    (tmp_path / "work" / "drafter").mkdir(parents=True)
    (tmp_path / "work" / "drafter" / "record.json").write_text('{"steps": 3}')
    found = module.describe_run(CONFIG, corpus, tmp_path / "out", tmp_path / "work")
    assert {name: found[name] for name in ("seed", "corpus_sha256", "corpus_files", "corpus_tokens", "training")} == {
        "seed": 6,
        "corpus_sha256": "abc",
        "corpus_files": 2,
        "corpus_tokens": 7,
        "training": {"drafter": {"steps": 3}},
    }
    assert found["corpus_megabytes"] == 1.5 and found["torch"] == torch.__version__ and found["cores"] >= 1


def test_the_readme_has_the_figures_in_their_places(tmp_path: Path):
    record = {"steps": 7, "tokens": 3_000_000, "seconds": 600.0, "final_loss": 1.2345}
    report = {
        "acceptance_length": {depth: 1 + depth / 10 for depth in range(1, 9)},
        "acceptance_length_at_start": 2.125,
        "training": {"target": record, "drafter": {**record, "steps": 9, "final_loss": 0.5}},
        "parameters": {"target": 5_600_000, "drafter": 1_200_000},
        "held_out_loss": {"target": 2.0, "drafter": 2.5},
        "held_out_perplexity": {"target": 7.389, "drafter": 12.182},
        "held_out_tokens": 16,
        "agreement_on_held_out_text": 0.5,
        "agreement_on_continuations": 0.75,
        "acceptance_rate_when_sampling": 0.25,
        "num_prompts": 2,
        "seed": 6,
        "corpus_sha256": "abc",
        "corpus_files": 2,
        "corpus_megabytes": 1.5,
        "corpus_tokens": 1_250_000,
        "python": "3.11",
        "torch": "2.11",
        "cores": 2,
    }
    module.write_readme(replace(CONFIG, sequence_length=9), report, tmp_path / "README.md")
    text = (tmp_path / "README.md").read_text()
    flat = " ".join(text.split())
    for line in (
        "| target | 2.000 | 7.4 |",
        "| drafter | 2.500 | 12.2 |",
        "| target | 5.6 M | 7 | 3.0 M | 10 min | 5000 | 1.234 |",
        "| drafter | 1.2 M | 9 | 3.0 M | 10 min | 5000 | 0.500 |",
        "| draft tokens | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 |",
        "|---|---|---|---|---|---|---|---|---|",
        "| acceptance length | 1.10 | 1.20 | 1.30 | 1.40 | 1.50 | 1.60 | 1.70 | 1.80 |",
    ):
        assert line in text.splitlines(), line
    for words in (
        "**Acceptance length 1.50** at 5 draft tokens per round",
        "over the first 32 tokens of each continuation the acceptance length at 5 draft tokens is 2.12",
        "2 files, 1.5 MB, 1.25 M tokens",
        "in sequences of 4 for the first",
        "2.5 M tokens of training sources",
        "continuations, to 24 tokens, of 11 prompts",
    ):
        assert words in flat, words
    assert max(map(len, text.splitlines())) <= 120
