"""Other weights in the middle of requests: tokens are those of a loop of transformers, before and after, whatever
drafts and however ranks are laid out; what is refused changes nothing."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from actors.coordinator.scheduler import Scheduler
from actors.drafters.auto.config import AutoDrafterConfig
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.lookup.suffix import SuffixDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.drafters.self_speculation.config import SelfDrafterConfig
from actors.drafters.speculator.config import SpeculatorDrafterConfig
from actors.options import PipelineConfig, PipelineName, TargetConfig
from actors.protocol.messages import SamplingParams
from actors.roles.served_weights import ServedWeights
from actors.roles.target import TargetRole
from actors.sampling.noise import NoiseStream, gumbel, noise_key
from cluster.completion import Completion
from cluster.engine import Engine, EngineError
from tests.actors.small_speculators import train_speculator
from tests.matrices import in_turn

PROMPTS = ["def median(values):", "x = x + 1\nx = x + ", "for i in range(10): é😀"]
NUM_AFTER = 9
"""Tokens of the new weights that are waited for."""
GREEDY = SamplingParams(max_tokens=450, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=450, ignore_eos=True, temperature=0.9, seed=5)


def pipeline(name: PipelineName) -> PipelineConfig:
    return PipelineConfig(name, adaptive=False)


LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": dict(drafter="none"),
    "model": dict(drafter="model"),
    "ngram-tp2": dict(drafter=NgramDrafterConfig(min_ngram=1), tp=2),
    "suffix": dict(drafter=SuffixDrafterConfig()),
    "branches": dict(drafter="model", pipeline=pipeline(PipelineName.branches)),
    "tree": dict(drafter="model", pipeline=pipeline(PipelineName.tree)),
    "pingpong": dict(drafter="ngram", pipeline=pipeline(PipelineName.pingpong)),
    "self": dict(drafter=SelfDrafterConfig(num_draft_tokens=3)),
    "speculator": dict(drafter="speculator"),
    "bridged": dict(drafter="speculator", pipeline=pipeline(PipelineName.branches)),
    "auto-branches": dict(drafter="auto", pipeline=pipeline(PipelineName.branches)),
}


@pytest.fixture(scope="module")
def checkpoints(tiny_checkpoint) -> list[Path]:
    return [tiny_checkpoint("Llama"), tiny_checkpoint("Llama", seed=1)]


@pytest.fixture(scope="module")
def models(checkpoints) -> list[Any]:
    return [AutoModelForCausalLM.from_pretrained(path).eval() for path in checkpoints]


@pytest.fixture(scope="module")
def speculator(models, tmp_path_factory) -> Path:
    return train_speculator("eagle", models[0], Path(), tmp_path_factory.mktemp("speculator"))


@pytest.fixture
def open_layout(open_engine, checkpoints, half_agreeing_drafter, speculator):
    def open_(name: str, **sections: Any) -> Engine:
        choices = dict(LAYOUTS[name])
        if choices["drafter"] == "speculator":
            choices["drafter"] = SpeculatorDrafterConfig(path=str(speculator), num_draft_tokens=3, device="cpu")
        if choices["drafter"] == "auto":
            draft_model = ModelDrafterConfig(path=str(half_agreeing_drafter), num_draft_tokens=3, device="cpu")
            choices["drafter"] = AutoDrafterConfig(drafters=[NgramDrafterConfig(min_ngram=1), draft_model])
        # each token is checked, and requests that end before the update show nothing
        target = TargetConfig(path=str(checkpoints[0]), device="cpu", pace_ms=15.0)
        return open_engine(target=target, **choices, **sections)

    return open_


def continued(model: Any, token_ids: list[int], num_tokens: int, sampling: SamplingParams) -> list[int]:
    """So many tokens after a text, one whole pass for each, with the engine's noise where tokens are sampled."""
    token_ids = [*token_ids]
    for _ in range(num_tokens):
        with torch.no_grad():
            scores = model(torch.tensor([token_ids])).logits[0, -1].float()
        if sampling.temperature:
            key = noise_key(sampling.seed, NoiseStream.COUPLED, len(token_ids))
            scores = scores / sampling.temperature + gumbel([key], torch.arange(len(scores)))[0]
        token_ids.append(int(scores.argmax()))
    return token_ids[-num_tokens:] if num_tokens else []


def await_tokens(completions: list[Completion], version: int, count: int) -> None:
    """Waits until every request has so many tokens of the weights."""
    deadline = time.monotonic() + 60
    while any(completion.versions.count(version) < count for completion in completions):
        assert time.monotonic() < deadline and not any(completion.finished for completion in completions)
        time.sleep(0.002)


def check_tokens(completion: Completion, models: list[Any]) -> None:
    """Each run of one version against the model of that version, which is given the text before."""
    text, versions = [*completion.prompt_token_ids], completion.versions
    assert versions == sorted(versions)
    for version, model in enumerate(models):
        num_tokens = versions.count(version)
        text += continued(model, text, num_tokens, completion.sampling)
    assert text == completion.prompt_token_ids + completion.token_ids


LIKE_OTHERS = dict.fromkeys(("plain", "suffix", "branches", "tree", "pingpong"), 0)
"""Not by default: their drafters and the parts of their pipelines that hold weights are those of others;
plain decoding is updated where a role is lost afterwards."""


@pytest.mark.parametrize("layout", list(in_turn(LAYOUTS, times=LIKE_OTHERS, extended=("speculator", "self"))))
def test_an_update_within_requests_changes_the_tokens_after_it_to_those_of_the_new_weights(
    open_layout, models, checkpoints, layout
):
    engine = open_layout(layout)
    completions = [engine.submit(PROMPTS[0], GREEDY), *(engine.submit(prompt, SAMPLED) for prompt in PROMPTS)]
    await_tokens(completions, 0, 3)
    assert engine.update_weights(checkpoints[1]) == 1
    later = engine.submit(PROMPTS[1], SAMPLED)
    await_tokens([*completions, later], 1, NUM_AFTER)
    for completion in (*completions, later):
        completion.abort()
    for completion in (*completions, later):
        check_tokens(completion.result(30), models)
    assert later.versions == [1] * len(later.token_ids), "rows of the old weights' prompts are found no more"
    counters = engine.report().counters
    may_be_none = layout in ("plain", "auto-branches")  # which still weighs its drafters
    assert counters["num_spec_steps"] > 0 or may_be_none, "the test shows nothing"
    assert counters["num_role_losses"] == {}


def changed(source: Path, path: Path, change) -> Path:
    """A copy of a checkpoint with other tensors."""
    shutil.copytree(source, path)
    save_file(change(load_file(source / "model.safetensors")), path / "model.safetensors", metadata={"format": "pt"})
    return path


def with_nan(tensors):
    name = "model.layers.1.mlp.down_proj.weight"
    return tensors | {name: torch.where(torch.rand_like(tensors[name]) < 0.01, torch.nan, tensors[name])}


DAMAGES = {
    "missing": (lambda tensors: {n: t for n, t in tensors.items() if "layers.1.mlp" not in n}, "is missing from the"),
    "shape": (
        lambda tensors: tensors | {"model.norm.weight": tensors["model.norm.weight"][:7]},
        r"is \[7\], config.json",
    ),
    "type": (lambda tensors: {n: t.half() for n, t in tensors.items()}, "is F16, not F32; save it in the type"),
    "nan": (with_nan, "holds NaN or infinity in torch.float32"),
}


@pytest.mark.extended
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_is_refused_changes_nothing_for_the_requests_that_run(open_engine, models, checkpoints, tmp_path, tp):
    engine = open_engine("ngram", tp=tp, target=TargetConfig(path=str(checkpoints[0]), device="cpu", pace_ms=6.0))
    sampling = replace(SAMPLED, max_tokens=60)
    completions = [engine.submit(prompt, sampling) for prompt in PROMPTS[:2]]
    await_tokens(completions, 0, 2)
    for name, (change, line) in DAMAGES.items():
        path = changed(checkpoints[1], tmp_path / name, change)
        with pytest.raises(ValueError, match=line) as refused:
            engine.update_weights(path)
        assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="config.json describes another model"):
        engine.update_weights(bigger(checkpoints[1], tmp_path / "config"))
    with pytest.raises(ValueError, match="version: 0 must be above 0"):
        engine.update_weights(checkpoints[1], 0)
    with pytest.raises(ValueError, match="holds the present weights"):
        engine.update_weights(checkpoints[0])
    for completion in completions:
        check_tokens(completion.result(60), models[:1])
        assert len(completion.token_ids) == sampling.max_tokens


def bigger(source: Path, path: Path) -> Path:
    shutil.copytree(source, path)
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert text != (path / "config.json").read_text()
    return path


def test_tensors_and_versions_of_the_trainers_own_are_taken_and_files_do_not_stay(
    open_engine, models, checkpoints, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine = open_engine("ngram")
    assert engine.update_weights(models[1].state_dict(), version=7) == 7
    (completion,) = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=5), logprobs=0)
    assert completion.versions == [7] * 5
    prompt, tokens = completion.prompt_token_ids, completion.token_ids
    assert tokens == continued(models[1], prompt, 5, completion.sampling)
    with torch.no_grad():
        logprobs = models[1](torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    assert completion.token_logprobs == pytest.approx(expected, abs=1e-4)
    assert engine.update_weights(models[0].state_dict()) == 8
    assert len(list(tmp_path.iterdir())) == 1, "one holds the present weights"
    with pytest.raises(ValueError, match=r"tensor model\.embed_tokens\.weight is missing"):
        engine.update_weights({})
    (completion,) = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=5))
    assert completion.token_logprobs is None
    assert completion.token_ids == continued(models[0], prompt, 5, completion.sampling)
    engine.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.extended
@pytest.mark.parametrize(
    ("owner", "method", "identity"), [(TargetRole, "answer", "target-0"), (Scheduler, "plan", "coordinator")]
)
def test_what_is_replaced_after_an_update_serves_the_new_weights(
    open_layout, models, checkpoints, monkeypatch, owner, method, identity
):
    engine = open_layout("plain")
    engine.update_weights(checkpoints[1])
    completions = [engine.submit(prompt, SAMPLED) for prompt in PROMPTS[:2]]
    await_tokens(completions, 1, 2)
    break_once(monkeypatch, owner, method)
    await_tokens(completions, 1, 2 + NUM_AFTER)
    for completion in completions:
        completion.abort()
        check_tokens(completion.result(60), models)
    while not engine.supervisor.incidents:
        time.sleep(0.01)
    assert [incident.identity for incident in engine.supervisor.incidents] == [identity]


def break_once(monkeypatch, owner: Any, method: str, after: bool = False, only=lambda one: True) -> None:
    """Its first call raises, at its beginning or `after` what it does."""
    right, broken = getattr(owner, method), []

    def wrong(self, *arguments, **options):
        breaks = not broken and only(self)
        answer = right(self, *arguments, **options) if after or not breaks else None
        if breaks:
            broken.append(method)
            raise RuntimeError(f"{method} breaks")
        return answer

    monkeypatch.setattr(owner, method, wrong)


@pytest.mark.extended
def test_a_rank_that_is_lost_while_it_loads_returns_with_the_weights_before(
    open_layout, models, checkpoints, monkeypatch
):
    engine = open_layout("ngram-tp2")
    completions = [engine.submit(prompt, SAMPLED) for prompt in PROMPTS[:2]]
    await_tokens(completions, 0, 2)
    is_lead = lambda served: served._runner.decoder.group.rank == 0  # noqa: E731
    break_once(monkeypatch, ServedWeights, "take", after=True, only=is_lead)
    with pytest.raises(EngineError, match="a rank of the target was lost meanwhile"):
        engine.update_weights(checkpoints[1])
    await_tokens(completions, 0, 2 + NUM_AFTER)
    assert engine.update_weights(checkpoints[1]) == 1
    await_tokens(completions, 1, NUM_AFTER)
    for completion in completions:
        completion.abort()
        check_tokens(completion.result(60), models)


PAGE = Path(__file__).parents[3] / "docs" / "rollouts.md"


@pytest.mark.extended
def test_the_trainer_of_the_page_makes_rewarded_texts_more_likely(open_engine, checkpoints):
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(source, str(PAGE), "exec"), names)
    model = AutoModelForCausalLM.from_pretrained(checkpoints[0]).eval()
    engine = open_engine("ngram", target=TargetConfig(path=str(checkpoints[0]), device="cpu"))
    rewards = names["reinforce"](engine, model, PROMPTS[:1], count_early, steps=6, samples=12, lr=0.1, max_tokens=8)
    assert rewards[-1] > rewards[0] + 1
    (completion,) = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=4))
    assert completion.versions == [6] * 4
    assert completion.token_ids == continued(model, completion.prompt_token_ids, 4, completion.sampling)


def count_early(text: str) -> float:
    """Characters before the letters."""
    return float(sum(character < "a" for character in text))
