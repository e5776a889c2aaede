"""Published checkpoints of block drafters: their config.json, the names of their tensors, and what a tap means."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.tools.training.speculators.recipes import RECIPES
from parallel.speculators.block.config import BlockConfig
from parallel.speculators.block.runner import BlockRunner
from parallel.speculators.registry import read_speculator
from tests.parallel.speculators.test_block import FLAGS, Pair, drafted, opened

MASK = 90
LAYERS = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 40,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "layer_types": ["full_attention"] * 2,
    "num_target_layers": 4,
    "dtype": "bfloat16",
}
DFLASH = {"architectures": ["DFlashDraftModel"], "block_size": 8, "rope_theta": 10000.0} | LAYERS
DFLASH["dflash_config"] = {"mask_token_id": MASK, "target_layer_ids": [0, 2]}
DFLASH2 = {"architectures": ["DFlash2DraftModel"], "is_causal": False} | LAYERS
DFLASH2 |= {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
DFLASH2["dflash_config"] = DFLASH["dflash_config"] | {
    "block_size": 8,
    "conv_group_size": 4,
    "conv_kernel_size": 2,
    "selector_rank": 8,
    "selector_top_k": 5,
}
DSPARK = {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 7,
    "mask_token_id": MASK,
    "target_layer_ids": [0, 2],
    "num_anchors": 512,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "markov_rank": 8,
    "markov_head_type": "vanilla",
    "rope_theta": 10000.0,
} | LAYERS
PUBLISHED = {"dflash": DFLASH, "dflash2": DFLASH2, "dspark": DSPARK}


@pytest.fixture(scope="module")
def pair(make_checkpoint):
    return Pair(make_checkpoint("Llama", num_hidden_layers=4).path)


def test_the_recipe_of_dspark_trains_every_head_that_is_published(pair, tmp_path):
    """A confidence that sees the corrector's embedding, a Markov corrector, blocks of 7 tokens behind their anchor."""
    defaults = RECIPES["dspark"].options
    pair.net(FLAGS["dspark"]).save(tmp_path)
    names = {name.split(".")[0] for name in load_file(tmp_path / "model.safetensors")}
    assert {"confidence_head", "markov_head"} <= names
    assert (defaults.block_size, defaults.corrector, defaults.anchor_first) == (DSPARK["block_size"], "markov", True)
    assert defaults.confidence and (defaults.cross_entropy, defaults.variation) == (0.1, 0.9)


def publish(pair, kind, folder, **fields):
    """The directory of a checkpoint in the published layout, and the same drafter as we trained it."""
    net = pair.net(FLAGS[kind])
    own, folder = folder / "own", folder / "published"
    runner = opened(pair, net, own)
    assert isinstance(runner, BlockRunner) and runner.layers.mask is not None
    runner.layers.mask.copy_(runner.layers.embed(torch.tensor([MASK])))
    tensors = load_file(own / "model.safetensors")
    del tensors["mask_embedding"]
    if kind == "dspark":
        tensors |= {f"{name}.weight": torch.zeros(97, 32) for name in ("embed_tokens", "lm_head")}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(PUBLISHED[kind] | fields))
    return folder, net, runner


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_published_checkpoint_drafts_as_the_same_weights_of_ours(kind, pair, tmp_path):
    folder, net, own = publish(pair, kind, tmp_path)
    config = read_speculator(folder)
    assert (config.method, config.taps, config.max_positions) == (kind, (1, 3), 128)
    published = opened(pair, net, tmp_path / "again", at=folder)
    assert published.longest_draft == 7
    tokens, features = pair.tokens[0].tolist(), pair.features(pair.tokens[0], config.taps)
    logits = []
    for runner in (own, published):
        runner.open(0)
        runner.read_features(0, 0, features[:11])
        logits.append(drafted(runner, 0, tokens[:12], [3, 1, 4]))
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)


def test_layer_i_of_a_checkpoint_is_what_comes_out_of_block_i(pair, tmp_path):
    """A hook on the target's block sees it; the features of a token are those streams side by side."""
    folder, _, _ = publish(pair, "dflash", tmp_path)
    streams = {}
    hooks = [
        pair.model.model.layers[i].register_forward_hook(lambda _m, _in, out, i=i: streams.update({i: out}))
        for i in DFLASH["dflash_config"]["target_layer_ids"]
    ]
    with torch.no_grad():
        pair.model(pair.tokens[:1])
    for hook in hooks:
        hook.remove()
    outputs = [out[0] if isinstance(out, tuple) else out for out in streams.values()]
    features = pair.features(pair.tokens[0], read_speculator(folder).taps)
    torch.testing.assert_close(features, torch.cat(outputs, -1)[0], atol=1e-4, rtol=1e-4)


def test_scales_and_caps_of_the_logits_are_read(pair, tmp_path):
    given = DFLASH["dflash_config"] | {"output_multiplier": 0.5, "final_logit_softcapping": 3.0}
    folder, net, own = publish(pair, "dflash", tmp_path, dflash_config=given)
    published = opened(pair, net, tmp_path / "again", at=folder)
    tokens, features = pair.tokens[0].tolist(), pair.features(pair.tokens[0], net.taps)
    logits = []
    for runner in (own, published):
        runner.open(0)
        runner.read_features(0, 0, features[:11])
        logits.append(drafted(runner, 0, tokens[:12], [3]))
    torch.testing.assert_close(logits[1], 3 * torch.tanh(logits[0] * 0.5 / 3), atol=1e-4, rtol=1e-4)


def test_a_window_hides_the_text_before_it(pair, tmp_path):
    """Sliding layers of DFlash 2: features older than the window change nothing, those within it do."""
    sliding = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6, "use_sliding_window": True}
    folder, net, _ = publish(pair, "dflash2", tmp_path, **sliding)
    tokens, features = pair.tokens[0].tolist(), pair.features(pair.tokens[0], net.taps)
    logits = []
    for changed in (None, 6, 8):  # the first row of the block, at 12, sees positions from 7 on
        runner, given = opened(pair, net, tmp_path / "again", at=folder), features[:12].clone()
        if changed is not None:
            given[: changed + 1] += 1.0
        runner.open(0)
        runner.read_features(0, 0, given)
        logits.append(drafted(runner, 0, tokens[:13], []))
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("dflash2", {"layer_types": ["sliding_attention"] * 2, "is_causal": None}, "is_causal"),
        ("dflash", {"is_causal": True}, "is_causal"),
        ("dflash", {"dflash_config": {"target_layer_ids": [0]}}, "mask_token_id"),
        ("dspark", {"markov_head_type": "transformer"}, "markov_head_type"),
        ("dspark", {"confidence_head_with_markov": False}, "confidence_head_with_markov"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(kind, fields, reason, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[kind] | fields))
    with pytest.raises(ValueError, match=reason) as refusal:
        read_speculator(tmp_path)
    assert "\n" not in str(refusal.value)


def test_a_missing_tensor_is_named(pair, tmp_path):
    folder, net, _ = publish(pair, "dspark", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["markov_head.markov_w2.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"markov_head\.markov_w2\.weight"):
        opened(pair, net, tmp_path / "again", at=folder)


def test_our_own_layout_is_read_as_it_was_trained(pair, tmp_path):
    options = replace(FLAGS["domino"], conv_taps=2, block_size=6)
    pair.net(options).save(tmp_path)
    config = read_speculator(tmp_path)
    assert isinstance(config, BlockConfig)
    assert (config.method, config.corrector, config.state_size, config.corrector_rank) == ("domino", "gru", 12, 8)
    assert (config.block_size, config.conv_taps, config.anchor_first, config.mask_token_id) == (6, 2, False, None)
