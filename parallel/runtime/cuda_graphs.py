"""CUDA graphs of whole passes, and of chains of them: the host launches one graph instead of hundreds of kernels.

A few small tensors describe a pass of a backend that rounds passes up to buckets. Passes whose tensors have the same
shapes share a graph: it is captured at the first of them over its own buffers, and replayed after copying the tensors
in. It has the layers and the head; choosing tokens is part of it only in a chain, whose steps feed what was chosen.
Knows no sequences and no sampling.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, Self, cast

import torch
from torch import Tensor

from parallel.comm.group import PeerLost
from parallel.model.decoder import Decoder, run_pass
from parallel.model.layers.attention import PassPlan
from parallel.runtime.interface import StepChoice

MOST_GRAPHS = 256
"""Graphs that are kept, or more if a longer list is captured at the start; the one that was used longest ago goes
first. Each takes some MiB of the device."""
MOST_OTHERS = 64
"""Graphs of shapes that are not in the list, of all that are kept."""
_capturing: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
"""Locks by device: PyTorch captures one graph at a time. Held without waiting for the device or another rank, so that
ranks that are threads cannot wait for each other in a circle."""


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
    inputs: list[Tensor]
    outputs: tuple[Tensor, ...]


class CapturedPasses:
    """Runs a decoder's passes on CUDA. Passes without bucketed shapes (prefill chunks) run eagerly.

    The graphs go with the connections of the group whose collectives they captured (`Group.hold`).
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._most = MOST_GRAPHS
        self._captured: OrderedDict[tuple[object, ...], _Captured] = OrderedDict()
        self._generation = decoder.group.generation
        self._memory = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream | None = None  # of captures: torch's default belongs to one device
        self._logits: Tensor | None = None
        """Logits of the last pass that was replayed. A row of a large vocabulary takes as much memory as dozens of
        rows of hidden states, so graphs have none of their own."""
        decoder.group.hold(self)

    def __len__(self) -> int:
        return len(self._captured)

    def expect(self, num_graphs: int) -> None:
        """So many are about to be captured, and stay while others are."""
        self._most = max(self._most, num_graphs + MOST_OTHERS)

    def forward(
        self, token_ids: Tensor, plan: PassPlan, taps: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """Computes what `run_pass` computes; logits are in float32 where the pass was replayed."""
        attention = cast(BucketedPlan, plan.attention)
        if not attention.bucketed:
            return run_pass(self._decoder, token_ids, plan, taps)
        inputs = [token_ids, *_inputs(plan)]
        key = (plan.fuzzy, plan.layers, tuple(taps), self._decoder.lm_head.gathers, *attention.key(), *_shapes(plan))
        hidden, *features, logits = self._replay(key, inputs, partial(self._pass_over, token_ids, plan, taps))
        # the next replay overwrites the graph's own outputs; of logits the copy is the cast that follows anyway
        logits = logits[: plan.num_logits].to(torch.float32, copy=True)
        return hidden.clone(), tuple(feature.clone() for feature in features), logits

    def chain(self, token_ids: Tensor, plans: Sequence[PassPlan], choice: StepChoice) -> Tensor:
        """Feed `token_ids` [n], one row of every sequence, then what is chosen from its logits, and so on: the tokens
        that are chosen, [steps, n]. The plans are those of the steps, all of one shape."""
        attentions = [cast(BucketedPlan, plan.attention) for plan in plans]
        assert len({one.key() for one in attentions}) == 1, "the steps of a chain have one shape"
        inputs = [token_ids, *choice.tensors(), *(tensor for plan in plans for tensor in _inputs(plan))]
        key = ("chain", len(plans), *choice.key(), *attentions[0].key(), *_shapes(plans[0]))
        (chosen,) = self._replay(key, inputs, partial(self._chain_over, token_ids, plans, choice))
        return chosen.clone()

    def drop(self) -> None:
        """Destroy all graphs. A thread that is about to replay one gets RuntimeError."""
        while self._captured:
            _, captured = self._captured.popitem()
            captured.graph.reset()  # not only the reference: another thread may hold one
        self._memory = torch.cuda.graph_pool_handle()  # PyTorch takes no handle whose graphs are all gone
        self._logits = None

    def _replay(
        self, key: tuple[object, ...], inputs: list[Tensor], prepare: Callable[[], tuple[list[Tensor], _Work]]
    ) -> tuple[Tensor, ...]:
        """The outputs of the graph of this key over these inputs; `prepare` gives tensors of their shapes, and the work
        over them that is captured."""
        group = self._decoder.group
        group.check()  # a replay calls no collective that would
        if self._generation != group.generation:
            self.drop()
            self._generation = group.generation
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._capture(*prepare())
            self._drop_if_closed()
            if len(self._captured) > self._most:
                _, oldest = self._captured.popitem(last=False)
                oldest.graph.reset()
        self._captured.move_to_end(key)
        _copy(captured.inputs, inputs)
        captured.graph.replay()
        return captured.outputs

    def _drop_if_closed(self) -> None:
        """The group may have been closed, and its graphs dropped, while another was being captured."""
        try:
            self._decoder.group.check()
        except PeerLost:
            self.drop()
            raise

    def _capture(self, inputs: list[Tensor], work: _Work) -> _Captured:
        """Captures by hand: `torch.cuda.graph` would wait for the whole device, on which another rank's thread may have
        queued a kernel that waits for a third one."""
        self._stream = side = self._stream or torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            # first eagerly, because libraries allocate workspaces at their first call; the replay writes the same KV
            # rows again
            work()
            with _capturing[torch.cuda.current_device()]:
                # other threads of this process may allocate meanwhile: ranks are threads with cluster=inprocess
                graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
                try:
                    outputs = work()
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()
                    graph.reset()  # the end of a group waits until graphs with its collectives are gone
                    raise
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(side)
        return _Captured(graph, inputs, outputs)

    def _pass_over(self, token_ids: Tensor, plan: PassPlan, taps: Sequence[int]) -> tuple[list[Tensor], _Work]:
        token_ids, plan = token_ids.clone(), _like(plan)

        def work() -> tuple[Tensor, ...]:
            hidden, features, logits = run_pass(self._decoder, token_ids, plan, taps)
            return hidden, *features, self._shared(logits)

        return [token_ids, *_inputs(plan)], work

    def _chain_over(
        self, token_ids: Tensor, plans: Sequence[PassPlan], choice: StepChoice
    ) -> tuple[list[Tensor], _Work]:
        token_ids, plans, choice = token_ids.clone(), [_like(plan) for plan in plans], choice.like()

        def work() -> tuple[Tensor, ...]:
            chosen = [token_ids]
            for step, plan in enumerate(plans):
                chosen.append(choice.choose(run_pass(self._decoder, chosen[-1], plan)[2], step))
            return (torch.stack(chosen[1:]),)

        return [token_ids, *choice.tensors(), *(tensor for plan in plans for tensor in _inputs(plan))], work

    def _shared(self, logits: Tensor) -> Tensor:
        """The logits in the memory that all graphs share; the eager run before a capture makes it large enough."""
        if self._logits is None or self._logits.numel() < logits.numel() or self._logits.dtype != logits.dtype:
            self._logits = torch.empty_like(logits).view(-1)  # graphs over the old one keep it
        return self._logits[: logits.numel()].view_as(logits).copy_(logits)


_Work = Callable[[], tuple[Tensor, ...]]


def _inputs(plan: PassPlan) -> list[Tensor]:
    """What the passes of a graph differ in, but for the tokens."""
    assert plan.logit_rows is not None, "a bucketed plan names the rows that the head reads"
    entering = [] if plan.entering is None else [plan.entering]
    return [*cast(BucketedPlan, plan.attention).tensors(), plan.logit_rows, *entering]


def _shapes(plan: PassPlan) -> list[object]:
    """Shapes of the inputs that do not belong to the attention."""
    entering = None if plan.entering is None else plan.entering.shape
    return [None if plan.logit_rows is None else len(plan.logit_rows), entering]


def _like(plan: PassPlan) -> PassPlan:
    """The same pass over tensors of its own."""
    attention = cast(BucketedPlan, plan.attention).like()
    rows, entering = (None if tensor is None else tensor.clone() for tensor in (plan.logit_rows, plan.entering))
    return replace(plan, places=attention.positions, attention=attention, logit_rows=rows, entering=entering)


def _copy(into: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies in one launch for each type of numbers, however many tensors."""
    pairs: defaultdict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for own, source in zip(into, sources, strict=True):
        pairs[own.dtype][0].append(own)
        pairs[own.dtype][1].append(source)
    for own, given in pairs.values():
        torch._foreach_copy_(own, given)  # pyright: ignore[reportPrivateImportUsage]
