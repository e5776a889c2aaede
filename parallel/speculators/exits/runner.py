"""One trained layer behind an early exit of the target: Kangaroo (arXiv 2404.18911) and EESD (arXiv 2406.03853).

A token passes the target's first layers, then this one, then the target's head. Kangaroo's layer is attention alone,
EESD's a whole one. What the first layers give for a row of text is a feature of the target's own pass; draft rows run
through them, over the target's KV rows, and so are as exact as those of text: the target's next pass takes over what
these layers computed. Only the trained layer has a pool of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor

from parallel.comm.group import SINGLE, Group
from parallel.kv.pass_plan import Span
from parallel.kv.pool import SeqId
from parallel.model.block import MLP, Attention
from parallel.model.layer_plan import LayerPlan
from parallel.model.layers.attention import PassPlan
from parallel.model.layers.norm import RMSNorm
from parallel.model.layers.weight import Shard, TensorOptions
from parallel.self_speculation.runner import SelfDraftRunner
from parallel.speculators.exits.layouts import MLP_NORM, ExitConfig
from parallel.speculators.own_layers import OwnLayers
from parallel.speculators.place import SpeculatorPlace
from parallel.speculators.runner import PooledRunner

_INPUT_NORM = "input_layernorm"


class ExitLayers(OwnLayers):
    def __init__(self, config: ExitConfig, group: Group = SINGLE, **options: Unpack[TensorOptions]) -> None:
        super().__init__(config, group, **options)
        block = config.block
        self.input_norm = RMSNorm(block.hidden_size, block.norm_eps, **options)
        self.attention = Attention(block, 0, group, windowed=False, **options)
        self.mlp_norm = RMSNorm(block.hidden_size, block.norm_eps, **options) if config.has_mlp else None
        self.mlp = MLP(block, group, **options) if config.has_mlp else None
        self.norm = RMSNorm(block.hidden_size, block.norm_eps, **options)

    def forward(self, stream: Tensor, plan: PassPlan) -> Tensor:
        """The target's stream at the exit [T, H] -> what its head reads."""
        plan.attention.prepare()
        stream = stream + self.attention(self.input_norm(stream), self.rope(plan.positions), plan.attention)
        if self.mlp is not None and self.mlp_norm is not None:
            stream = stream + self.mlp(self.mlp_norm(stream))
        return self.norm(stream)

    def shards(self) -> Iterator[Shard]:
        yield from self.input_norm.shards(f"layer.{_INPUT_NORM}")
        yield from self.attention.shards("layer.self_attn")
        if self.mlp is not None and self.mlp_norm is not None:
            yield from self.mlp_norm.shards(f"layer.{MLP_NORM}")
            yield from self.mlp.shards("layer")
        yield from self.norm.shards("norm")


class ExitRunner(PooledRunner):
    """The pool's row r is that of token r. Rows of draft tokens, and of the newest one of the text, stand in the
    target's pool too, from their first pass to the end of the draft."""

    speculator: ExitConfig
    self_draft: SelfDraftRunner  # pyright: ignore[reportIncompatibleVariableOverride]  never None here

    def __init__(
        self, layers: ExitLayers, place: SpeculatorPlace, target: SelfDraftRunner, *, backend: str | None = None
    ) -> None:
        super().__init__(layers, place, backend=backend)
        self.layers = layers
        self.self_draft = target

    def can_reserve(self, num_rows: int) -> bool:
        return super().can_reserve(num_rows) and self.self_draft.can_reserve(num_rows)

    def close(self, seq_id: SeqId) -> None:
        super().close(seq_id)
        self.self_draft.close(seq_id)

    def commit(self, seq_id: SeqId, keep: Sequence[int], retain: Sequence[int] = ()) -> None:
        super().commit(seq_id, keep, retain)
        self.self_draft.close(seq_id)

    def truncate(self, seq_id: SeqId, length: int) -> None:
        super().truncate(seq_id, length)
        self.self_draft.close(seq_id)

    def _read(self, spans: Sequence[Span], token_ids: Tensor, *, fuzzy: bool) -> Tensor:  # noqa: ARG002  all are exact
        plan = self._plan(spans)
        hidden = self.layers.forward(self._streams(spans, token_ids), plan)
        return plan.asked(hidden)

    def _streams(self, spans: Sequence[Span], token_ids: Tensor) -> Tensor:
        """The target's stream at the exit, [T, H]: known for the text before its newest token, computed for others."""
        known: list[Tensor | None] = []
        fed: list[Span] = []
        tokens: list[Tensor] = []
        first = 0
        for span in spans:
            features, num_rows = self._features[span.seq_id], self.pool.cached_len(span.seq_id)
            before = len(self._pending[span.seq_id].parents) - span.num_tokens
            num_text = max(0, features.end - num_rows)  # of the pending rows: the text comes first, in order
            count = min(max(0, num_text - before), span.num_tokens)
            positions = range(num_rows + before, num_rows + before + count)
            known.append(features.rows(positions) if count else None)
            if count < span.num_tokens:
                parents = span.parents and [parent - num_text for parent in span.parents[count:]]
                fed.append(Span(span.seq_id, span.num_tokens - count, parents, 0))
                tokens.append(token_ids[first + count : first + span.num_tokens])
            first += span.num_tokens
        computed = iter(self._compute(fed, torch.cat(tokens))) if fed else iter(())
        parts: list[Tensor] = []
        for span, rows in zip(spans, known, strict=True):
            parts += [] if rows is None else [rows.to(self.pool.keys.dtype)]
            if rows is None or len(rows) < span.num_tokens:
                parts.append(next(computed))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _compute(self, spans: Sequence[Span], token_ids: Tensor) -> Sequence[Tensor]:
        """The streams of these draft rows, by span."""
        (streams,) = self.self_draft.forward(spans, token_ids, (self.speculator.exit_layer,)).features
        return streams.split([span.num_tokens for span in spans])


def open_runner(directory: Path, config: ExitConfig, place: SpeculatorPlace) -> ExitRunner:
    """Load the layer beside the target whose first layers it follows."""
    of_target = place.its_target(directory, config.method)
    target = SelfDraftRunner(of_target, LayerPlan.prefix(config.exit_layer), resumes=True)
    return ExitRunner(ExitLayers.opened(directory, config, place), place, target)
