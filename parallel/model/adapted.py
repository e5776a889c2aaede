"""A decoder with trainable linear adapters: what the layers of `decoder.py`, which are for inference, cannot do.

Every matrix W of a block becomes (I + A) W, with A = up @ down of low rank (R-Adapter, arXiv 2408.05749). A starts at
zero, W never changes, and the product folds into one matrix of W's shape, so that the engine serves it at no cost.
Plain PyTorch over short windows without KV, in float32. Knows no data and no optimizer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.comm.group import SINGLE
from parallel.model.block import MLP, Block
from parallel.model.checkpoint import resolve_checkpoint, tensor_shapes
from parallel.model.config import DecoderConfig
from parallel.model.decoder import Decoder
from parallel.model.layers.linear import ColumnLinear, RowLinear
from parallel.model.layers.norm import Norm, RMSNorm
from parallel.model.layers.rope import Rotation, rotate
from parallel.model.layers.weight import Weight
from parallel.model.weights import load_shards

Adapter = tuple[Tensor, Tensor]
"""up [outputs, rank] and down [rank, outputs]."""


def block_weights(decoder: Decoder) -> list[Weight]:
    """The matrices that adapters change, in a fixed order: four of every block."""
    return [linear.weight for block in decoder.layers for linear in linears(block)]


def linears(block: Block) -> tuple[ColumnLinear, RowLinear, ColumnLinear, RowLinear]:
    assert block.attention is not None
    assert isinstance(block.mlp, MLP)
    return block.attention.qkv, block.attention.o, block.mlp.gate_up, block.mlp.down


class AdaptedModel(ABC):
    """Frozen `weights` with room for adapters of `rank`."""

    def __init__(self, weights: list[Tensor], rank: int) -> None:
        self.weights = weights
        self.rank = rank

    @abstractmethod
    def logits(
        self,
        token_ids: Tensor,
        num_rows: int,
        adapters: Sequence[Adapter] | None = None,
        scales: Sequence[float] = (),
        features: Tensor | None = None,
    ) -> Tensor:
        """Logits [num_rows, V] of the last rows of the windows token_ids [B, T], window after window: B * `num_rows`
        rows. `scales`: factors of the adapters, 1 if left out. `features` [B, T, F] are the target's one place before
        each token, for a model that reads them."""

    def columns(self, token_ids: Tensor) -> Tensor:
        """Columns of the logits for these tokens; the one behind the last for tokens that the model lacks."""
        return token_ids

    def zero_adapters(self, seed: int = 0) -> list[Adapter]:
        """Adapters that change nothing: `up` is zero, `down` random."""
        source, device = torch.Generator().manual_seed(seed), self.weights[0].device
        return [
            (
                torch.zeros(len(weight), self.rank, device=device),
                (torch.randn(self.rank, len(weight), generator=source) / len(weight) ** 0.5).to(device),
            )
            for weight in self.weights
        ]

    @torch.no_grad()
    def folded(self, adapters: Sequence[Adapter], strength: float) -> list[Tensor]:
        """(I + strength * A) W for every matrix."""
        return [
            torch.addmm(weight, up, down @ weight, alpha=strength)
            for weight, (up, down) in zip(self.weights, adapters, strict=True)
        ]

    def pairs(self, adapters: Sequence[Adapter] | None, scales: Sequence[float]) -> list[tuple[Adapter, float] | None]:
        """The adapter of every matrix with its factor."""
        if adapters is None:
            return [None] * len(self.weights)
        return list(zip(adapters, scales or [1.0] * len(self.weights), strict=True))


class AdaptedDecoder(AdaptedModel):
    """A checkpoint of a whole model."""

    def __init__(self, config: DecoderConfig, path: str | Path, device: torch.device | str, rank: int) -> None:
        config.check_adaptable()
        self.config = config
        self._frozen = Decoder(config, SINGLE, device, torch.float32)  # never packed: the matrices stay readable
        load_shards(self._frozen.shards(), tensor_shapes(config), resolve_checkpoint(str(path)))
        super().__init__([weight.plain for weight in block_weights(self._frozen)], rank)

    def logits(
        self,
        token_ids: Tensor,
        num_rows: int,
        adapters: Sequence[Adapter] | None = None,
        scales: Sequence[float] = (),
        features: Tensor | None = None,
    ) -> Tensor:
        assert features is None, "a draft model reads tokens alone"
        decoder, pairs = self._frozen, self.pairs(adapters, scales)
        assert decoder.rope is not None
        rope = decoder.rope(torch.arange(token_ids.shape[1], device=token_ids.device))
        hidden = F.embedding(token_ids, decoder.embedding.weight.plain)
        for i, block in enumerate(decoder.layers):
            hidden = run_block(
                block, self.config, normed(hidden, block.norms[0]), hidden, pairs[4 * i : 4 * i + 4], rope
            )
        assert decoder.norm is not None
        last = normed(hidden[:, -num_rows:], decoder.norm).flatten(0, 1)
        return F.linear(last, decoder.lm_head.weight.plain)[:, : self.config.vocab_size]


def run_block(
    block: Block,
    config: DecoderConfig,
    x: Tensor,
    stream: Tensor,
    pairs: Sequence[tuple[Adapter, float] | None],
    rope: Rotation,
) -> Tensor:
    """The residual stream [B, T, H] after a block whose attention reads `x`."""
    qkv, o, gate_up, down = zip(linears(block), pairs, strict=True)
    stream = stream + _adapted(_attend(block, config, _adapted(x, *qkv), rope), *o)
    gate, up = _adapted(normed(stream, block.norms[1]), *gate_up).chunk(2, -1)
    return stream + _adapted(F.silu(gate) * up, *down)


def _attend(block: Block, config: DecoderConfig, qkv: Tensor, rope: Rotation) -> Tensor:
    """qkv [B, T, (heads + 2 KV heads) * head_dim] -> [B, T, heads * head_dim], causal."""
    attention, num_kv = block.attention, config.num_kv_heads
    assert attention is not None
    heads = qkv.unflatten(-1, (config.num_heads + 2 * num_kv, config.head_dim))
    queries, keys, values = heads.split((config.num_heads, num_kv, num_kv), 2)
    if attention.q_norm is not None and attention.k_norm is not None:
        queries, keys = normed(queries, attention.q_norm), normed(keys, attention.k_norm)
    queries, keys = rotate(queries, rope), rotate(keys, rope)
    q, k, v = (part.transpose(1, 2) for part in (queries, keys, values))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return attended.transpose(1, 2).flatten(2)


def _adapted(x: Tensor, linear: ColumnLinear | RowLinear, pair: tuple[Adapter, float] | None) -> Tensor:
    y = F.linear(x, linear.weight.plain)
    if pair is not None and pair[1]:
        (up, down), scale = pair
        y = y + scale * F.linear(F.linear(y, down), up)
    return y if linear.bias is None else y + linear.bias


def normed(x: Tensor, norm: Norm) -> Tensor:
    """Computes what the served norm computes, with gradients."""
    assert isinstance(norm, RMSNorm)
    return F.rms_norm(x, (norm.hidden,), norm.weight, norm.eps)
