"""Speculative Streaming (arXiv 2402.11131, lossless): one pass of the target verifies a tree and emits the next drafts.

Layers below the streams run for the nodes alone. There every row with logits begins streams, which hang behind it as a
chain of rows: stream j sees what its node sees, the node, and streams 1 to j. In the layers above, nodes and streams
share each product. The streams' final hidden states are features of their nodes; their KV rows live for the pass. With
mask embeddings in front of the first layer these are the appended masks of arXiv 2507.11851. Knows no drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.kv.pass_plan import PendingRows, Span, SpanRows, lay_out, logit_rows
from parallel.model.layer_plan import LayerPlan
from parallel.model.layers.attention import PassPlan
from parallel.runtime.runner import ModelRunner, PassOutput
from parallel.speculators.config import STREAMS
from parallel.speculators.stream_layers import StreamLayers


@dataclass(frozen=True, slots=True)
class _Grown:
    """A pass's rows with streams behind those of some nodes: `nodes` of the pass have them."""

    plan: PassPlan
    base: Tensor
    """Where the pass's own rows are, int64 [T]."""
    streams: Tensor
    """Where those of the streams are, int64 [nodes * streams]."""
    nodes: Tensor
    """Rows of the pass that have streams, int64 [n]."""


class StreamingRunner(ModelRunner):
    """The target's runner with streams where its features are asked for. Sequences for whose streams the pool has no
    free rows go without, so that their features are zeros: a poor draft, never a wrong token."""

    def __init__(self, target: ModelRunner, layers: StreamLayers, *, backend: str | None = None) -> None:
        super().__init__(target.decoder, target.pool, backend=backend, graphs=False)
        self.layers = layers

    @torch.inference_mode()
    def forward(
        self, spans: Sequence[Span], token_ids: Tensor | Sequence[int], taps: Sequence[int] = (), *, fuzzy: bool = False
    ) -> PassOutput:
        if not taps:
            return super().forward(spans, token_ids, fuzzy=fuzzy)
        assert tuple(taps) == (STREAMS,), "a drafter of streams reads nothing else"
        assert self.pool.can_reserve(sum(span.num_tokens for span in spans)), "call can_reserve before planning"
        if not isinstance(token_ids, Tensor):
            token_ids = torch.tensor(token_ids, dtype=torch.int64)
        laid_out = lay_out(self.pool, self._pending, spans)
        plan = self._backend.plan(laid_out, logit_rows(spans))
        grown = self._grow(spans, laid_out)
        hidden, streams = self._run(plan, grown, token_ids.to(self.decoder.device, non_blocking=True))
        for span in spans:
            self.pool.commit(span.seq_id, (), range(len(self._pending[span.seq_id].parents)))
        read = hidden if plan.logit_rows is None else hidden.index_select(0, plan.logit_rows)
        logits = self.decoder.head(read).float()
        features = hidden.new_zeros(len(hidden), self.layers.config.feature_size)
        if grown is not None:
            features.index_copy_(0, grown.nodes, streams)
        return PassOutput(logits, hidden, (features,))

    def _grow(self, spans: Sequence[Span], laid_out: Sequence[SpanRows]) -> _Grown | None:
        """Reserve the rows of the streams and plan a pass over all rows; None if there are no streams."""
        count, first = self.layers.config.num_heads, 0
        rows: list[SpanRows] = []
        base: list[int] = []
        streams: list[int] = []
        nodes: list[int] = []
        for span, own in zip(spans, laid_out, strict=True):
            size = own.num_rows
            num_nodes = span.num_logits if self.pool.can_reserve(span.num_logits * count) else 0
            forest, parents = own.pending, list(own.pending.parents)
            if num_nodes:
                self.pool.reserve(span.seq_id, num_nodes * count)
                for node in range(own.num_pending - num_nodes, own.num_pending):
                    parents += [node, *range(len(parents), len(parents) + count - 1)]
                forest = PendingRows()
                forest.append(len(parents), parents)
            total = size + num_nodes * count
            slots, run = self.pool.slots(span.seq_id), self.pool.run(span.seq_id)
            rows.append(SpanRows(span.seq_id, first, total, own.context, len(parents), slots, run, forest))
            base += range(first, first + size)
            streams += range(first + size, first + total)
            nodes += range(own.first + size - num_nodes, own.first + size)
            first += total
        if not nodes:
            return None
        device = self.decoder.device
        places = (torch.tensor(each, device=device) for each in (base, streams, nodes))
        return _Grown(self._backend.plan(rows, list(range(first))), *places)

    def _run(self, plan: PassPlan, grown: _Grown | None, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Final hidden states of the pass's rows [T, H] and of the streams, [nodes, streams * H]."""
        decoder, config = self.decoder, self.layers.config
        positions = plan.positions[: plan.num_rows]
        assert len(positions) == len(plan.positions), "passes that are not captured are not padded"
        end = decoder.config.num_layers - decoder.config.stretch
        stop = end if grown is None else config.layers[0]
        hidden, _ = decoder.run_layers(decoder.embed(token_ids, positions), plan, LayerPlan.prefix(stop))
        streams = hidden.new_empty(0)
        if grown is not None:
            begun = self.layers.begin(hidden.index_select(0, grown.nodes)).flatten(0, 1)
            rows = hidden.new_empty(len(hidden) + len(begun), hidden.shape[1])
            rows.index_copy_(0, grown.base, hidden).index_copy_(0, grown.streams, begun)
            rows = self.layers.run(rows, grown.plan, grown.streams)
            hidden = rows.index_select(0, grown.base)
            streams = decoder.normalize(rows.index_select(0, grown.streams)).view(len(grown.nodes), -1)
        if decoder.config.stretch:
            hidden, _ = decoder.run_layers(hidden, plan, LayerPlan.span(end, decoder.config.num_layers))
        return decoder.normalize(hidden), streams
