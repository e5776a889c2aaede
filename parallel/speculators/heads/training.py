"""Heads in training: Medusa, blockwise, Hydra, ReDrafter, MLP and LSTM speculators.

Every anchor of a text is drafted after with the text's own tokens; the arithmetic is that of
`parallel/speculators/heads/cells.py`, which drafts too. Knows no loop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.ranges import OneOf, Range
from parallel.speculators.config import FINAL
from parallel.speculators.heads.cells import CELLS, HeadCell
from parallel.speculators.heads.config import HEAD_CHOICES, TARGET_TABLE, HeadsConfig
from parallel.speculators.heads.layouts import write_heads
from parallel.training.checkpoints import write_checkpoint
from parallel.training.interface import Speculator, TargetBatch, TargetShape, TrainingOptions, depth_metrics
from parallel.training.losses import DIVERGENCES, acceptance, cross_entropy, decayed_mean, divergences, masked_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLossOptions(TrainingOptions):
    """Settings of the loss over the depths of a draft."""

    heads: Annotated[int, Range(1, 64)] = 5
    """Draft tokens of a path, at most, and depths that are trained."""
    decay: Annotated[float, Range(above=0, high=1)] = 0.8
    """Weight of a depth relative to that before."""
    divergence: Annotated[str, OneOf(("ce", *DIVERGENCES))] = "fkl"
    """ce = the text's own tokens; the others are taken from the target's distribution, see `job.recipe=distill`."""
    anchors: Annotated[int, Range(1)] = 1024
    """Positions of a batch that are drafted after, at most, drawn at random."""


@dataclass(frozen=True, slots=True)
class HeadsOptions(HeadLossOptions):
    """Settings of heads and of their loss."""

    method: Annotated[str, OneOf(tuple(CELLS))] = "medusa"
    """Which heads."""
    blocks: Annotated[int, Range(0, 64)] = 1
    """medusa, hydra, rnn: residual blocks before the output layer."""
    inner: Annotated[int, Range(0, zero="as the target")] = 0
    """mlp, lstm, rnn: width of the state; blockwise: of one head's hidden layer."""
    head: Annotated[str, OneOf(HEAD_CHOICES)] = "target"
    """Output layer: the target's, an own one that all depths share, or an own one for every depth."""
    own_embedding: bool = False
    """mlp, lstm: embeddings of their own rather than projections of the target's."""
    tied: bool = False
    """mlp: all depths share their weights."""
    linear_skip: bool = False
    """hydra: the first block adds a projection of its input, as the released code does, not the target's state."""


def build(options: HeadsOptions, target: TargetShape) -> Speculator:
    """Heads with fresh weights for this target."""
    hidden = target.embedding.shape[1]
    config = HeadsConfig(
        method=options.method,
        vocab_size=len(target.embedding),
        max_positions=target.config.max_position_embeddings,
        target_hidden=hidden,
        taps=(FINAL,),
        num_heads=options.heads,
        inner=options.inner or hidden,
        num_blocks=options.blocks,
        head=options.head,
        own_embedding=options.own_embedding,
        tied=options.tied,
        linear_skip=options.linear_skip,
    )
    net = HeadsNet(CELLS[config.method](config), options)
    if net.cell.shapes.width != hidden and options.head == "target":
        raise ValueError(f"job.options.inner={options.inner}: the target's head reads {hidden}; set head=shared or own")
    net.start_from(target)
    return net


class HeadsNet(Speculator):
    """Heads as parameters."""

    def __init__(self, cell: HeadCell, options: HeadLossOptions) -> None:
        super().__init__()
        self.cell, self.config, self.options = cell, cell.config, options
        self.taps = cell.config.taps
        self.num_draft_tokens = options.heads
        self._keys: dict[str, str] = {}
        shapes = self.cell.shapes
        for name, size in shapes.matrices.items():
            self._declare(f"{name}.weight", torch.zeros(size.outputs, size.inputs))
            if size.bias:
                self._declare(f"{name}.bias", torch.zeros(size.outputs))
        for name, size in shapes.vectors.items():
            self._declare(name, torch.full((size,), float(name.endswith("weight"))))
        for name, width in shapes.tables.items():
            self._declare(f"{name}.weight", torch.zeros(self.config.vocab_size, width), is_table=True)

    def start_from(self, target: TargetShape) -> None:
        """Begin where a head says about what the target's would: residual branches without what they read of its
        state, output layers its own. Embeddings are small beside that state, so what reads them begins large."""
        rms, hidden = float(target.embedding.square().mean().sqrt()), self.config.target_hidden
        for name, size in self.cell.shapes.matrices.items():
            weight = self.parameter(f"{name}.weight").data
            if size.begins == "path":
                nn.init.normal_(weight[:, hidden:], std=0.5 / (rms * math.sqrt(size.inputs - hidden)))
            elif size.begins != "zero":
                scale = 1 / (rms * math.sqrt(size.outputs)) if size.begins == "token" else 1.0
                nn.init.normal_(weight, std=scale / math.sqrt(size.inputs))
            if size.begins == "state" and self.cell.shapes.width == hidden:
                weight[:, :hidden] = torch.eye(hidden)
        for name, width in self.cell.shapes.tables.items():
            is_head = name in {self.cell.shapes.head(depth) for depth in range(self.options.heads)}
            table = self.parameter(f"{name}.weight")
            if is_head and width == target.head.shape[1]:
                table.data.copy_(target.head)
            else:
                nn.init.normal_(table, std=1 / math.sqrt(width))

    def parameter(self, name: str) -> nn.Parameter:
        """The parameter by its name in the checkpoint."""
        return getattr(self, self._keys[name])

    # --- training -----------------------------------------------------------------------------------------------------

    def loss(self, batch: TargetBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        depths, options = self.options.heads, self.options
        rows, anchors = self._anchors(batch, generator)
        losses, rates, valid = [], [], []
        # the target's logits after the tokens of all depths; those of neighbouring anchors are the same rows
        length = batch.tokens.shape[1]
        needed = torch.stack([rows * length + anchors + depth for depth in range(depths)])
        places, order = needed.unique(return_inverse=True)
        logits_there = batch.head(batch.taps[FINAL].flatten(0, 1)[places])
        for depth, logits in enumerate(self.unroll(batch, rows, anchors)):
            goals = logits_there[order[depth]]
            labels = anchors + 1 + depth
            is_label = batch.loss_mask[rows, labels]
            if options.divergence == "ce":
                values = cross_entropy(logits, batch.tokens[rows, labels])
            else:
                values = divergences()[options.divergence](goals, logits)
            losses.append(masked_mean(values, is_label))
            rates.append(acceptance(goals, logits, batch.temperature))
            valid.append(is_label)
        return decayed_mean(losses, options.decay), depth_metrics(torch.stack(rates, 1), torch.stack(valid, 1))

    def unroll(self, batch: TargetBatch, rows: Tensor, anchors: Tensor) -> list[Tensor]:
        """Logits [N, V] of every depth after the tokens at these places, int64 [N] each, and those that follow."""
        tensors = _Tensors(self, batch)
        states = self.cell.start(tensors, self.read_target(batch, rows, anchors))
        outputs = []
        for depth in range(self.options.heads):
            states = self.cell.step(tensors, depth, states, batch.tokens[rows, anchors + depth])
            read, name = self.cell.read(tensors, depth, states), self.cell.shapes.head(depth)
            is_target = name == TARGET_TABLE
            outputs.append(batch.head(read) if is_target else F.linear(read, self.parameter(f"{name}.weight")))
        return outputs

    def read_target(self, batch: TargetBatch, rows: Tensor, anchors: Tensor) -> Tensor:
        """What the states of the tokens at these places are made of."""
        return batch.taps[FINAL][rows, anchors - 1]

    def _anchors(self, batch: TargetBatch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Rows and positions of newest tokens; the first token after is a label, and there is text at all depths."""
        last = batch.tokens.shape[1] - self.options.heads - 1
        rows, anchors = batch.loss_mask[:, 2 : last + 2].nonzero(as_tuple=True)
        if self.training and len(rows) > self.options.anchors:
            chosen = torch.randperm(len(rows), generator=generator)[: self.options.anchors].to(rows.device)
            rows, anchors = rows[chosen], anchors[chosen]
        return rows, anchors + 1

    def save(self, folder: Path) -> None:
        values = {name: self.parameter(name).detach() for name in self._keys}
        tensors = {name: value.cpu().bfloat16().contiguous() for name, value in values.items()}
        write_checkpoint(folder, tensors, write_heads(self.config))

    def _declare(self, name: str, value: Tensor, *, is_table: bool = False) -> None:
        """A parameter's name has no points; what it begins with tells the optimizer whether it is a table."""
        key = f"{'table' if is_table else 'layer'}_{len(self._keys)}"
        self._keys[name] = key
        self.register_parameter(key, nn.Parameter(value))


@dataclass(frozen=True)
class _Tensors:
    """What a cell reads: the parameters, and the embedding of a batch's target."""

    net: HeadsNet
    batch: TargetBatch

    def linear(self, name: str, x: Tensor) -> Tensor:
        bias = self.net.parameter(f"{name}.bias") if self.net.cell.shapes.matrices[name].bias else None
        return F.linear(x, self.net.parameter(f"{name}.weight"), bias)

    def vector(self, name: str) -> Tensor:
        return self.net.parameter(name)

    def embed(self, table: str, token_ids: Tensor) -> Tensor:
        own = table != TARGET_TABLE
        return F.embedding(token_ids, self.net.parameter(f"{table}.weight")) if own else self.batch.embed(token_ids)
