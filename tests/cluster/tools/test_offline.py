"""Models and prompts without an engine: what a launch configures is what is opened, read and refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from actors.drafters.model.config import ModelDrafterConfig
from actors.drafters.vocabulary.token_list import write_token_list
from actors.options import SamplingConfig, TargetConfig
from actors.tokenizer_file import tokenizer_digest
from cluster.config.jobs import TreeConfig
from cluster.io.text import load_tokenizer
from cluster.tools.offline import open_alone, read_task


def test_a_model_is_opened_as_it_is_configured(tiny_checkpoint, tmp_path):
    path = str(tiny_checkpoint("Llama"))
    whole = open_alone(ModelDrafterConfig(path=path), 16, device="cpu")
    target = open_alone(TargetConfig(path=path, device="cpu", dtype="bfloat16", stretch=2), 16)
    assert (whole.decoder.dtype, target.decoder.dtype) == (torch.float32, torch.bfloat16)
    assert target.config.num_layers == whole.config.num_layers + 2
    write_token_list(tmp_path / "tokens.json", [5, 7, 9], {}, tokenizer_digest(Path(path)))
    some = open_alone(ModelDrafterConfig(path=path, device="cpu", vocabulary=str(tmp_path / "tokens.json")), 16)
    assert some.config.head is not None and set(some.config.head.rows) == {5, 7, 9}


def test_prompts_are_read_in_the_targets_tokens_each_with_its_seed(tiny_launch, write_prompts):
    prompts = write_prompts({"prompt": "def f():"}, {"prompt": "x = 1"}, {"prompt": "left out"})
    config = tiny_launch(TreeConfig(prompts=prompts, limit=2), sampling=SamplingConfig(seed=7, max_tokens=30))
    task, tokenizer = read_task(config), load_tokenizer(Path(config.target.path))
    assert task.prompts == [tuple(tokenizer.encode(text).ids) for text in ("def f():", "x = 1")]
    assert [one.seed for one in task.sampling] == [7, 8] and task.num_tokens == 30
    assert task.longest == max(map(len, task.prompts)) + 30
    task.check_room(task.longest)
    with pytest.raises(ValueError, match=r"^sampling.max_tokens=30: prompt and completion exceed .*; lower it$"):
        task.check_room(task.longest - 1)
    assert replace(task, prompts=task.prompts[1:]).longest <= task.longest
