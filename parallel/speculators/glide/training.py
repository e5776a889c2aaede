"""GliDe in training (arXiv 2402.02082): one pass in which a row sees the target's keys and values before its block.

In a draft no token sees the target's rows from the newest committed token on; blocks of as many rows mimic that gap.
The rows before the first block are roots, which see all before themselves. Knows no loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.model.layers.weight import TensorOptions
from parallel.ranges import OneOf, Range
from parallel.speculators.config import FINAL
from parallel.speculators.glide.runner import GlideLayers, read_own
from parallel.training.interface import TargetBatch, TargetShape, TrainingOptions, depth_metrics
from parallel.training.layers import TrainedLayers, causal, llama_fields, options_for, text_pass
from parallel.training.losses import DIVERGENCES, divergences, masked_mean


@dataclass(frozen=True)
class GlideOptions(TrainingOptions):
    """Settings of GliDe and its loss."""

    intermediate_size: Annotated[int, Range(0)] = 0
    """Width of the layer's MLP; 0 for the target's."""
    depths: Annotated[int, Range(1)] = 5
    """Rows of a block, which see none of the target's keys and values within it."""
    divergence: Annotated[str, OneOf(DIVERGENCES)] = "fkl"
    """Loss against the target's distribution, as of `distill`."""


def build(options: GlideOptions, target: TargetShape) -> GlideNet:
    """A net with fresh weights for this target."""
    hf = llama_fields(target, 1, options.intermediate_size)
    speculator = {"method": "glide", "kv_layer": target.config.num_hidden_layers - 1}
    return GlideNet(hf | {"speculator": speculator}, options, **options_for(target))


class GlideNet(TrainedLayers[GlideLayers]):
    """The module of one config.json, `hf`."""

    taps = (FINAL,)  # of the labels alone

    def __init__(self, hf: dict[str, Any], options: GlideOptions, **tensors: Unpack[TensorOptions]) -> None:
        config = read_own(hf)
        super().__init__(GlideLayers(config, **tensors), config.tensor_shapes(), hf)
        self.options = options
        self.kv_layers = (hf["speculator"]["kv_layer"],)
        self.num_draft_tokens = options.depths

    def loss(self, batch: TargetBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        size, length = self.options.depths, batch.tokens.shape[1]
        first = int(torch.randint(1, size + 1, (), generator=generator)) if self.training else size
        logits, goal = batch.head(self.rows(batch, first)), batch.target_logits()
        valid = F.pad(batch.loss_mask[:, 1:], (0, 1))  # row i drafts token i + 1
        loss = masked_mean(divergences()[self.options.divergence](goal, logits), valid)
        rates = (logits.detach().argmax(-1) == goal.argmax(-1)).float()
        end = first + (length - first) // size * size
        rates, valid = (rows[:, first:end].unflatten(1, (-1, size)).flatten(0, 1) for rows in (rates, valid))
        return loss, depth_metrics(rates, valid)

    def rows(self, batch: TargetBatch, first: int) -> Tensor:
        """What the head reads, [B, T, H]; blocks begin at row `first` and every `depths` rows after it."""
        layers, (num_texts, length) = self.loaded(), batch.tokens.shape
        positions = torch.arange(length, device=batch.tokens.device)
        plan = text_pass(positions, num_texts, [causal])
        x = layers.attend(batch.embed(batch.tokens).flatten(0, 1), plan)
        limit = torch.where(positions < first, positions, positions - (positions - first) % self.options.depths)
        crossed = self._read(batch, layers.queries(x, plan.positions), limit)
        return layers.finish(x, crossed).unflatten(0, (num_texts, length))

    def _read(self, batch: TargetBatch, queries: Tensor, limit: Tensor) -> Tensor:
        """What queries [B * T, heads, head size] read of the target's positions below their `limit`, [B * T, heads *
        head size]; 0 below a limit of 0."""
        keys, values = batch.kv[self.kv_layers[0]]
        queries = queries.unflatten(0, (-1, len(limit))).transpose(1, 2)
        group = queries.shape[1] // keys.shape[1]
        keys, values = (kv.to(queries.dtype).repeat_interleave(group, 1) for kv in (keys, values))
        sees = torch.arange(len(limit), device=queries.device) < limit.clamp(min=1)[:, None]
        read = F.scaled_dot_product_attention(queries, keys, values, sees)
        return (read * (limit > 0)[:, None]).transpose(1, 2).flatten(0, 1).flatten(1)
