"""Kangaroo (arXiv 2404.18911) and EESD (arXiv 2406.03853) in training: one layer behind an early exit of the target.

What the layer reads of a draft token, the target's stream after its first layers, is the same whether the token was
drafted or accepted, so one causal pass over a text trains every depth: depth k from an anchor is position anchor + k.
The modules are those of `parallel/speculators/exits/runner.py` under the same names. Knows no loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.model.config import DecoderConfig
from parallel.model.layers.rope import Rope, Rotation
from parallel.ranges import OneOf, Range
from parallel.speculators.config import FINAL
from parallel.speculators.exits.runner import METHODS, read_own
from parallel.training.checkpoints import write_checkpoint
from parallel.training.interface import Speculator, TargetBatch, TargetShape, TrainingOptions, chain_metrics
from parallel.training.layers import LlamaAttention, LlamaLayer, llama_fields
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
    """Loss against the target's law, as of `distill`."""
    depth: Annotated[int, Range(1)] = 5
    """Draft tokens per round for which acceptance is reported."""


def build(options: ExitOptions, target: TargetShape) -> ExitNet:
    """A net with fresh weights for this target. ValueError, one line, for an exit that it does not have."""
    num_layers = target.config.num_hidden_layers
    if options.exit >= num_layers:
        raise ValueError(f"job.options.exit={options.exit}: the target has {num_layers} layers; exit before the last")
    hf = llama_fields(target, 1, options.intermediate_size)
    return ExitNet(hf | {"speculator": {"method": options.method, "exit": options.exit}}, options)


class ExitNet(Speculator):
    """The module of one config.json, `hf`."""

    def __init__(self, hf: dict[str, Any], options: ExitOptions) -> None:
        super().__init__()
        self.hf, self.options = hf, options
        self.config = read_own(hf)
        self.taps = self.config.taps
        self.num_draft_tokens = options.depth
        block = self.config.block
        self.layer = LlamaLayer(block) if self.config.has_mlp else _Adapter(block)
        self.norm = nn.RMSNorm(block.hidden_size, block.norm_eps)
        assert block.rope is not None
        self._rope = Rope(block.rope, block.head_dim, torch.float32, "cpu")
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

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
        stream = batch.taps[self.config.exit_layer]
        stream = stream.to(self.norm.weight.dtype)
        cos, sin = self._rope(torch.arange(stream.shape[1]))
        return self.norm(self.layer(stream, (cos.to(stream.device), sin.to(stream.device)), _causal))

    def save(self, folder: Path) -> None:
        tensors = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in self.state_dict().items()}
        write_checkpoint(folder, tensors, self.hf)


class _Adapter(nn.Module):
    """Attention without an MLP."""

    def __init__(self, block: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(block.hidden_size, block.norm_eps)
        self.self_attn = LlamaAttention(block, block.hidden_size)

    def forward(self, hidden: Tensor, rotation: Rotation, attend: Any) -> Tensor:
        return hidden + self.self_attn(self.input_layernorm(hidden), rotation, attend)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
