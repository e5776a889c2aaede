"""P-EAGLE (arXiv 2602.01469): draft layers that give the logits of several depths in one pass.

Behind the row of the newest token stand mask rows, one for each further depth: a learned vector in place of the
target's features and another in place of the token. They see the text, that row and each other like a chain of draft
tokens, and are not kept; draft tokens have no rows, only the logits of their depth, as those of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel.kv.pass_plan import Span
from parallel.kv.pool import SeqId
from parallel.model.layers.attention import PassPlan
from parallel.speculators.depths import DepthNode, LaterRowsRunner
from parallel.speculators.eagle.config import DraftLayerConfig
from parallel.speculators.eagle.layers import DraftLayers


class ParallelEagleRunner(LaterRowsRunner):
    """A row reads a token and the features before it."""

    speculator: DraftLayerConfig
    layers: DraftLayers

    @property
    def longest_draft(self) -> int:
        return self.speculator.num_depths

    @property
    def rows_beside(self) -> int:
        return self.speculator.num_depths

    def _start(self, spans: Sequence[Span], token_ids: Tensor) -> dict[SeqId, DepthNode]:
        """Write the rows of the text, and behind each root those of the masks, which are given back."""
        config, fed, features, tokens = self.speculator, list[Span](), list[Tensor](), list[Tensor]()
        num_masks, first = config.num_depths - 1, 0
        mask = token_ids.new_full((num_masks,), config.mask_token_id or 0)
        masked: list[int] = []
        num_rows = 0
        for span in spans:
            row = self.pool.cached_len(span.seq_id)
            num_text = span.num_text
            features.append(self.layers.fused(self._known_rows(span.seq_id, row, num_text)))
            tokens.append(token_ids[first : first + num_text])
            num_rows += num_text
            if span.num_logits:
                masked += range(num_rows, num_rows + num_masks)
                features.append(self.layers.mask_features(num_masks))
                tokens.append(mask)
                num_rows += num_masks
            rows = num_text + (num_masks if span.num_logits else 0)
            fed.append(Span(span.seq_id, rows, num_logits=config.num_depths if span.num_logits else 0))
            first += span.num_tokens
        embedding = self.layers.embed(torch.cat(tokens), self.decoder, masked)

        def run(plan: PassPlan) -> Tensor:
            normed, _ = self._passes.compute(self.layers.rows, plan, (embedding, torch.cat(features)))
            return self.layers.head(plan.asked(normed), self.decoder) if masked else normed[:0]

        return self._run_text(spans, fed, run)
