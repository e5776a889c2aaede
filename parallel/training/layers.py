"""Training of the very layers that serve a module: parameters beside them, and attention over whole texts.

A served layer holds plain tensors that a checkpoint is copied into. In training parameters are copied into them, once a
pass, and PyTorch differentiates through the copies: the pass of training is the arithmetic of the runner over the rows
of all texts, with its attention planned otherwise. Knows no method.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.model.config import RopeScaling
from parallel.model.decoder import ServedLayers
from parallel.model.families.registry import read_config
from parallel.model.layers.attention import AttentionPlan, Heads, PassPlan
from parallel.model.layers.norm import LayerNorm, RMSNorm
from parallel.model.layers.rope import Rotation
from parallel.model.layers.weight import TensorOptions
from parallel.speculators.own_layers import OwnLayers
from parallel.training.checkpoints import write_checkpoint
from parallel.training.interface import Speculator, TargetShape

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values [B, heads, N, head size] -> what the attention gives, of the queries' shape."""


L = TypeVar("L", bound=ServedLayers)
Own = TypeVar("Own", bound=OwnLayers)


class TrainedLayers(Speculator, Generic[Own]):
    """The tensors of a checkpoint as parameters, under its names, beside the `layers` that would be loaded from it."""

    def __init__(self, layers: Own, hf: dict[str, Any], *, besides: Collection[str] = ()) -> None:
        """Matrices are small and random, norms 1, biases 0; `hf` is the config.json. Tensors `besides` are none that
        is trained."""
        super().__init__()
        self.hf = hf
        self.served = layers
        self.taps = layers.config.taps
        use_gradients(layers)
        for name, shape in layers.config.tensor_shapes().items():
            if name in besides:
                continue
            vector = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
            hold(self, name, vector if len(shape) == 1 else 0.02 * torch.randn(shape))

    def loaded(self) -> Own:
        """The layers with the parameters as they are; gradients flow back to these."""
        return load_parameters(self.served, self.get_parameter)

    def saved(self) -> dict[str, Tensor]:
        """The tensors of the checkpoint."""
        return {name: value.detach().cpu().bfloat16().contiguous() for name, value in self.named_parameters()}

    def save(self, folder: Path) -> None:
        write_checkpoint(folder, self.saved(), self.hf)


def use_gradients(layers: ServedLayers) -> None:
    """Compute by what PyTorch differentiates: the kernel of norms has no gradient."""
    for part in layers.walk():
        if isinstance(part, RMSNorm | LayerNorm):
            part.has_kernel = False


def load_parameters(layers: L, parameter: Callable[[str], Tensor]) -> L:
    """The layers with these tensors, by their names in a checkpoint; gradients flow back to them."""
    for part in layers.walk():
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and value.requires_grad:  # of the last pass, whose graph may still be there
                setattr(part, name, torch.empty_like(value))
    for shard in layers.shards():
        place = shard.place()
        assert isinstance(place, Tensor), "what is trained is not stored as codes"
        place.copy_(parameter(shard.name)[shard.index])
    return layers


def hold(module: nn.Module, name: str, value: Tensor) -> None:
    """A parameter of the module under a name with points, in modules of their own."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in dict(module.named_children()):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(leaf, nn.Parameter(value))


@dataclass(frozen=True, slots=True)
class TextAttention(AttentionPlan):
    """Attention of the rows of several texts, text after text; `attends` is that of each layer. No row is kept."""

    num_texts: int
    attends: Sequence[Attend] = ()

    def attend(self, heads: Heads, projected: Tensor, rotation: Rotation | None) -> Tensor:
        return self.by_row(self.attends[heads.layer](*self.split(heads, projected, rotation)))

    def written(self, layer: int) -> tuple[Tensor, Tensor]:
        raise AssertionError(f"a pass of training keeps no rows, of layer {layer} or another")

    def split(self, heads: Heads, projected: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as of `attend`, [B, heads, N, head size] each, with a key for every query's head."""
        parts = heads.split(projected, rotation)
        q, k, v = (part.to(parts[2].dtype).unflatten(0, (self.num_texts, -1)).transpose(1, 2) for part in parts)
        group = heads.num_heads // heads.num_kv_heads
        return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

    def by_row(self, attended: Tensor) -> Tensor:
        """[B, heads, N, head size] -> [B * N, heads * head size]."""
        return attended.transpose(1, 2).flatten(0, 1).flatten(1)


def text_pass(positions: Tensor, num_texts: int, attends: Sequence[Attend]) -> PassPlan:
    """A pass over rows at these `positions`, int64 [N], of each of so many texts."""
    everywhere = positions.repeat(num_texts)
    return PassPlan(len(everywhere), everywhere, None, TextAttention(num_texts, attends))


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every row sees those up to itself."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@dataclass(frozen=True)
class AnchoredAttention:
    """The attention in one layer of `size` rows behind each of n anchors: over the text that bool `sees` [B, n, T]
    names, with keys and values [B, KV heads, T, head size], and over each other, if `is_causal` up to themselves."""

    size: int
    sees: Tensor
    keys: Tensor
    values: Tensor
    is_causal: bool = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length, group = self.sees.shape[-1], q.shape[1] // self.keys.shape[1]
        keys, values = (rows.to(v.dtype).repeat_interleave(group, 1) for rows in (self.keys, self.values))
        q, k, v = (rows.unflatten(2, (-1, self.size)) for rows in (q, k, v))  # B, heads, n, size, head size
        of_text = (q.flatten(2, 3) @ keys.transpose(-1, -2)).unflatten(2, q.shape[2:4])
        own = q @ k.transpose(-1, -2)
        later = torch.ones_like(own[0, 0, 0], dtype=torch.bool).triu(1) & self.is_causal
        of_text = of_text.masked_fill(~self.sees[:, None, :, None], -torch.inf)
        scores = torch.cat((of_text, own.masked_fill(later, -torch.inf)), -1).float() * q.shape[-1] ** -0.5
        shares = scores.softmax(-1).to(v.dtype)
        return shares[..., :length].flatten(2, 3) @ values + (shares[..., length:] @ v).flatten(2, 3)


def options_for(target: TargetShape) -> TensorOptions:
    """Where the layers of a module for this target are trained."""
    return TensorOptions(dtype=torch.float32, device=target.embedding.device)


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
