"""One decoder of the Llama family on one group of ranks: token ids and a plan in, hidden states out.

It has never heard of sequences, trees or speculation: where rows stand and what they see is the plan's business. No
state of its own but the weights; keys and values go where the plan puts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.comm.group import SINGLE, Group
from parallel.model.config import DecoderConfig
from parallel.model.layers.attention import AttentionPlan, attend
from parallel.model.layers.embedding import VocabTable
from parallel.model.layers.linear import ColumnLinear, Part, RowLinear, Shard, even_rows
from parallel.model.layers.norm import RMSNorm
from parallel.model.layers.rope import Rope, rotate
from parallel.model.layers.weight import Layer


class PassPlan(Protocol):
    """What a forward needs to know of its rows."""

    positions: Tensor  # [T]
    attention: AttentionPlan
    fuzzy: bool


class Attention(Layer):
    def __init__(self, config: DecoderConfig, layer: int, group: Group, **factory_kwargs: object) -> None:
        self.layer = layer
        self.head_dim = config.head_dim
        self.num_heads = config.num_heads // group.size
        self.num_kv_heads = config.local_kv_heads(group.size)
        self.windowed = layer in config.windowed
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        first = group.rank * config.num_kv_heads // group.size * config.head_dim
        kv_rows = slice(first, first + self.num_kv_heads * config.head_dim)
        parts = [
            Part("q_proj", queries, even_rows(queries, group)),
            Part("k_proj", keys, kv_rows),
            Part("v_proj", keys, kv_rows),
        ]
        self.qkv = ColumnLinear(config.hidden_size, parts, bias=config.qkv_bias, **factory_kwargs)
        self.o = RowLinear("o_proj", queries, config.hidden_size, group, bias=config.o_bias, **factory_kwargs)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps, **factory_kwargs) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps, **factory_kwargs) if config.qk_norm else None

    def __call__(self, x: Tensor, rope: tuple[Tensor, Tensor], plan: AttentionPlan) -> Tensor:
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        turning, v = heads.split_with_sizes((self.num_heads + self.num_kv_heads, self.num_kv_heads), 1)
        if self.q_norm is not None:
            q, k = turning.split_with_sizes((self.num_heads, self.num_kv_heads), 1)
            turning = torch.cat((self.q_norm(q), self.k_norm(k)), 1)
        q, k = rotate(turning, rope).split_with_sizes((self.num_heads, self.num_kv_heads), 1)
        return self.o(attend(q, k, v, self.layer, plan, windowed=self.windowed))

    def shards(self, prefix: str) -> Iterator[Shard]:
        yield from self.qkv.shards(prefix)
        yield from self.o.shards(prefix)
        if self.q_norm is not None:
            yield from self.q_norm.shards(f"{prefix}.q_norm")
            yield from self.k_norm.shards(f"{prefix}.k_norm")


class MLP(Layer):
    def __init__(self, config: DecoderConfig, group: Group, **factory_kwargs: object) -> None:
        rows = even_rows(config.intermediate_size, group)
        parts = [Part(name, config.intermediate_size, rows) for name in ("gate_proj", "up_proj")]
        self.gate_up = ColumnLinear(config.hidden_size, parts, bias=config.mlp_bias, **factory_kwargs)
        self.down = RowLinear(
            "down_proj", config.intermediate_size, config.hidden_size, group, bias=config.mlp_bias, **factory_kwargs
        )

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate).mul_(up))

    def shards(self, prefix: str) -> Iterator[Shard]:
        yield from self.gate_up.shards(prefix)
        yield from self.down.shards(prefix)


class DecoderLayer(Layer):
    def __init__(self, config: DecoderConfig, layer: int, group: Group, **factory_kwargs: object) -> None:
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps, **factory_kwargs)
        self.attention = Attention(config, layer, group, **factory_kwargs)
        self.post_norm = RMSNorm(config.hidden_size, config.norm_eps, **factory_kwargs)
        self.mlp = MLP(config, group, **factory_kwargs)

    def __call__(self, x: Tensor, rope: tuple[Tensor, Tensor], plan: AttentionPlan) -> Tensor:
        x = x + self.attention(self.input_norm(x), rope, plan)
        return x + self.mlp(self.post_norm(x))

    def shards(self, prefix: str) -> Iterator[Shard]:
        yield from self.input_norm.shards(f"{prefix}.input_layernorm")
        yield from self.attention.shards(f"{prefix}.self_attn")
        yield from self.post_norm.shards(f"{prefix}.post_attention_layernorm")
        yield from self.mlp.shards(f"{prefix}.mlp")


class Decoder(Layer):
    """Weights are allocated uninitialised; `weights.load_weights` fills them."""

    def __init__(
        self,
        config: DecoderConfig,
        group: Group = SINGLE,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        config.check_ranks(group.size)
        self._allocate_ends(config, group, group, device, dtype)
        self.layers = [DecoderLayer(config, i, group, dtype=dtype, device=device) for i in range(config.num_layers)]

    def _allocate_ends(
        self,
        config: DecoderConfig,
        group: Group,
        embedding_group: Group,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        """All but the layers: the head is sharded over `group`, the embedding over `embedding_group`."""
        self.config = config
        self.group = group
        self.device = torch.device(device)
        self.dtype = dtype
        factory_kwargs = {"dtype": dtype, "device": device}
        table, name = (config.vocab_size, config.hidden_size), "model.embed_tokens.weight"
        self.embedding = VocabTable(name, *table, embedding_group, **factory_kwargs)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, **factory_kwargs)
        if config.tied and embedding_group.size == group.size:
            self.lm_head = self.embedding
        else:
            self.lm_head = VocabTable(name if config.tied else "lm_head.weight", *table, group, **factory_kwargs)
        self.rope = Rope(config.rope, config.head_dim, dtype, device)

    @property
    def attention_ranks(self) -> int:
        """Over how many ranks the heads of a layer are split."""
        return self.group.size

    def forward(self, token_ids: Tensor, plan: PassPlan, taps: Sequence[int] = ()) -> tuple[Tensor, tuple[Tensor, ...]]:
        """token_ids [T] -> final hidden states [T, H] and, for every tap i, the residual stream [T, H] behind i layers.

        Tap 0 is the embedding; tap `num_layers` is the stream before the final norm.
        """
        plan.attention.prepare()
        rope = self.rope(plan.positions)
        hidden = self.embedding.embed(token_ids)
        tapped = {0: hidden} if 0 in taps else {}
        for i, layer in enumerate(self.layers, 1):
            hidden = layer(hidden, rope, plan.attention)
            if i in taps:
                tapped[i] = hidden
        return self.norm(hidden), tuple(tapped[tap] for tap in taps)

    def head(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> logits [N, vocab], on every rank."""
        return self.lm_head.logits(hidden)

    def shards(self) -> Iterator[Shard]:
        """Every checkpoint tensor this rank needs and where its part goes."""
        yield from self.embedding.shards()
        num_real = self.config.num_layers - self.config.stretch
        for i, layer in enumerate(self.layers):
            yield from layer.shards(f"model.layers.{min(i, num_real - 1)}")
        yield from self.norm.shards("model.norm")
        if self.lm_head is not self.embedding:
            yield from self.lm_head.shards()

    def pack(self) -> None:
        """Once the weights are there: put those that are multiplied by into the layouts that suit the device."""
        for part in self.walk():
            if isinstance(part, ColumnLinear | RowLinear):
                part.weight.pack()
        self.lm_head.weight.pack(keep_plain=self.lm_head is self.embedding)

    def silence_stretch(self) -> None:
        """Zero what the stretched layers would add to the residual stream."""
        for layer in self.layers[self.config.num_layers - self.config.stretch :]:
            for projection in (layer.attention.o, layer.mlp.down):
                projection.weight.plain.zero_()
                if projection.bias is not None:
                    projection.bias.zero_()
