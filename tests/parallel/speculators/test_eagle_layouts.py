"""Checkpoints of draft layers in the layouts in which they are published: the fields, names and shapes of each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel.kv.pass_plan import Span
from parallel.runtime.runner import open_model
from parallel.speculators.config import FINAL
from parallel.speculators.registry import read_speculator
from tests.parallel.conftest import SHAPE, Checkpoint
from tests.parallel.speculators.test_eagle import Trained, drafted

LLAMA = {
    "model_type": "llama",
    "vocab_size": SHAPE["vocab_size"],
    "hidden_size": SHAPE["hidden_size"],
    "head_dim": SHAPE["head_dim"],
    "intermediate_size": SHAPE["intermediate_size"],
    "num_attention_heads": SHAPE["num_attention_heads"],
    "num_key_value_heads": SHAPE["num_key_value_heads"],
    "num_hidden_layers": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
TABLE = SHAPE["vocab_size"], SHAPE["hidden_size"]


def write(folder: Path, hf: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf))


def renamed(tensors: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    """Tensors with the first fitting prefix of their names replaced."""
    result = {}
    for name, tensor in tensors.items():
        old = next((prefix for prefix in names if name.startswith(prefix)), "")
        result[names.get(old, "") + name.removeprefix(old)] = tensor
    return result


def specforge(tensors: dict[str, Tensor], *, later: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """configs/llama3-8B-eagle3.json and qwen3-30B-A3B-eagle3.1.json of SpecForge, `LlamaForCausalLMEagle3`."""
    hf = LLAMA | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 40,
        "rope_scaling": None,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 1], "use_aux_hidden_state": True},
    }
    return hf | ({"fc_norm": True, "norm_output": True} if later else {}), tensors


def speculators_eagle3(tensors: dict[str, Tensor], *, later: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`Eagle3DraftModel` of vllm-project/speculators: also an embedding, frozen and equal to the target's."""
    hf = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.4.0",
        "draft_vocab_size": 40,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": later,
        "norm_output": later,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [1, 1, 2],
        "transformer_layer_config": LLAMA,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "target"}},
    }
    return hf, renamed(tensors, {"midlayer.": "layers.0."}) | {"embed_tokens.weight": torch.ones(TABLE)}


def eagle(tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`Model` of cnets1.py of SafeAILab/EAGLE; config.json is a Llama's."""
    hf = LLAMA | {"architectures": ["LlamaForCausalLM"], "bias": True}
    bias = {"fc.bias": torch.zeros(TABLE[1]), "embed_tokens.weight": torch.ones(TABLE)}
    return hf, renamed(tensors, {"midlayer.": "layers.0."}) | bias


_MTP = {
    "eh_proj.": "input_proj.",
    "enorm.": "token_layernorm.",
    "hnorm.": "hidden_layernorm.",
    "norm.": "final_layernorm.",
    "midlayer.": "",
}


def speculators_mtp(tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`MTPDraftModel` of vllm-project/speculators."""
    hf = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": LLAMA | {"num_hidden_layers": 2},
    }
    return hf, renamed(tensors, {ours: f"mtp_layers.0.{theirs}" for ours, theirs in _MTP.items()})


def mimo(tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """XiaomiMiMo/MiMo-7B, whose module is within the target's own checkpoint, with the hidden state first."""
    hf = LLAMA | {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
    hf |= {"num_hidden_layers": 2, "use_sliding_window": False}
    theirs = renamed(tensors, {ours: f"model.mtp_layers.0.{name}" for ours, name in _MTP.items()})
    join = "model.mtp_layers.0.input_proj.weight"
    theirs[join] = theirs[join].roll(TABLE[1], 1)
    widths = {"q": SHAPE["num_attention_heads"], "k": SHAPE["num_key_value_heads"], "v": SHAPE["num_key_value_heads"]}
    for name, heads in widths.items():
        theirs[f"model.mtp_layers.0.self_attn.{name}_proj.bias"] = torch.zeros(heads * SHAPE["head_dim"])
    return hf, theirs


LAYOUTS: dict[str, tuple[str, Callable[[dict[str, Tensor]], tuple[dict[str, Any], dict[str, Tensor]]]]] = {
    "SpecForge EAGLE-3": ("eagle3", lambda tensors: specforge(tensors, later=False)),
    "SpecForge EAGLE-3.1": ("eagle3.1", lambda tensors: specforge(tensors, later=True)),
    "speculators EAGLE-3": ("eagle3", lambda tensors: speculators_eagle3(tensors, later=False)),
    "speculators EAGLE-3.1": ("eagle3.1", lambda tensors: speculators_eagle3(tensors, later=True)),
    "EAGLE-1": ("eagle", eagle),
    "speculators MTP": ("mtp", speculators_mtp),
    "MiMo MTP": ("mtp", mimo),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_layouts_give_the_same_logits(llama: Checkpoint, tmp_path: Path, layout: str) -> None:
    method, translate = LAYOUTS[layout]
    options: dict[str, Any] = {"draft_vocab": 40, "taps": (1, 1, 2)} if method.startswith("eagle3") else {}
    one = Trained(llama, tmp_path / "own", method, **options)
    expected = drafted(one.open(), one, 6)
    one.path = tmp_path / "published"
    write(one.path, *translate(load_file(tmp_path / "own" / "model.safetensors")))
    assert read_speculator(one.path).taps == one.net.taps
    torch.testing.assert_close(drafted(one.open(), one, 6), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_said", [True, False])
def test_the_bias_of_eagle_is_read(llama: Checkpoint, tmp_path: Path, is_said: bool) -> None:
    """Also where config.json says nothing of it, as those of the first checkpoints."""
    one = Trained(llama, tmp_path / "own", "eagle")
    hf, tensors = eagle(load_file(tmp_path / "own" / "model.safetensors"))
    if not is_said:
        del hf["bias"]
    logits = []
    for bias in (0.0, 1.0):
        one.path = tmp_path / str(bias)
        write(one.path, hf, tensors | {"fc.bias": torch.full((TABLE[1],), bias)})
        logits.append(drafted(one.open(), one, 6)[0])
    assert not torch.allclose(*logits, atol=1e-3)


@pytest.mark.parametrize("field", ["norm_before_residual", "norm_before_fc"])
def test_norms_of_speculators_are_read(llama: Checkpoint, tmp_path: Path, field: str) -> None:
    one = Trained(llama, tmp_path / "own", "eagle3", draft_vocab=40, taps=(1, 1, 2))
    hf, tensors = speculators_eagle3(load_file(tmp_path / "own" / "model.safetensors"), later=False)
    tensors["input_norm.weight"] = torch.full((3 * TABLE[1],), 0.5)
    logits = []
    for is_set in (False, True):
        one.path = tmp_path / str(is_set)
        write(one.path, hf | {field: is_set}, tensors)
        logits.append(drafted(one.open(), one, 6)[0][one.net.tokens])
    assert not torch.allclose(*logits, atol=1e-3)


def test_taps_are_what_published_code_captures(llama: Checkpoint, tmp_path: Path) -> None:
    """SpecForge names layers whose outputs, speculators layers whose inputs it reads; the last is before the norm."""
    seen: dict[str, Tensor] = {}
    model: Any = llama.model
    layers = model.model.layers
    hooks = [layers[i].register_forward_hook(lambda _, __, out, i=i: seen.__setitem__(f"out {i}", out)) for i in (0, 1)]
    hooks += [layers[1].register_forward_pre_hook(lambda _, given: seen.__setitem__("in 1", given[0]))]
    llama.logits(list(range(5, 17)))
    for hook in hooks:
        hook.remove()
    runner = open_model(llama.path)
    runner.open("a")
    of = {"specforge": specforge({}, later=False)[0], "speculators": speculators_eagle3({}, later=False)[0]}
    wanted = {"specforge": ["out 0", "out 0", "out 1"], "speculators": ["in 1", "in 1", "out 1"]}
    for name, hf in of.items():
        write(tmp_path / name, hf, {})
        taps = read_speculator(tmp_path / name).taps
        features = runner.forward([Span("a", 12)], list(range(5, 17)), taps).features
        runner.drop_pending("a")
        for feature, key in zip(features, wanted[name], strict=True):
            torch.testing.assert_close(feature, seen[key].view(12, -1), atol=1e-4, rtol=1e-4)


def test_what_lacks_its_layers_is_refused_in_a_line(tmp_path: Path) -> None:
    hf, _ = specforge({}, later=False)
    write(tmp_path, {name: value for name, value in hf.items() if name != "eagle_config"}, {})
    with pytest.raises(ValueError, match=r"lacks eagle_config\.eagle_aux_hidden_state_layer_ids.*add it") as error:
        read_speculator(tmp_path)
    assert "\n" not in str(error.value)


def test_without_layers_those_of_the_released_code_are_read(tmp_path: Path) -> None:
    hf, _ = specforge({}, later=False)
    write(tmp_path, {name: value for name, value in hf.items() if name != "eagle_config"}, {})
    assert read_speculator(tmp_path, target_layers=32).taps == (2, 16, 29)


def test_eagle_reads_the_final_hidden_state(tmp_path: Path) -> None:
    write(tmp_path, eagle({})[0], {})
    assert read_speculator(tmp_path).taps == (FINAL,)
