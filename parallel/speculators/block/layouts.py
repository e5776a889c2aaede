"""The layouts of block drafters' checkpoints: our own, and those that z-lab, DeepSpec and SpecForge publish."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parallel.model.config import CheckpointNames
from parallel.model.families.fields import HfConfig, architecture_of, refuse, require
from parallel.model.families.registry import read_config
from parallel.speculators.block.config import BlockConfig
from parallel.speculators.config import beside, record_of
from parallel.speculators.layout import CheckpointLayout, opened_by

_NAMES = CheckpointNames(blocks="layers", final_norm="norm")


def read_own(hf: HfConfig) -> BlockConfig:
    """Our own layout: the layers' fields are those of Qwen 3, all others are in `speculator`."""
    return _read(hf, **hf["speculator"])


def read_dflash(hf: HfConfig) -> BlockConfig:
    """DFlash and DFlash 2 as z-lab publishes them."""
    given, fields = _dflash_fields(hf)
    fields |= {
        "method": "dflash",
        "embedding_scale": float(given.get("input_embedding_scale", 1.0)),
        "logit_scale": float(given.get("output_multiplier", 1.0)),
        "logit_softcap": given.get("final_logit_softcapping") or None,
    }
    if architecture_of(hf) == "DFlash2DraftModel":
        require(given, "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        fields |= {"method": "dflash2", "conv_taps": given["conv_kernel_size"], "conv_group": given["conv_group_size"]}
        fields |= {"corrector": "selector", "corrector_rank": given["selector_rank"], "top_k": given["selector_top_k"]}
    return _read(hf, **fields)


def read_dspark(hf: HfConfig) -> BlockConfig:
    """DSpark as DeepSpec saves it, whose copies of the target's tables are not read and whose layer -1 is the
    embedding, and as SpecForge does, whose training gives the anchor's row the next token, too."""
    given, fields = _dflash_fields(hf)
    require(given, "markov_rank")
    kind = given.get("markov_head_type", "vanilla") if given["markov_rank"] else "none"
    refuse({"markov_head_type": kind}, "markov_head_type", "none", "vanilla", "gated", "rnn")
    has_confidence = bool(given.get("enable_confidence_head", given.get("confidence_head_alpha")))
    if has_confidence and bool(given.get("confidence_head_with_markov")) != (kind != "none"):
        raise ValueError("confidence_head_with_markov=false is not supported beside a Markov head")
    return _read(
        hf,
        **fields,
        method="dspark",
        anchor_first=True,
        corrector="markov" if kind == "vanilla" else kind,
        corrector_rank=given["markov_rank"],
        confidence=has_confidence,
    )


def read_domino(hf: HfConfig) -> BlockConfig:
    """Domino as SpecForge saves it: with `shift_label` the anchor's row drafts the next token."""
    given, fields = _dflash_fields(hf)
    require(given, "emb_dim", "gru_hidden_dim", "pure_draft_prefix_len")
    if given["pure_draft_prefix_len"] != 1:
        raise ValueError(f"pure_draft_prefix_len={given['pure_draft_prefix_len']} is not supported; 1 is")
    return _read(
        hf,
        **fields,
        method="domino",
        anchor_first=bool(given.get("shift_label")),
        corrector="gru",
        corrector_rank=given["emb_dim"],
        state_size=given["gru_hidden_dim"],
    )


def _dflash_fields(hf: HfConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of config.json, those of `dflash_config` among them, and what all read of them: layer i of the target
    is tap i + 1."""
    given: dict[str, Any] = dict(hf) | dict(hf.get("dflash_config") or {})
    if "sliding_attention" in (hf.get("layer_types") or ()) and hf.get("is_causal") is not False:
        raise ValueError("is_causal: sliding layers whose blocks are causal are not supported; is_causal=false is")
    refuse(hf, "is_causal")
    require(given, "mask_token_id", "block_size")
    if not given.get("target_layer_ids"):
        raise ValueError("config.json lacks target_layer_ids, the layers whose outputs it reads")
    taps = [layer + 1 for layer in given["target_layer_ids"]]
    names = {"taps": taps, "block_size": given["block_size"], "mask_token_id": given["mask_token_id"]}
    return given, names | {"embedding_scale": 1.0}


def _read(hf: HfConfig, /, **fields: Any) -> BlockConfig:
    block = read_config({**hf, "architectures": ["Qwen3ForCausalLM"]})
    return record_of(BlockConfig, fields | beside(block) | {"block": replace(block, names=_NAMES)})


OWN = CheckpointLayout(read_own, opened_by("block.runner"))
DFLASH = CheckpointLayout(read_dflash, opened_by("block.runner"))
DSPARK = CheckpointLayout(read_dspark, opened_by("block.runner"))
DOMINO = CheckpointLayout(read_domino, opened_by("block.runner"))
