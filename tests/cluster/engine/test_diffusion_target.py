"""A target that fills masks, through the engine: its text is that of its static decoder in transformers."""

from __future__ import annotations

import json
import shutil

import pytest
import transformers

from actors.options import SchedulerConfig
from actors.protocol.messages import SamplingParams
from actors.roles.diffusion_target import DiffusionTargetRole
from cluster.io.text import load_tokenizer
from tests.actors.masked_diffusion import MaskedDiffusion
from tests.cluster.engine.diffusion_engines import MAX_TOKENS, PROMPTS, open_target, tokens_of


def masked_diffusion(checkpoint, path):
    shutil.copytree(checkpoint, path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    return MaskedDiffusion(path, model, mask=model.config.vocab_size - 1)


@pytest.fixture(scope="module")
def diffusion(tiny_checkpoint, tmp_path_factory):
    return masked_diffusion(tiny_checkpoint("Qwen3"), tmp_path_factory.mktemp("sdar") / "checkpoint")


@pytest.fixture(scope="module")
def expected(diffusion):
    tokenizer = load_tokenizer(diffusion.path)
    return [diffusion.decoded(tokenizer.encode(prompt).ids, MAX_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("tp", [1, 2])
def test_tokens_are_those_of_the_static_decoder(open_engine, diffusion, expected, tp):
    with open_target(open_engine, diffusion, tp=tp, num_states=3) as engine:
        assert tokens_of(engine) == expected
        assert tokens_of(engine, PROMPTS[:1]) == expected[:1], "alone as in a batch"
        with pytest.raises(ValueError, match=r"sampling.min_tokens: .* fills masks"):
            engine.submit("a", SamplingParams(min_tokens=2))
        with pytest.raises(ValueError, match="logprobs: is for targets that write token by token"):
            engine.submit("a", logprobs=1)


def test_after_an_update_tokens_are_those_of_the_new_weights(
    open_engine, diffusion, expected, tiny_checkpoint, tmp_path
):
    other = masked_diffusion(tiny_checkpoint("Qwen3", seed=1), tmp_path / "checkpoint")
    with open_target(open_engine, diffusion, num_states=3) as engine:
        assert tokens_of(engine, PROMPTS[:2]) == expected[:2]
        engine.update_weights(other.path)
        tokenizer = load_tokenizer(other.path)
        wanted = [other.decoded(tokenizer.encode(prompt).ids, MAX_TOKENS) for prompt in PROMPTS[:2]]
        assert tokens_of(engine, PROMPTS[:2]) == wanted != expected[:2]


@pytest.mark.parametrize("max_num_batched_tokens", [2048, 8])
def test_preempted_requests_fill_their_blocks_again(open_engine, diffusion, expected, max_num_batched_tokens):
    """Also where passes have no room for the states of all requests."""
    scheduler = SchedulerConfig(4, max_num_batched_tokens, prefill_chunk=2)
    with open_target(open_engine, diffusion, num_states=2, kv_slots=33, scheduler=scheduler) as engine:
        for _ in range(10):  # on a busy machine one request may end before the next one comes
            assert tokens_of(engine) == expected
            if engine.report().counters["num_preemptions"]:
                break
        else:
            pytest.fail("no request lost its place")


def test_a_rank_that_is_replaced_changes_no_token(open_engine, diffusion, expected, monkeypatch):
    """It dies in the middle of blocks; the requests come again with what their clients have."""
    passes, fill = list[int](), DiffusionTargetRole._fill

    def failing(role, rows):
        passes.append(len(rows))
        if len(passes) == 5:
            raise MemoryError("once")
        return fill(role, rows)

    monkeypatch.setattr(DiffusionTargetRole, "_fill", failing)
    with open_target(open_engine, diffusion, num_states=2) as engine:
        assert tokens_of(engine) == expected
    assert len(passes) > 5


@pytest.mark.slow
def test_the_command_line_runs_it_and_names_what_it_cannot(entered, diffusion, expected, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))
    target = ["target=hf", f"target.path={diffusion.path}", "target.decoder=static"]
    options = ["cluster=inprocess", f"job.prompts={prompts}", f"sampling.max_tokens={MAX_TOKENS}"]
    code, _, error = entered(*target, *options, "sampling.ignore_eos=true", f"hydra.run.dir={tmp_path}/run")
    assert code == 0, error
    lines = sorted(
        map(json.loads, (tmp_path / "run/completions.jsonl").read_text().splitlines()), key=lambda o: o["index"]
    )
    assert [line["token_ids"] for line in lines] == expected
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert report["plain"]["num_guessed_states"] == 0 < report["num_guessed_states"], "compared with one state a pass"
    assert report["tokens_equal_plain"] and report["speedup_vs_ar"] > 0 and report["notes"] == []
    code, _, error = entered("job=certify", *target)
    assert code == 2 and "job=certify: is for targets that write token by token" in error
    code, _, error = entered("drafter=ngram", *target)
    assert code == 2 and "drafter=ngram: drafts for targets that write token by token" in error
    code, _, error = entered(*target[:2], "target.decoder=dual")
    assert code == 2 and "target.decoder=dual: keeps rows of models that see the whole text" in error
    code, _, error = entered("target.decoder=static")
    assert code == 2 and "target.decoder=static: is for masked-diffusion checkpoints" in error
