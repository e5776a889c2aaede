"""The record of GliDe's and LongSpec's layer, and the layouts of its checkpoints: our own, and that of LongSpec's
authors."""

from __future__ import annotations

from dataclasses import dataclass, replace

from parallel.model.checkpoint import Shape, block_tensors
from parallel.model.config import DecoderConfig
from parallel.model.families.fields import HfConfig
from parallel.model.families.registry import read_config
from parallel.speculators.config import TARGET_LAYERS, LayersConfig, beside, kv_tap, method_of
from parallel.speculators.layout import CheckpointLayout, opened_by

LONGSPEC = "longspec"
PUBLISHED_WINDOW = 513
"""Keys of LongSpec's own attention: flash attention with a window of 512 to the left sees the row itself too."""
_FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GlideConfig(LayersConfig):
    """Its layer has heads as the target's."""

    reads_kv = True

    def check_target(self, target: DecoderConfig) -> None:
        super(GlideConfig, self).check_target(target)
        theirs, ours = ((one.num_kv_heads, one.head_dim) for one in (target, self.block))
        if theirs != ours:
            raise ValueError(f"(KV heads, head size) is {ours}, the target's {theirs}; they must be equal")

    @property
    def is_longspec(self) -> bool:
        return self.method == LONGSPEC

    @property
    def kv_layer(self) -> int:
        """The layer of the target whose keys and values it reads."""
        return kv_tap(self.taps[0])

    @property
    def window(self) -> int | None:
        return self.block.window

    @property
    def feature_size(self) -> int:
        return 2 * self.block.num_kv_heads * self.block.head_dim

    def bytes_per_slot(self, ranks: int, item_bytes: int) -> int:
        return 2 * super(GlideConfig, self).bytes_per_slot(ranks, item_bytes)

    def tensor_shapes(self) -> dict[str, Shape]:
        hidden, queries = self.block.hidden_size, self.block.num_heads * self.block.head_dim
        if self.is_longspec:
            shapes = {name: shape for name, shape, _ in block_tensors(self.block)}
            return shapes | {
                "cross_attn.q_proj.weight": (queries, hidden),
                "cross_attn.q_proj.bias": (queries,),
                "cross_attn.o_proj.weight": (hidden, queries),
                "post_self_attention_layernorm.weight": (hidden,),
            }
        shapes: dict[str, Shape] = {
            "cross.q_proj.weight": (queries, hidden),
            "cross.o_proj.weight": (hidden, queries),
            "norm.weight": (hidden,),
        }
        return shapes | {f"layer.{name}": shape for name, shape, _ in block_tensors(self.block)}


def read_longspec(hf: HfConfig) -> GlideConfig:
    """LongSpec as its authors publish it: the keys and values of its second attention are in the file, and unused."""
    family = _FAMILIES.get(model_type := hf.get("model_type", ""))
    if family is None:
        remedy = f"use {', '.join(_FAMILIES)}"
        raise ValueError(f"model_type={model_type!r} of a layer of LongSpec is not supported; {remedy}")
    last = (hf.get(TARGET_LAYERS) or hf["num_hidden_layers"]) - 1
    head_dim = hf["hidden_size"] // hf["num_attention_heads"]
    layer = {"num_hidden_layers": 1, "use_sliding_window": False, "head_dim": head_dim}
    return _longspec(read_config({**hf, "architectures": [family], **layer}), last, PUBLISHED_WINDOW)


def _longspec(block: DecoderConfig, kv_layer: int, window: int) -> GlideConfig:
    names = replace(block.names, mlp_norm="post_cross_attention_layernorm")
    block = replace(block.with_window(window, [0]), qkv_bias=True, o_bias=False, names=names)
    return GlideConfig(method=LONGSPEC, **beside(block), taps=(kv_tap(kv_layer),), block=block)


def read_own(hf: HfConfig) -> GlideConfig:
    """The record of a checkpoint that `job=train job.recipe=glide` or `longspec` made."""
    block = read_config(hf)
    if method_of(hf) == LONGSPEC:
        return _longspec(block, hf["speculator"]["kv_layer"], hf["speculator"]["window"])
    taps = (kv_tap(hf["speculator"]["kv_layer"]),)
    return GlideConfig(method="glide", **beside(block), taps=taps, block=block)


OWN = CheckpointLayout(read_own, opened_by("glide.runner"))
LONGSPEC_LAYOUT = CheckpointLayout(read_longspec, opened_by("glide.runner"))
