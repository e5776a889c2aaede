"""Stand-ins for CUDA graphs, events and NCCL on the CPU, for tests of what the engine does around them.

`CudaTwin` takes the place of the names of `torch.cuda` that the engine uses. A captured block is recorded operation by
operation and replayed over the same tensors, so that whatever a capture leaves out (host values, buffers that were not
copied in) is stale in the replay; and what CUDA refuses while a stream is capturing raises here too.

`NcclTwin` is a process group whose `abort` returns only once no graph is left that captured one of its collectives:
`ncclCommAbort` waits for the same.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.model.layers.backends import make_backend
from parallel.model.layers.rope import Rope
from parallel.runtime.cuda_graphs import CapturedPasses
from tests.parallel import host_kernels
from tests.parallel.fake_accelerator import leaves_of

_WAIT_FOR_HOST = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim"}
_FROM_HOST = {"lift_fresh"}
"""`torch.tensor` of host values: a copy from pageable memory, which waits for the stream."""


class NotWhileCapturing(RuntimeError):
    """An operation that CUDA does not permit while a stream is capturing."""


class Graph:
    """A recorded block. `reset` drops it, as `torch.cuda.CUDAGraph.reset` does."""

    def __init__(self, twin: CudaTwin) -> None:
        self._twin = twin
        self._steps: Any = None
        self._recorder: Any = None
        self._pool: Any = None
        self.captured_groups: set[object] = set()
        self.device = None

    def capture_begin(self, pool=None, capture_error_mode="global") -> None:
        """A pool of memory whose graphs are all gone is no pool any more: an assertion in PyTorch's allocator."""
        twin = self._twin
        assert threading.get_ident() not in twin.capturing, "a stream captures one graph at a time"
        assert pool not in twin.used_pools or any(graph._pool is pool for graph in twin.live), "use_count > 0"
        assert twin.on_side_stream(), "the default stream cannot capture"
        self._pool = pool or object()
        twin.used_pools.append(self._pool)
        twin.capturing[threading.get_ident()] = self
        twin.num_captures += 1
        self._recorder = _Recorder()
        self._recorder.__enter__()

    def capture_end(self) -> None:
        self._recorder.__exit__(None, None, None)
        del self._twin.capturing[threading.get_ident()]
        self.device, self._steps = self._twin.current_device(), self._recorder.steps
        with self._twin.changed:
            self._twin.live.add(self)

    def replay(self) -> None:
        assert self._steps is not None, "a graph is captured before it is replayed"
        assert self.device == self._twin.current_device(), "replayed on another device than it was captured on"
        self._twin.num_replays += 1
        for step in self._steps:
            step()

    def reset(self) -> None:
        self._steps = self._recorder = None
        with self._twin.changed:
            self._twin.live.discard(self)
            self._twin.changed.notify_all()

    def __del__(self) -> None:
        self.reset()


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if name in _WAIT_FOR_HOST | _FROM_HOST:
            raise NotWhileCapturing(f"{name}: operation not permitted when stream is capturing")
        result = func(*args, **kwargs)
        made = [leaf for leaf in leaves_of(result) if isinstance(leaf, torch.Tensor)]
        read = {leaf.untyped_storage().data_ptr() for leaf in leaves_of((args, kwargs)) if _is_tensor(leaf)}
        if func._schema.is_mutable:
            self.steps.append(lambda: func(*args, **kwargs))
        elif fresh := [i for i, one in enumerate(made) if one.untyped_storage().data_ptr() not in read]:

            def compute_again() -> None:
                again = [leaf for leaf in leaves_of(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
                for i in fresh:
                    made[i].copy_(again[i])

            self.steps.append(compute_again)
        return result


def _is_tensor(leaf) -> bool:
    return isinstance(leaf, torch.Tensor)


class _Event:
    def __init__(self, twin: CudaTwin) -> None:
        self._twin = twin
        self.at = None

    def record(self) -> None:
        self._twin.refuse_own_capture("an event for timing")
        self._twin.now += 1.0
        self.at = self._twin.now

    def synchronize(self) -> None:
        self._twin.refuse_own_capture("the wait for an event")
        self._twin.num_syncs += 1

    def elapsed_time(self, other) -> float:
        """Milliseconds between two events: the twin's clock advances by one at every event."""
        return other.at - self.at


class _Stream:
    def __init__(self, *_, **__) -> None:
        pass

    def wait_stream(self, other) -> None:
        pass


class CudaTwin:
    """The state of the device that the stand-ins share. `num_syncs` counts waits of the host."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.live: set[Graph] = set()
        self.num_captures = self.num_replays = self.num_syncs = 0
        self.now = 0.0
        self._thread = threading.local()
        self.capturing: dict[int, Graph] = {}
        self.used_pools: list[object] = []

    def install(self, monkeypatch) -> CudaTwin:
        twin = self

        class CUDAGraph(Graph):  # a type, because libraries annotate with it
            def __init__(self) -> None:
                super().__init__(twin)

        names = {
            "CUDAGraph": CUDAGraph,
            "graph": self.capture,
            "Event": lambda **_: _Event(self),
            "Stream": _Stream,
            "current_stream": _Stream,
            "stream": self.stream,
            "graph_pool_handle": object,
            "synchronize": self.synchronize,
            "is_current_stream_capturing": self.is_capturing,
            "set_device": self.set_device,
            "init": lambda: None,
            "current_device": self.current_device,
            "device": self.on_device,
            "get_device_capability": lambda *_: (9, 0),
            "mem_get_info": lambda *_: (80 << 30, 80 << 30),
        }
        for name, stand_in in names.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        host_kernels.use_none(monkeypatch)
        monkeypatch.setattr("actors.sampling.logits._is_on_host", lambda _: False)
        # a CPU's table of rotations grows with the positions; a GPU computes them
        monkeypatch.setattr(Rope, "__call__", lambda rope, positions: rope._rotation(positions))
        return self

    # --- devices ------------------------------------------------------------------------------------------------------

    def set_device(self, device) -> None:
        """Sets the device of the calling thread, as CUDA does."""
        index = torch.device(device).index if not isinstance(device, int) else device
        self._thread.device = index or 0

    def current_device(self) -> int:
        return getattr(self._thread, "device", 0)

    @contextmanager
    def on_device(self, device):
        before = self.current_device()
        if isinstance(device, int) or torch.device(device).type == "cuda":
            self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    # --- graphs -------------------------------------------------------------------------------------------------------

    @contextmanager
    def stream(self, _):
        before, self._thread.is_aside = self.on_side_stream(), True
        try:
            yield
        finally:
            self._thread.is_aside = before

    def on_side_stream(self) -> bool:
        return getattr(self._thread, "is_aside", False)

    @contextmanager
    def capture(self, graph, pool=None, stream=None, capture_error_mode="global"):
        """`torch.cuda.graph`, which waits for the device first."""
        self.synchronize()
        with self.stream(stream):
            graph.capture_begin(pool, capture_error_mode)
            try:
                yield
            finally:
                graph.capture_end()

    def is_capturing(self) -> bool:
        return threading.get_ident() in self.capturing

    def capturing_graph(self) -> Graph | None:
        return self.capturing.get(threading.get_ident())

    def refuse_own_capture(self, what) -> None:
        if self.is_capturing():
            raise NotWhileCapturing(f"{what}: operation not permitted when stream is capturing")

    def synchronize(self, *_) -> None:
        """A wait for the whole device, which may have no stream that is capturing, in whatever thread and mode."""
        if self.capturing:
            raise NotWhileCapturing("synchronize: operation not permitted while a stream of the device is capturing")
        self.num_syncs += 1


class _Work:
    def wait(self, *_) -> None:
        pass


class NcclTwin:
    """A process group of one rank of `size`; its collectives change nothing."""

    def __init__(self, twin: CudaTwin, size: int = 2) -> None:
        self._twin, self._size = twin, size
        self.aborted, self.aborting = False, threading.Event()

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size

    def _collective(self, *_):
        assert not self.aborted
        graph = self._twin.capturing_graph()
        if graph is not None:
            graph.captured_groups.add(self)
            self._twin.live.add(graph)  # from its first collective on, although it is not finished
        return _Work()

    allreduce = broadcast = _collective

    def _allgather_base(self, parts, tensor, *_):
        parts.copy_(tensor.expand_as(parts))
        return self._collective()

    def abort(self) -> None:
        self.aborting.set()
        with self._twin.changed:
            self._twin.changed.wait_for(lambda: not any(self in graph.captured_groups for graph in self._twin.live))
        self.aborted = True


def capture_passes(model) -> CapturedPasses:
    """Let a model on the CPU capture its passes as one on CUDA does; the twin must be installed."""
    model._backend = make_backend("padded", model.pool, model.decoder.attention_shape(), bucketed=True)
    model._passes = CapturedPasses(model.decoder)
    return model._passes
