"""Published layouts of draft layers: the fields of their config.json and the names of their tensors.

Which taps a draft layer reads: SpecForge and SGLang name layers by their outputs, so tap = id + 1; speculators and vLLM
by their inputs, so tap = id, and its number of layers is the stream before the final norm. Loads no PyTorch.
"""

from __future__ import annotations

from dataclasses import replace

from parallel.model.config import DecoderConfig
from parallel.model.families.fields import HfConfig
from parallel.model.families.registry import read_config
from parallel.speculators.config import FINAL, TARGET_LAYERS
from parallel.speculators.eagle.config import LISTED, DraftLayerConfig, DraftLayerNames, draft_layer, read_own
from parallel.speculators.layout import CheckpointLayout, opened_by, stored_tensors

_ARCHITECTURE_OF = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def read_eagle3(hf: HfConfig) -> DraftLayerConfig:
    """EAGLE-3 and 3.1 as SpecForge, SGLang and the authors write them: one layer, called `midlayer` or in a list."""
    stored = stored_tensors(hf)
    head_rows = hf.get("draft_vocab_size") or stored.get("lm_head.weight", (hf["vocab_size"],))[0]
    names = LISTED if "layers.0.hidden_norm.weight" in stored else DraftLayerNames()
    return _eagle3({**hf, "draft_vocab_size": head_rows}, _llama_block(hf), _aux_taps(hf), names)


def _aux_taps(hf: HfConfig) -> tuple[int, ...]:
    key, named = "eagle_aux_hidden_state_layer_ids", "eagle_config.eagle_aux_hidden_state_layer_ids"
    ids = (hf.get("eagle_config") or {}).get(key)
    taps = None if ids is None else tuple(i + 1 for i in ids)
    return _taps(hf, taps, f"{named}, the layers that it reads", "[1, L // 2 - 1, L - 4]")


def _taps(hf: HfConfig, named: tuple[int, ...] | None, lacks: str, usual: str) -> tuple[int, ...]:
    """Those that the config.json names, else those of the released code; ValueError where the target is not known."""
    if named is None and (num_layers := hf.get(TARGET_LAYERS, 0)):
        named = 2, num_layers // 2, num_layers - 3
    if not named:
        raise ValueError(
            f"config.json lacks {lacks}; add it: for a target of L layers they are {usual} unless it was trained on "
            "others"
        )
    return named


def read_vllm_eagle3(hf: HfConfig) -> DraftLayerConfig:
    """EAGLE-3 as vLLM's speculators library writes it: layers in a list, their fields in a record of their own."""
    config = _eagle3(hf, _block(hf["transformer_layer_config"], hf), _vllm_taps(hf), LISTED)
    return replace(config, own_embedding=bool(hf.get("embed_requires_grad", False)))


def _vllm_taps(hf: HfConfig) -> tuple[int, ...]:
    key = "eagle_aux_hidden_state_layer_ids"
    ids = hf.get(key)
    taps = None if ids is None else tuple(ids)
    return _taps(hf, taps, f"{key}, the layers whose inputs it reads", "[2, L // 2, L - 3]")


def read_p_eagle(hf: HfConfig) -> DraftLayerConfig:
    """P-EAGLE as SpecForge and vLLM's speculators library write it. Neither notes the depths that it was trained for,
    unless as the tokens that it proposes; both train 8 by default. SpecForge keeps the target's embedding and does not
    note the mask token."""
    if not isinstance(hf.get("mask_token_id"), int):
        raise ValueError("config.json lacks mask_token_id, the token of masked rows; add the one it was trained with")
    if "speculators_model_type" in hf:
        config = replace(read_vllm_eagle3(hf), own_embedding=bool(hf.get("embed_requires_grad", True)))
    else:
        config = _eagle3(hf, _llama_block(hf), _aux_taps(hf), LISTED)
    return replace(config, method="p_eagle", num_depths=_proposed(hf) or 8, mask_token_id=hf["mask_token_id"])


def _proposed(hf: HfConfig) -> int:
    """Tokens that vLLM's speculators library says it proposes, 0 if it does not say."""
    proposals = (hf.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return proposals[0].get("speculative_tokens", 0)


def read_eagle(hf: HfConfig) -> DraftLayerConfig:
    """EAGLE-1 and EAGLE-2, whose checkpoints do not differ: `fc` over the pair, one layer without an input norm."""
    names = replace(LISTED, join="fc")
    return draft_layer("eagle", _llama_block(hf), (FINAL,), join_bias=bool(hf.get("bias", True)), names=names)


def read_vllm_mtp(hf: HfConfig) -> DraftLayerConfig:
    """A module for multi-token prediction as vLLM's speculators library writes it."""
    block = replace(_block(hf["transformer_layer_config"], hf), num_layers=1)
    return draft_layer("mtp", block, (FINAL,), names=_mtp_names("mtp_layers"))


def _mtp_names(modules: str) -> DraftLayerNames:
    """Those of the first of these modules."""
    return DraftLayerNames(
        join=f"{modules}.0.input_proj",
        embedding_norm=f"{modules}.0.token_layernorm",
        hidden_norm=f"{modules}.0.hidden_layernorm",
        layers=f"{modules}.{{i}}",
        final_norm=f"{modules}.0.final_layernorm",
    )


def read_native_mtp(hf: HfConfig) -> DraftLayerConfig:
    """The first module within the checkpoint of MiMo-7B, a Qwen2 with multi-token prediction: the hidden state comes
    first in the projected pair."""
    block = replace(_block({**hf, "model_type": "qwen2"}, hf), num_layers=1)
    return draft_layer("mtp", block, (FINAL,), hidden_first=True, names=_mtp_names("model.mtp_layers"))


def _eagle3(hf: HfConfig, block: DecoderConfig, taps: tuple[int, ...], names: DraftLayerNames) -> DraftLayerConfig:
    normed = bool(hf.get("norm_output", False))
    return draft_layer(
        "eagle3.1" if normed and hf.get("fc_norm") else "eagle3",
        block,
        taps,
        target_hidden=hf.get("target_hidden_size") or block.hidden_size,
        head_rows=hf.get("draft_vocab_size") or block.vocab_size,
        norms_taps=bool(hf.get("fc_norm", False)),
        norms_features=bool(hf.get("norm_before_fc", False)),
        norms_residual=bool(hf.get("norm_before_residual", False)),
        feeds_normed=normed,
        names=names,
    )


def _llama_block(hf: HfConfig) -> DecoderConfig:
    """The layers where they are Llama's whatever `model_type` says, as in the code of EAGLE's authors and SpecForge;
    which projections have biases the tensors say, or `qkv_bias`, which they write for Qwen 2."""
    block = _block({**hf, "model_type": "llama", "attention_bias": False}, hf)
    stored = stored_tensors(hf)
    has_bias = {kind: any(name.endswith(f"self_attn.{kind}_proj.bias") for name in stored) for kind in "qo"}
    return replace(block, qkv_bias=has_bias["q"] or bool(hf.get("qkv_bias")), o_bias=has_bias["o"])


def _block(fields: HfConfig, hf: HfConfig) -> DecoderConfig:
    """The layers as a decoder of the family that they are made of."""
    model_type = fields.get("model_type", "llama")
    if model_type not in _ARCHITECTURE_OF:
        raise ValueError(
            f"model_type={model_type!r} of draft layers is not supported; use {', '.join(_ARCHITECTURE_OF)}"
        )
    if hf.get("quantization_config"):
        raise ValueError("quantization_config: quantized checkpoints are not supported; use unquantized weights")
    return read_config({**fields, "architectures": [_ARCHITECTURE_OF[model_type]]})


_OPENED = opened_by("eagle.runner")
OWN = CheckpointLayout(read_own, _OPENED)
EAGLE = CheckpointLayout(read_eagle, _OPENED)
EAGLE3 = CheckpointLayout(read_eagle3, _OPENED)
VLLM_EAGLE3 = CheckpointLayout(read_vllm_eagle3, _OPENED)
P_EAGLE = CheckpointLayout(read_p_eagle, _OPENED)
VLLM_MTP = CheckpointLayout(read_vllm_mtp, _OPENED)
NATIVE_MTP = CheckpointLayout(read_native_mtp, _OPENED)
