"""A model turned into a target that fills masks: what is trained is what its decoder computes, block by block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.tools.training.models import drafter_config, initialised
from cluster.tools.training.speculators.sdar import SdarNet, SdarOptions, build, with_norms
from parallel.model.families.registry import read_config
from parallel.speculators.config import FINAL
from parallel.training.interface import TargetBatch, TargetShape
from tests.actors.masked_diffusion import SHAPE, MaskedDiffusion
from tests.families import tiny_model

BLOCK, LENGTH, MASK = 4, 18, 7
TOKENS = torch.randint(8, 64, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def shape_of(model: Any) -> TargetShape:
    table = model.get_input_embeddings().weight
    return TargetShape(model.config, table, table, torch.ones(64, dtype=torch.int64), model)


@pytest.fixture(scope="module")
def net() -> SdarNet:
    config = drafter_config(64)
    config.initializer_range = 0.2
    made = build(SdarOptions(block=BLOCK, mask_token=MASK), shape_of(initialised(config, 0, "cpu")))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_((parameter + 0.05 * torch.randn_like(parameter)).bfloat16())  # as saved
    return made


@torch.no_grad()
def test_hidden_rows_are_those_of_a_block_behind_whole_ones(net: SdarNet, tmp_path: Path):
    net.save(tmp_path)
    decoder = MaskedDiffusion(tmp_path, net.model, MASK, BLOCK)
    tokens = TOKENS[:, : LENGTH // BLOCK * BLOCK]
    is_hidden = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(2)) < 0.5
    trained = net.model.lm_head(net.hidden(tokens, is_hidden))
    masked = tokens.masked_fill(is_hidden, MASK)
    for text, row in enumerate(tokens.tolist()):
        for start in range(0, len(row), BLOCK):
            block = masked[text, start : start + BLOCK].tolist()
            served = decoder.logits(row[:start] + block)[start:]
            torch.testing.assert_close(trained[text, start : start + BLOCK], served, atol=1e-4, rtol=0)


def test_its_checkpoint_is_a_target_that_fills_masks(net: SdarNet, tmp_path: Path):
    net.save(tmp_path)
    diffusion = read_config(tmp_path).diffusion
    assert diffusion is not None and (diffusion.block_size, diffusion.mask_token) == (BLOCK, MASK)


@torch.no_grad()
def test_queries_and_keys_have_the_size_that_they_had():
    config = drafter_config(64)
    config.initializer_range = 0.2
    model = initialised(config, 0, "cpu")
    made, layer = with_norms(model, TOKENS), 0
    trunk: Any = model.model
    attention: Any = trunk.layers[layer].self_attn
    stream = trunk.layers[layer].input_layernorm(trunk.embed_tokens(TOKENS))
    own: Any = made.model.layers[layer].self_attn
    for projection, norm in ((attention.q_proj, own.q_norm), (attention.k_proj, own.k_norm)):
        heads = projection(stream).unflatten(-1, (-1, config.head_dim))
        before, after = (one.square().mean(-1).sqrt().mean() for one in (heads, norm(heads)))
        assert after == pytest.approx(float(before), rel=0.01) and abs(before - 1) > 0.1


@pytest.mark.extended
def test_a_prompt_is_shown_and_labels_alone_are_trained(net: SdarNet, monkeypatch: pytest.MonkeyPatch):
    mask = torch.zeros(2, LENGTH, dtype=torch.bool)
    mask[0, 5:11] = True  # what is written behind its end of text is no label, but hidden
    mask[1, 3:] = True
    head = torch.nn.Linear(16, 64, bias=False)
    batch = TargetBatch(TOKENS, {FINAL: torch.zeros(2, LENGTH, 16)}, mask, head, head)
    seen, trained, hidden = list[torch.Tensor](), list[torch.Tensor](), net.hidden
    monkeypatch.setattr(net, "hidden", lambda tokens, one: seen.append(one) or hidden(tokens, one))
    net.model.lm_head.register_forward_hook(lambda _module, inputs, _output: trained.append(inputs[0]))
    net.train()
    for seed in range(50):
        net.loss(batch, torch.Generator().manual_seed(seed))
    net.eval()
    counts = torch.stack(seen).float().mean(0)
    assert not counts[0, :5].any() and not counts[1, :3].any() and (counts[0, 5:] > 0).all()
    assert counts[1, 4:].mean() == pytest.approx((1 + 1 / BLOCK) / 2, abs=0.05)
    of_labels = [int((one & mask[:, : one.shape[1]]).sum()) for one in seen]
    assert [len(rows) for rows in trained] == of_labels


@torch.no_grad()
def test_held_out_length_counts_the_tokens_that_an_empty_block_gets_right(net: SdarNet):
    net.eval()
    net_tokens = TOKENS[:, :16]
    nothing = torch.ones(2, 16, dtype=torch.bool)
    nothing[:, :4] = False
    said = net.model.lm_head(net.hidden(net_tokens, nothing)).argmax(-1)
    tokens = net_tokens.clone()
    tokens[:, 4:6] = said[:, 4:6]  # of the first block two tokens, which does not change what it is filled with
    tokens[:, 6] = (said[:, 6] + 1) % 64
    said = net.model.lm_head(net.hidden(tokens, nothing)).argmax(-1)
    right = (said == tokens)[:, 4:].float().unflatten(1, (-1, BLOCK)).cumprod(-1).sum(-1).mean()
    head = torch.nn.Linear(16, 64, bias=False)
    _, metrics = net.loss(TargetBatch(tokens, {FINAL: torch.zeros(2, 16, 16)}, nothing, head, head), torch.Generator())
    assert float(metrics["length"]) == pytest.approx(float(right)) and right >= 2 / 3


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [("Qwen3", {}, "only a Llama is converted"), ("Llama", {"mask_token": 64}, "is none of 64 tokens")],
)
def test_a_model_that_cannot_be_converted_is_refused(family: str, options: dict[str, int], message: str):
    model = tiny_model(family, 0, **(SHAPE | {"vocab_size": 64}))
    with pytest.raises(ValueError, match=message):
        build(SdarOptions(mask_token=options.get("mask_token", 7)), shape_of(model))
