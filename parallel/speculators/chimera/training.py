"""Chimera in training (arXiv 2402.15758): from every anchor, steps over the hidden states before it and trigrams.

The row of a trigram depends on no anchor, so one set of keys and values serves all: at step s, row j is drafted from
anchor j - s, sees the target's hidden states before the anchor and the trigrams from it on, and predicts token j + 1.
The modules are those of `parallel/speculators/chimera/runner.py` under the same names. Knows no loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.model.layers.rope import Rope
from parallel.ranges import OneOf, Range
from parallel.speculators.chimera.runner import TRIGRAM, read_own
from parallel.speculators.config import FINAL
from parallel.training.checkpoints import write_checkpoint
from parallel.training.interface import Speculator, TargetBatch, TargetShape, TrainingOptions, depth_metrics
from parallel.training.layers import LlamaLayer, llama_fields
from parallel.training.losses import DIVERGENCES, divergences, masked_mean


@dataclass(frozen=True)
class ChimeraOptions(TrainingOptions):
    """Settings of Chimera and its losses."""

    intermediate_size: Annotated[int, Range(0)] = 0
    """Of the layer's MLP; 0 for the target's."""
    depths: Annotated[int, Range(1)] = 5
    """Draft tokens from every anchor, in training and on held-out text."""
    decay: Annotated[float, Range(above=0, high=1)] = 0.8
    """Weight of a depth relative to that before."""
    divergence: Annotated[str, OneOf(DIVERGENCES)] = "fkl"
    """Loss against the target's law, as of `distill`."""
    feature_weight: Annotated[float, Range(0)] = 1.0
    """Weight of the mean squared distance between the layer's outputs and the target's hidden states."""


def build(options: ChimeraOptions, target: TargetShape) -> ChimeraNet:
    """A net with fresh weights for this target."""
    hf = llama_fields(target, 1, options.intermediate_size)
    return ChimeraNet(hf | {"speculator": {"method": "chimera"}}, options)


class ChimeraNet(Speculator):
    """The module of one config.json, `hf`."""

    def __init__(self, hf: dict[str, Any], options: ChimeraOptions) -> None:
        super().__init__()
        self.hf, self.options = hf, options
        self.num_draft_tokens = options.depths
        block = read_own(hf).block
        hidden = block.hidden_size
        wide = TRIGRAM * hidden
        self.mix = nn.Linear(wide, wide)
        self.narrow = nn.Linear(wide, hidden, bias=False)
        self.layer = LlamaLayer(block)
        self.norm = nn.RMSNorm(hidden, block.norm_eps)
        self.join = nn.Linear(2 * hidden, hidden, bias=False)
        assert block.rope is not None
        self._rope = Rope(block.rope, block.head_dim, torch.float32, "cpu")
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(self.mix.bias)
        self.join.weight.data.copy_(torch.cat((torch.eye(hidden), torch.eye(hidden)), 1) / 2)

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
        total, rates = final.new_zeros(()), []
        for step, outputs in enumerate(self.unroll(batch, options.depths)):
            counted = valid[..., step]
            expected, read = (rows[:, :num_anchors] for rows in outputs)
            wanted = final[:, step : step + num_anchors]
            goal, logits = batch.head(wanted), batch.head(read)
            rates.append((logits.detach().argmax(-1) == goal.argmax(-1)).float().flatten())
            distance = F.mse_loss(expected.float(), wanted.float(), reduction="none").mean(-1)
            loss = masked_mean(divergence(goal, logits), counted)
            loss = loss + options.feature_weight * masked_mean(distance, counted)
            total = total + options.decay**step * loss
        weight = sum(options.decay**step for step in range(options.depths))
        return total / weight, depth_metrics(torch.stack(rates, -1), valid.flatten(0, 1))

    def unroll(self, batch: TargetBatch, num_steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """At every step, of the anchors from 0 on that have a row there: the hidden states that the layer expects, and
        what the target's head reads, [B, T - step, H] each."""
        hidden, length = batch.taps[FINAL], batch.tokens.shape[1]
        trigrams = self._trigrams(batch)
        positions = torch.arange(length, device=hidden.device)
        cos, sin = self._rope(positions.cpu().repeat(2))
        rows = torch.cat((hidden.to(trigrams.dtype), trigrams), 1)
        layer, norm = self.layer, self.layer.input_layernorm
        assert norm is not None
        q, k, v = layer.self_attn.heads(norm(rows), (cos.to(hidden.device), sin.to(hidden.device)))
        known = F.pad(hidden, (0, 0, 1, 0))  # the newest of an anchor is that before it
        for step in range(num_steps):
            at = positions[step:, None]
            sees = torch.cat((positions < at - step, (positions >= at - step) & (positions <= at)), 1)
            attended = F.scaled_dot_product_attention(q[:, :, length + step :], k, v, sees)
            stream = trigrams[:, step:] + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
            expected = self.norm(stream + layer.mlp(layer.post_attention_layernorm(stream)))
            newest = known[:, : length - step].to(expected.dtype)
            yield expected, self.join(torch.cat((newest, expected), -1))

    def _trigrams(self, batch: TargetBatch) -> Tensor:
        """[B, T, H]"""
        length = batch.tokens.shape[1]
        before = [(torch.arange(length) - back).clamp(min=0) for back in reversed(range(TRIGRAM))]
        embedding = batch.embed(batch.tokens)
        x = torch.cat([embedding[:, places.to(embedding.device)] for places in before], -1)
        return self.narrow(x + F.silu(self.mix(x)))

    def save(self, folder: Path) -> None:
        tensors = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in self.state_dict().items()}
        write_checkpoint(folder, tensors, self.hf)
