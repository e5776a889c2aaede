"""A frozen model with trainable linear adapters on the matrices of its blocks.

Every matrix W of a block becomes (I + A) W, with A = up @ down of low rank (R-Adapter, arXiv 2408.05749). A starts at
zero, W never changes, and the product folds into one matrix of W's shape, so that the engine serves it at no cost. The
layers are those that serve, over short windows without KV, in float32. Knows no data and no optimizer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.comm.group import SINGLE
from parallel.model.block import MLP, Block
from parallel.model.checkpoint import resolve_checkpoint, tensor_shapes
from parallel.model.config import DecoderConfig
from parallel.model.decoder import Decoder, ServedLayers
from parallel.model.layers.attention import PassPlan
from parallel.model.layers.weight import Weight
from parallel.model.weights import load_shards
from parallel.training.layers import causal, text_pass, use_gradients

Adapter = tuple[Tensor, Tensor]
"""up [outputs, rank] and down [rank, outputs]."""


def block_weights(blocks: Sequence[Block]) -> list[Weight]:
    """The matrices that adapters change, in a fixed order: four of every block."""
    found: list[Weight] = []
    for block in blocks:
        assert block.attention is not None
        assert isinstance(block.mlp, MLP)
        linears = block.attention.qkv, block.attention.o, block.mlp.gate_up, block.mlp.down
        found += [linear.weight for linear in linears]
    return found


@dataclass(slots=True)
class _AdaptedProduct:
    """Rows times a matrix, and what an adapter adds to that."""

    adapter: Adapter | None = None
    scale: float = 1.0

    def __call__(self, x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        y = F.linear(x, matrix)
        if self.adapter is not None and self.scale:
            up, down = self.adapter
            y = y + self.scale * F.linear(F.linear(y, down), up)
        return y if bias is None else y + bias


class AdaptedModel(ABC):
    """Frozen `layers`, with room for adapters of `rank` on the matrices of `blocks`."""

    def __init__(self, layers: ServedLayers, blocks: Sequence[Block], rank: int) -> None:
        use_gradients(layers)
        adapted = block_weights(blocks)
        self.weights = [weight.plain for weight in adapted]  # never packed: they stay readable
        self.rank = rank
        self._num_layers = len(blocks)
        self._products = [_AdaptedProduct() for _ in adapted]
        for weight, product in zip(adapted, self._products, strict=True):
            weight.product = product

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
        for i, product in enumerate(self._products):
            product.adapter = None if adapters is None else adapters[i]
            product.scale = scales[i] if scales else 1.0
        num_windows, length = token_ids.shape
        plan = text_pass(torch.arange(length, device=token_ids.device), num_windows, [causal] * self._num_layers)
        rows = None if features is None else features.flatten(0, 1)
        hidden = self._hidden(token_ids.flatten(), rows, plan)
        return self._head(hidden.unflatten(0, token_ids.shape)[:, -num_rows:].flatten(0, 1))

    @abstractmethod
    def _hidden(self, token_ids: Tensor, features: Tensor | None, plan: PassPlan) -> Tensor:
        """token_ids [N], features [N, F] -> what the head reads, [N, H]."""

    @abstractmethod
    def _head(self, hidden: Tensor) -> Tensor: ...

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


class AdaptedDecoder(AdaptedModel):
    """A checkpoint of a whole model."""

    def __init__(self, config: DecoderConfig, path: str | Path, device: torch.device | str, rank: int) -> None:
        config.check_adaptable()
        self._decoder = Decoder(config, SINGLE, device, torch.float32)
        load_shards(self._decoder.shards(), tensor_shapes(config), resolve_checkpoint(str(path)))
        super().__init__(self._decoder, self._decoder.layers, rank)

    def _hidden(self, token_ids: Tensor, features: Tensor | None, plan: PassPlan) -> Tensor:
        assert features is None, "a draft model reads tokens alone"
        return self._decoder.forward(token_ids, plan)[0]

    def _head(self, hidden: Tensor) -> Tensor:
        return self._decoder.head(hidden)
