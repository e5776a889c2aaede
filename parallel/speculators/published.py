"""The layouts in which speculators are published: by which fields of its config.json a checkpoint is recognised, and
the module that reads it, which is loaded for it alone.

Recognises and reads nothing else. Loads no PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from parallel.model.families.fields import HfConfig, architecture_of
from parallel.speculators.layout import stored_tensors

_EAGLE3 = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaEagle3ForCausalLM"}
_EAGLE = {"EagleLlamaForCausalLM", "LlamaForCausalLM"}


def _named(*architectures: str) -> Callable[[HfConfig], bool]:
    """Whether the first architecture is one of these."""
    return lambda hf: architecture_of(hf) in architectures


def _has(key: str) -> Callable[[HfConfig], bool]:
    return lambda hf: key in hf


def _of_speculators(kind: str) -> Callable[[HfConfig], bool]:
    """Whether vLLM's speculators library wrote it for this kind of module."""
    return lambda hf: hf.get("speculators_model_type") == kind


def _is_dflash(hf: HfConfig) -> bool:
    return architecture_of(hf) in ("DFlashDraftModel", "DFlash2DraftModel") and "dflash_config" in hf


def _is_longspec(hf: HfConfig) -> bool:
    """The release saves the layer alone, with the config.json of its target."""
    return any(str(name).endswith("GlideDecoderLayer") for name in _architectures(hf))


def _is_p_eagle(hf: HfConfig) -> bool:
    return "PEagleDraftModel" in _architectures(hf) or hf.get("speculators_model_type") == "peagle"


def _is_native_mtp(hf: HfConfig) -> bool:
    return "MiMoForCausalLM" in _architectures(hf) and hf.get("num_nextn_predict_layers", 0) > 0


def _is_eagle3(hf: HfConfig) -> bool:
    """Its authors' config.json is that of a Llama of one layer, as EAGLE-1's is, with `draft_vocab_size` in most; of
    the two EAGLE-3's layer alone has a norm for what it reads of the target."""
    if not _EAGLE3.isdisjoint(_architectures(hf)):
        return True
    return _is_llama_layer(hf) and (
        "draft_vocab_size" in hf or any(name.endswith("hidden_norm.weight") for name in stored_tensors(hf))
    )


def _is_eagle(hf: HfConfig) -> bool:
    """Its authors' config.json is that of a Llama of one layer, which a whole model may be too."""
    return _is_llama_layer(hf) and not _is_eagle3(hf) and "model.norm.weight" not in stored_tensors(hf)


def _is_llama_layer(hf: HfConfig) -> bool:
    marked = {"speculator", "speculators_model_type", "medusa_num_heads"} & set(hf)
    return not marked and not _EAGLE.isdisjoint(_architectures(hf)) and hf.get("num_hidden_layers") == 1


def _architectures(hf: HfConfig) -> Collection[str]:
    return hf.get("architectures") or ()


PUBLISHED: dict[str, tuple[Callable[[HfConfig], bool], tuple[str, str]]] = {
    "LongSpec": (_is_longspec, ("glide.layouts", "LONGSPEC_LAYOUT")),
    "multi-token prediction of Gloeckle et al.": (_has("n_future_tokens"), ("gloeckle.layouts", "PUBLISHED")),
    "DFlash": (_is_dflash, ("block.layouts", "DFLASH")),
    "DSpark": (_named("Qwen3DSparkModel", "DSparkDraftModel"), ("block.layouts", "DSPARK")),
    "Domino": (_named("DominoDraftModel"), ("block.layouts", "DOMINO")),
    "EAGLE-3": (_is_eagle3, ("eagle.layouts", "EAGLE3")),
    "P-EAGLE of SpecForge and speculators": (_is_p_eagle, ("eagle.layouts", "P_EAGLE")),
    "EAGLE-3 of speculators": (_of_speculators("eagle3"), ("eagle.layouts", "VLLM_EAGLE3")),
    "MTP of speculators": (_of_speculators("mtp"), ("eagle.layouts", "VLLM_MTP")),
    "MTP of MiMo": (_is_native_mtp, ("eagle.layouts", "NATIVE_MTP")),
    "EAGLE-1": (_is_eagle, ("eagle.layouts", "EAGLE")),
    "Medusa": (_has("medusa_num_heads"), ("heads.layouts", "MEDUSA")),
    "MedusaModel": (lambda hf: hf.get("architectures") == ["MedusaModel"], ("heads.layouts", "VLLM_MEDUSA")),
    "ReDrafter": (lambda hf: hf.get("model_type") == "recurrent_drafting_drafter", ("heads.layouts", "REDRAFTER")),
    "MLP speculator": (
        _named("MLPSpeculatorPreTrainedModel", "ArcticMLPSpeculatorPreTrainedModel"),
        ("heads.layouts", "MLP_SPECULATOR"),
    ),
    "LSTM speculator": (
        _named("ArcticLSTMSpeculatorPreTrainedModel", "MLPVariantSpeculatorPreTrainedModel"),
        ("heads.layouts", "LSTM_SPECULATOR"),
    ),
}
"""Name -> whether a config.json is of the layout, the module below `parallel.speculators` that has it, and its name
there; the first that recognises a config.json reads it."""
