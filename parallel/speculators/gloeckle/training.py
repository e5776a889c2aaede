"""Heads of multi-token prediction (arXiv 2404.19737) in training, beside a target that is frozen.

One causal pass of a head over a text trains its depth at every position. The paper trains trunk and heads together and
from scratch; here the trunk and the next token's layer are those of the target. Knows no loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Unpack

import torch
from torch import Tensor

from parallel.model.layers.weight import TensorOptions
from parallel.ranges import OneOf, Range
from parallel.speculators.gloeckle.layouts import METHOD, read_own
from parallel.speculators.gloeckle.runner import GloeckleLayers
from parallel.training.interface import TargetBatch, TargetShape, TrainingOptions, depth_metrics
from parallel.training.layers import TrainedLayers, causal, llama_fields, options_for, text_pass
from parallel.training.losses import DIVERGENCES, acceptance, decayed_mean, divergences, masked_mean


@dataclass(frozen=True)
class GloeckleOptions(TrainingOptions):
    """Settings of the heads and their loss."""

    heads: Annotated[int, Range(1)] = 3
    """Draft tokens: heads beside the target's last layer."""
    intermediate_size: Annotated[int, Range(0)] = 0
    """Width of each head's MLP; 0 for the target's."""
    decay: Annotated[float, Range(above=0, high=1)] = 0.8
    """Weight of a depth relative to that before; 1 in the paper."""
    divergence: Annotated[str, OneOf(DIVERGENCES)] = "fkl"
    """Loss against the target's distribution, as of `distill`."""


def build(options: GloeckleOptions, target: TargetShape) -> GloeckleNet:
    """A net with fresh weights for this target."""
    hf = llama_fields(target, options.heads, options.intermediate_size)
    own = {"method": METHOD, "taps": [target.config.num_hidden_layers - 1]}
    return GloeckleNet(hf | {"speculator": own}, options, **options_for(target))


class GloeckleNet(TrainedLayers[GloeckleLayers]):
    """The module of one config.json, `hf`."""

    def __init__(self, hf: dict[str, Any], options: GloeckleOptions, **tensors: Unpack[TensorOptions]) -> None:
        super().__init__(GloeckleLayers(read_own(hf), **tensors), hf)
        self.options = options
        self.num_draft_tokens = options.heads

    def loss(
        self,
        batch: TargetBatch,
        generator: torch.Generator,  # noqa: ARG002  every anchor counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        options, divergence = self.options, divergences()[self.options.divergence]
        # anchor i, whose row is that before it, drafts token i + 1 + depth, as the target does at row i + depth
        valid = batch.loss_mask[:, 2:].unfold(1, options.heads, 1).cumprod(-1, dtype=torch.int8).bool()
        num_anchors = valid.shape[1]
        goals = batch.target_logits()[:, 1:]
        losses, rates = [], []
        for depth, read in enumerate(self.read(batch)):
            counted, goal = valid[..., depth], goals[:, depth : depth + num_anchors]
            logits = batch.head(read[:, :num_anchors])
            rates.append(acceptance(goal, logits.detach(), batch.temperature).flatten())
            losses.append(masked_mean(divergence(goal, logits), counted))
        return decayed_mean(losses, options.decay), depth_metrics(torch.stack(rates, -1), valid.flatten(0, 1))

    def read(self, batch: TargetBatch) -> Iterator[Tensor]:
        """What the target's head reads at every row, [B, T, H], of each head."""
        trunk = batch.taps[self.taps[0]].float()
        num_texts, length = batch.tokens.shape
        attends = [causal] * self.options.heads
        plan = text_pass(torch.arange(length, device=trunk.device), num_texts, attends)
        for given in self.loaded().forward(trunk.flatten(0, 1), plan):
            yield batch.normalize(given).unflatten(0, (num_texts, length))
