"""`job=vocabulary` and the drafter that uses its list, from the command line's side."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from actors.drafters.corpus import read_corpus
from actors.drafters.model.config import ModelDrafterConfig
from actors.drafters.vocabulary.token_list import count_tokens, read_token_list, write_token_list
from actors.tokenizer_file import tokenizer_digest
from cluster import pocket
from cluster.config.jobs import GenerateConfig, VocabularyConfig
from cluster.engine import Engine
from cluster.jobs import generate, vocabulary
from tests.cluster.config.quick_loading import load_quickly


@pytest.mark.extended
def test_the_list_of_the_targets_output_serves_a_drafter(tiny_launch, write_prompts, tmp_path, one_free_thread):
    prompts = write_prompts({"prompt": "def f():"}, {"prompt": "x = 1"})
    config = tiny_launch(VocabularyConfig(prompts=prompts, out=str(tmp_path / "list.json")))
    vocabulary.run(config, tmp_path)
    tokens = read_token_list(tmp_path / "list.json")
    report = json.loads((tmp_path / "vocabulary_report.json").read_text())
    assert (report["texts"], report["counted"], report["covered"]) == (2, 26, 1.0)
    assert tokens[0] == 0 and len(set(tokens)) == len(tokens) == report["tokens"], "the end token, then those counted"
    assert (report["job"], report["list"]) == ("vocabulary", str(tmp_path / "list.json"))
    assert report["config"]["job"]["prompts"] == prompts
    with Engine(config) as engine:
        sampling = config.sampling_params(engine.tokenizer)
        written = [one.token_ids for one in engine.generate(["def f():", "x = 1"], sampling)]
    assert set(tokens) == {0, *(token for text in written for token in text)}
    drafter = replace(config.drafter, vocabulary=str(tmp_path / "list.json"))
    config = replace(config, drafter=drafter, job=GenerateConfig(prompts=prompts, trace=False))
    generate.run(config, tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["tokens_equal_plain"]
    assert report["draft_acceptance_rate"] == 1.0, "the target drafts for itself, and every token it writes is listed"


def test_texts_are_counted_without_an_engine(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("x = 1\n" * 20 + "rare")
    job = ["job=vocabulary", f"job.files=[{tmp_path}/a.txt]", f"job.out={tmp_path}/deep/er/list.json", "job.size=5"]
    vocabulary.run(load_quickly(job), tmp_path)
    assert len(read_token_list(tmp_path / "deep/er/list.json")) == 5
    counts = count_tokens(read_corpus(tmp_path / "a.txt", pocket.TARGET))
    about = json.loads((tmp_path / "vocabulary_report.json").read_text())
    covered = sum(counts[token] for token in read_token_list(tmp_path / "deep/er/list.json")) / counts.total()
    assert (about["texts"], about["tokens"], about["counted"]) == (1, 5, counts.total())
    assert about["covered"] == pytest.approx(covered) and 0 < covered < 1
    assert f"drafter.vocabulary={tmp_path}/deep/er/list.json" in capsys.readouterr().out.replace("\n", "")
    chosen = ["drafter=model", f"drafter.vocabulary={tmp_path}/deep/er/list.json", "drafter.vocabulary_size=3"]
    drafter = load_quickly(chosen).drafter
    assert isinstance(drafter, ModelDrafterConfig) and drafter.vocabulary == f"{tmp_path}/deep/er/list.json"
    content = json.loads((tmp_path / "deep/er/list.json").read_text()) | {"tokenizer": "another"}
    (tmp_path / "other.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"drafter.vocabulary=.*: was made with another tokenizer than the target's"):
        load_quickly(["drafter=model", f"drafter.vocabulary={tmp_path}/other.json"])


@pytest.mark.parametrize(
    "overrides, line",
    [
        (["drafter=model", "drafter.vocabulary=README.md"], "drafter.vocabulary=.*README.md: is no token list"),
        (["drafter=model", "drafter.vocabulary=nowhere"], "drafter.vocabulary=nowhere: no such file"),
        (["drafter=model", "drafter.vocabulary_size=9"], "drafter.vocabulary_size=9: counts tokens of a list"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(overrides, line):
    with pytest.raises(ValueError, match=line):
        load_quickly(overrides)


def test_a_list_of_tokens_that_the_drafter_lacks_is_refused(tmp_path):
    write_token_list(tmp_path / "list.json", [7], {}, tokenizer_digest(pocket.TARGET))
    with pytest.raises(ValueError, match=r"^drafter.path: .* can draft 1 of the target's tokens; use another drafter"):
        load_quickly(["drafter=model", f"drafter.vocabulary={tmp_path}/list.json"])


def test_a_list_of_tokens_beyond_the_target_is_refused(tmp_path):
    write_token_list(tmp_path / "list.json", [10**6, 7], {}, tokenizer_digest(pocket.TARGET))
    with pytest.raises(ValueError, match=r"^drafter.vocabulary=.*names token 1000000, beyond the target's 4096; make"):
        load_quickly(["drafter=model", f"drafter.vocabulary={tmp_path}/list.json"])
