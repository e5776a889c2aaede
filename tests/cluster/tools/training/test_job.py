"""The `train` job, small: loss falls, checkpoints load, stages need one another."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.config.jobs import TrainConfig
from cluster.jobs import train
from cluster.tools.training import stages
from cluster.tools.training.corpus import Corpus, Source
from cluster.tools.training.models import drafter_config
from cluster.tools.training.trainer import Recipe

SMALL = TrainConfig(
    compile=False,
    threads=1,
    vocab_size=320,
    held_out_tokens=256,
    batch_tokens=128,
    sequence_length=64,
    target_minutes=5.0,
    target_steps=8,
    drafter_minutes=5.0,
    drafter_steps=8,
    distillation_tokens=512,
    continuation_prompts=4,
    continuation_length=64,
    num_prompts=2,
    num_prompt_tokens=8,
)

FUNCTION = '''def combine_{n}(first, second):
    """Return the sum of both arguments, which must be numbers of the same kind.

    Raises TypeError when they are not.
    """
    total = first + second
    return total


'''


@pytest.fixture(scope="module", autouse=True)
def narrow_target() -> Iterator[None]:
    """One of half the width and a third of the layers: what the stages do does not depend on it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "target_config", drafter_config)
        yield


@pytest.fixture(scope="module")
def tiny_corpus() -> Corpus:
    """Four training sources of a few functions each, and two held-out ones."""
    texts = ["".join(FUNCTION.format(n=4 * file + n) for n in range(4)) for file in range(6)]
    sources = [Source(f"module_{n}.py", text) for n, text in enumerate(texts)]
    return Corpus(tuple(sources[:4]), tuple(sources[4:]))


@pytest.fixture(scope="module")
def finished(tiny_corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of one complete small run."""
    run_dir = tmp_path_factory.mktemp("run") / "fresh"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "load_corpus", lambda seed: tiny_corpus)
        patch.setattr(stages, "RECIPE", Recipe(warmup_steps=2, log_steps=1))
        threads = torch.get_num_threads()
        train.make_pair(SMALL, run_dir)
        torch.set_num_threads(threads)
    return run_dir


@pytest.mark.parametrize("role", [pytest.param("target", marks=pytest.mark.slow), "drafter"])
def test_loss_falls(finished: Path, role: str):
    lines = [json.loads(line) for line in (finished / "work" / role / "loss.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[-1]["tokens"] == 8 * 128
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_checkpoints_load(finished: Path, role: str):
    model = AutoModelForCausalLM.from_pretrained(finished / role)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == 0
    assert AutoTokenizer.from_pretrained(finished / role).vocab_size == 320


def test_report_says_what_was_done(finished: Path):
    report = json.loads((finished / "report.json").read_text())
    assert report["training"]["target"]["steps"] == 8
    assert report["num_prompts"] == 2
    assert list(report["acceptance_length"]) == ["1", "2", "3", "4", "5", "6", "7", "8"]
    assert 1.0 <= report["acceptance_length"]["5"] <= 6.0
    assert (finished / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert report["corpus_sha256"] in (finished / "README.md").read_text()


def test_same_seed_and_steps_give_the_same_weights(tiny_corpus: Corpus, tmp_path: Path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for attempt in ("first", "second"):
        place = stages.Workplace(replace(SMALL, target_steps=2), tiny_corpus, tmp_path / attempt, tmp_path / "work")
        stages.make_tokenizer(place)
        stages.make_target(place)
    torch.set_num_threads(threads)
    first, second = (tmp_path / attempt / "target/model.safetensors" for attempt in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()


def test_neither_stage_trains_on_held_out_text(finished: Path, tiny_corpus: Corpus, tmp_path: Path, monkeypatch):
    """What the target continues and what the drafter is distilled on come from the training sources."""
    cut, packed = [], []
    choose, pack = stages.choose_prompts, stages.pack
    monkeypatch.setattr(stages, "choose_prompts", lambda of, *a: (cut.extend(of), choose(of, *a))[1])
    monkeypatch.setattr(stages, "pack", lambda tokenizer, of: (packed.extend(of), pack(tokenizer, of))[1])
    monkeypatch.setattr(stages, "RECIPE", Recipe(warmup_steps=2, log_steps=1))
    threads = torch.get_num_threads()
    out = tmp_path / "out"
    shutil.copytree(finished / "target", out / "target")
    place = stages.Workplace(replace(SMALL, drafter_steps=1, target_steps=1), tiny_corpus, out, tmp_path)
    stages.make_target(place)
    stages.make_continuations(place)
    stages.make_drafter(place)
    torch.set_num_threads(threads)
    assert {source.path for source in cut} == {source.path for source in packed}
    assert {source.path for source in cut} == {source.path for source in tiny_corpus.training}


def test_stages_run_one_by_one_from_named_folders(finished: Path, tiny_corpus: Corpus, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(train, "load_corpus", lambda seed: tiny_corpus)
    config = replace(SMALL, stages=["continuations"], out=str(finished), work=str(tmp_path / "work"))
    outcome = train.make_pair(config, tmp_path / "unused")
    assert outcome == {"continuation_tokens": 4 * 64}
    assert torch.load(tmp_path / "work" / "continuations.pt").shape == (4 * 64,)
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize(
    ("stage", "missing"), [("target", "tokenizer"), ("continuations", "tokenizer"), ("drafter", "continuations")]
)
def test_a_stage_without_its_predecessor_is_an_error(
    tiny_corpus: Corpus, tmp_path: Path, monkeypatch, stage: str, missing: str
):
    monkeypatch.setattr(train, "load_corpus", lambda seed: tiny_corpus)
    with pytest.raises(FileNotFoundError, match=missing):
        train.make_pair(replace(SMALL, stages=[stage]), tmp_path)


@pytest.mark.parametrize("wrong", [{"stages": ["target", "magic"]}, {"stages": []}, {"vocab_size": 4}])
def test_wrong_settings_are_named(wrong: dict, tmp_path: Path):
    with pytest.raises(ValueError, match=f"job.{next(iter(wrong))}"):
        train.make_pair(replace(SMALL, **wrong), tmp_path)
