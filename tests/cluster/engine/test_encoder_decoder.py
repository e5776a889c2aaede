"""Encoder-decoders through the engine: tokens are those of `transformers.generate`, whatever drafts them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from actors.drafters.lookup.copy import CopyDrafterConfig
from actors.drafters.lookup.suffix import SuffixDrafterConfig
from actors.drafters.model.config import LengthRule, ModelDrafterConfig
from actors.drafters.self_speculation.config import SelfDrafterConfig
from actors.options import PipelineConfig, PipelineName, SchedulerConfig, TargetConfig
from actors.protocol.messages import SamplingParams
from actors.verification.verifier import Verifier
from cluster.io.text import load_tokenizer
from tests.cluster.serving.conftest import serving
from tests.families import ENCODER_DECODERS
from tests.matrices import in_turn

SOURCES = [
    "def median(values):",
    "x = x + 1",
    "return",
    "class Stack:\n    pass",
    "a",
    "import os, sys",
    "1 2 3",
    "# end",
]
MAX_TOKENS = 16
SEEDS = {"plain": 28, "rules": 7}
SETTINGS = {
    "plain": {},
    "rules": {"no_repeat_ngram_size": 2, "min_length": 6, "forced_bos_token_id": 9, "bad_words_ids": [[30], [40, 41]]},
}


@pytest.fixture(scope="module")
def reference(tiny_checkpoint):
    """A checkpoint with these settings in its generation_config.json, and what transformers writes for the sources."""
    import transformers

    made: dict[tuple[str, str], tuple[Path, list[list[int]]]] = {}

    def make(family: str, settings: str) -> tuple[Path, list[list[int]]]:
        if (family, settings) not in made:
            path = tiny_checkpoint(family, seed=SEEDS[settings])
            file = path / "generation_config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | SETTINGS[settings]))
            model = transformers.AutoModelForSeq2SeqLM.from_pretrained(path)
            tokenizer, written = load_tokenizer(path), []
            for source in SOURCES:
                ids = torch.tensor([tokenizer.encode(source).ids])
                written.append(
                    model.generate(ids, max_new_tokens=MAX_TOKENS, num_beams=1, do_sample=False)[0, 1:].tolist()
                )
            made[family, settings] = path, written
        return made[family, settings]

    return make


def drafters(path: Path, other: Path):
    on_cpu = {"device": "cpu", "num_draft_tokens": 3}
    return {
        "none": "none",
        "ngram": "ngram",
        "copy": CopyDrafterConfig(num_draft_tokens=4),
        "suffix": SuffixDrafterConfig(),
        "model": ModelDrafterConfig(path=str(other), **on_cpu),
        "itself": ModelDrafterConfig(path=str(path), **on_cpu),
        "self": SelfDrafterConfig(exit=2, num_draft_tokens=3),
        "free": SelfDrafterConfig(exit=2, num_draft_tokens=6, length_rule=LengthRule.gap),
    }


def tokens_of(engine, sources=SOURCES):
    return [completion.token_ids for completion in engine.generate(sources, SamplingParams(max_tokens=MAX_TOKENS))]


@pytest.mark.parametrize(("family", "settings"), list(in_turn(ENCODER_DECODERS, SETTINGS)))
def test_tokens_are_those_of_transformers(open_engine, reference, family, settings):
    path, expected = reference(family, settings)
    assert len({*map(tuple, expected)}) > 1, "the sources matter"
    with open_engine(CopyDrafterConfig(), target=TargetConfig(path=str(path), device="cpu")) as engine:
        assert tokens_of(engine) == expected
        assert tokens_of(engine, SOURCES[:1]) == expected[:1], "alone as in a batch"
        assert engine.report().counters["num_prompt_tokens"] > sum(map(len, SOURCES))


LIKE_OTHERS = dict.fromkeys(("none", "ngram", "copy", "suffix", "itself"), 0)
"""What others have: lookups are given the same text as `copy`, which drafts for every family (above), and the target's
own model drafts for ranks that share both stacks."""


@pytest.mark.extended
@pytest.mark.parametrize(
    "name", list(in_turn(["none", "ngram", "copy", "suffix", "model", "itself", "self"], times=LIKE_OTHERS))
)
def test_no_drafter_changes_a_token(open_engine, reference, name):
    (path, expected), (other, _) = reference("Marian", "rules"), reference("Bart", "rules")
    assert max(len(set(tokens)) for tokens in expected) > 6, "the tokens repeat"
    config = drafters(path, other)[name]
    pipeline = PipelineConfig(PipelineName.plain if name == "none" else PipelineName.sync, adaptive=False)
    with open_engine(config, target=TargetConfig(path=str(path), device="cpu"), pipeline=pipeline) as engine:
        assert tokens_of(engine) == expected
        if name in ("itself", "self"):
            assert engine.report().counters["num_accepted_tokens"] > 0


@pytest.mark.extended
@pytest.mark.parametrize(("num_draft_tokens", "family"), list(in_turn(range(1, 9), ENCODER_DECODERS)))
def test_no_length_of_a_draft_changes_a_token(open_engine, reference, family, num_draft_tokens):
    """Every draft is right, and so has its whole length: eight requests at a time, and one."""
    path, expected = reference(family, "plain")
    config = ModelDrafterConfig(path=str(path), device="cpu", num_draft_tokens=num_draft_tokens)
    options = {"target": TargetConfig(path=str(path), device="cpu"), "pipeline": PipelineConfig(adaptive=False)}
    with open_engine(config, scheduler=SchedulerConfig(max_num_seqs=8), **options) as engine:
        assert tokens_of(engine) == expected
        assert tokens_of(engine, SOURCES[:1]) == expected[:1]
        counters = engine.report().counters
    assert counters["num_accepted_tokens"] > 0.8 * counters["num_draft_tokens"]
    assert len(counters["num_drafted_per_pos"]) == num_draft_tokens


@pytest.mark.extended
def test_free_drafts_for_the_kind_of_model_that_its_paper_used(open_engine, reference):
    """Early exits of a T5, whose drafts end by the distance of the two likeliest tokens."""
    path, expected = reference("T5", "plain")
    target = TargetConfig(path=str(path), device="cpu")
    with open_engine(drafters(path, path)["free"], target=target, pipeline=PipelineConfig(adaptive=False)) as engine:
        assert tokens_of(engine) == expected
        assert engine.report().counters["num_accepted_tokens"] > 0


@pytest.mark.extended
@pytest.mark.parametrize(("family", "name"), list(in_turn(ENCODER_DECODERS, ["itself", "copy"])))
def test_ranks_share_both_stacks_and_preempted_requests_read_their_source_again(open_engine, reference, family, name):
    path, expected = reference(family, "rules")
    target = TargetConfig(path=str(path), device="cpu", kv_slots=70)
    config = drafters(path, path)[name]
    with open_engine(config, tp=2, target=target, scheduler=SchedulerConfig(max_num_seqs=8)) as engine:
        for _ in range(10):  # on a busy machine one request may end before the next one comes
            assert tokens_of(engine) == expected
            if engine.report().counters["num_preemptions"]:
                break
        else:
            pytest.fail("no request lost its place")


@pytest.mark.parametrize(
    ("family", "name"), list(in_turn(ENCODER_DECODERS, ["none", "copy"], extended={*ENCODER_DECODERS} - {"T5"}))
)
def test_a_rank_that_is_replaced_reads_its_sources_again(open_engine, reference, monkeypatch, family, name):
    """It dies in the middle of the texts; the requests come again with what their clients have."""
    path, expected = reference(family, "rules")
    passes, forward = list[int](), Verifier.forward

    def failing(verifier, inputs, *arguments, **options):
        passes.append(len(inputs))
        if len(passes) == 4:
            raise MemoryError("once")
        return forward(verifier, inputs, *arguments, **options)

    monkeypatch.setattr(Verifier, "forward", failing)
    config = drafters(path, path)[name]
    with open_engine(config, target=TargetConfig(path=str(path), device="cpu")) as engine:
        assert tokens_of(engine) == expected
    assert len(passes) > 4


@pytest.mark.extended
def test_sampled_text_is_the_same_whatever_drafts(open_engine, reference):
    path, _ = reference("Marian", "rules")
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.9, seed=3)
    found = []
    for config in ("none", drafters(path, path)["itself"]):
        with open_engine(config, target=TargetConfig(path=str(path), device="cpu")) as engine:
            found.append([completion.token_ids for completion in engine.generate(SOURCES, sampling)])
    assert found[0] == found[1] and len({*map(tuple, found[0])}) > 4


def test_a_server_reads_prompts_by_the_encoder(reference):
    path, expected = reference("Bart", "rules")
    with serving(path, CopyDrafterConfig()) as server:
        body = {"prompt": SOURCES[0], "temperature": 0, "max_tokens": MAX_TOKENS}
        status, _, answer = server.ask("/v1/completions", body)
        assert status == 200 and answer["usage"]["prompt_tokens"] == len(SOURCES[0])
        assert answer["choices"][0]["text"] == load_tokenizer(path).decode(expected[0])
        status, _, answer = server.ask("/v1/completions", body | {"prompt": [5] * 257})
        assert status == 400 and "257 tokens do not fit the encoder's 256" in answer["error"]["message"]
        status, _, answer = server.ask("/v1/completions", body | {"prompt_logprobs": 0})
        assert status == 400 and "prompt_logprobs" in answer["error"]["message"]


@pytest.mark.slow
def test_the_command_line_runs_it(entered, reference, tmp_path):
    """By default the engine does (above), and another target's on the command line (`test_whole_text_target.py`)."""
    path, expected = reference("Marian", "rules")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": source}) for source in SOURCES))
    options = ["target=hf", f"target.path={path}", "drafter=copy", "cluster=inprocess", f"job.prompts={prompts}"]
    options += [f"sampling.max_tokens={MAX_TOKENS}", f"hydra.run.dir={tmp_path}/run"]
    code, _, _ = entered(*options)
    assert code == 0
    lines = sorted(
        map(json.loads, (tmp_path / "run/completions.jsonl").read_text().splitlines()), key=lambda o: o["index"]
    )
    assert [line["token_ids"] for line in lines] == expected
    assert json.loads((tmp_path / "run/report.json").read_text())["tokens_equal_plain"] is True


@pytest.mark.extended
def test_a_job_that_cannot_run_it_says_so(entered, reference):
    options = ["target=hf", f"target.path={reference('Marian', 'rules')[0]}", "drafter=copy"]
    code, _, error = entered("job=certify", *options)
    assert code == 2 and "job=certify: is for targets without an encoder" in error


def test_what_does_not_fit_the_encoder_is_refused(open_engine, tiny_checkpoint):
    path = tiny_checkpoint("Bart")
    with open_engine("none", target=TargetConfig(path=str(path), device="cpu")) as engine:
        assert engine.ready["target-0"].facts["max_source_len"] == 256
        long = engine.submit([5] * 257)
        with pytest.raises(Exception, match="source: 257 tokens do not fit the encoder's 256"):
            long.result()
