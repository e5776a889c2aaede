"""Block drafters in training: DFlash, DSpark, DFlash 2 and Domino as flags of one module.

Blocks start at random anchors of every row of text and run in one pass: a block's rows see the target's features before
their anchor and each other, never the text from the anchor on, whose tokens are their labels. The tokens before a label
that a corrector reads are the text's own. It must not know the training loop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.model.config import RopeScaling
from parallel.model.families.registry import read_config
from parallel.model.layers.attention import PassPlan
from parallel.ranges import OneOf, Range
from parallel.speculators.block.corrector_shapes import SHAPES
from parallel.speculators.block.layers import MASK, BlockLayers
from parallel.speculators.block.layouts import read_own
from parallel.speculators.config import FINAL
from parallel.training.interface import TargetBatch, TargetShape, TrainingOptions, depth_metrics
from parallel.training.layers import AnchoredAttention, TextAttention, TrainedLayers, options_for
from parallel.training.losses import (
    acceptance,
    cross_entropy,
    d_pace_weights,
    exponential_weights,
    masked_mean,
    total_variation,
)


@dataclass(frozen=True, slots=True)
class BlockOptions(TrainingOptions):
    """Options of `job.recipe=dflash`, `dspark`, `dflash2` and `domino`."""

    method: str = "dflash"
    """Set by the recipe."""
    layers: Annotated[int, Range(1)] = 2
    """Draft layers, with the target's heads."""
    intermediate_size: Annotated[int, Range(1)] = 512
    """Width of their MLPs."""
    taps: Annotated[int, Range(1)] = 3
    """Layers of the target whose outputs are read, evenly spaced from the first to the last but one."""
    block_size: Annotated[int, Range(2)] = 8
    """Rows of a block, its anchor included."""
    anchor_first: bool = False
    """Whether the anchor's row drafts the next token; else the first mask's row does."""
    corrector: Annotated[str, OneOf(("none", *SHAPES))] = "none"
    """What makes a position depend on the tokens drafted before it."""
    rank: Annotated[int, Range(1)] = 64
    """Inner size of the corrector."""
    state_size: Annotated[int, Range(1)] = 128
    """corrector=gru: size of its state."""
    top_k: Annotated[int, Range(1)] = 16
    """corrector=selector: candidates of a position."""
    conv_taps: Annotated[int, Range(0, zero="none")] = 0
    """Rows of a block that its convolutions read."""
    conv_group: Annotated[int, Range(1)] = 16
    """Channels that share what the convolutions add to their weights."""
    confidence: bool = False
    """Whether a head is trained that predicts the acceptance of every draft token."""
    anchors: Annotated[int, Range(1)] = 24
    """Blocks of a row of text."""
    weighting: Annotated[str, OneOf(("exponential", "d_pace"))] = "exponential"
    """Weights over the positions of a block. d_pace: by how much each lengthens what is accepted (arXiv 2605.18810)."""
    decay: Annotated[float, Range(above=0)] = 4.0
    """weighting=exponential: position k of a block, from 0, has the weight exp(-k / decay)."""
    cross_entropy: Annotated[float, Range(0)] = 1.0
    """Weight of the cross-entropy of the text's tokens."""
    variation: Annotated[float, Range(0)] = 0.0
    """Weight of the L1 distance to the target's distribution."""
    base_steps: Annotated[int, Range(0, zero="none")] = 0
    """Steps in which the loss moves from the logits without the corrector to those with it."""


class BlockDrafter(TrainedLayers[BlockLayers]):
    """The layers of one config.json, `hf`."""

    def __init__(self, hf: dict[str, Any], options: BlockOptions, target: TargetShape) -> None:
        config, embed = read_own(hf), partial(F.embedding, weight=target.embedding)
        super().__init__(BlockLayers(config, embed=embed, **options_for(target)), hf)
        self.options = options
        self.num_draft_tokens = config.num_drafted
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.steps: Tensor

    # --- the pass -----------------------------------------------------------------------------------------------------

    def hidden_states(self, batch: TargetBatch, anchors: Tensor) -> Tensor:
        """anchors `[rows, n]` -> final hidden states of the drafting rows of their blocks, `[rows, n, depths, d]`."""
        layers, size, (num_texts, length) = self.loaded(), self.options.block_size, batch.tokens.shape
        features = torch.cat([batch.taps[tap] for tap in self.taps], -1).flatten(0, 1)
        text = torch.arange(length, device=anchors.device)
        context = layers.context(features, text.repeat(num_texts))
        keys, values = (rows.unflatten(1, batch.tokens.shape).transpose(2, 3) for rows in context)
        before = text < anchors[..., None]
        attends = [AnchoredAttention(size, before, *kv) for kv in zip(keys, values, strict=True)]
        tokens = F.pad(batch.tokens.gather(1, anchors)[..., None], (0, size - 1), value=MASK)
        places = anchors[..., None] + torch.arange(size, device=anchors.device)
        plan = PassPlan(tokens.numel(), places.flatten(), None, TextAttention(num_texts, attends))
        hidden = layers.forward(tokens.flatten(), plan).view(*tokens.shape, -1)
        # contiguous, because products of a slice with the head copy the head for every row of text
        return hidden[:, :, size - self.num_draft_tokens :].contiguous()

    def corrected(self, base: Tensor, hidden: Tensor, before: Tensor) -> Tensor:
        """Logits of the depths given the tokens before each, `[rows, n, depths]`."""
        tensors = self.served.corrector
        if tensors is None:
            return base
        return tensors.cell.along(tensors, tensors.cell.prepare(tensors, base, hidden), before)

    def logits_at(self, batch: TargetBatch, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states `[rows, n, depths, d]`, the logits that they give, and those with the text's own tokens before
        every depth."""
        hidden = self.hidden_states(batch, anchors)
        base = batch.head(hidden).float()
        return hidden, base, self.corrected(base, hidden, self._tokens(batch, anchors, 0))

    def predicted(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Logits of the acceptance of the token drafted at each depth, which they do not depend on."""
        head, tensors = self.served.confidence, self.served.corrector
        assert head is not None, "the recipe trains none"
        return head(hidden if tensors is None else tensors.cell.with_token(tensors, hidden, before))[..., 0].float()

    # --- the loss -----------------------------------------------------------------------------------------------------

    def loss(self, batch: TargetBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        options = self.options
        anchors, valid = self._anchors(batch, generator)
        hidden, base, logits = self.logits_at(batch, anchors)
        before, labels = self._tokens(batch, anchors, 0), self._tokens(batch, anchors, 1)
        with torch.no_grad():
            p_logits = batch.head(_rows_at(batch.taps[FINAL], anchors, self.num_draft_tokens)).float()
        values = cross_entropy(logits, labels)
        if options.weighting == "d_pace":
            weights = d_pace_weights((-values).exp(), valid)
        else:
            weights = valid * exponential_weights(self.num_draft_tokens, math.exp(-1 / options.decay)).to(valid.device)
        if options.corrector == "selector":  # which is trained where the label is a candidate
            hits = values.isfinite()
            loss = masked_mean(cross_entropy(base, labels), weights)
            loss = loss + masked_mean(values.masked_fill(~hits, 0), weights * hits)
        else:
            loss = masked_mean(values, weights)
        loss = options.cross_entropy * loss
        if options.base_steps:
            share = (1 - self.steps / options.base_steps).clamp(min=0)
            loss = (1 - share) * loss + share * masked_mean(cross_entropy(base, labels), weights)
            self.steps += int(self.training)
        distance = None
        if options.variation or options.confidence:
            distance = total_variation(p_logits, logits)
        if options.variation and distance is not None:
            loss = loss + options.variation * 2 * masked_mean(distance, weights)
        metrics: dict[str, Tensor] = {}
        if distance is not None and options.confidence:
            expected = self.predicted(hidden, before)
            off = F.binary_cross_entropy_with_logits(expected, 1 - distance.detach(), reduction="none")
            loss = loss + masked_mean(off, weights)
            metrics["confidence_error"] = masked_mean((expected.sigmoid() - 1 + distance).abs(), valid).detach()
        rates = acceptance(p_logits, logits, batch.temperature)
        flat = valid.flatten(0, 1)
        return loss, depth_metrics(rates.flatten(0, 1), flat) | metrics

    def _anchors(self, batch: TargetBatch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random anchors `[rows, n]` whose own token and the next are labels, and which depths `[rows, n, depths]` have
        a label; none of an anchor that was drawn for want of another."""
        mask, depths = batch.loss_mask, self.num_draft_tokens
        able = mask[:, :-1] & mask[:, 1:]
        count = min(self.options.anchors, able.shape[1])
        order = torch.rand(able.shape, generator=generator).to(mask.device).masked_fill(~able, -1)
        drawn, anchors = order.topk(count, -1)
        places = anchors[..., None] + 1 + torch.arange(depths, device=mask.device)
        labelled = F.pad(mask, (0, depths)).gather(1, places.flatten(1)).view_as(places)
        return anchors, (labelled & (drawn >= 0)[..., None]).cumprod(-1).bool()

    def _tokens(self, batch: TargetBatch, anchors: Tensor, after: int) -> Tensor:
        """The text from `after` behind the anchors on, `[rows, n, depths]`; zeros behind its end."""
        places = anchors[..., None] + after + torch.arange(self.num_draft_tokens, device=anchors.device)
        return F.pad(batch.tokens, (0, self.num_draft_tokens + 1)).gather(1, places.flatten(1)).view_as(places)


def build(options: BlockOptions, target: TargetShape) -> BlockDrafter:
    """The module with fresh weights: convolutions and the corrector change nothing."""
    net = BlockDrafter(_fields(options, target), options, target)
    for name, parameter in net.named_parameters():
        if parameter.ndim == 2 and name.startswith(("fc.", "layers.")):
            small = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=(0.3 if small else 1.0) * parameter.shape[1] ** -0.5)
        if name.endswith("base_kernel"):
            parameter.data.zero_()[:, 0] = 1
        elif "kernel_projection" in name:
            parameter.data.zero_()
    net.get_parameter("mask_embedding").data.copy_(target.embedding.mean(0, keepdim=True))
    if (corrector := net.served.config.corrector_shapes()) is not None:
        for name, matrix in corrector.matrices.items():
            _begin(net, name, matrix.inputs**-0.5, matrix.bias)
        nn.init.zeros_(net.get_parameter(corrector.AFTER))
        if corrector.BEFORE:
            weight = net.get_parameter(corrector.BEFORE)
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    if options.confidence:
        width = net.get_parameter("confidence_head.proj.weight").shape[1] ** -0.5
        _begin(net, "confidence_head.proj.weight", width, "confidence_head.proj.bias")
    return net


def _begin(net: nn.Module, weight: str, width: float, bias: str) -> None:
    """A matrix, and its bias if that has a name, between minus and plus `width`."""
    for name in (weight, bias) if bias else (weight,):
        nn.init.uniform_(net.get_parameter(name), -width, width)


def _fields(options: BlockOptions, target: TargetShape) -> dict[str, Any]:
    """The config.json."""
    shape = read_config(target.config.to_dict())
    return {
        "architectures": ["BlockDrafter"],
        "speculator": {
            "method": options.method,
            "taps": list(_spaced_taps(options.taps, shape.num_layers)),
            "block_size": options.block_size,
            "mask_token_id": None,
            "anchor_first": options.anchor_first,
            "embedding_scale": 1.0,
            "corrector": options.corrector,
            "corrector_rank": options.rank,
            "state_size": options.state_size,
            "top_k": options.top_k,
            "conv_taps": options.conv_taps,
            "conv_group": options.conv_group,
            "confidence": options.confidence,
        },
        "vocab_size": len(target.embedding),
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": options.layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": options.intermediate_size,
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": shape.max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": (shape.rope or RopeScaling()).rope_theta},
        "dtype": "bfloat16",
    }


def _spaced_taps(count: int, num_layers: int) -> tuple[int, ...]:
    """Streams after `count` layers of the target, evenly spaced from the first to the last but one."""
    if count == 1:
        return (num_layers // 2,)
    return tuple(dict.fromkeys(round(1 + i * (num_layers - 2) / (count - 1)) for i in range(count)))


def _rows_at(states: Tensor, anchors: Tensor, depths: int) -> Tensor:
    """The states at an anchor and the positions behind it, `[rows, n, depths, hidden]`; the last one's behind the end
    of the text."""
    places = (anchors[..., None] + torch.arange(depths, device=anchors.device)).clamp(max=states.shape[1] - 1)
    found = states.gather(1, places.flatten(1)[..., None].expand(-1, -1, states.shape[-1]))
    return found.view(*places.shape, -1)
