"""CUDA graphs of whole passes: the host launches one graph instead of hundreds of kernels.

A few small tensors describe a pass of the "padded" backend. Passes whose tensors have the same shapes share a graph:
it is captured at the first of them over its own buffers, and replayed after copying the tensors in. `forward` is that
of the decoder. Knows no sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parallel.model.decoder import Decoder
from parallel.model.layers.attention import PassPlan
from parallel.model.layers.padded import PaddedPlan


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    token_ids: Tensor
    inputs: list[Tensor]
    hidden: Tensor
    features: tuple[Tensor, ...]


class CapturedPasses:
    """Runs a decoder's passes on CUDA. Passes without bucketed shapes (prefill chunks) run eagerly."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._captured: dict[tuple[object, ...], _Captured] = {}
        self._generation = decoder.group.generation
        self._memory = torch.cuda.graph_pool_handle()

    def forward(self, token_ids: Tensor, plan: PassPlan, taps: Sequence[int] = ()) -> tuple[Tensor, tuple[Tensor, ...]]:
        attention = _padded(plan)
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
        torch._foreach_copy_(captured.inputs, inputs)  # pyright: ignore[reportPrivateImportUsage]
        captured.graph.replay()
        # the graph's own outputs are overwritten by its next replay
        return captured.hidden.clone(), tuple(feature.clone() for feature in captured.features)

    def _capture(self, token_ids: Tensor, plan: PassPlan, taps: Sequence[int]) -> _Captured:
        attention = _padded(plan).like()
        static = replace(plan, positions=attention.positions, attention=attention)
        token_ids = token_ids.clone()
        # run the pass eagerly first, because libraries allocate workspaces at their first call; the replay writes the
        # same KV rows again
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._decoder.forward(token_ids, static, taps)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            hidden, features = self._decoder.forward(token_ids, static, taps)
        return _Captured(graph, token_ids, attention.tensors(), hidden, features)


def _padded(plan: PassPlan) -> PaddedPlan:
    assert isinstance(plan.attention, PaddedPlan), "only padded passes can be captured"
    return plan.attention
