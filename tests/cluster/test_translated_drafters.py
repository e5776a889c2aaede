"""Engines whose draft model has another tokenizer than the target, over text that is awkward to cut into tokens."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from actors.drafters.cascade.config import CascadeDrafterConfig
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig, Strategy, Translation
from actors.options import SamplingConfig, VerifyConfig, VerifyRule
from cluster.config.compose import checked
from cluster.config.jobs import GenerateConfig
from cluster.jobs import generate
from tests.actors.drafters.vocabulary.small_tokenizers import AWKWARD, save
from tests.cluster.jobs.conftest import forked_processes as forked_processes  # noqa: PLC0414 (a fixture)


@pytest.fixture(scope="module")
def foreign_checkpoint(tiny_checkpoint, tmp_path_factory):
    import shutil

    path = tmp_path_factory.mktemp("foreign")
    shutil.copytree(tiny_checkpoint("Llama", seed=3, vocab_size=330), path, dirs_exist_ok=True)
    return save(path, "pieces", 330)


@pytest.fixture
def launch(tiny_launch, write_prompts, foreign_checkpoint):
    def make(temperature=0.0, rule=VerifyRule.coupled, **keys):
        prompts = write_prompts(*({"prompt": text} for text in AWKWARD))
        return tiny_launch(
            GenerateConfig(prompts=prompts, trace=False, concurrency=2, limit=0),
            drafter=ModelDrafterConfig(path=str(foreign_checkpoint), num_draft_tokens=3, device="cpu", **keys),
            sampling=SamplingConfig(max_tokens=14, ignore_eos=True, temperature=temperature),
            verify=VerifyConfig(rule),
        )

    return make


LINES = {
    Translation.auto: "it drafts the tokens that both have",
    Translation.strings: "its text is encoded in the target's tokens",
}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("translate", "temperature"), [pytest.param("auto", 0.0, marks=pytest.mark.slow), ("auto", 1.0), ("strings", 0.0)]
)
def test_tokens_are_those_of_plain_decoding(launch, tmp_path, capsys, one_free_thread, translate, temperature):
    config = checked(launch(temperature, translate=Translation(translate)))
    assert config.drafter.translated_models()
    generate.run(config, tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["tokens_equal_plain"] and report["num_draft_tokens"] > 20
    line = f"whose tokenizer is not the target's: {LINES[Translation(translate)]}"
    assert line in " ".join(capsys.readouterr().out.split())


def test_an_equal_tokenizer_needs_no_translation(launch, foreign_checkpoint):
    config = launch()
    same = replace(config, target=replace(config.target, path=str(foreign_checkpoint)))
    assert not checked(same).drafter.translated_models()


def test_tokenizers_without_anything_in_common_are_refused_in_one_line(launch, foreign_checkpoint, tmp_path):
    import shutil

    other = shutil.copytree(foreign_checkpoint, tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    content["decoder"], content["pre_tokenizer"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}, None
    (other / "tokenizer.json").write_text(json.dumps(content | {"model": content["model"] | {"vocab": {"<unk>": 0}}}))
    config = launch()
    with pytest.raises(ValueError, match=r"^drafter.path: .*: is neither byte-level nor SentencePiece") as refusal:
        checked(replace(config, drafter=ModelDrafterConfig(path=str(other), device="cpu")))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("keys", "rule", "line"),
    [
        (dict(strategy=Strategy.tree), VerifyRule.coupled, "drafter.translate=strings: writes chains"),
        (dict(vocabulary="list.json"), VerifyRule.coupled, "drafter.vocabulary=list.json: lists tokens that the model"),
        ({}, VerifyRule.kseq, "verify.rule=kseq would bias"),
    ],
)
def test_what_cannot_be_written_as_text_is_refused_in_one_line(launch, keys, rule, line):
    with pytest.raises(ValueError, match=line) as refusal:
        checked(launch(rule=rule, translate=Translation.strings, **keys))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("levels", [pytest.param(("ngram", "auto"), marks=pytest.mark.slow), ("strings", "auto")])
@pytest.mark.slow
def test_levels_of_a_cascade_may_be_translated(launch, tmp_path, one_free_thread, levels):
    config = launch()
    foreign = config.drafter
    drafters = [
        NgramDrafterConfig(min_ngram=1) if name == "ngram" else replace(foreign, translate=Translation(name))
        for name in levels
    ]
    config = checked(replace(config, drafter=CascadeDrafterConfig(levels=drafters)))
    generate.run(config, tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["tokens_equal_plain"] and report["num_draft_tokens"] > 20
    spelling = ModelDrafterConfig(path=config.drafter.models()[-1], translate=Translation.strings, device="cpu")
    with pytest.raises(ValueError, match=r"^drafter.levels\[1\].translate=strings: drafts text and verifies none"):
        checked(replace(config, drafter=CascadeDrafterConfig(levels=["ngram", spelling])))
