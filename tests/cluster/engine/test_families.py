"""A launch on a checkpoint of a family with sliding windows, soft caps or experts: the tokens are transformers' own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from actors.options import PipelineConfig, PipelineName, TargetConfig
from actors.protocol.messages import SamplingParams
from cluster.io.text import load_tokenizer
from tests.families import FAMILIES

ROOT = Path(__file__).parents[3]
PROMPTS = ["def median(values):\n    return median(values", "x = x + 1\nx = x + 1\nx = "]
MAX_TOKENS = 20


def reference_tokens(path: Path) -> list[list[int]]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    prompts = [torch.tensor([load_tokenizer(path).encode(prompt).ids]) for prompt in PROMPTS]
    ended = dict(max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=None)
    return [model.generate(prompt, **ended)[0, prompt.shape[1] :].tolist() for prompt in prompts]


@pytest.mark.parametrize("family", ["Gemma2", "Gemma3", "OPT", "Mixtral"])
def test_tokens_are_those_of_transformers_and_of_plain_decoding(open_engine, tiny_checkpoint, family):
    path = tiny_checkpoint(family, **FAMILIES[family])
    expected, greedy = reference_tokens(path), SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    target = TargetConfig(path=str(path), device="cpu")
    for drafter, tp, name in (("none", 1, "plain"), ("ngram", 2, "sync")):
        pipeline = PipelineConfig(PipelineName(name), adaptive=False)
        with open_engine(drafter, tp=tp, target=target, pipeline=pipeline) as engine:
            tokens = [completion.token_ids for completion in engine.generate(PROMPTS, greedy)]
            assert tokens == expected


@pytest.mark.slow
def test_the_command_line_runs_gemma_without_a_compiler_and_says_so_once(tiny_checkpoint, tmp_path):
    path = tiny_checkpoint("Gemma2", **FAMILIES["Gemma2"])
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))
    options = [
        "target=hf",
        f"target.path={path}",
        "drafter=ngram",
        "cluster=inprocess",
        f"job.prompts={prompts}",
        f"sampling.max_tokens={MAX_TOKENS}",
        "sampling.ignore_eos=true",
        f"hydra.run.dir={tmp_path}/run",
    ]
    command = [sys.executable, "-m", "cluster.launch", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CXX": "/nowhere/c++", "SPECDEC_KERNELS": "1"}
    done = subprocess.run(command, cwd=ROOT, check=True, timeout=150, env=environment, capture_output=True, text=True)
    shown = done.stdout.splitlines()
    (at,) = (number for number, line in enumerate(shown) if "kernels" in line)
    assert shown[at].endswith("target-0: no compiled kernels, so passes take several times longer")
    assert shown[at + 1].startswith("  CXX=/nowhere/c++: not found; install a C++ compiler (apt-get install g++)")
    assert shown[0] == "importing libraries"
    lines = map(json.loads, (tmp_path / "run/completions.jsonl").read_text().splitlines())
    assert [line["token_ids"] for line in sorted(lines, key=lambda line: line["index"])] == reference_tokens(path)
    assert json.loads((tmp_path / "run/report.json").read_text())["tokens_equal_plain"] is True
