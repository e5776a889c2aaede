"""PARD: a plain draft model that fills several mask tokens behind the text in one pass, one for each further depth.

Trained in one forward pass over rows of text and, behind them, mask rows of all depths: the row of anchor a at depth k
stands at position a + k, sees the text up to a and the masks of its own anchor up to k, and learns the target's
distribution of token a + k + 1. Depths far from the anchor are trained on fewer anchors (conditional drop).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from cluster.tools.training.speculators.distill import DistilledDrafter, DistillOptions, start_model
from parallel.model.config_fields import MASK_FIELD
from parallel.ranges import Range
from parallel.speculators.config import FINAL
from parallel.speculators.pard import DEPTH_FIELD
from parallel.training.interface import TargetBatch, TargetShape, depth_metrics
from parallel.training.losses import acceptance, masked_mean

EVALUATED_ANCHORS = 24
"""Anchors of a row on which acceptance is measured: each needs a mask row for every depth."""


@dataclass(frozen=True, slots=True)
class PardOptions(DistillOptions):
    """Options of `job.recipe=pard`: those of distill, of which `depth` is also the tokens of one pass, and these."""

    mask_token: Annotated[int, Range(0)] = 0
    """Token whose rows are filled; one that never stands inside a text, such as the end of text."""
    keep: Annotated[float, Range(above=0, high=1)] = 0.7
    """Share of a depth's anchors that the next depth is trained on."""
    keep_least: Annotated[float, Range(0, 1)] = 0.2
    """Share of all anchors that every depth is trained on at least."""


@dataclass(frozen=True)
class MaskRows:
    """Mask rows behind a text, in order of depth: their anchors and depths, int64 `[rows]` each."""

    anchors: Tensor
    depths: Tensor
    mutual: bool = False
    """Whether the masks of an anchor see each other, or only those of smaller depths."""

    def positions(self, length: int) -> Tensor:
        """Positions of the text's rows and of these, int64 `[length + rows]`."""
        return torch.cat((torch.arange(length), self.anchors + self.depths))

    def visible(self, length: int) -> Tensor:
        """bool `[length + rows, length + rows]`: which row sees which."""
        anchors = torch.cat((torch.arange(length), self.anchors))
        depths = torch.cat((torch.zeros(length, dtype=torch.long), self.depths))
        of_text = (depths == 0) & (anchors[:, None] >= anchors)
        not_behind = depths[:, None] > 0 if self.mutual else depths[:, None] >= depths
        return of_text | (depths > 0) & (anchors[:, None] == anchors) & not_behind


def dropped_rows(length: int, depth: int, keep: float, least: float, generator: torch.Generator) -> MaskRows:
    """Mask rows of depths 1 to `depth` - 1; depth k has `max(keep ** k, least)` of the anchors, all among those of
    depth k - 1."""
    kept, anchors, depths = torch.arange(length), [], []
    for k in range(1, depth):
        count = max(1, round(max(keep**k, least) * length))
        kept = kept[torch.randperm(len(kept), generator=generator)[:count]].sort().values
        anchors.append(kept)
        depths.append(torch.full_like(kept, k))
    nothing = torch.empty(0, dtype=torch.long)
    return MaskRows(torch.cat([nothing, *anchors]), torch.cat([nothing, *depths]))


class PardDrafter(DistilledDrafter):
    """A causal language model that also fills masks."""

    is_mutual = False

    def __init__(self, model: LlamaForCausalLM, options: PardOptions) -> None:
        super().__init__(model, options)
        self._options = options
        setattr(model.config, MASK_FIELD, options.mask_token)
        setattr(model.config, DEPTH_FIELD, options.depth)

    def blocks(self, anchors: Tensor) -> MaskRows:
        """All masks of these anchors."""
        further = torch.arange(1, self._options.depth)
        return MaskRows(anchors.repeat(len(further)), further.repeat_interleave(len(anchors)), self.is_mutual)

    def trained_rows(self, length: int, generator: torch.Generator) -> MaskRows:
        """The mask rows of a step."""
        options = self._options
        return dropped_rows(length, options.depth, options.keep, options.keep_least, generator)

    def shown_rows(self, rows: MaskRows, generator: torch.Generator) -> Tensor:  # noqa: ARG002
        """Which of these rows have the text's token instead of the mask, bool `[rows]`; all in the order of depth."""
        return torch.zeros(len(rows.anchors), dtype=torch.bool)

    def trained_text(self, rows: MaskRows, length: int) -> Tensor:  # noqa: ARG002
        """Which rows of the text learn in a step, bool [length]."""
        return torch.ones(length, dtype=torch.bool)

    def step_loss(
        self,
        p_logits: Tensor,
        q_logits: Tensor,
        labels: Tensor,
        mask: Tensor,  # noqa: ARG002
        rows: MaskRows,  # noqa: ARG002
        shown: Tensor | None,  # noqa: ARG002
    ) -> Tensor:
        """The loss of a step over the rows of text and masks where `mask` [texts, rows] is set."""
        return self._loss(p_logits, q_logits, labels).mean()

    def hidden(self, tokens: Tensor, rows: MaskRows, shown: Tensor | None = None) -> Tensor:
        """Final hidden states of the text's rows and the mask rows behind them, `[texts, length + rows, hidden]`."""
        length = tokens.shape[1]
        masks = torch.full((len(tokens), len(rows.anchors)), self._options.mask_token, device=tokens.device)
        if shown is not None and shown.any():
            places = (rows.anchors + rows.depths).clamp(max=length - 1)
            masks = torch.where(shown.to(tokens.device), tokens[:, places], masks)
        visible, positions = rows.visible(length).to(tokens.device), rows.positions(length).to(tokens.device)
        output = self._parts.trunk(
            input_ids=torch.cat((tokens, masks), dim=1),
            attention_mask=visible[None, None].expand(len(tokens), 1, -1, -1),
            position_ids=positions.expand(len(tokens), -1),
            use_cache=False,
        )
        return output.last_hidden_state

    def loss(self, batch: TargetBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """The divergence at rows of text and at mask rows whose next token is a label."""
        length, options = batch.tokens.shape[1], self._options
        shown: Tensor | None = None
        if self.training:
            rows = self.trained_rows(length, generator)
            shown = self.shown_rows(rows, generator)
        else:
            anchors = torch.linspace(0, length - 1 - options.depth, EVALUATED_ANCHORS).long().unique()
            rows = self.blocks(anchors)
        labelled = rows.positions(length) + 1  # the token that a row predicts
        inside = labelled < length
        labelled = labelled.clamp(max=length - 1)
        if shown is not None and shown.any():  # whole blocks: the row that has a row's label is of the next depth
            num_anchors = int((rows.depths == 1).sum())
            of_text, of_last = torch.zeros(length, dtype=torch.bool), torch.zeros(num_anchors, dtype=torch.bool)
            inside &= ~torch.cat((of_text, shown[num_anchors:], of_last))
        if self.training:
            inside[:length] &= self.trained_text(rows, length)
        mask = batch.loss_mask[:, labelled] & inside.to(batch.loss_mask.device)
        q_hidden, p_hidden = self.hidden(batch.tokens, rows, shown), batch.taps[FINAL][:, labelled - 1]
        labels = batch.tokens[:, labelled]
        if self.training:
            p_logits, q_logits = batch.head(p_hidden[mask]), self._parts.head(q_hidden[mask])
            return self.step_loss(p_logits, q_logits, labels[mask], mask, rows, shown), {}
        p_logits, q_logits = batch.head(p_hidden), self._parts.head(q_hidden)
        rates = acceptance(p_logits, q_logits, batch.temperature)
        first = anchors.to(rates.device)
        chains, valid = (
            torch.stack((each[:, first], *each[:, length:].unflatten(1, (options.depth - 1, -1)).unbind(1)), dim=-1)
            for each in (rates, mask)
        )
        loss = masked_mean(self._loss(p_logits, q_logits, labels), mask)
        return loss, depth_metrics(chains.flatten(0, 1), valid.flatten(0, 1))


def build(options: PardOptions, target: TargetShape) -> PardDrafter:
    """The draft model to go on with. ValueError, one line, for a checkpoint that cannot be one."""
    return PardDrafter(start_model(options, target), options)
