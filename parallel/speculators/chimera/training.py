"""Chimera in training (arXiv 2402.15758): from every anchor, steps over the hidden states before it and trigrams.

The row of a trigram depends on no anchor, so one set of keys and values serves all: at step s, row j is drafted from
anchor j - s, sees the target's hidden states before the anchor and the trigrams from it on, and predicts token j + 1.
Knows no loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.model.layers.weight import TensorOptions
from parallel.ranges import OneOf, Range
from parallel.speculators.chimera.layouts import TRIGRAM, read_own
from parallel.speculators.chimera.runner import ChimeraLayers
from parallel.speculators.config import FINAL
from parallel.training.interface import TargetBatch, TargetShape, TrainingOptions, depth_metrics
from parallel.training.layers import TextAttention, TrainedLayers, llama_fields, options_for
from parallel.training.losses import DIVERGENCES, decayed_mean, divergences, masked_mean


@dataclass(frozen=True)
class ChimeraOptions(TrainingOptions):
    """Settings of Chimera and its losses."""

    intermediate_size: Annotated[int, Range(0)] = 0
    """Width of the layer's MLP; 0 for the target's."""
    depths: Annotated[int, Range(1)] = 5
    """Draft tokens from every anchor, in training and on held-out text."""
    decay: Annotated[float, Range(above=0, high=1)] = 0.8
    """Weight of a depth relative to that before."""
    divergence: Annotated[str, OneOf(DIVERGENCES)] = "fkl"
    """Loss against the target's distribution, as of `distill`."""
    feature_weight: Annotated[float, Range(0)] = 1.0
    """Weight of the mean squared distance between the layer's outputs and the target's hidden states."""


def build(options: ChimeraOptions, target: TargetShape) -> ChimeraNet:
    """A net with fresh weights for this target."""
    hf = llama_fields(target, 1, options.intermediate_size)
    return ChimeraNet(hf | {"speculator": {"method": "chimera"}}, options, **options_for(target))


class ChimeraNet(TrainedLayers[ChimeraLayers]):
    """The module of one config.json, `hf`."""

    def __init__(self, hf: dict[str, Any], options: ChimeraOptions, **tensors: Unpack[TensorOptions]) -> None:
        super().__init__(ChimeraLayers(read_own(hf), **tensors), hf)
        self.options = options
        self.num_draft_tokens = options.depths
        eye = torch.eye(self.served.config.block.hidden_size)
        self.get_parameter("join.weight").data.copy_(torch.cat((eye, eye), 1) / 2)

    def loss(
        self,
        batch: TargetBatch,
        generator: torch.Generator,  # noqa: ARG002  every anchor counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        options, final = self.options, batch.taps[FINAL]
        divergence = divergences()[options.divergence]
        # anchor i drafts token i + 1 + step at step `step`, as the target does at row i + step
        valid = batch.loss_mask[:, 1:].unfold(1, options.depths, 1).cumprod(-1, dtype=torch.int8).bool()
        num_anchors = valid.shape[1]
        losses, rates = [], []
        for step, outputs in enumerate(self.unroll(batch, options.depths)):
            counted = valid[..., step]
            expected, read = (rows[:, :num_anchors] for rows in outputs)
            wanted = final[:, step : step + num_anchors]
            goal, logits = batch.head(wanted), batch.head(read)
            rates.append((logits.detach().argmax(-1) == goal.argmax(-1)).float().flatten())
            distance = F.mse_loss(expected.float(), wanted.float(), reduction="none").mean(-1)
            loss = masked_mean(divergence(goal, logits), counted)
            losses.append(loss + options.feature_weight * masked_mean(distance, counted))
        return decayed_mean(losses, options.decay), depth_metrics(torch.stack(rates, -1), valid.flatten(0, 1))

    def unroll(self, batch: TargetBatch, num_steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """What every step gives, of the anchors from 0 on that have a row there: the hidden states that the layer
        expects, and what the target's head reads, [B, T - step, H] each."""
        layers, hidden, (num_texts, length) = self.loaded(), batch.taps[FINAL], batch.tokens.shape
        trigrams = self._trigrams(layers, batch)
        positions = torch.arange(length, device=hidden.device)
        block, known = layers.layer, F.pad(hidden, (0, 0, 1, 0))  # the newest of an anchor is that before it
        assert block.attention is not None
        rows = torch.cat((hidden.to(trigrams.dtype), trigrams), 1).flatten(0, 1)
        texts, rope = TextAttention(num_texts), layers.rope(positions.repeat(2).repeat(num_texts))
        q, k, v = texts.split(block.attention.heads, block.attention.qkv(block.norms[0](rows)), rope)
        for step in range(num_steps):
            at = positions[step:, None]
            sees = torch.cat((positions < at - step, (positions >= at - step) & (positions <= at)), 1)
            attended = F.scaled_dot_product_attention(q[:, :, length + step :], k, v, sees)
            added = block.attention.o(texts.by_row(attended))
            expected = layers.norm(block.finish(trigrams[:, step:].flatten(0, 1), added))
            newest = known[:, : length - step].flatten(0, 1).to(expected.dtype)
            of_texts = num_texts, length - step
            yield expected.unflatten(0, of_texts), layers.read(newest, expected).unflatten(0, of_texts)

    def _trigrams(self, layers: ChimeraLayers, batch: TargetBatch) -> Tensor:
        """[B, T, H]"""
        before = [(torch.arange(batch.tokens.shape[1]) - back).clamp(min=0) for back in reversed(range(TRIGRAM))]
        embedding = batch.embed(batch.tokens)
        x = torch.cat([embedding[:, places.to(embedding.device)] for places in before], -1)
        return layers.trigrams(x.flatten(0, 1)).unflatten(0, batch.tokens.shape)
