"""CUDA graphs of whole passes: the host launches one graph where it would launch hundreds of kernels.

A pass of the "padded" backend is told by a handful of small tensors; passes whose tensors have the same shapes share
a graph, captured at their first occurrence over buffers of its own and replayed after copying the tensors in. The
eager twin has the same call: it is the decoder itself. Knows nothing of sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parallel.kv.pass_plan import Plan
from parallel.model.decoder import Decoder
from parallel.model.layers.padded import PaddedPlan


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    token_ids: Tensor
    inputs: list[Tensor]
    hidden: Tensor
    features: tuple[Tensor, ...]


class CapturedPasses:
    """Stands in for a decoder on CUDA. Passes without bucketed shapes (prefill chunks) run eagerly."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._captured: dict[tuple[object, ...], _Captured] = {}
        self._generation = decoder.group.generation
        self._memory = torch.cuda.graph_pool_handle()

    def forward(self, token_ids: Tensor, plan: Plan, taps: Sequence[int] = ()) -> tuple[Tensor, tuple[Tensor, ...]]:
        attention = plan.attention
        assert isinstance(attention, PaddedPlan), "only padded passes can be captured"
        if not attention.bucketed:
            return self._decoder.forward(token_ids, plan, taps)
        inputs = attention.tensors()
        key = (plan.fuzzy, *taps, *(tensor.shape for tensor in inputs))
        if self._generation != self._decoder.group.generation:
            self._captured.clear()
            self._generation = self._decoder.group.generation
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._capture(token_ids, plan, taps)
        captured.token_ids.copy_(token_ids)
        torch._foreach_copy_(captured.inputs, inputs)
        captured.graph.replay()
        # the graph's own outputs are overwritten by its next replay
        return captured.hidden.clone(), tuple(feature.clone() for feature in captured.features)

    def _capture(self, token_ids: Tensor, plan: Plan, taps: Sequence[int]) -> _Captured:
        attention = plan.attention.like()
        static = replace(plan, positions=attention.positions, attention=attention)
        token_ids = token_ids.clone()
        # a pass outside the graph first: libraries allocate workspaces at their first call. It writes the rows that
        # the replay then writes again.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._decoder.forward(token_ids, static, taps)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            hidden, features = self._decoder.forward(token_ids, static, taps)
        return _Captured(graph, token_ids, attention.tensors(), hidden, features)
