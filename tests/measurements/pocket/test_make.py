"""The bundled pair, made small: loss falls, checkpoints load, stages need one another."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from cluster.tools.training.corpus import Corpus, Source
from cluster.tools.training.models import llama_config
from cluster.tools.training.trainer import Recipe, StepOutcome, TrainingRecord
from docs.measurements.pocket import make
from docs.measurements.pocket.config import STAGES, PairConfig

pytestmark = pytest.mark.extended

SMALL = PairConfig(
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


def narrow(vocab_size: int, layers: int = 1) -> LlamaConfig:
    return llama_config(vocab_size, hidden=48, layers=layers, heads=1, kv_heads=1, intermediate=64)


@pytest.fixture(scope="module", autouse=True)
def narrow_pair() -> Iterator[None]:
    """Models of a quarter of the drafter's width: what the stages do does not depend on it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "target_config", narrow)
        patch.setattr(make, "drafter_config", narrow)
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
        patch.setattr(make, "load_corpus", lambda seed: tiny_corpus)
        recipe = Recipe(matrix_learning_rate=0.02, other_learning_rate=0.012, warmup_steps=2, log_steps=1)
        patch.setattr(make, "RECIPE", recipe)
        threads = torch.get_num_threads()
        make.make_pair(SMALL, run_dir)
        torch.set_num_threads(threads)
    return run_dir


@pytest.mark.extended
@pytest.mark.parametrize("role", ["target", "drafter"])
def test_loss_falls(finished: Path, role: str):
    lines = [json.loads(line) for line in (finished / "work" / role / "loss.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[-1]["tokens"] == 8 * 128
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]


@pytest.mark.extended
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
        place = make.Workplace(replace(SMALL, target_steps=2), tiny_corpus, tmp_path / attempt, tmp_path / "work")
        make.make_tokenizer(place)
        make.make_target(place)
    torch.set_num_threads(threads)
    first, second = (tmp_path / attempt / "target/model.safetensors" for attempt in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()


def test_neither_stage_trains_on_held_out_text(finished: Path, tiny_corpus: Corpus, tmp_path: Path, monkeypatch):
    """What the target continues and what the drafter is distilled on come from the training sources."""
    cut, packed = [], []
    choose, pack = make.choose_prompts, make.pack
    monkeypatch.setattr(make, "choose_prompts", lambda of, *a: (cut.extend(of), choose(of, *a))[1])
    monkeypatch.setattr(make, "pack", lambda tokenizer, of: (packed.extend(of), pack(tokenizer, of))[1])
    monkeypatch.setattr(make, "RECIPE", Recipe(warmup_steps=2, log_steps=1))
    threads = torch.get_num_threads()
    out = tmp_path / "out"
    shutil.copytree(finished / "target", out / "target")
    place = make.Workplace(replace(SMALL, drafter_steps=1, target_steps=1), tiny_corpus, out, tmp_path)
    make.make_target(place)
    make.make_continuations(place)
    make.make_drafter(place)
    torch.set_num_threads(threads)
    assert {source.path for source in cut} == {source.path for source in packed}
    assert {source.path for source in cut} == {source.path for source in tiny_corpus.training}


def test_stages_run_one_by_one_from_named_folders(finished: Path, tiny_corpus: Corpus, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(make, "load_corpus", lambda seed: tiny_corpus)
    config = replace(SMALL, stages=["continuations"], out=str(finished), work=str(tmp_path / "work"))
    outcome = make.make_pair(config, tmp_path / "unused")
    assert outcome == {"continuation_tokens": 4 * 64}
    assert torch.load(tmp_path / "work" / "continuations.pt").shape == (4 * 64,)
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize(
    ("stage", "missing"), [("target", "tokenizer"), ("continuations", "tokenizer"), ("drafter", "continuations")]
)
def test_a_stage_without_its_predecessor_is_an_error(
    tiny_corpus: Corpus, tmp_path: Path, monkeypatch, stage: str, missing: str
):
    monkeypatch.setattr(make, "load_corpus", lambda seed: tiny_corpus)
    with pytest.raises(FileNotFoundError, match=missing):
        make.make_pair(replace(SMALL, stages=[stage]), tmp_path)


@pytest.mark.parametrize("wrong", [{"stages": ["target", "magic"]}, {"stages": []}, {"vocab_size": 4}])
def test_wrong_settings_are_named(wrong: dict, tmp_path: Path):
    with pytest.raises(ValueError, match=f"pair.{next(iter(wrong))}"):
        make.make_pair(replace(SMALL, **wrong), tmp_path)


LONG = PairConfig(sequence_length=8, batch_tokens=20, target_minutes=3.0, target_steps=5, compile=False, seed=4)


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

    monkeypatch.setattr(make, "initialised", lambda config, seed, device: model if seed == 4 else None)
    monkeypatch.setattr(make, "load_tokenizer", lambda folder: folder)
    monkeypatch.setattr(make, "pack", lambda tokenizer, sources: torch.arange(300))
    monkeypatch.setattr(make, "cross_entropy", lambda trained: loss)
    monkeypatch.setattr(make, "_fit", fit)
    monkeypatch.setattr(make, "save_model", lambda trained, folder: fitted.update(saved=folder))
    corpus: Any = SimpleNamespace(training=[])
    place = make.Workplace(LONG, corpus, tmp_path / "out", tmp_path / "work")
    assert make.make_target(place) == "record"
    outcomes = [fitted["step_loss"](0, progress) for progress in (0.0, 0.699, 0.7, 1.0)]
    assert seen == [((5, 4), True)] * 2 + [((2, 8), True)] * 2, "twenty tokens a step at most"
    assert [outcome.tokens for outcome in outcomes] == [20, 20, 16, 16] and isinstance(outcomes[0], StepOutcome)
    assert (fitted["role"], fitted["saved"], fitted["trained"]) == ("target", tmp_path / "out" / "target", model)
    assert fitted["progress"] == 1.0, "five steps are the limit"


def test_a_stage_is_fitted_in_a_folder_of_its_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given: dict[str, Any] = {}
    monkeypatch.setattr(make, "fit", lambda *asked, **options: given.update(asked=asked, **options) or "record")
    config = PairConfig(resume=True, device="cpu:0")
    corpus: Any = None
    place = make.Workplace(config, corpus, tmp_path, tmp_path / "work")
    parts: list[Any] = ["model", "loss", "source", "budget"]
    assert make._fit(place, parts[0], parts[1], parts[2], parts[3], "drafter") == "record"
    assert given == {
        "asked": ("model", "loss", make.RECIPE, "budget", tmp_path / "work" / "drafter"),
        "device": "cpu",
        "sources": ["source"],
        "resume": True,
    }


RECORD = TrainingRecord(3, 4, 5.0, 6.0)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What PyTorch was asked for."""
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    return asked


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch, threads: list[int]) -> list[Any]:
    """The stages that ran, and the place that they were given."""
    ran: list[Any] = []

    def stage(name: str, value: Any) -> Any:
        return lambda place: ran.append((name, place.out, place.work, place.corpus)) or value

    results = {"tokenizer": None, "target": RECORD, "continuations": 12, "drafter": RECORD}
    for name, value in results.items():
        monkeypatch.setattr(make, f"make_{name}", stage(name, value))
    monkeypatch.setattr(make, "load_corpus", lambda seed: f"corpus {seed}")
    monkeypatch.setattr(make.report, "describe_run", lambda *given: {"described": len(given)})
    monkeypatch.setattr(make.report, "measure", lambda *given: {"acceptance_length": {1: 1.5, 2: 2.0}})
    monkeypatch.setattr(make.report, "draw_losses", lambda work, path: ran.append(("drawn", work, path)))
    monkeypatch.setattr(make.report, "write_readme", lambda config, found, path: ran.append(("readme", path, found)))
    return ran


PARTS = {"target": {"steps": 3, "tokens": 4, "seconds": 5.0, "final_loss": 6.0}}


@pytest.mark.parametrize(
    ("chosen", "outcome"),
    [
        (["tokenizer"], {}),
        (["target"], PARTS),
        (["continuations"], {"continuation_tokens": 12}),
        (["drafter", "target"], PARTS | {"drafter": PARTS["target"]}),
    ],
)
def test_the_chosen_stages_run_in_their_order(staged, tmp_path, chosen, outcome):
    config = PairConfig(stages=chosen, seed=8, out=str(tmp_path / "deep" / "out"), work=str(tmp_path / "work"))
    assert make.make_pair(config, tmp_path / "run") == outcome
    expected = [name for name in STAGES if name in chosen]
    assert staged == [(name, tmp_path / "deep" / "out", tmp_path / "work", "corpus 8") for name in expected]
    assert (tmp_path / "deep" / "out").is_dir() and not (tmp_path / "run").exists()


def test_the_report_is_written_beside_the_pair_and_shown(staged, threads, tmp_path, capsys):
    found = {"described": 4, "acceptance_length": {1: 1.5, 2: 2.0}}
    for _ in range(2):
        staged.clear()
        assert make.make_pair(PairConfig(stages=["report"], threads=3), tmp_path) == found
    assert staged == [("drawn", tmp_path / "work", tmp_path / "loss.png"), ("readme", tmp_path / "README.md", found)]
    assert json.loads((tmp_path / "report.json").read_text())["described"] == 4 and threads == [3, 3]
    shown = capsys.readouterr().out
    assert "draft tokens      1      2" in shown and "1.50   2.00" in shown and f"written to {tmp_path}" in shown
    threads.clear()
    make.make_pair(PairConfig(stages=["tokenizer"], threads=0), tmp_path)
    assert threads == [], "PyTorch's choice"


def test_the_command_line_names_fields(monkeypatch, tmp_path):
    made: list[Any] = []
    monkeypatch.setattr(make, "make_pair", lambda *given: made.append(given))
    make.main(["stages=[drafter]", "drafter_minutes=45", f"out={tmp_path}"])
    assert made == [(PairConfig(stages=["drafter"], drafter_minutes=45.0, out=str(tmp_path)), Path("runs/pair"))]
    with pytest.raises(ValueError, match="^pair.*magic"):
        make.main(["magic=1"])
