"""The bundled pair: loads in transformers unchanged, fits its byte budget, and has learnt something."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from cluster import pocket
from cluster.io.text import load_tokenizer
from cluster.jobs import generate
from cluster.tools.training.corpus import load_corpus
from cluster.tools.training.token_stream import pack, spread_rows
from docs.measurements.pocket.config import PairConfig
from docs.measurements.pocket.evaluation import (
    acceptance_length,
    agreement_rate,
    greedy_matches,
    mean_loss,
)
from tests.cluster.config.quick_loading import load_quickly

FOLDERS = {"target": pocket.TARGET, "drafter": pocket.DRAFTER, "deep": pocket.DEEP_DRAFTER}
SHAPES = {
    "target": {"hidden": 384, "layers": 6, "heads": 8, "kv_heads": 4, "intermediate": 896},
    "drafter": {"hidden": 192, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 512},
    "deep": {"hidden": 192, "layers": 8, "heads": 4, "kv_heads": 2, "intermediate": 512},
}
MOST_BYTES = 41e6
WORST_PERPLEXITY = {"target": 40.0, "drafter": 50.0, "deep": 50.0}
LOWEST_AGREEMENT = 0.6
LOWEST_ACCEPTANCE_LENGTH = 3.0


@pytest.fixture(scope="module")
def pair() -> dict[str, LlamaForCausalLM]:
    return {role: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for role, folder in FOLDERS.items()}


@pytest.fixture(scope="module")
def held_out_rows() -> torch.Tensor:
    stream = pack(load_tokenizer(pocket.TARGET), load_corpus(seed=0, test_megabytes=0.0).held_out)
    return spread_rows(stream, length=512, num_tokens=2048)


@pytest.fixture(scope="module")
def losses(pair: dict[str, LlamaForCausalLM], held_out_rows: torch.Tensor) -> dict[str, float]:
    """Mean loss per role on held-out text."""
    return {role: mean_loss(model, held_out_rows) for role, model in pair.items()}


@pytest.mark.parametrize("role", FOLDERS)
def test_checkpoint_has_the_expected_shape(role: str):
    config = json.loads((FOLDERS[role] / "config.json").read_text())
    shape = SHAPES[role]
    assert config["model_type"] == "llama"
    assert config["dtype"] == "bfloat16"
    assert config["hidden_size"] == shape["hidden"]
    assert config["num_hidden_layers"] == shape["layers"]
    assert config["num_attention_heads"] == shape["heads"]
    assert config["num_key_value_heads"] == shape["kv_heads"]
    assert config["intermediate_size"] == shape["intermediate"]
    assert config["head_dim"] == 48
    assert config["vocab_size"] == 4096
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == 8192
    with safe_open(FOLDERS[role] / "model.safetensors", "pt") as tensors:
        names = list(tensors.keys())
        assert {tensors.get_tensor(name).dtype for name in names} == {torch.bfloat16}
        assert tensors.get_tensor("model.embed_tokens.weight").shape == (4096, shape["hidden"])
        assert "lm_head.weight" not in names
        assert all(tensors.get_tensor(name).isfinite().all() for name in names)


def test_weights_fit_the_byte_budget():
    files = [file for folder in FOLDERS.values() for file in Path(folder).glob("*.safetensors")]
    files.append(pocket.SPECULATOR / "model.safetensors")
    assert len(files) == 4
    assert 20e6 < sum(file.stat().st_size for file in files) <= MOST_BYTES
    assert (pocket.TARGET.parent / "loss.png").stat().st_size < 60_000


@pytest.mark.slow
def test_held_out_perplexity_is_that_of_trained_models(losses: dict[str, float]):
    assert all(math.exp(loss) < WORST_PERPLEXITY[role] for role, loss in losses.items())
    assert losses["target"] == min(losses.values()), "it is better than its drafters"


@pytest.mark.slow
@pytest.mark.parametrize("role", ["drafter", "deep"])
def test_drafters_imitate_the_target(role: str, pair: dict[str, LlamaForCausalLM], held_out_rows: torch.Tensor):
    assert agreement_rate(pair["target"], pair[role], held_out_rows) > LOWEST_AGREEMENT


@pytest.mark.extended
@pytest.mark.parametrize("role", ["drafter", pytest.param("deep", marks=pytest.mark.slow)])
def test_acceptance_length_of_some_prompts(role: str, pair: dict[str, LlamaForCausalLM]):
    tokenizer = load_tokenizer(pocket.TARGET)
    lines = pocket.PROMPTS.read_text(encoding="utf-8").splitlines()[::24]
    prompts = [tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines]
    matches = [greedy_matches(pair["target"], pair[role], prompt, 32) for prompt in prompts]
    assert acceptance_length(matches, 5) > LOWEST_ACCEPTANCE_LENGTH


@pytest.mark.extended
def test_the_bundled_speculator_drafts_what_the_target_writes(tmp_path: Path):
    """The default of `drafter=speculator`, on the target's ranks."""
    options = ["cluster=inprocess", "drafter=speculator", "pipeline.adaptive=false", "job.baseline=false"]
    config = load_quickly([*options, "cluster.oversubscribe=true", "job.limit=1", "sampling.max_tokens=32"])
    generate.run(config, tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["mean_acceptance_length"] > LOWEST_ACCEPTANCE_LENGTH


def test_transformers_generates_with_the_pair(pair: dict[str, LlamaForCausalLM]):
    tokenizer = AutoTokenizer.from_pretrained(pocket.TARGET)
    prompt = tokenizer("def main(argv):\n    ", return_tensors="pt")
    plain = pair["target"].generate(**prompt, max_new_tokens=16)
    assisted = pair["target"].generate(**prompt, max_new_tokens=16, assistant_model=pair["drafter"])
    assert plain.shape[1] > prompt["input_ids"].shape[1]
    assert torch.equal(plain, assisted)


def test_readme_and_report_tell_of_this_pair():
    report = json.loads((pocket.TARGET.parent / "report.json").read_text())
    readme = (pocket.TARGET.parent / "README.md").read_text()
    assert report["seed"] == PairConfig().seed
    assert report["corpus_sha256"] in readme
    assert f"Acceptance length {report['acceptance_length']['5']:.2f}" in readme
    assert "PSF" in readme
