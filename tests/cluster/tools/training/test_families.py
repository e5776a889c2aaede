"""The `train` job for a target of every family: what it writes drafts in the engine as it did in training."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster import pocket
from cluster.jobs import train
from cluster.tools.training.continuations import TextRows, load_rows, written_rows
from cluster.tools.training.speculators import run as training
from cluster.tools.training.speculators.frozen_target import FrozenTarget, load_target
from cluster.tools.training.speculators.recipes import RECIPES
from parallel.comm.group import SINGLE
from parallel.kv.pass_plan import Span
from parallel.model.families.registry import read_config
from parallel.runtime.runner import ModelRunner, open_model
from parallel.speculators.config import FINAL
from parallel.speculators.opening import open_speculator, open_tables
from parallel.speculators.place import SpeculatorPlace
from parallel.training.losses import forward_kl
from tests.cluster.config.quick_loading import load_quickly
from tests.families import FAMILIES, tiny_model
from tests.matrices import in_turn

LENGTH = 20
SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
FRESH = "{start: ''}"
"""A draft model of the target's vocabulary that begins with random weights."""

MakeTarget = Callable[[str], Path]


@pytest.fixture(autouse=True)
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing curves takes as long as all else of a run of two steps; test_speculator_runs.py sees them drawn."""
    monkeypatch.setattr(training, "draw_curves", lambda folder, path: None)


@pytest.fixture(scope="module")
def target_of(tmp_path_factory: pytest.TempPathFactory) -> MakeTarget:
    """A tiny target of a family with the bundled tokenizer; norms and biases are not those that a model starts with."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            folder = made[family] = tmp_path_factory.mktemp(family)
            model = tiny_model(family, 0, **SHAPE | FAMILIES[family])
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.data += 0.1 * torch.randn_like(parameter)
            model.save_pretrained(folder)
            shutil.copyfile(pocket.TARGET / "tokenizer.json", folder / "tokenizer.json")
        return made[family]

    return make


def trained(target: Path, recipe: str, out: Path, options: str = "{}") -> dict[str, Any]:
    """The report of a run of two steps; the target's text is written once."""
    text = target / "prompts.jsonl"
    text.write_text("\n".join(json.dumps({"prompt": f"def combine_{n}(first, second)"}) for n in range(24)))
    words = [f"target.path={target}", f"job.text={text}", f"job.work={target / 'work'}", f"job.options={options}"]
    words += ["job=train", f"job.recipe={recipe}", "job.threads=1", "job.minutes=60", "job.steps=2"]
    words += ["job.batch_tokens=60", f"job.continuation_length={LENGTH}", "job.temperatures=[0.0]"]
    return train.run(load_quickly(words), out)


def held_out_rows(target: Path) -> TextRows:
    """The smaller one of the two files of text."""
    return min((load_rows(file) for file in (target / "work" / "continuations").glob("*/0.pt")), key=len)


UNLIKE = dict.fromkeys(FAMILIES, 0) | {"Gemma2": 1, "OPT": 1}
"""Embeddings that are scaled, or have positions of their own: what training reads of each family is compared below."""


@pytest.mark.extended
@pytest.mark.parametrize("family", list(in_turn(FAMILIES, times=UNLIKE)))
def test_a_speculator_of_any_target_drafts_as_its_report_says(target_of: MakeTarget, tmp_path: Path, family: str):
    """Features, embedding, head and positions that it was trained on are those that it is given: its divergence from
    the target on the held-out text is the reported loss, but for bfloat16, and of features turned round another."""
    target = target_of(family)
    report = trained(target, "eagle3", tmp_path, "{depths: 1}")
    place = SpeculatorPlace(open_tables(str(target), SINGLE, "cpu", torch.float32), SINGLE, "cpu", torch.float32, 64)
    drafter, runner = open_speculator(str(tmp_path / "drafter"), place), open_model(str(target), num_slots=64)
    text = held_out_rows(target)
    anchors = slice(int(text.begins[0]) - 2, LENGTH - 2)
    found = {sign: [] for sign in (1, -1)}
    for (sign, values), tokens in itertools.product(found.items(), text.tokens.tolist()):
        features, logits = of_engine(runner, tokens, drafter.speculator.taps)
        drafter.open("a")
        drafter.read_features("a", 0, sign * torch.cat(features, 1))
        read = drafter.forward([Span("a", LENGTH - 1, None, LENGTH - 1)], tokens[1:]).logits
        drafter.close("a")
        values.append(forward_kl(logits[1:], read)[anchors])
    right, wrong = (float(torch.cat(values).mean()) for values in found.values())
    assert right == pytest.approx(report["held_out"]["loss"], rel=0.04)
    assert wrong != pytest.approx(report["held_out"]["loss"], rel=0.04)


def of_engine(runner: ModelRunner, tokens: list[int], taps: tuple[int, ...]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What the engine's pass of the target gives at every position: its taps, and logits."""
    runner.open("a")
    output = runner.forward([Span("a", len(tokens), None, len(tokens))], tokens, taps)
    runner.close("a")
    return list(output.features), output.logits


@pytest.mark.extended
@pytest.mark.parametrize("family", FAMILIES)
def test_what_training_reads_of_a_target_is_what_the_engine_gives(target_of: MakeTarget, family: str):
    target = target_of(family)
    tokens = torch.randint(1, 4096, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    config, runner = read_config(target), open_model(str(target), num_slots=64)
    taps = (*range(config.num_layers + 1), FINAL)
    frozen = FrozenTarget(load_target(target, "cpu"), written_rows(tokens, 4, []), taps, range(config.num_layers))
    batch = frozen.batch(torch.arange(2))
    assert all(keys.shape[2] == LENGTH for keys, _ in batch.kv.values()), "a window cuts no rows off"
    for i, row in enumerate(tokens.tolist()):
        features, logits = of_engine(runner, row, taps[:-1])
        for tap, ours in zip(taps, features, strict=False):
            assert is_near(batch.taps[tap][i], ours), tap
        assert is_near(batch.target_logits()[i], logits)
        bare = runner.decoder.embedding.embed(tokens[i])
        torch.testing.assert_close(batch.embed(tokens[i]), bare)


def is_near(rows: torch.Tensor, expected: torch.Tensor) -> bool:
    """Most rows, but for bfloat16, which sends a row of a mixture now and then to another expert."""
    apart = (rows.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float((apart < 0.1).float().mean()) > 0.5


QUICK = [("OPT", "layerskip"), ("OPT", "dflash")]
QUICK += [
    ("Gemma3", "chimera"),
    ("Llama", "sdar"),
    ("OPT", "sdar"),
]
EVERY = [
    pytest.param(family, recipe, marks=() if (family, recipe) in QUICK else pytest.mark.slow)
    for recipe in RECIPES
    for family in FAMILIES
]


@pytest.mark.extended
@pytest.mark.parametrize(("family", "recipe"), EVERY)
def test_every_recipe_trains_on_every_family_or_says_why_not(
    target_of: MakeTarget, tmp_path: Path, family: str, recipe: str
):
    defaults = RECIPES[recipe].options
    options = FRESH if hasattr(defaults, "start") else "{}"
    options = "{start: '', prefixes: [1]}" if recipe == "sorted" else options
    if recipe == "sdar" and family != "Llama":
        with pytest.raises(ValueError, match="only a Llama is converted"):
            trained(target_of(family), recipe, tmp_path, options)
        return
    options = {"streaming": "{layers: 2}", "s3d": "{skip: 1}"}.get(recipe, options)
    if recipe in ("streaming", "mask_lora", "s3d") and family not in ("Llama", "Qwen3"):
        with pytest.raises(ValueError, match=r"cannot be adapted; one of Llama's or Qwen's kind can"):
            trained(target_of(family), recipe, tmp_path, options)
        return
    report = trained(target_of(family), recipe, tmp_path, options)
    assert all(math.isfinite(report[when]["loss"]) for when in ("held_out_before", "held_out"))
    assert (tmp_path / RECIPES[recipe].writes / "config.json").exists()
