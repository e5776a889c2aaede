"""A runner whose rows stand in a KV pool as they were fed, computed by layers of one decoder.

Others can take part in its passes: they lay rows out, choose the layers or what enters them, and run the plan. So the
target's own layers draft over its rows, and its passes go on where drafts left off. Knows no requests.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel.kv.pass_plan import Span, SpanRows, TableRead, logit_rows
from parallel.kv.pool import SeqId
from parallel.kv.prefix_tree import Text
from parallel.kv.sequences import PooledSequences
from parallel.model.config import DecoderConfig
from parallel.model.decoder import Decoder
from parallel.model.layers.attention import PassPlan, ReadPlan
from parallel.runtime.graph_list import GraphList
from parallel.runtime.interface import PassOutput, Runner, StepChoice
from parallel.transfers import upload

if TYPE_CHECKING:
    from parallel.runtime.row_policies import PartialRows

LONGEST_TEXT = 1 << 62
"""Tokens of a text where rows, and with them positions, are dropped: any number."""


class DecoderRunner(Runner):
    """`sequences` may be those of another runner, whose rows this one then reads and writes."""

    def __init__(self, decoder: Decoder, sequences: PooledSequences) -> None:
        self.decoder = decoder
        self.sequences = sequences
        self.pool = sequences.pool
        self._policy: PartialRows | None = None

    def keep_rows_by(self, policy: PartialRows) -> None:
        """Let a policy decide which rows passes see and which are kept; before any sequence is open."""
        self._policy = self.sequences.policy = policy

    @property
    def config(self) -> DecoderConfig:
        return self.decoder.config

    @property
    def longest_text(self) -> int:
        return LONGEST_TEXT if self.drops_rows else self.config.max_positions

    @property
    def drops_rows(self) -> bool:
        return self._policy is not None and self._policy.drops_rows

    # --- sequences ---------------------------------------------------------------------------------------------------

    def open(self, seq_id: SeqId, text: Text | None = None) -> None:
        """Opens without known rows where a policy drops some: another text needs them all."""
        self.sequences.open(seq_id, None if self.drops_rows else text)

    def close(self, seq_id: SeqId) -> None:
        self.sequences.close(seq_id)
        if self._policy is not None:
            self._policy.forget(seq_id)

    def forget_texts(self) -> None:
        self.pool.forget_texts()

    def cached_len(self, seq_id: SeqId) -> int:
        return self.pool.text_len(seq_id)

    def can_reserve(self, num_rows: int) -> bool:
        return self.pool.can_reserve(num_rows + self.sequences.num_unread)

    def set_source(self, seq_id: SeqId, token_ids: Sequence[int]) -> None:
        if self.config.encoder is not None:
            self.sequences.set_source(seq_id, token_ids)

    def commit(self, seq_id: SeqId, keep: Sequence[int], retain: Sequence[int] = ()) -> None:
        self.sequences.commit(seq_id, keep, retain)

    def truncate(self, seq_id: SeqId, length: int) -> None:
        self.sequences.truncate(seq_id, length)

    # --- passes ------------------------------------------------------------------------------------------------------

    def forward(
        self,
        spans: Sequence[Span],
        token_ids: Tensor | Sequence[int],
        taps: Sequence[int] = (),
        *,
        fuzzy: bool = False,  # noqa: ARG002  of LayerParallelRunner
    ) -> PassOutput:
        """Plan and run; plans may also be built ahead."""
        return self.run(self.plan(spans), token_ids, taps)

    def plan(self, spans: Sequence[Span]) -> PassPlan:
        """Reserve the rows of a pass and build its plan; call `can_reserve` first."""
        plan = self.plan_rows(self.lay_out(spans), logit_rows(spans))
        if self._policy is not None:
            self._policy.watch(plan)
        return plan

    def lay_out(self, spans: Sequence[Span]) -> list[SpanRows]:
        """Reserve the rows of a pass, and before them those of sources that are read first."""
        if self.sequences.unread:
            self._read_sources(spans)
        return self.sequences.lay_out(spans)

    @torch.inference_mode()
    def _read_sources(self, spans: Sequence[Span]) -> None:
        """Encode the sources of these sequences that have no rows yet, each by itself."""
        for span in spans:
            if span.seq_id in self.sequences.unread:
                token_ids, slots = self.sequences.reserve_source(span.seq_id)
                device = self.decoder.device
                self.decoder.write_source(upload(token_ids, device), self.pool, upload(slots, device))

    @abstractmethod
    def plan_rows(self, rows: Sequence[SpanRows], wanted: list[int]) -> PassPlan:
        """The plan of a pass over rows that are laid out; the head reads those `wanted`."""
        ...

    @abstractmethod
    def plan_reads(self, reads: Sequence[TableRead]) -> ReadPlan:
        """The plan of queries over rows of its pool, which writes nothing."""
        ...

    @abstractmethod
    def run(self, plan: PassPlan, token_ids: Tensor | Sequence[int], taps: Sequence[int] = ()) -> PassOutput:
        """Run a plan on its rows' tokens, [T]; the host does not wait for a tensor that is on the device."""
        ...

    @property
    def captures(self) -> bool:
        """Whether passes are captured as CUDA graphs."""
        return False

    def capture(
        self,
        graphs: GraphList,  # noqa: ARG002  of runners that capture
        taps: Sequence[int] = (),  # noqa: ARG002
        choices: Callable[[int, int], StepChoice] | None = None,  # noqa: ARG002
    ) -> GraphList:
        """Capture these passes and chains, which no sequence may be open for; those that gave a graph of their own.
        `choices(sequences, steps)` chooses the tokens of a chain.

        With several ranks all do so, in the same order. Empty where passes are not captured; shapes that the pool
        cannot hold are left out.
        """
        return GraphList()
