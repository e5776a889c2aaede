"""Block drafters in training: DFlash, DSpark, DFlash 2 and Domino as flags of one module.

Blocks start at random anchors of every row of text and run in one pass: a block's rows see the target's features before
their anchor and each other, never the text from the anchor on, whose tokens are their labels. The tokens before a label
that a corrector reads are the text's own. It must not know the training loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import RMSNorm

from parallel.model.config import DecoderConfig, RopeScaling
from parallel.model.families.registry import read_config
from parallel.model.layers.rope import Rope, Rotation, rotate
from parallel.ranges import OneOf, Range
from parallel.speculators.block.convolutions import convolve, convolved
from parallel.speculators.block.correctors import CORRECTORS, Corrector, CorrectorSizes, make_corrector
from parallel.speculators.config import FINAL
from parallel.training.checkpoints import write_checkpoint
from parallel.training.interface import Speculator, TargetBatch, TargetShape, TrainingOptions, depth_metrics
from parallel.training.layers import GatedMLP
from parallel.training.losses import (
    acceptance,
    cross_entropy,
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
    """Of their MLPs."""
    taps: Annotated[int, Range(1)] = 3
    """Layers of the target whose outputs are read, evenly spaced from the first to the last but one."""
    block_size: Annotated[int, Range(2)] = 8
    """Rows of a block, its anchor included."""
    anchor_first: bool = False
    """Whether the anchor's row drafts the next token; else the first mask's row does."""
    corrector: Annotated[str, OneOf(("none", *CORRECTORS))] = "none"
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
    decay: Annotated[float, Range(above=0)] = 4.0
    """Position k of a block, from 0, has the weight exp(-k / decay)."""
    cross_entropy: Annotated[float, Range(0)] = 1.0
    """Weight of the cross-entropy of the text's tokens."""
    variation: Annotated[float, Range(0)] = 0.0
    """Weight of the L1 distance to the target's law."""
    base_steps: Annotated[int, Range(0, zero="none")] = 0
    """Steps in which the loss moves from the logits without the corrector to those with it."""


class _BlockConvolutions(nn.Module):
    """Around one sublayer; without effect until trained."""

    def __init__(self, hidden: int, taps: int, group: int) -> None:
        super().__init__()
        self.taps, self.groups = taps, hidden // group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * taps * self.groups, bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1
            self.kernel_projection.weight.zero_()

    def weights(self, x: Tensor) -> Tensor:
        return self.kernel_projection(x).unflatten(-1, (2, self.taps, self.groups))

    def forward(self, x: Tensor, added: Tensor, side: int) -> Tensor:
        return convolve(x, self.base_kernel[side], added[..., side, :, :], x.shape[-2])


class _BlockAttention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.q_norm, self.k_norm = RMSNorm(head_dim, eps=eps), RMSNorm(head_dim, eps=eps)

    def forward(self, x: Tensor, context: Tensor, anchors: Tensor, ropes: tuple[Rotation, Rotation]) -> Tensor:
        """x `[rows, anchors, block, hidden]`, context `[rows, length, hidden]`; ropes are the rotations of both."""
        of_blocks, of_context = ropes
        q = rotate(self.q_norm(self._heads(self.q_proj(x))), of_blocks)
        k = rotate(self.k_norm(self._heads(self.k_proj(x))), of_blocks)
        v = self._heads(self.v_proj(x))
        context_k = rotate(self.k_norm(self._heads(self.k_proj(context))), of_context)
        context_v = self._heads(self.v_proj(context))
        rows, count, block, heads, size = q.shape
        kv_heads, length = k.shape[-2], context.shape[1]
        q = q.unflatten(-2, (kv_heads, -1)).permute(0, 3, 1, 4, 2, 5)  # rows, kv heads, anchors, group, block, size
        k, v = (each.permute(0, 3, 1, 2, 4)[:, :, :, None] for each in (k, v))
        context_k, context_v = (each.transpose(1, 2) for each in (context_k, context_v))
        flat = q.flatten(2, 4)
        scores = (flat @ context_k.transpose(-1, -2)).unflatten(2, q.shape[2:5])
        before = torch.arange(length, device=x.device) < anchors[..., None]  # rows, anchors, length
        scores = scores.masked_fill(~before[:, None, :, None, None], -torch.inf)
        scores = torch.cat((scores, q @ k.transpose(-1, -2)), -1).float() / math.sqrt(size)
        shares = scores.softmax(-1).to(v.dtype)
        out = (shares[..., :length].flatten(2, 4) @ context_v).unflatten(2, q.shape[2:5])
        out = out + shares[..., length:] @ v
        return self.o_proj(out.permute(0, 2, 4, 1, 3, 5).reshape(rows, count, block, heads * size))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class _BlockLayer(nn.Module):
    def __init__(self, shape: DecoderConfig, options: BlockOptions) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.norm_eps
        self.self_attn = _BlockAttention(hidden, shape.num_heads, shape.num_kv_heads, shape.head_dim, eps)
        self.mlp = GatedMLP(hidden, options.intermediate_size)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden, eps=eps), RMSNorm(hidden, eps=eps)
        self.attention_conv: _BlockConvolutions | None = None
        self.mlp_conv: _BlockConvolutions | None = None
        if options.conv_taps:
            self.attention_conv, self.mlp_conv = (
                _BlockConvolutions(hidden, options.conv_taps, options.conv_group) for _ in range(2)
            )

    def forward(self, x: Tensor, context: Tensor, anchors: Tensor, ropes: tuple[Rotation, Rotation]) -> Tensor:
        def attend(y: Tensor) -> Tensor:
            return self.self_attn(y, context, anchors, ropes)

        x = _after(x, self.input_layernorm, self.attention_conv, attend)
        return _after(x, self.post_attention_layernorm, self.mlp_conv, self.mlp)


def _after(x: Tensor, norm: nn.Module, conv: _BlockConvolutions | None, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    """The residual stream after a sublayer."""
    return x + sublayer(norm(x)) if conv is None else convolved(x, norm, conv, sublayer)


@dataclass(frozen=True)
class _BatchTensors:
    """What a corrector reads: the parameters, and the embedding of a batch's target."""

    net: BlockDrafter
    batch: TargetBatch

    def linear(self, name: str, x: Tensor) -> Tensor:
        assert self.net.corrector is not None
        bias = self.net.corrector.matrices[name].bias
        return F.linear(x, self.net.get_parameter(name), self.net.get_parameter(bias) if bias else None)

    def rows(self, name: str, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.net.get_parameter(name))

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.batch.embed(token_ids)


class _ConfidenceHead(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)[..., 0]


class BlockDrafter(Speculator):
    """Its modules are named as the tensors of published checkpoints."""

    def __init__(self, options: BlockOptions, target: TargetShape) -> None:
        super().__init__()
        shape = read_config(target.config.to_dict())
        hidden, vocab_size = shape.hidden_size, len(target.embedding)
        self.options, self.shape, self.vocab_size = options, shape, vocab_size
        self.taps = _spaced_taps(options.taps, shape.num_layers)
        self.num_draft_tokens = options.block_size - (not options.anchor_first)
        self.fc = nn.Linear(len(self.taps) * hidden, hidden, bias=False)
        self.hidden_norm, self.norm = (RMSNorm(hidden, eps=shape.norm_eps) for _ in range(2))
        self.layers = nn.ModuleList([_BlockLayer(shape, options) for _ in range(options.layers)])
        self.mask_embedding = nn.Parameter(target.embedding.float().mean(0, keepdim=True).clone())
        sizes = options.rank, options.state_size, options.top_k
        self.corrector = make_corrector(CorrectorSizes(options.corrector, vocab_size, hidden, *sizes))
        if self.corrector is not None:
            self._declare(self.corrector)
        self.confidence_head: _ConfidenceHead | None = None
        if options.confidence:
            inputs = hidden if self.corrector is None else self.corrector.confidence_inputs
            self.confidence_head = _ConfidenceHead(inputs)
        self._rope = Rope(RopeScaling(rope_theta=_rope_theta(shape)), shape.head_dim, torch.float32, "cpu")
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.steps: Tensor

    def _declare(self, corrector: Corrector) -> None:
        """Parameters named as in the checkpoint; a fresh corrector adds nothing to logits."""
        for name, matrix in corrector.matrices.items():
            width = matrix.inputs**-0.5
            weight = torch.empty(matrix.outputs, matrix.inputs).uniform_(-width, width)
            if name == corrector.BEFORE:
                nn.init.normal_(weight, std=width)
            _hold(self, name, weight.zero_() if name == corrector.AFTER else weight)
            if matrix.bias:
                _hold(self, matrix.bias, torch.empty(matrix.outputs).uniform_(-width, width))

    # --- the pass -----------------------------------------------------------------------------------------------------

    def hidden_states(self, batch: TargetBatch, anchors: Tensor) -> Tensor:
        """anchors `[rows, n]` -> final hidden states of the drafting rows of their blocks, `[rows, n, depths, d]`."""
        context = self.hidden_norm(self.fc(torch.cat([batch.taps[tap] for tap in self.taps], -1).to(self.fc.weight)))
        size = self.options.block_size
        first = batch.embed(batch.tokens.gather(1, anchors)).to(context.dtype)[:, :, None]
        masks = self.mask_embedding.expand(*anchors.shape, size - 1, -1)
        x = torch.cat((first, masks.to(context.dtype)), 2)
        places = anchors[..., None] + torch.arange(size, device=anchors.device)
        ropes = self._rotation(places), self._rotation(torch.arange(context.shape[1], device=anchors.device))
        for layer in self.layers:
            x = layer(x, context, anchors, ropes)
        # contiguous, because products of a slice with the head copy the head for every row of text
        return self.norm(x[:, :, size - self.num_draft_tokens :].contiguous())

    def corrected(self, batch: TargetBatch, base: Tensor, hidden: Tensor, before: Tensor) -> Tensor:
        """Logits of the depths given the tokens before each, `[rows, n, depths]`."""
        if self.corrector is None:
            return base
        tensors = _BatchTensors(self, batch)
        return self.corrector.along(tensors, self.corrector.prepare(tensors, base, hidden), before)

    def logits_at(self, batch: TargetBatch, anchors: Tensor) -> Tensor:
        """Logits `[rows, n, depths, vocabulary]` where the text's own tokens precede every depth."""
        hidden = self.hidden_states(batch, anchors)
        return self.corrected(batch, batch.head(hidden).float(), hidden, self._tokens(batch, anchors, 0))

    def predicted(self, batch: TargetBatch, hidden: Tensor, before: Tensor) -> Tensor:
        """Logits of the acceptance of the token drafted at each depth, which they do not depend on."""
        assert self.confidence_head is not None
        read = (
            hidden if self.corrector is None else self.corrector.with_token(_BatchTensors(self, batch), hidden, before)
        )
        return self.confidence_head(read).float()

    # --- the loss -----------------------------------------------------------------------------------------------------

    def loss(self, batch: TargetBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        options = self.options
        anchors, valid = self._anchors(batch, generator)
        hidden = self.hidden_states(batch, anchors)
        before, labels = self._tokens(batch, anchors, 0), self._tokens(batch, anchors, 1)
        weights = valid * exponential_weights(self.num_draft_tokens, math.exp(-1 / options.decay)).to(valid.device)
        base = batch.head(hidden).float()
        logits = self.corrected(batch, base, hidden, before)
        with torch.no_grad():
            p_logits = batch.head(_rows_at(batch.taps[FINAL], anchors, self.num_draft_tokens)).float()
        values = cross_entropy(logits, labels)
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
        if options.variation or self.confidence_head is not None:
            distance = total_variation(p_logits, logits)
        if options.variation and distance is not None:
            loss = loss + options.variation * 2 * masked_mean(distance, weights)
        metrics: dict[str, Tensor] = {}
        if self.confidence_head is not None and distance is not None:
            expected = self.predicted(batch, hidden, before)
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

    def _rotation(self, places: Tensor) -> Rotation:
        cos, sin = self._rope(places.flatten().cpu())
        shape = *places.shape, 1, -1
        return cos.to(places.device).view(shape), sin.to(places.device).view(shape)

    # --- the checkpoint -----------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        options, shape = self.options, self.shape
        fields: dict[str, Any] = {
            "method": options.method,
            "taps": list(self.taps),
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
        }
        config = {
            "architectures": ["BlockDrafter"],
            "speculator": fields,
            "vocab_size": self.vocab_size,
            "hidden_size": shape.hidden_size,
            "num_hidden_layers": options.layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "intermediate_size": options.intermediate_size,
            "rms_norm_eps": shape.norm_eps,
            "max_position_embeddings": shape.max_positions,
            "rope_parameters": {"rope_type": "default", "rope_theta": _rope_theta(shape)},
            "dtype": "bfloat16",
        }
        tensors = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in self.named_parameters()}
        write_checkpoint(folder, {name: tensor.contiguous() for name, tensor in tensors.items()}, config)


def _hold(module: nn.Module, name: str, value: Tensor) -> None:
    """A parameter of the module under a name with points, in modules of their own."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in dict(module.named_children()):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(leaf, nn.Parameter(value))


def build(options: BlockOptions, target: TargetShape) -> BlockDrafter:
    """The module with fresh weights."""
    net = BlockDrafter(options, target)
    for name, parameter in net.named_parameters():
        if name.startswith(("fc.", "layers.")) and parameter.ndim == 2 and "kernel_projection" not in name:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.mul_(0.3)
    return net


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


def _rope_theta(shape: DecoderConfig) -> float:
    return (shape.rope or RopeScaling()).rope_theta
