"""P-EAGLE (arXiv 2602.01469): draft layers that give the logits of several depths in one pass.

Behind the row of the newest token stand mask rows, one for each further depth: a learned vector in place of the
target's features and another in place of the token. They see the text, that row and each other like a chain of draft
tokens, and are not kept; draft tokens have no rows, only the logits of their depth, as those of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel.kv.pass_plan import PendingRows, Span, lay_out, logit_rows
from parallel.kv.pool import SeqId
from parallel.kv.prefix_tree import Text
from parallel.model.config import DecoderConfig
from parallel.speculators.block.runner import BlockNode, BlockPass, BlockRunner
from parallel.speculators.eagle.config import DraftLayerConfig
from parallel.speculators.eagle.layers import DraftLayers


class ParallelEagleRunner(BlockRunner):
    """The pool's row r is that of token r + 1 of the text."""

    speculator: DraftLayerConfig
    layers: DraftLayers

    def _rows_of(self) -> DecoderConfig:
        return self.speculator.block

    def open(self, seq_id: SeqId, text: Text | None = None) -> None:  # noqa: ARG002
        super().open(seq_id)
        self._sequences[seq_id].length = 1  # token 0, which has no row

    def cached_len(self, seq_id: SeqId) -> int:
        """Accepted draft tokens have no row and are fed again as text."""
        return self.pool.cached_len(seq_id) + 1

    def truncate(self, seq_id: SeqId, length: int) -> None:
        sequence = self._sequences[seq_id]
        sequence.length, sequence.last, sequence.nodes = max(1, length), None, []
        if length - 1 < self.pool.cached_len(seq_id):
            self.pool.truncate(seq_id, max(0, length - 1))

    def drop_fuzzy(self, seq_id: SeqId) -> bool:
        self._features[seq_id].forget(self.pool.cached_len(seq_id) - 1)
        sequence, known = self._sequences[seq_id], self.cached_len(seq_id)
        if sequence.length <= known:
            return False
        sequence.length, sequence.last, sequence.nodes = known, None, []
        return True

    def _start_blocks(self, spans: Sequence[Span], token_ids: Tensor) -> dict[SeqId, BlockNode]:
        """Write the rows of the text, and behind each root those of the masks, which are given back."""
        config, fed, features, tokens = self.speculator, list[Span](), list[Tensor](), list[Tensor]()
        num_masks, first = config.num_depths - 1, 0
        mask = token_ids.new_full((num_masks,), config.mask_token_id or 0)
        masked: list[int] = []
        num_rows = 0
        for span in spans:
            row = self.pool.cached_len(span.seq_id)
            num_text = span.num_tokens - max(0, span.num_logits - 1)
            known = self._features[span.seq_id]
            assert row + num_text <= known.end, f"token {row + num_text} was fed, features end at {known.end}"
            features.append(self.layers.fused(known.rows(range(row, row + num_text))))
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
        forests = {span.seq_id: PendingRows() for span in fed}
        plan = self._backend.plan(lay_out(self.pool, forests, fed), logit_rows(fed))
        embedding = self.layers.embed(torch.cat(tokens), self.decoder, masked)
        normed, _ = self.layers.forward(embedding, torch.cat(features), plan)
        for span, one in zip(spans, fed, strict=True):
            self.pool.commit(one.seq_id, range(span.num_tokens - max(0, span.num_logits - 1)))
        started = [span.seq_id for span in spans if span.num_logits]
        if not started:
            return {}
        normed = normed if plan.logit_rows is None else normed.index_select(0, plan.logit_rows)
        blocks = BlockPass((self.layers.head(normed, self.decoder).float(),))
        return {seq_id: BlockNode(blocks, i * config.num_depths, 0) for i, seq_id in enumerate(started)}
