"""Kangaroo (arXiv 2404.18911) and EESD (arXiv 2406.03853) in training: one layer behind an early exit of the target.

What the layer reads of a draft token, the target's stream after its first layers, is the same whether the token was
drafted or accepted, so one causal pass over a text trains every depth: depth k from an anchor is position anchor + k.
Knows no loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Unpack

import torch
from torch import Tensor

from parallel.model.layers.weight import TensorOptions
from parallel.ranges import OneOf, Range
from parallel.speculators.config import FINAL
from parallel.speculators.exits.layouts import METHODS, read_own
from parallel.speculators.exits.runner import ExitLayers
from parallel.training.interface import TargetBatch, TargetShape, TrainingOptions, chain_metrics
from parallel.training.layers import TrainedLayers, causal, llama_fields, options_for, text_pass
from parallel.training.losses import DIVERGENCES, divergences, masked_mean


@dataclass(frozen=True)
class ExitOptions(TrainingOptions):
    """Settings of a layer behind an early exit and its loss."""

    method: Annotated[str, OneOf(tuple(METHODS))] = "kangaroo"
    """Which layer: kangaroo has attention alone, eesd is a whole one."""
    exit: Annotated[int, Range(1)] = 2
    """Layers of the target that a draft token passes."""
    intermediate_size: Annotated[int, Range(0)] = 0
    """eesd: of the layer's MLP; 0 for the target's."""
    divergence: Annotated[str, OneOf(DIVERGENCES)] = "fkl"
    """Loss against the target's distribution, as of `distill`."""
    depth: Annotated[int, Range(1)] = 5
    """Draft tokens per round for which acceptance is reported."""


def build(options: ExitOptions, target: TargetShape) -> ExitNet:
    """A net with fresh weights for this target. ValueError, one line, for an exit that it does not have."""
    num_layers = target.config.num_hidden_layers
    if options.exit >= num_layers:
        raise ValueError(f"job.options.exit={options.exit}: the target has {num_layers} layers; exit before the last")
    own = {"speculator": {"method": options.method, "exit": options.exit}}
    return ExitNet(llama_fields(target, 1, options.intermediate_size) | own, options, **options_for(target))


class ExitNet(TrainedLayers[ExitLayers]):
    """The module of one config.json, `hf`."""

    def __init__(self, hf: dict[str, Any], options: ExitOptions, **tensors: Unpack[TensorOptions]) -> None:
        config = read_own(hf)
        super().__init__(ExitLayers(config, **tensors), hf)
        self.options, self.config = options, config
        self.num_draft_tokens = options.depth

    def loss(self, batch: TargetBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:  # noqa: ARG002
        mask, divergence = batch.loss_mask[:, 1:], divergences()[self.options.divergence]
        p_hidden, q_hidden = batch.taps[FINAL][:, :-1], self.read(batch)[:, :-1]
        if self.training:  # the head is most of the work: only rows that count
            return divergence(batch.head(p_hidden[mask]), batch.head(q_hidden[mask])).mean(), {}
        p_logits, q_logits = batch.head(p_hidden), batch.head(q_hidden)
        loss = masked_mean(divergence(p_logits, q_logits), mask)
        return loss, chain_metrics(p_logits, q_logits, mask, self.num_draft_tokens, batch.temperature)

    def read(self, batch: TargetBatch) -> Tensor:
        """What the target's head reads at every position, [B, T, H]."""
        stream = batch.taps[self.config.exit_layer].float()
        num_texts, length = batch.tokens.shape
        plan = text_pass(torch.arange(length, device=stream.device), num_texts, [causal])
        return self.loaded().forward(stream.flatten(0, 1), plan).unflatten(0, (num_texts, length))
