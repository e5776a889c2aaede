"""Block drafters in training: DFlash, DSpark, DFlash 2 and Domino as flags of one module.

Blocks start at random anchors of every row of text and run in one pass: a block's rows see the target's features before
their anchor and each other, never the text from the anchor on, whose tokens are their labels. The tokens before a label
that a corrector reads are the text's own. It must not know the training loop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import RMSNorm

from actors.ranges import OneOf, Range, Section
from cluster.tools.training.checkpoints import write_checkpoint
from cluster.tools.training.losses import (
    acceptance,
    cross_entropy,
    exponential_weights,
    masked_mean,
    total_variation,
)
from cluster.tools.training.speculators.eagle import GatedMLP
from cluster.tools.training.speculators.interface import Speculator, TargetBatch, TargetShape, depth_metrics
from parallel.model.config import DecoderConfig, RopeScaling
from parallel.model.families.registry import read_config
from parallel.speculators.config import FINAL

CORRECTORS = ("none", "markov", "gated", "rnn", "gru", "selector")


@dataclass(frozen=True, slots=True)
class BlockOptions(Section):
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
    corrector: Annotated[str, OneOf(CORRECTORS)] = "none"
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
    """Convolutions along a block before and after a sublayer; without effect until trained."""

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
        """x `[..., block, hidden]`."""
        out = torch.zeros_like(x)
        for tap in range(self.taps):
            kernel = self.base_kernel[side, tap].unflatten(0, (self.groups, -1)) + added[..., side, tap, :, None]
            earlier = F.pad(x, (0, 0, tap, 0))[..., : x.shape[-2], :]
            out = out + kernel.flatten(-2) * earlier
        return out


class _BlockAttention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.q_norm, self.k_norm = RMSNorm(head_dim, eps=eps), RMSNorm(head_dim, eps=eps)

    def forward(self, x: Tensor, context: Tensor, anchors: Tensor, ropes: tuple[Tensor, Tensor]) -> Tensor:
        """x `[rows, anchors, block, hidden]`, context `[rows, length, hidden]`; ropes are the angles of both."""
        of_blocks, of_context = ropes
        q = _rotate(self.q_norm(self._heads(self.q_proj(x))), of_blocks)
        k = _rotate(self.k_norm(self._heads(self.k_proj(x))), of_blocks)
        v = self._heads(self.v_proj(x))
        context_k = _rotate(self.k_norm(self._heads(self.k_proj(context))), of_context)
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

    def forward(self, x: Tensor, context: Tensor, anchors: Tensor, ropes: tuple[Tensor, Tensor]) -> Tensor:
        y = self.input_layernorm(x)
        conv, added = self.attention_conv, None
        if conv is not None:
            added = conv.weights(y)
            y = conv(y, added, 0)
        y = self.self_attn(y, context, anchors, ropes)
        x = x + (y if conv is None or added is None else conv(y, added, 1))
        y = self.post_attention_layernorm(x)
        conv, added = self.mlp_conv, None
        if conv is not None:
            added = conv.weights(y)
            y = conv(y, added, 0)
        y = self.mlp(y)
        return x + (y if conv is None or added is None else conv(y, added, 1))


class _MarkovHead(nn.Module):
    """Adds to the logits of a position what the token before it says of it."""

    def __init__(self, kind: str, vocab_size: int, hidden: int, rank: int) -> None:
        super().__init__()
        self.kind, self.rank = kind, rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(hidden + 2 * rank, 3 * rank)

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        """hidden `[..., depths, hidden]`, tokens before them `[..., depths]`."""
        embedded = self.markov_w1(before)
        if self.kind == "markov":
            return self.markov_w2(embedded)
        if self.kind == "gated":
            gate = self.gate_proj(torch.cat((hidden, embedded), -1)).sigmoid()
            return self.markov_w2(gate * embedded)
        state, outputs = torch.zeros_like(embedded[..., 0, :]), []
        for k in range(before.shape[-1]):
            joint = self.joint_proj(torch.cat((state, embedded[..., k, :], hidden[..., k, :]), -1))
            gate, candidate, output = joint.chunk(3, -1)
            gate = gate.sigmoid()
            state = gate * state + (1 - gate) * candidate.tanh()
            outputs.append(output.tanh())
        return self.markov_w2(torch.stack(outputs, -2))


class _SelectorHead(nn.Module):
    """Scores of the likeliest tokens of a position, given the token before it."""

    def __init__(self, vocab_size: int, hidden: int, rank: int, top_k: int) -> None:
        super().__init__()
        self.top_k = min(top_k, vocab_size)
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab_size, rank) * rank**-0.5)
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)

    def forward(self, logits: Tensor, hidden: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """The candidates `[..., top_k]` and their scores."""
        values, candidates = logits.topk(self.top_k, -1)
        wanted = F.embedding(before, self.predecessor_codebook) * self.hidden_projection(hidden)
        scores = values + (F.embedding(candidates, self.successor_codebook) @ wanted[..., None])[..., 0]
        return candidates, scores


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
        self.markov_head: _MarkovHead | None = None
        self.candidate_selector: _SelectorHead | None = None
        rank, kind = options.rank, options.corrector
        if kind in ("markov", "gated", "rnn"):
            self.markov_head = _MarkovHead(kind, vocab_size, hidden, rank)
        elif kind == "selector":
            self.candidate_selector = _SelectorHead(vocab_size, hidden, rank, options.top_k)
        elif kind == "gru":
            self.prefix_gru = nn.GRU(hidden, options.state_size, batch_first=True, bias=False)
            inner = nn.Linear(hidden + options.state_size, rank, bias=False)
            table = nn.Linear(rank, vocab_size, bias=False)
            nn.init.zeros_(table.weight)
            self.embed_proj = nn.Sequential(inner, nn.SiLU(), table)
        self.confidence_head: _ConfidenceHead | None = None
        if options.confidence:
            self.confidence_head = _ConfidenceHead(hidden + (rank if self.markov_head is not None else 0))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.steps: Tensor

    # --- the pass -----------------------------------------------------------------------------------------------------

    def hidden_states(self, batch: TargetBatch, anchors: Tensor) -> Tensor:
        """anchors `[rows, n]` -> final hidden states of the drafting rows of their blocks, `[rows, n, depths, d]`."""
        context = self.hidden_norm(self.fc(torch.cat([batch.taps[tap] for tap in self.taps], -1).to(self.fc.weight)))
        size = self.options.block_size
        first = batch.embed(batch.tokens.gather(1, anchors)).to(context.dtype)[:, :, None]
        masks = self.mask_embedding.expand(*anchors.shape, size - 1, -1)
        x = torch.cat((first, masks.to(context.dtype)), 2)
        places = anchors[..., None] + torch.arange(size, device=anchors.device)
        ropes = self._angles(places), self._angles(torch.arange(context.shape[1], device=anchors.device))
        for layer in self.layers:
            x = layer(x, context, anchors, ropes)
        # contiguous, because products of a slice with the head copy the head for every row of text
        return self.norm(x[:, :, size - self.num_draft_tokens :].contiguous())

    def corrected(
        self, batch: TargetBatch, base: Tensor, hidden: Tensor, before: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Logits of the depths given the tokens before each, `[rows, n, depths]`; of a selector the candidates and
        their scores too."""
        if self.markov_head is not None:
            return base + self.markov_head(hidden, before).float(), None
        if self.candidate_selector is not None:
            candidates, scores = self.candidate_selector(base, hidden, before)
            logits = torch.full_like(base, -torch.inf).scatter(-1, candidates, scores.float())
            return logits, (candidates, scores.float())
        if self.options.corrector == "gru":
            states, _ = self.prefix_gru(batch.embed(before).to(hidden.dtype).flatten(0, 1))
            added = self.embed_proj(torch.cat((hidden, states.unflatten(0, before.shape[:2])), -1)).float()
            return torch.cat((base[:, :, :1], base[:, :, 1:] + added[:, :, 1:]), 2), None
        return base, None

    def logits_at(self, batch: TargetBatch, anchors: Tensor) -> Tensor:
        """Logits `[rows, n, depths, vocabulary]` where the text's own tokens precede every depth."""
        hidden = self.hidden_states(batch, anchors)
        return self.corrected(batch, batch.head(hidden).float(), hidden, self._tokens(batch, anchors, 0))[0]

    def predicted(self, head: _ConfidenceHead, hidden: Tensor, before: Tensor) -> Tensor:
        """Logits of the acceptance of the token drafted at each depth, which they do not depend on."""
        read = hidden if self.markov_head is None else torch.cat((hidden, self.markov_head.markov_w1(before)), -1)
        return head(read).float()

    # --- the loss -----------------------------------------------------------------------------------------------------

    def loss(self, batch: TargetBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        options = self.options
        anchors, valid = self._anchors(batch, generator)
        hidden = self.hidden_states(batch, anchors)
        before, labels = self._tokens(batch, anchors, 0), self._tokens(batch, anchors, 1)
        weights = valid * exponential_weights(self.num_draft_tokens, math.exp(-1 / options.decay)).to(valid.device)
        base = batch.head(hidden).float()
        logits, selected = self.corrected(batch, base, hidden, before)
        with torch.no_grad():
            p_logits = batch.head(_rows_at(batch.taps[FINAL], anchors, self.num_draft_tokens)).float()
        if selected is None:
            loss = options.cross_entropy * masked_mean(cross_entropy(logits, labels), weights)
        else:
            candidates, scores = selected
            hits = candidates == labels[..., None]
            chosen = -(scores.log_softmax(-1).masked_fill(~hits, 0)).sum(-1)
            loss = masked_mean(cross_entropy(base, labels), weights) + masked_mean(chosen, weights * hits.any(-1))
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
            expected = self.predicted(self.confidence_head, hidden, before)
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

    def _angles(self, places: Tensor) -> Tensor:
        size = self.shape.head_dim
        rates = _rope_theta(self.shape) ** -(torch.arange(0, size, 2, device=places.device).float() / size)
        return (places[..., None].float() * rates)[..., None, :]

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


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """x `[..., heads, size]`: the halves of a head are the two coordinates."""
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _rope_theta(shape: DecoderConfig) -> float:
    return (shape.rope or RopeScaling()).rope_theta
