"""A target that fills masks and sees the whole text, through the engine: its text is that of the decoder it names."""

from __future__ import annotations

import json
import shutil

import pytest
import transformers

from actors.options import SchedulerConfig
from actors.roles.diffusion_target import DiffusionTargetRole
from cluster.io.text import load_tokenizer
from tests.actors.whole_text_diffusion import WholeTextDiffusion
from tests.cluster.engine.diffusion_engines import MAX_TOKENS, PROMPTS, open_target, tokens_of

FAMILIES = {"llada": "Llama", "dream": "Qwen2"}


@pytest.fixture(scope="module", params=FAMILIES)
def diffusion(request, tiny_checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param) / "checkpoint"
    shutil.copytree(tiny_checkpoint(FAMILIES[request.param], tie_word_embeddings=False), path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    return WholeTextDiffusion(path, model, mask=model.config.vocab_size - 1)


usually_llada = pytest.mark.parametrize(
    "diffusion", ["llada", pytest.param("dream", marks=pytest.mark.slow)], indirect=True
)
"""For what does not depend on the family, of which both have the tokens of every decoder."""


@pytest.fixture(scope="module")
def expected(diffusion):
    tokenizer = load_tokenizer(diffusion.path)
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    return {
        decoder: [diffusion.decoded(ids, MAX_TOKENS, decoder) for ids in prompts]
        for decoder in ("static", "prefix", "dual")
    }


@pytest.mark.extended
@pytest.mark.parametrize(("decoder", "tp"), [("auto", 1), ("prefix", 2), ("dual", 1)])
def test_tokens_are_those_of_the_decoder(open_engine, diffusion, expected, decoder, tp):
    texts = expected["static" if decoder == "auto" else decoder]
    with open_target(open_engine, diffusion, tp=tp, num_states=3, decoder=decoder) as engine:
        assert tokens_of(engine) == texts
        assert tokens_of(engine, PROMPTS[:1]) == texts[:1], "alone as in a batch"


@usually_llada
def test_requests_wait_for_rows_of_their_whole_text(open_engine, diffusion, expected):
    """The pool has those of one."""
    scheduler = SchedulerConfig(max_num_seqs=4, prefill_chunk=2)
    with open_target(open_engine, diffusion, decoder="prefix", kv_slots=36, scheduler=scheduler) as engine:
        assert tokens_of(engine) == expected["prefix"]
        assert engine.report().counters["num_preemptions"] == 0


@usually_llada
@pytest.mark.parametrize("decoder", [pytest.param("static", marks=pytest.mark.slow), "dual"])
def test_a_rank_that_is_replaced_changes_no_token(open_engine, diffusion, expected, decoder, monkeypatch):
    """It dies in the middle of blocks; the requests come again with what their clients have."""
    passes, fill = list[int](), DiffusionTargetRole._fill

    def failing(role, rows):
        passes.append(len(rows))
        if len(passes) == 5:
            raise MemoryError("once")
        return fill(role, rows)

    monkeypatch.setattr(DiffusionTargetRole, "_fill", failing)
    with open_target(open_engine, diffusion, num_states=2, decoder=decoder) as engine:
        assert tokens_of(engine) == expected[decoder]
    assert len(passes) > 5


@pytest.mark.extended
@usually_llada
def test_the_command_line_runs_it(entered, diffusion, expected, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))
    target = ["target=hf", f"target.path={diffusion.path}", "target.decoder=dual"]
    options = ["cluster=inprocess", f"job.prompts={prompts}", f"sampling.max_tokens={MAX_TOKENS}"]
    code, _, error = entered(*target, *options, "sampling.ignore_eos=true", f"hydra.run.dir={tmp_path}/run")
    assert code == 0, error
    lines = sorted(
        map(json.loads, (tmp_path / "run/completions.jsonl").read_text().splitlines()), key=lambda o: o["index"]
    )
    assert [line["token_ids"] for line in lines] == expected["dual"]
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert 0 < report["num_accepted_states"] <= report["num_guessed_states"]
