"""Speculative Streaming (arXiv 2402.11131, lossless): one pass of the target verifies a tree and emits the next drafts.

Layers below the streams run for the nodes alone. There every row with logits begins streams, which hang behind it as a
chain of rows: stream j sees what its node sees, the node, and streams 1 to j. In the layers above, nodes and streams
share each product. The streams' final hidden states are features of their nodes; their KV rows live for the pass. With
mask embeddings in front of the first layer these are the appended masks of arXiv 2507.11851. Knows no drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from parallel.kv.pass_plan import PendingRows, Span, SpanRows, logit_rows
from parallel.model.layer_plan import LayerPlan
from parallel.model.layers.attention import PassPlan
from parallel.model.layers.backends import default_backend, make_backend
from parallel.runtime.borrowed_passes import BorrowedPasses
from parallel.runtime.decoder_runner import DecoderRunner
from parallel.runtime.graph_list import GraphList
from parallel.runtime.interface import PassOutput, StepChoice
from parallel.speculators.config import STREAMS
from parallel.speculators.streams.layers import StreamLayers
from parallel.transfers import to_device, upload


@dataclass(frozen=True, slots=True)
class _Grown:
    """The upper part of a pass: the rows that go on, with streams behind those of them that are `nodes`."""

    plan: PassPlan
    kept: Tensor
    """Rows of the pass that go on, int64 [k], and where they are in the plan."""
    base: Tensor
    streams: Tensor
    """Where those of the streams are, int64 [nodes * streams]."""
    nodes: Tensor
    """Rows of the pass that have streams, int64 [n]."""


class StreamingRunner(BorrowedPasses):
    """The target's runner with streams where its features are asked for. Spans without streams, and sequences for whose
    streams the pool has no free rows, have zeros as features: a poor draft, never a wrong token. A pass in which no
    span has streams is the target's own.

    Nodes whose token has a probability below `prune_below` by the early logits of its parent end below the streams'
    layers, and with them what hangs on them: they have no logits, and the verifier must take them as rejected.
    """

    def __init__(
        self, target: DecoderRunner, layers: StreamLayers, *, prune_below: float = 0.0, backend: str | None = None
    ) -> None:
        super().__init__(target, target.sequences)
        if backend is None:  # on CUDA plans that take the slots which they are given, not all of a sequence
            backend = "padded" if target.decoder.device.type == "cuda" else default_backend(self.pool)
        self._backend = make_backend(backend, self.pool, self.decoder.attention_shape(), self.decoder)
        self.layers = layers
        self._prune_below = prune_below

    @torch.inference_mode()
    def forward(
        self, spans: Sequence[Span], token_ids: Tensor | Sequence[int], taps: Sequence[int] = (), *, fuzzy: bool = False
    ) -> PassOutput:
        if not taps or not any(span.has_streams and span.num_logits for span in spans):
            output = self.target.forward(spans, token_ids, fuzzy=fuzzy)
            nothing = output.hidden.new_zeros(1, 1).expand(len(output.hidden), self.layers.config.feature_size)
            return replace(output, features=(nothing,) * len(taps))
        assert tuple(taps) == (STREAMS,), "a drafter of streams reads nothing else"
        token_ids = upload(token_ids, self.decoder.device)
        decoder, wanted = self.decoder, logit_rows(spans)
        laid_out = self.sequences.lay_out(spans)
        plan = self._backend.plan(laid_out, wanted)
        assert len(plan.positions) == plan.num_rows, "passes that are not captured are not padded"
        hidden = decoder.embed(token_ids, plan.positions)
        hidden, _ = decoder.run_layers(hidden, plan, LayerPlan.prefix(self.layers.config.layers[0]))
        pruned = self._pruned(spans, laid_out, hidden, token_ids)
        hidden, features = self._finish(hidden, plan, self._grow(spans, laid_out, pruned))
        for span in spans:
            self.pool.commit(span.seq_id, (), range(len(self.sequences.pending[span.seq_id].parents)))
        read = plan.asked(hidden)
        places = frozenset(place for place, row in enumerate(wanted) if row in pruned) if pruned else frozenset[int]()
        return PassOutput(decoder.head(read).float(), hidden, (features,), pruned=places)

    def capture(
        self,
        graphs: GraphList,
        taps: Sequence[int] = (),  # noqa: ARG002
        choices: Callable[[int, int], StepChoice] | None = None,
    ) -> GraphList:
        """Passes without streams."""
        return self.target.capture(graphs, (), choices)

    def _pruned(
        self, spans: Sequence[Span], laid_out: Sequence[SpanRows], hidden: Tensor, token_ids: Tensor
    ) -> set[int]:
        """Rows of the pass that end here: unlikely nodes and what hangs on them."""
        edges = [
            (own.first + own.pending.parents[own.first_pending + i] - own.first_pending, own.first + i)
            for span, own in zip(spans, laid_out, strict=True)
            for i in range(own.num_rows - span.num_logits + 1, own.num_rows)
        ]
        if not (edges and self._prune_below):
            return set()
        above, below = upload(np.array(edges).T, hidden.device)
        early, head = self.layers.early(hidden.index_select(0, above)), self.decoder.lm_head
        gathers, head.gathers = head.gathers, True  # every rank decides, whatever is asked of the pass's own logits
        logits = self.decoder.head(self.decoder.normalize(early))
        head.gathers = gathers
        chances = logits.float().softmax(-1).gather(1, token_ids.index_select(0, below)[:, None])[:, 0].tolist()
        pruned: set[int] = set()
        for (parent, row), chance in zip(edges, chances, strict=True):
            if chance < self._prune_below or parent in pruned:
                pruned.add(row)
        return pruned

    def _grow(self, spans: Sequence[Span], laid_out: Sequence[SpanRows], pruned: set[int]) -> _Grown:
        """Reserve the rows of the streams and plan a pass over all rows that go on."""
        count, first = self.layers.config.num_heads, 0
        rows: list[SpanRows] = []
        places: tuple[list[int], ...] = [], [], [], []
        kept, base, streams, nodes = places
        for span, own in zip(spans, laid_out, strict=True):
            inside = [i for i in range(own.num_rows) if own.first + i not in pruned]
            speaking = [i for i in inside if span.has_streams and i >= own.num_rows - span.num_logits]
            if not self.pool.can_reserve(len(speaking) * count):
                speaking = []
            self.pool.reserve(span.seq_id, len(speaking) * count)
            parents, place = list(own.pending.parents[: own.first_pending]), {-1: -1}
            place |= {row: row for row in range(own.first_pending)}
            for i in inside:
                place[own.first_pending + i] = len(parents)
                parents.append(place[own.pending.parents[own.first_pending + i]])
            for i in speaking:
                parents += [place[own.first_pending + i], *range(len(parents), len(parents) + count - 1)]
            forest = PendingRows()
            forest.append(len(parents), parents)
            slots, run = self.pool.slots(span.seq_id), self.pool.run(span.seq_id)
            if len(inside) < own.num_rows:
                leaving = own.context + own.first_pending + np.setdiff1d(np.arange(own.num_rows), inside)
                slots, run = np.delete(slots, leaving), None
            total = len(inside) + len(speaking) * count
            rows.append(SpanRows(span.seq_id, first, total, own.context, len(parents), slots, run, forest))
            kept += [own.first + i for i in inside]
            base += range(first, first + len(inside))
            streams += range(first + len(inside), first + total)
            nodes += [own.first + i for i in speaking]
            first += total
        plan = self._backend.plan(rows, list(range(first)))
        return _Grown(plan, *to_device([np.array(each, dtype=np.int64) for each in places], self.decoder.device))

    def _finish(self, hidden: Tensor, plan: PassPlan, grown: _Grown) -> tuple[Tensor, Tensor]:
        """The layers of the streams: final hidden states of the pass's rows [T, H], zero where they were pruned, and
        the features of each, [T, streams * H]."""
        decoder, count = self.decoder, len(hidden)
        begun = self.layers.begin(hidden.index_select(0, grown.nodes)).flatten(0, 1)
        rows = hidden.new_empty(len(grown.kept) + len(begun), hidden.shape[1])
        rows.index_copy_(0, grown.base, hidden.index_select(0, grown.kept)).index_copy_(0, grown.streams, begun)
        rows = self.layers.run(rows, grown.plan, grown.streams)
        streams = decoder.normalize(rows.index_select(0, grown.streams))
        hidden = rows.index_select(0, grown.base)
        if len(grown.kept) < count:
            hidden = hidden.new_zeros(count, hidden.shape[1]).index_copy_(0, grown.kept, hidden)
        if stretch := decoder.config.stretch:
            num_layers = decoder.config.num_layers
            hidden, _ = decoder.run_layers(hidden, plan, LayerPlan.span(num_layers - stretch, num_layers))
        features = hidden.new_zeros(count, self.layers.config.feature_size)
        if len(streams):
            features.index_copy_(0, grown.nodes, streams.view(len(grown.nodes), -1))
        return decoder.normalize(hidden), features
