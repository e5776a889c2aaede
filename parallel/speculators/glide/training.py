"""GliDe in training (arXiv 2402.02082): one pass in which a row sees the target's keys and values before its block.

In a draft no token sees the target's rows from the newest committed token on; blocks of as many rows mimic that gap.
The rows before the first block are roots, which see all before themselves. LongSpec's layer (arXiv 2502.17421, section
3.2) is trained on the same gap by a shift, drawn anew for each batch, and on positions that begin anywhere: those of
the first few tokens stay, and all later ones are moved by one random distance ("anchor-offset indices"), for the target
too, so that short text trains the positions of long ones. Knows no loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.model.checkpoint import find_tensors
from parallel.model.layers.weight import TensorOptions
from parallel.model.tensor_files import open_tensors
from parallel.ranges import OneOf, Range
from parallel.speculators.config import FINAL
from parallel.speculators.glide.layouts import LONGSPEC, PUBLISHED_WINDOW, read_own
from parallel.speculators.glide.runner import GlideLayers
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
    method: Annotated[str, OneOf(("glide", LONGSPEC))] = "glide"
    """Set by the recipe."""
    window: Annotated[int, Range(1)] = PUBLISHED_WINDOW
    """longspec: keys of its own that a row sees, itself included."""
    shift: Annotated[int, Range(1)] = 4
    """longspec: newest keys of the target that no row sees, at most; their number is drawn for each batch."""
    reach: Annotated[int, Range(0, zero="off")] = 0
    """longspec: positions that offsets of short texts reach, at most; the release: 30,000 for texts of up to 1,200
    tokens and 0 for longer ones."""
    start: str = ""
    """A checkpoint of this method and shape to begin with, such as that of an earlier stage on shorter text; empty =
    random weights."""
    divergence: Annotated[str, OneOf(DIVERGENCES)] = "fkl"
    """Loss against the target's distribution, as of `distill`."""


def build(options: GlideOptions, target: TargetShape) -> GlideNet:
    """A net with fresh weights for this target."""
    hf = llama_fields(target, 1, options.intermediate_size)
    speculator: dict[str, Any] = {"method": options.method, "kv_layer": target.config.num_hidden_layers - 1}
    if options.method == LONGSPEC:
        speculator["window"] = options.window
    net = GlideNet(hf | {"speculator": speculator}, options, **options_for(target))
    if options.start:
        _load(net, Path(options.start).expanduser())
    return net


@torch.no_grad()
def _load(net: GlideNet, folder: Path) -> None:
    """Copy the checkpoint's tensors; ValueError, one line, where they are not those of the net."""
    parameters = dict(net.named_parameters())
    try:
        files = find_tensors(folder, {name: tuple(one.shape) for name, one in parameters.items()})
    except (OSError, ValueError) as error:
        raise ValueError(f"job.options.start={folder}: {error}") from error
    for file in set(files.values()):
        with open_tensors(file) as tensors:
            for name in [name for name, its_file in files.items() if its_file == file]:
                parameters[name].copy_(tensors.get_tensor(name))


class GlideNet(TrainedLayers[GlideLayers]):
    """The module of one config.json, `hf`."""

    def __init__(self, hf: dict[str, Any], options: GlideOptions, **tensors: Unpack[TensorOptions]) -> None:
        config = read_own(hf)
        super().__init__(GlideLayers(config, **tensors), hf)
        self.taps = (FINAL,)  # of the labels alone
        self.options = options
        self.kv_layers = (hf["speculator"]["kv_layer"],)
        self.num_draft_tokens = options.depths
        self.reach = options.reach if config.is_longspec else 0
        self.attend = causal if config.window is None else partial(_within, config.window)

    def loss(self, batch: TargetBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        size, length = self.options.depths, batch.tokens.shape[1]
        first, shift = size, 0
        if self.training and self.served.is_longspec:
            shift = int(torch.randint(1, self.options.shift + 1, (), generator=generator))
        elif self.training:
            first = int(torch.randint(1, size + 1, (), generator=generator))
        logits, goal = batch.head(self.rows(batch, first, shift)), batch.target_logits()
        valid = F.pad(batch.loss_mask[:, 1:], (0, 1))  # row i drafts token i + 1
        loss = masked_mean(divergences()[self.options.divergence](goal, logits), valid)
        rates = (logits.detach().argmax(-1) == goal.argmax(-1)).float()
        end = first + (length - first) // size * size
        rates, valid = (rows[:, first:end].unflatten(1, (-1, size)).flatten(0, 1) for rows in (rates, valid))
        return loss, depth_metrics(rates, valid)

    def rows(self, batch: TargetBatch, first: int, shift: int = 0) -> Tensor:
        """What the head reads, [B, T, H]; blocks begin at row `first` and every `depths` rows after it or, with a
        `shift`, row t sees the target's rows up to t - shift."""
        layers, (num_texts, length) = self.loaded(), batch.tokens.shape
        index = torch.arange(length, device=batch.tokens.device)
        plan = text_pass(index, num_texts, [self.attend])
        if batch.positions is not None:
            plan.places = batch.positions.flatten()
        x = layers.attend(batch.embed(batch.tokens).flatten(0, 1), plan)
        limit = torch.where(index < first, index, index - (index - first) % self.options.depths)
        limit = (index - shift + 1).clamp(min=0) if shift else limit
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


def _within(window: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every row sees the newest `window` rows up to itself."""
    places = torch.arange(q.shape[2], device=q.device)
    distance = places[:, None] - places
    return F.scaled_dot_product_attention(q, k, v, (distance >= 0) & (distance < window))
