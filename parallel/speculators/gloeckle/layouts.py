"""The record of heads that are whole layers beside the target's last one, and the layouts of their checkpoints: our
own, and that of `facebook/multi-token-prediction`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parallel.model.checkpoint import Shape, block_tensors, tensor_headers
from parallel.model.config import CheckpointNames, DecoderConfig
from parallel.model.families.fields import HfConfig
from parallel.model.families.registry import read_config
from parallel.speculators.config import LayersConfig, beside
from parallel.speculators.layout import CheckpointLayout, opened_by

METHOD = "gloeckle"
_OWN_HEADS = "heads"
_PUBLISHED_NAMES = CheckpointNames(
    blocks="extra_heads",
    attention_norm="attention_norm",
    mlp_norm="ffn_norm",
    attention="attention",
    projections=("wq", "wk", "wv"),
    o="wo",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
)
_ANY_LENGTH = 2**20
"""Positions of a published model, which does not say how many it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GloeckleConfig(LayersConfig):
    """Its layers are the heads."""

    interleaved: bool = False
    """The two coordinates of a rotation are neighbours in the checkpoint; here they are the halves of a head."""
    drafts_blocks = True

    @property
    def num_drafted(self) -> int:
        """Draft tokens of a row of text."""
        return self.block.num_layers

    def check_target(self, target: DecoderConfig) -> None:
        super(GloeckleConfig, self).check_target(target)
        num_layers = target.num_layers - target.stretch
        if num_layers and self.taps != (num_layers - 1,):
            raise ValueError(f"stands behind layer {self.taps[0]}, the target's trunk ends with {num_layers - 1}")

    def tensor_shapes(self) -> dict[str, Shape]:
        shapes = [(name, shape) for name, shape, _ in block_tensors(self.block)]
        heads = range(self.num_drafted)
        return {f"{self.block.names.blocks}.{i}.{name}": shape for i in heads for name, shape in shapes}


def read_own(hf: HfConfig) -> GloeckleConfig:
    """The record of a checkpoint that `job=train job.recipe=gloeckle` made."""
    block = read_config(hf)
    block = replace(block, names=replace(block.names, blocks=_OWN_HEADS))
    return GloeckleConfig(method=METHOD, **beside(block), taps=tuple(hf["speculator"]["taps"]), block=block)


def read_published(hf: HfConfig) -> GloeckleConfig:
    """The record of the authors' `params.json`: the trunk, the next token's layer and the further heads of one model,
    of which only the last are read here; the rest is the target's."""
    dim, num_heads, num_extra = hf["dim"], hf["n_heads"], hf["n_future_tokens"] - 1
    if not 0 < num_extra < hf["n_layers"] or dim % num_heads:
        raise ValueError(f"n_future_tokens={num_extra + 1}, n_layers={hf['n_layers']}: has no further heads")
    inner = int(int(8 * dim / 3) * (hf.get("ffn_dim_multiplier") or 1))
    multiple = hf["multiple_of"]
    vocab_size = hf.get("vocab_size") or 0
    if vocab_size <= 0:  # which the authors' code takes from the tokenizer
        vocab_size, _ = tensor_headers(Path(hf["_name_or_path"]))["output.weight"]
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": dim,
        "num_hidden_layers": num_extra,
        "num_attention_heads": num_heads,
        "num_key_value_heads": hf.get("n_kv_heads") or num_heads,
        "intermediate_size": multiple * -(-inner // multiple),
        "max_position_embeddings": _ANY_LENGTH,
        "rms_norm_eps": hf["norm_eps"],
        "rope_theta": hf.get("rope_theta") or 10000.0,
        "hidden_act": "silu",
    }
    block = replace(read_config(fields), names=_PUBLISHED_NAMES)
    taps = (hf["n_layers"] - num_extra - 1,)
    return GloeckleConfig(method=METHOD, **beside(block), taps=taps, block=block, interleaved=True)


OWN = CheckpointLayout(read_own, opened_by("gloeckle.runner"))
PUBLISHED = CheckpointLayout(read_published, opened_by("gloeckle.runner"))
