"""SpecDiff: a masked-diffusion draft model that fills a block behind the text in a few steps (arXiv 2408.05636).

As PARD's masks, but those of a block see each other, and in training some of a block's tokens are shown, another share
in each block, so that a later step can build on what earlier ones filled in. A row is trained where its token is not
shown. The paper's model reads the whole context again in each step; here rows of text see nothing behind them, so that
they are kept, and a step costs the rows of the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from cluster.tools.training.speculators.distill import start_model
from cluster.tools.training.speculators.pard import MaskRows, PardDrafter, PardOptions
from parallel.ranges import Range
from parallel.speculators.pard import MUTUAL_FIELD, STEPS_FIELD
from parallel.training.interface import TargetShape
from parallel.training.losses import total_variation


@dataclass(frozen=True, slots=True)
class SpecdiffOptions(PardOptions):
    """Options of `job.recipe=specdiff`: those of pard, of which `keep` is the share of a text's places that a block
    begins at, at least `keep_least`, and these."""

    keep: Annotated[float, Range(above=0, high=1)] = 0.25
    """Share of a text's places behind which a block is trained."""
    keep_least: Annotated[float, Range(0, 1)] = 0.0
    """The same, at least."""
    steps: Annotated[int, Range(1, cap=64)] = 2
    """Passes of a draft, which its checkpoint names; `drafter.mask_steps` chooses others."""
    streak: Annotated[float, Range(0, zero="off")] = 0.0
    """Weight of the loss of accepted streaks (SpecDiff-2): the share of a draft that is expected to be rejected."""


class SpecdiffDrafter(PardDrafter):
    """A causal language model that also fills blocks in steps."""

    is_mutual = True

    def __init__(self, model: LlamaForCausalLM, options: SpecdiffOptions) -> None:
        super().__init__(model, options)
        self._streak = options.streak
        setattr(model.config, MUTUAL_FIELD, True)
        setattr(model.config, STEPS_FIELD, options.steps)

    def trained_rows(self, length: int, generator: torch.Generator) -> MaskRows:
        """Whole blocks, behind some places of the text."""
        options = self._options
        places = max(1, length - options.depth)
        count = min(places, max(1, round(max(options.keep, options.keep_least) * length)))
        return self.blocks(torch.randperm(places, generator=generator)[:count].sort().values)

    def shown_rows(self, rows: MaskRows, generator: torch.Generator) -> Tensor:
        """Each block shows a share of its own, between none and all."""
        count = len(rows.anchors) // max(1, self._options.depth - 1)
        shares = torch.rand(count, generator=generator).repeat(self._options.depth - 1)
        return torch.rand(len(rows.anchors), generator=generator) < shares

    def trained_text(self, rows: MaskRows, length: int) -> Tensor:
        """Those that blocks begin behind: the output layer is most of the work."""
        return torch.zeros(length, dtype=torch.bool).index_fill(0, rows.anchors, value=True)

    def step_loss(
        self, p_logits: Tensor, q_logits: Tensor, labels: Tensor, mask: Tensor, rows: MaskRows, shown: Tensor | None
    ) -> Tensor:
        loss, weight = super().step_loss(p_logits, q_logits, labels, mask, rows, shown), self._streak
        return loss + weight * self.rejected_share(p_logits, q_logits, mask, rows, shown) if weight else loss

    def rejected_share(
        self, p_logits: Tensor, q_logits: Tensor, mask: Tensor, rows: MaskRows, shown: Tensor | None
    ) -> Tensor:
        """The share of a draft that is expected to be rejected: 1 - sum over k of the product of the acceptances
        sum(min(p, q)) up to depth k, divided by the depths. Tokens that are shown count as accepted, but for the first,
        which a row of text predicts; those that are no labels as rejected (SpecDiff-2, arXiv 2511.00606)."""
        depth = self._options.depth
        length = mask.shape[1] - len(rows.anchors)
        first = rows.anchors[: len(rows.anchors) // max(1, depth - 1)]  # of the blocks
        rates = torch.zeros(mask.shape, device=mask.device).masked_scatter(
            mask, 1 - total_variation(p_logits, q_logits)
        )
        if shown is not None:  # the row that has a row's label is of the next depth
            of_last = torch.zeros(len(first), dtype=torch.bool)
            is_shown = torch.cat((torch.zeros(length, dtype=torch.bool), shown[len(first) :], of_last))
            rates = rates.masked_fill(is_shown.to(mask.device), 1.0)
        chains = torch.stack((rates[:, first], *rates[:, length:].unflatten(1, (depth - 1, -1)).unbind(1)), dim=-1)
        return 1 - chains.cumprod(-1).mean()


def build(options: SpecdiffOptions, target: TargetShape) -> SpecdiffDrafter:
    """The draft model to go on with. ValueError, one line, for a checkpoint that cannot be one."""
    return SpecdiffDrafter(start_model(options, target), options)
