"""GliDe in training (arXiv 2402.02082): one pass in which a row sees the target's keys and values before its block.

In a draft no token sees the target's rows from the newest committed token on; blocks of as many rows mimic that gap.
The rows before the first block are roots, which see all before themselves. The modules are those of
`parallel/speculators/glide/runner.py` under the same names. Knows no loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.model.layers.rope import Rope, rotate
from parallel.ranges import OneOf, Range
from parallel.speculators.config import FINAL
from parallel.speculators.glide.runner import read_own
from parallel.training.checkpoints import write_checkpoint
from parallel.training.interface import Speculator, TargetBatch, TargetShape, TrainingOptions, depth_metrics
from parallel.training.layers import LlamaLayer, llama_fields
from parallel.training.losses import DIVERGENCES, divergences, masked_mean


@dataclass(frozen=True)
class GlideOptions(TrainingOptions):
    """Settings of GliDe and its loss."""

    intermediate_size: Annotated[int, Range(0)] = 0
    """Of the layer's MLP; 0 for the target's."""
    depths: Annotated[int, Range(1)] = 5
    """Rows of a block, which see none of the target's keys and values within it."""
    divergence: Annotated[str, OneOf(DIVERGENCES)] = "fkl"
    """Loss against the target's law, as of `distill`."""


def build(options: GlideOptions, target: TargetShape) -> GlideNet:
    """A net with fresh weights for this target."""
    hf = llama_fields(target, 1, options.intermediate_size)
    speculator = {"method": "glide", "kv_layer": target.config.num_hidden_layers - 1}
    return GlideNet(hf | {"speculator": speculator}, options)


class GlideNet(Speculator):
    """The module of one config.json, `hf`."""

    taps = (FINAL,)  # of the labels alone

    def __init__(self, hf: dict[str, Any], options: GlideOptions) -> None:
        super().__init__()
        self.hf, self.options = hf, options
        self.kv_layers = (hf["speculator"]["kv_layer"],)
        self.num_draft_tokens = options.depths
        block = read_own(hf).block
        hidden, queries = block.hidden_size, block.num_heads * block.head_dim
        self.layer = LlamaLayer(block)
        self.cross = nn.ModuleDict(
            {"q_proj": nn.Linear(hidden, queries, bias=False), "o_proj": nn.Linear(queries, hidden, bias=False)}
        )
        self.norm = nn.RMSNorm(hidden, block.norm_eps)
        self._head_dim = block.head_dim
        assert block.rope is not None
        self._rope = Rope(block.rope, block.head_dim, torch.float32, "cpu")
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

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
        device, length = batch.tokens.device, batch.tokens.shape[1]
        positions = torch.arange(length, device=device)
        cos, sin = self._rope(positions.cpu())
        rotation = cos.to(device), sin.to(device)
        layer, norm = self.layer, self.layer.input_layernorm
        assert norm is not None
        x = batch.embed(batch.tokens)
        q, k, v = layer.self_attn.heads(norm(x), rotation)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        limit = torch.where(positions < first, positions, positions - (positions - first) % self.options.depths)
        x = x + self.cross["o_proj"](self._read(batch, x, rotation, limit))
        return self.norm(x + layer.mlp(layer.post_attention_layernorm(x)))

    def _read(self, batch: TargetBatch, x: Tensor, rotation: tuple[Tensor, Tensor], limit: Tensor) -> Tensor:
        """What rows read of the target's positions below their `limit`; 0 below a limit of 0."""
        keys, values = batch.kv[self.kv_layers[0]]
        queries = rotate(self.cross["q_proj"](x).unflatten(-1, (-1, self._head_dim)), rotation).transpose(1, 2)
        group = queries.shape[1] // keys.shape[1]
        keys, values = (kv.to(x.dtype).repeat_interleave(group, 1) for kv in (keys, values))
        sees = torch.arange(len(limit), device=x.device) < limit.clamp(min=1)[:, None]
        read = F.scaled_dot_product_attention(queries.to(x.dtype), keys, values, sees)
        return (read * (limit > 0)[:, None]).transpose(1, 2).flatten(2)

    def save(self, folder: Path) -> None:
        tensors = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in self.state_dict().items()}
        write_checkpoint(folder, tensors, self.hf)
