"""LayerSkip (arXiv 2404.16710) in training: the target itself, tuned so that its first layers draft for all of them.

Layers are dropped at random, the later the more, and every exit learns through the shared norm and head (early-exit
loss). What comes out is another target: its text differs from that of the one it began as. Knows no loop.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from cluster.tools.training.models import save_rounded
from cluster.tools.training.parts import ModelParts, parts_of
from cluster.tools.training.speculators.distill import HARD_LABELS, read_exits
from parallel.ranges import OneOf, Range, require
from parallel.speculators.config import FINAL
from parallel.training.interface import Speculator, TargetBatch, TargetShape, TrainingOptions, chain_metrics
from parallel.training.losses import DIVERGENCES, acceptance, cross_entropy, divergences, masked_mean

CURRICULA = ("rotational", "gradual")


@dataclass(frozen=True)
class LayerSkipOptions(TrainingOptions):
    """Settings of LayerSkip: the target is tuned, and `target/` of the run's folder is another target."""

    exit: Annotated[int, Range(1)] = 2
    """Exit for which held-out acceptance is reported; all are trained."""
    dropout: Annotated[float, Range(0, high=1)] = 0.1
    """Chance that a row of text skips the last layer; the first is never skipped, those between exponentially more."""
    exit_scale: Annotated[float, Range(0, zero="only the last layer learns")] = 1.0
    """Weight of the loss of early exits: exit i, from 0, weighs this times i (i + 1) / 2 before normalisation, the last
    one as that before it and its number."""
    curriculum: Annotated[str, OneOf(CURRICULA)] = "rotational"
    """Which exits a step trains beside the last: rotational = every `interval`-th, in turn; gradual = from the last
    one down, another after every `interval` steps."""
    interval: Annotated[int, Range(1)] = 3
    """Steps of the curriculum."""
    divergence: Annotated[str, OneOf((*DIVERGENCES, HARD_LABELS))] = "fkl"
    """Loss of every exit: against the distribution of the target as it was, as of `distill`, which changes the text the
    least, or ce, cross entropy with the text (the paper)."""
    repeat: Annotated[int, Range(1)] = 1
    """Times that every layer runs before the next, as layers of their own that each begin with the layer's weights and
    add its share of the residual stream: 2 makes a target of 12 layers from one of 6."""
    depth: Annotated[int, Range(1)] = 5
    """Draft tokens per round for which acceptance is reported."""


def build(options: LayerSkipOptions, target: TargetShape) -> LayerSkipNet:
    """A copy of the target. ValueError, one line, for an exit that it does not have."""
    num_layers = target.config.num_hidden_layers * options.repeat
    if options.exit >= num_layers:
        raise ValueError(f"job.options.exit={options.exit}: the target has {num_layers} layers; exit before the last")
    assert target.model is not None, "LayerSkip begins as the target"
    return LayerSkipNet(repeated(target.model, options.repeat).float().requires_grad_(True), options)


@torch.no_grad()
def repeated(model: LlamaForCausalLM, times: int) -> LlamaForCausalLM:
    """A copy in which each layer stands `times` in a row, every one adding that share of what the layer added."""
    model = copy.deepcopy(model)
    if times == 1:
        return model
    parts = parts_of(model)
    names, has_layers = parts.config.names, parts.config.norm_placement == "before" and not parts.config.num_experts
    remedy = "needs a target whose layers add what one matrix of attention and one of the MLP give; use 1"
    require(has_layers, "job.options.repeat", times, remedy)
    layers: list[Any] = [copy.deepcopy(layer) for layer in parts.layers for _ in range(times)]
    for i, layer in enumerate(layers):
        layer.self_attn.layer_idx = i
        for last in (f"{names.attention}.{names.o}", names.down):
            for parameter in layer.get_submodule(last).parameters():
                parameter.div_(times)
    parts.use_layers(nn.ModuleList(layers))
    model.config.num_hidden_layers = len(layers)
    if types := getattr(model.config, "layer_types", None):
        model.config.layer_types = [kind for kind in types for _ in range(times)]
    return model


class LayerSkipNet(Speculator):
    """The target in training."""

    taps = (FINAL,)

    def __init__(self, model: LlamaForCausalLM, options: LayerSkipOptions) -> None:
        super().__init__()
        self.model, self._parts, self.options = model, parts_of(model), options
        self.num_layers: int = model.config.num_hidden_layers
        self.num_draft_tokens = options.depth
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))  # a resumed run goes on from it

    def loss(self, batch: TargetBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        options, tokens, mask = self.options, batch.tokens[:, :-1], batch.loss_mask[:, 1:]
        of_text = cross_entropy if options.divergence == HARD_LABELS else None
        labels = batch.tokens[:, 1:][mask] if of_text else batch.head(batch.taps[FINAL][:, :-1][mask])
        last = self.num_layers
        exits, kept = [*range(1, last), last], []
        if self.training:
            exits = exits_at(int(self.num_steps), last, options.curriculum, options.interval)
            kept = [torch.rand(len(tokens), generator=generator) >= p for p in drop_rates(last, options.dropout)]
            self.num_steps += 1
        with dropped(self._parts, kept):
            read = read_exits(self._parts, tokens, exits)
        weights = exit_weights(exits, last, options.exit_scale)
        total = mask.new_zeros((), dtype=torch.float32)
        for exit_layer, weight in weights.items():
            logits = self._parts.head(read[exit_layer][mask])
            by_row = of_text(logits, labels) if of_text else divergences()[options.divergence](labels, logits)
            total = total + weight * by_row.mean()
        if self.training:
            return total, {}
        own, early = (self._parts.head(read[at]) for at in (last, options.exit))
        metrics = chain_metrics(own, early, mask, self.num_draft_tokens, batch.temperature)
        untuned = batch.head(batch.taps[FINAL][:, :-1])
        return total, metrics | {"agreement": masked_mean(acceptance(untuned, own, batch.temperature), mask)}

    def save(self, folder: Path) -> None:
        """Write an ordinary checkpoint for `target.path=`."""
        save_rounded(self.model, folder)


def drop_rates(num_layers: int, most: float) -> list[float]:
    """The rates by layer, from 0 at the first to `most` at the last."""
    return [most * (math.exp(i * math.log(2) / max(1, num_layers - 1)) - 1) for i in range(num_layers)]


def exits_at(step: int, last: int, curriculum: str, interval: int) -> list[int]:
    """The exits, in layers, that a step trains; the last is always among them."""
    early = range(1, last)
    if curriculum == "rotational":
        chosen = [one for one in early if (one - 1) % interval == step % interval]
    else:
        chosen = [one for one in early if one >= last - 1 - step // interval]
    return [*chosen, last]


def exit_weights(exits: Sequence[int], last: int, scale: float) -> dict[int, float]:
    """The weights by exit, in layers; they sum to 1. That of one layer has none."""
    raw = {one: scale * (one - 1) * one / 2 for one in exits if one < last}
    raw[last] = last - 1 + scale * (last - 2) * (last - 1) / 2
    total = sum(raw.values()) or 1.0
    return {one: weight / total for one, weight in raw.items() if weight}


@contextmanager
def dropped(parts: ModelParts, kept: Sequence[Tensor]) -> Iterator[None]:
    """Context in which row b of a batch passes layer l only where `kept[l][b]`."""

    def hook_of(rows: Tensor) -> object:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> object:
            stream = output[0] if isinstance(output, tuple) else output
            stream = torch.where(rows.to(stream.device)[:, None, None], stream, inputs[0].to(stream.dtype))
            return (stream, *output[1:]) if isinstance(output, tuple) else stream

        return hook

    hooks = [
        layer.register_forward_hook(hook_of(rows))  # pyright: ignore[reportArgumentType]
        for layer, rows in zip(parts.layers, kept, strict=False)
    ]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()
