"""Multi-token prediction of Gloeckle et al. (arXiv 2404.19737): whole layers beside the target's last one.

The target without its last layer is the trunk. Every head is a layer as that one, reads the trunk's output and attends
to its own keys and values of it; behind it stand the target's final norm and head. Head k of a row gives the logits of
the token k places after the one that the target predicts there, so all depths of a draft come from one row of text: a
draft token costs a look-up, and has no row of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor

from parallel.comm.group import SINGLE, Group
from parallel.kv.pass_plan import Span
from parallel.kv.pool import SeqId
from parallel.model.block import Block
from parallel.model.layers.attention import PassPlan
from parallel.model.layers.weight import Shard, TensorOptions
from parallel.speculators.depths import DepthNode, LaterRowsRunner
from parallel.speculators.gloeckle.layouts import GloeckleConfig
from parallel.speculators.own_layers import OwnLayers
from parallel.speculators.place import SpeculatorPlace


class GloeckleLayers(OwnLayers):
    config: GloeckleConfig

    def __init__(self, config: GloeckleConfig, group: Group = SINGLE, **options: Unpack[TensorOptions]) -> None:
        super().__init__(config, group, **options)
        block = config.block
        self.heads = [Block(block, i, i, group, group, **options) for i in range(config.num_drafted)]

    def forward(self, trunk: Tensor, plan: PassPlan) -> Tensor:
        """What the trunk gives, [T, H] -> what every head gives at the rows asked for, [heads, N, H]."""
        plan.attention.prepare()
        rope, wanted, given = self.rope(plan.positions), plan.logit_rows, list[Tensor]()
        for head in self.heads:
            stream, attended = trunk, head.attend(trunk, rope, plan.attention)
            if wanted is not None:
                stream, attended = stream.index_select(0, wanted), attended.index_select(0, wanted)
            given.append(head.finish(stream, attended))
        return torch.stack(given)

    def shards(self) -> Iterator[Shard]:
        block = self.config.block
        turned = [block.names.in_attention(f"{name}.weight") for name in block.names.projections[:2]]
        for i, head in enumerate(self.heads):
            prefix = f"{block.names.blocks}.{i}"
            for shard in head.shards(prefix):
                name = shard.name.removeprefix(f"{prefix}.")
                if self.config.interleaved and name in turned:
                    assert head.attention is not None
                    heads = head.attention.heads
                    count = heads.num_heads if name == turned[0] else heads.num_kv_heads
                    yield replace(shard, picked=_halves(count, block.head_dim))
                else:
                    yield shard


def _halves(num_heads: int, head_dim: int) -> tuple[int, ...]:
    """The rows of interleaved heads, in the order in which the coordinates of a rotation are halves."""
    order = [*range(0, head_dim, 2), *range(1, head_dim, 2)]
    return tuple(head * head_dim + row for head in range(num_heads) for row in order)


class GloeckleRunner(LaterRowsRunner):
    """The row before a token is that of the trunk's output, so the token itself is never read."""

    speculator: GloeckleConfig
    layers: GloeckleLayers

    @property
    def longest_draft(self) -> int:
        return self.speculator.num_drafted

    def _start(self, spans: Sequence[Span], token_ids: Tensor) -> dict[SeqId, DepthNode]:  # noqa: ARG002
        """Write the rows of the text; the newest one of each sequence that asks for logits is read."""
        fed, features = list[Span](), list[Tensor]()
        for span in spans:
            row, num_text = self.pool.cached_len(span.seq_id), span.num_text
            features.append(self._known_rows(span.seq_id, row, num_text))
            fed.append(Span(span.seq_id, num_text, num_logits=min(1, span.num_logits)))

        def run(plan: PassPlan) -> Tensor:
            given = self.layers.forward(torch.cat(features).to(self.pool.dtype), plan)
            read = given.transpose(0, 1).flatten(0, 1)
            return self.decoder.head(self.decoder.normalize(read)) if len(read) else read

        return self._run_text(spans, fed, run)


def open_runner(directory: Path, config: GloeckleConfig, place: SpeculatorPlace) -> GloeckleRunner:
    """Load the heads beside their target."""
    return GloeckleRunner(GloeckleLayers.opened(directory, config, place), place)
