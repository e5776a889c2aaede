"""Decoder layers in training, and the config.json of layers as Llama's beside a target. Knows no method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from parallel.model.config import DecoderConfig, RopeScaling
from parallel.model.families.registry import read_config
from parallel.model.layers.rope import Rotation, rotate
from parallel.training.interface import TargetShape

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values [B, heads, N, head size] -> what the attention gives, of the queries' shape."""


class LlamaLayer(nn.Module):
    """A layer after the first."""

    def __init__(self, block: DecoderConfig, inputs: int = 0, *, norms_input: bool = True) -> None:
        super().__init__()
        hidden = block.hidden_size
        self.input_layernorm = nn.RMSNorm(hidden, block.norm_eps) if norms_input else None
        self.self_attn = LlamaAttention(block, inputs or hidden)
        self.post_attention_layernorm = nn.RMSNorm(hidden, block.norm_eps)
        self.mlp = GatedMLP(hidden, block.intermediate_size)

    def forward(self, hidden: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        return self.after(hidden, hidden, rotation, attend)

    def after(self, stream: Tensor, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """The stream after the layer, whose attention reads `x`."""
        x = x if self.input_layernorm is None else self.input_layernorm(x)
        stream = stream + self.self_attn(x, rotation, attend)
        return stream + self.mlp(self.post_attention_layernorm(stream))


class LlamaAttention(nn.Module):
    def __init__(self, block: DecoderConfig, inputs: int) -> None:
        super().__init__()
        self.head_dim = block.head_dim
        self.group = block.num_heads // block.num_kv_heads
        queries, keys = block.num_heads * block.head_dim, block.num_kv_heads * block.head_dim
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(inputs, outputs, bias=False) for outputs in (queries, keys, keys)
        )
        self.o_proj = nn.Linear(queries, block.hidden_size, bias=False)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        return self.o_proj(attend(*self.heads(x, rotation)).transpose(1, 2).flatten(2))

    def heads(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [B, query heads, N, head size] each."""
        q, k, v = (self._heads(linear(x)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, rotation).transpose(1, 2), rotate(k, rotation).transpose(1, 2)
        k, v = k.repeat_interleave(self.group, 1), v.transpose(1, 2).repeat_interleave(self.group, 1)
        return q.to(v.dtype), k.to(v.dtype), v

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim)


class GatedMLP(nn.Module):
    """The MLP of a Llama layer, without biases."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def llama_fields(target: TargetShape, num_layers: int, intermediate_size: int) -> dict[str, Any]:
    """A config.json of layers as Llama's of the target's heads, with an MLP as wide if `intermediate_size` is 0; rotary
    positions as the target's, or Llama's first ones where it learns its positions."""
    theirs = read_config(target.config.to_dict())
    ends = {name: getattr(target.config, name, None) for name in ("bos_token_id", "eos_token_id")}
    return {name: token for name, token in ends.items() if token is not None} | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": theirs.vocab_size,
        "hidden_size": theirs.hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": theirs.num_heads,
        "num_key_value_heads": theirs.num_kv_heads,
        "head_dim": theirs.head_dim,
        "intermediate_size": intermediate_size or theirs.intermediate_size,
        "max_position_embeddings": theirs.max_positions,
        "rms_norm_eps": theirs.norm_eps,
        "rope_parameters": rope_fields(theirs.rope or RopeScaling()),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


def rope_fields(rope: RopeScaling) -> dict[str, Any]:
    """`rope_parameters` of a config.json: what is named here is what differs from a plain rotation."""
    plain = asdict(RopeScaling())
    always = ("rope_type", "rope_theta")
    return {name: value for name, value in asdict(rope).items() if name in always or value != plain[name]}
