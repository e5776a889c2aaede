"""Draft layers in training: EAGLE-1, EAGLE-3 and 3.1 with training-time test, multi-token prediction.

One pass over a text unrolls the steps of a draft: at step s, row i reads token i + 1 + s and its own output of the step
before, sees the rows up to i of step 0 and its own rows of later steps, and predicts token i + 2 + s (EAGLE-3, arXiv
2503.01840). Knows no loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.model.layers.weight import TensorOptions
from parallel.ranges import OneOf, Range, require
from parallel.speculators.config import FINAL
from parallel.speculators.eagle.config import METHODS, read_own
from parallel.speculators.eagle.layers import DraftLayers
from parallel.training.interface import Speculator, TargetBatch, TargetShape, TrainingOptions, depth_metrics
from parallel.training.layers import TrainedLayers, causal, llama_fields, options_for, text_pass
from parallel.training.losses import DIVERGENCES, decayed_mean, divergences, masked_mean


@dataclass(frozen=True)
class DraftLayerOptions(TrainingOptions):
    """Settings of draft layers and their losses."""

    method: Annotated[str, OneOf(tuple(METHODS))] = "eagle3"
    """Which layers: a row of `parallel.speculators.eagle.config.METHODS`."""
    layers: Annotated[int, Range(1)] = 1
    """Draft layers."""
    taps: Annotated[tuple[int, ...], Range(-1)] = ()
    """Taps of the target; none for those of the method."""
    intermediate_size: Annotated[int, Range(0)] = 0
    """Width of the layer's MLP; 0 for the target's."""
    draft_vocab: Annotated[int, Range(0)] = 0
    """Most frequent tokens that an own head may propose; 0 for the target's head."""
    steps: Annotated[int, Range(1)] = 5
    """Steps unrolled in training."""
    depths: Annotated[int, Range(1)] = 5
    """Steps at which held-out text is evaluated; p_eagle: depths of a pass."""
    anchors: Annotated[int, Range(0)] = 512
    """Rows of a training batch that count, drawn at random; 0 for all."""
    decay: Annotated[float, Range(above=0, high=1)] = 0.8
    """Weight of a step relative to that before."""
    divergence: Annotated[str, OneOf(DIVERGENCES)] = "fkl"
    """Loss against the target's distribution, as of `distill`."""
    logits_weight: Annotated[float, Range(0)] = 1.0
    """Weight of that loss."""
    feature_weight: Annotated[float, Range(0)] = 0.0
    """Weight of the smooth L1 distance between outputs and the target's features (EAGLE-1)."""
    keep: Annotated[float, Range(above=0, high=1)] = 0.75
    """p_eagle: share of a depth's rows that the next depth keeps in training; each depth keeps a fifth."""
    noise: Annotated[float, Range(0)] = 0.0
    """Width of the uniform noise added to features in training (EAGLE-1: 0.2 * 512 / length)."""

    def check_fields(self, where: str) -> None:
        fits = len(self.taps) < 2 or "fuses" in METHODS[self.method]
        require(fits, f"{where}.taps", list(self.taps), f"{self.method} reads one tap; name one")


def build(options: DraftLayerOptions, target: TargetShape) -> Speculator:
    """A net with fresh weights for this target."""
    counts = target.token_counts
    head_rows = min(options.draft_vocab, len(counts))
    speculator = {
        "method": options.method,
        "taps": _taps(options, target.config.num_hidden_layers),
        "head_rows": head_rows,
    }
    if options.method == "p_eagle":
        speculator["num_depths"] = options.depths
    hf = llama_fields(target, options.layers, options.intermediate_size) | {"speculator": speculator}
    net = (ParallelNet if options.method == "p_eagle" else DraftLayerNet)(hf, options, **options_for(target))
    if head_rows:
        chosen = counts.argsort(descending=True, stable=True)[:head_rows].sort().values
        net.choose_tokens(chosen, target.head)
    return net


def _taps(options: DraftLayerOptions, num_layers: int) -> list[int]:
    if options.taps:
        if max(options.taps) > num_layers:
            raise ValueError(
                f"job.options.taps={list(options.taps)}: the target has {num_layers} layers; name none above"
            )
        return list(options.taps)
    if METHODS[options.method].get("fuses"):  # the inputs of these blocks, as the published code has them
        return [min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, num_layers // 2 + 1)]
    return [FINAL]


class DraftLayerNet(TrainedLayers[DraftLayers]):
    """The layers of one config.json, `hf`."""

    def __init__(self, hf: dict[str, Any], options: DraftLayerOptions, **tensors: Unpack[TensorOptions]) -> None:
        config = read_own(hf)
        super().__init__(DraftLayers(config, **tensors), hf, besides={"d2t"})
        self.options, self.config = options, config
        self.num_draft_tokens = options.depths
        self.register_buffer("tokens", torch.arange(config.head_rows), persistent=False)
        hidden, names = config.block.hidden_size, config.names
        projections = [names.fuse] * config.fuses + [names.join] * (not config.joins_in_attention)
        for name in projections:  # at first the deepest tap passes through
            self.get_parameter(f"{name}.weight").data[:, -hidden:] += torch.eye(hidden)

    def choose_tokens(self, tokens: Tensor, head: Tensor) -> None:
        """The draft vocabulary: these tokens of the target's, with their rows of its head."""
        self.tokens = tokens
        self.get_parameter("lm_head.weight").data.copy_(head[tokens])

    def loss(self, batch: TargetBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        options = self.options
        divergence = divergences()[options.divergence]
        features = torch.cat([batch.taps[tap] for tap in self.taps], -1)
        if self.training and options.noise:
            noise = torch.rand(features.shape, generator=generator) - 0.5
            features = features + options.noise * noise.to(features.device)
        num_steps = options.steps if self.training else options.depths
        # row i drafts token i + 2 + step at step `step`, after the target's row i + 1 + step
        labels = batch.loss_mask[:, 2:].unfold(1, num_steps, 1)
        valids = labels.cumprod(-1, dtype=torch.int8).bool()
        rows = self._anchors(valids[..., 0], generator)
        valid, wanted = valids[rows], batch.taps[FINAL][:, 1:].unfold(1, num_steps, 1)[rows]
        losses, rates = [], []
        for step, normed in enumerate(self.unroll(batch, features, num_steps)):
            read, final = normed[:, : valids.shape[1]][rows], wanted[..., step]
            goal, logits, known, rate = self._compared(batch, final, read)
            rates.append(rate)
            loss = options.logits_weight * masked_mean(divergence(goal, logits), valid[:, step] & known)
            if options.feature_weight:
                distance = F.smooth_l1_loss(read.float(), final.float(), reduction="none").mean(-1)
                loss = loss + options.feature_weight * masked_mean(distance, valid[:, step])
            losses.append(loss)
        return decayed_mean(losses, options.decay), depth_metrics(torch.stack(rates, -1), valid)

    def _anchors(self, valid: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Indices of rows whose first draft token is a label: all, or in training some."""
        rows = valid.nonzero()
        if self.training and 0 < self.options.anchors < len(rows):
            rows = rows[torch.randperm(len(rows), generator=generator)[: self.options.anchors].to(rows.device)]
        return tuple(rows.T)

    def _compared(self, batch: TargetBatch, final: Tensor, read: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The target's final states and what the head reads at the same places [N, H] -> logits of both, of the draft
        vocabulary alone, whether it has the target's choice, and whether that is drafted, as 0 or 1."""
        goal, logits = batch.head(final), self.logits(read, batch)
        best, drafted = goal.argmax(-1), logits.detach().argmax(-1)
        known = torch.ones_like(best, dtype=torch.bool)
        if len(self.tokens):
            goal, drafted, known = goal[..., self.tokens], self.tokens[drafted], torch.isin(best, self.tokens)
        return goal, logits, known, (drafted == best).float()

    def logits(self, normed: Tensor, batch: TargetBatch) -> Tensor:
        """Those of an own head in its order."""
        own = self.served.lm_head
        return batch.head(normed) if own is None else own.logits(normed)

    def unroll(self, batch: TargetBatch, features: Tensor, num_steps: int) -> Iterator[Tensor]:
        """What the head reads, [B, T, H], at every step; the last `step` + 1 rows have no token to read and hold
        nothing."""
        layers, (num_texts, length) = self.loaded(), batch.tokens.shape
        hidden = layers.fused(features.flatten(0, 1))
        steps = [_Steps() for _ in range(self.config.block.num_layers)]
        for step in range(num_steps):
            tokens = F.pad(batch.tokens[:, 1 + step :], (0, 1 + step))
            plan = text_pass(torch.arange(step, step + length, device=tokens.device), num_texts, steps)
            normed, hidden = layers.forward(batch.embed(tokens).flatten(0, 1), hidden, plan)
            yield normed.unflatten(0, (num_texts, length))

    def saved(self) -> dict[str, Tensor]:
        tensors = super().saved()
        if self.config.has_draft_vocab:
            chosen = self.tokens.cpu()
            tensors["d2t"] = chosen - torch.arange(len(chosen))
            tensors["t2d"] = torch.zeros(self.config.vocab_size, dtype=torch.bool).index_fill_(0, chosen, True)
        return tensors


class ParallelNet(DraftLayerNet):
    """P-EAGLE (arXiv 2602.01469): rows (anchor, depth), depths above 0 masks that see the text up to their anchor and
    the rows of smaller depth at it. In training ever fewer anchors have the deeper rows (conditional drop)."""

    def loss(self, batch: TargetBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        options, num_depths, length = self.options, self.config.num_depths, batch.tokens.shape[1]
        divergence = divergences()[options.divergence]
        anchors = [torch.arange(length - 1 - num_depths)]
        for depth in range(1, num_depths):
            before = anchors[-1]
            if self.training:
                keep = max(1, int(max(options.keep**depth, 0.2) * len(anchors[0])))
                before = before[torch.randperm(len(before), generator=generator)[:keep].sort().values]
            anchors.append(before)
        features = torch.cat([batch.taps[tap] for tap in self.taps], -1)
        rows = self.rows(batch, features, anchors)
        whole = anchors[-1]  # the anchors that have all depths
        losses, rates, valids, valid = [], [], [], torch.ones_like(batch.loss_mask[:, : len(anchors[0])])
        for depth, (own, normed) in enumerate(zip(anchors, rows, strict=True)):
            valid = valid & batch.loss_mask[:, 2 + depth : 2 + depth + len(anchors[0])]
            counted = valid[:, own]
            final = batch.taps[FINAL][:, own + 1 + depth][counted]
            goal, logits, known, right = self._compared(batch, final, normed[counted])
            losses.append(masked_mean(divergence(goal, logits), known))
            rate = torch.zeros_like(counted, dtype=torch.float32)
            rate[counted] = right
            places = torch.searchsorted(own, whole)
            rates.append(rate[:, places].flatten())
            valids.append(counted[:, places].flatten())
        return decayed_mean(losses, options.decay), depth_metrics(torch.stack(rates, -1), torch.stack(valids, -1))

    def rows(self, batch: TargetBatch, features: Tensor, anchors: Sequence[Tensor]) -> list[Tensor]:
        """What the head reads at every depth, [B, anchors of the depth, H]."""
        sizes = [len(own) for own in anchors]
        anchor, depth = torch.cat(list(anchors)), torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        same, earlier = anchor[:, None] == anchor, depth[:, None] >= depth
        sees = ((depth == 0) & (anchor[:, None] >= anchor)) | (same & earlier)
        text, num_masks, num_texts = anchors[0], sum(sizes[1:]), len(features)
        layers, sees = self.loaded(), sees.to(features.device)
        assert layers.mask_embedding is not None
        known = layers.fused(features[:, text].flatten(0, 1)).unflatten(0, (num_texts, -1))
        hidden = torch.cat((known, layers.mask_features(num_masks).expand(num_texts, -1, -1)), 1)
        masks = layers.mask_embedding.expand(num_texts, num_masks, -1)
        embedding = torch.cat((batch.embed(batch.tokens[:, text + 1]), masks), 1)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, sees)

        plan = text_pass((anchor + depth).to(sees.device), num_texts, [attend] * self.config.block.num_layers)
        normed, _ = layers.forward(embedding.flatten(0, 1), hidden.flatten(0, 1), plan)
        return list(normed.unflatten(0, (num_texts, -1)).split(sizes, 1))


class _Steps:
    """Attention of row i over the first step's rows up to i and its own rows of the steps after; called once a step."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._keys.append(k)
        self._values.append(v)
        if len(self._keys) == 1:
            return causal(q, k, v)
        length, scale = q.shape[2], q.shape[3] ** -0.5
        sees = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        text = (q @ self._keys[0].transpose(-2, -1)).masked_fill(~sees, -torch.inf)
        own = torch.stack([(q * key).sum(-1) for key in self._keys[1:]], -1)
        weights = torch.cat((text, own), -1).mul(scale).softmax(-1, dtype=torch.float32).to(v.dtype)
        out = weights[..., :length] @ self._values[0]
        for i, value in enumerate(self._values[1:]):
            out = out + weights[..., length + i, None] * value
        return out
