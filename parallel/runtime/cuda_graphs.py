"""CUDA graphs of whole passes: the host launches one graph instead of hundreds of kernels.

A few small tensors describe a pass of a backend that rounds passes up to buckets. Passes whose tensors have the same
shapes share a graph: it is captured at the first of them over its own buffers, and replayed after copying the tensors
in. `forward` is that of the decoder. Knows no sequences.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self, cast

import torch
from torch import Tensor

from parallel.comm.group import PeerLost
from parallel.model.decoder import Decoder
from parallel.model.layers.attention import PassPlan

MOST_GRAPHS = 256
"""Graphs that are kept; the one that was used longest ago goes first. Each takes some MiB of the device."""
_capturing: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
"""By device: a capture begins by waiting for the whole device, an error while another thread captures there."""


class BucketedPlan(Protocol):
    """The attention of a pass that can be captured."""

    bucketed: bool
    """Whether its shapes are among few; passes of long spans are not, and run eagerly."""
    positions: Tensor

    def tensors(self) -> list[Tensor]:
        """Everything in which passes of the same shapes differ, the positions included."""
        ...

    def key(self) -> tuple[object, ...]:
        """What passes share that are the same graph."""
        ...

    def like(self) -> Self:
        """The same pass over tensors of its own."""
        ...


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    token_ids: Tensor
    inputs: list[Tensor]
    hidden: Tensor
    features: tuple[Tensor, ...]


class CapturedPasses:
    """Runs a decoder's passes on CUDA. Passes without bucketed shapes (prefill chunks) run eagerly.

    The graphs go with the connections of the group whose collectives they captured (`Group.hold`).
    """

    def __init__(self, decoder: Decoder, most: int = MOST_GRAPHS) -> None:
        self._decoder = decoder
        self._most = most
        self._captured: OrderedDict[tuple[object, ...], _Captured] = OrderedDict()
        self._generation = decoder.group.generation
        self._memory = torch.cuda.graph_pool_handle()
        decoder.group.hold(self)

    def __len__(self) -> int:
        return len(self._captured)

    def forward(self, token_ids: Tensor, plan: PassPlan, taps: Sequence[int] = ()) -> tuple[Tensor, tuple[Tensor, ...]]:
        attention = cast(BucketedPlan, plan.attention)
        if not attention.bucketed:
            return self._decoder.forward(token_ids, plan, taps)
        group = self._decoder.group
        group.check()  # a replay calls no collective that would
        if self._generation != group.generation:
            self.drop()
            self._generation = group.generation
        entering = _entering(plan)
        inputs = [*attention.tensors(), *entering]
        key = (plan.fuzzy, plan.layers, *taps, *attention.key(), *(tensor.shape for tensor in entering))
        captured = self._captured.get(key)
        if captured is None:
            if len(self._captured) >= self._most:
                _, oldest = self._captured.popitem(last=False)
                oldest.graph.reset()
            captured = self._captured[key] = self._capture(token_ids, plan, taps)
            self._drop_if_closed()
        self._captured.move_to_end(key)
        captured.token_ids.copy_(token_ids)
        torch._foreach_copy_(captured.inputs, inputs)  # pyright: ignore[reportPrivateImportUsage]
        captured.graph.replay()
        # the graph's own outputs are overwritten by its next replay
        return captured.hidden.clone(), tuple(feature.clone() for feature in captured.features)

    def drop(self) -> None:
        """Destroy all graphs. A thread that is about to replay one gets RuntimeError."""
        while self._captured:
            _, captured = self._captured.popitem()
            captured.graph.reset()  # not only the reference: another thread may hold one

    def _drop_if_closed(self) -> None:
        """The group may have been closed, and its graphs dropped, while another was being captured."""
        try:
            self._decoder.group.check()
        except PeerLost:
            self.drop()
            raise

    def _capture(self, token_ids: Tensor, plan: PassPlan, taps: Sequence[int]) -> _Captured:
        attention = cast(BucketedPlan, plan.attention).like()
        entering = None if plan.entering is None else plan.entering.clone()
        static = replace(plan, positions=attention.positions, attention=attention, entering=entering)
        token_ids = token_ids.clone()
        # run the pass eagerly first, because libraries allocate workspaces at their first call; the replay writes the
        # same KV rows again
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._decoder.forward(token_ids, static, taps)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # other threads of this process may wait for the device meanwhile: ranks are threads with cluster=inprocess
        capture = torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local")
        with _capturing[torch.cuda.current_device()], capture:
            hidden, features = self._decoder.forward(token_ids, static, taps)
        return _Captured(graph, token_ids, [*attention.tensors(), *_entering(static)], hidden, features)


def _entering(plan: PassPlan) -> list[Tensor]:
    return [] if plan.entering is None else [plan.entering]
