"""A runner that shares the decoder of another one, which plans and runs its passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from parallel.kv.pass_plan import SpanRows, TableRead
from parallel.kv.sequences import PooledSequences
from parallel.model.layers.attention import PassPlan, ReadPlan
from parallel.runtime.decoder_runner import DecoderRunner
from parallel.runtime.graph_list import GraphList
from parallel.runtime.interface import PassOutput, StepChoice


class BorrowedPasses(DecoderRunner):
    """Over `sequences` of its own, or the `target`'s."""

    def __init__(self, target: DecoderRunner, sequences: PooledSequences) -> None:
        super().__init__(target.decoder, sequences)
        self.target = target

    def plan_rows(self, rows: Sequence[SpanRows], wanted: list[int]) -> PassPlan:
        return self.target.plan_rows(rows, wanted)

    def plan_reads(self, reads: Sequence[TableRead]) -> ReadPlan:
        return self.target.plan_reads(reads)

    def run(self, plan: PassPlan, token_ids: Tensor | Sequence[int], taps: Sequence[int] = ()) -> PassOutput:
        return self.target.run(plan, token_ids, taps)

    @property
    def captures(self) -> bool:
        return self.target.captures

    def capture(
        self, graphs: GraphList, taps: Sequence[int] = (), choices: Callable[[int, int], StepChoice] | None = None
    ) -> GraphList:
        return self.target.capture(graphs, taps, choices)

    def run_eagerly(self) -> None:
        self.target.run_eagerly()
