"""Stand-ins for CUDA graphs, events and NCCL on the CPU, for tests of what the engine does around them.

`CudaTwin` takes the place of the names of `torch.cuda` that the engine uses. A captured block is recorded operation by
operation and replayed over the same tensors, so that whatever a capture leaves out (host values, buffers that were not
copied in) is stale in the replay; and what CUDA refuses while a stream is capturing raises here too.

`NcclTwin` is a process group whose `abort` returns only once no graph is left that captured one of its collectives:
`ncclCommAbort` waits for the same.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel.runtime.cuda_graphs import CapturedPasses
from parallel.runtime.runner import make_backend

_WAIT_FOR_HOST = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim"}
_FROM_HOST = {"lift_fresh"}
"""`torch.tensor` of host values: a copy from pageable memory, which waits for the stream."""


class NotWhileCapturing(RuntimeError):
    """An operation that CUDA does not permit while a stream is capturing."""


class Graph:
    """A recorded block. `reset` drops it, as `torch.cuda.CUDAGraph.reset` does."""

    def __init__(self, twin: CudaTwin) -> None:
        self._twin = twin
        self._steps = None
        self.captured_groups: set[object] = set()
        self.device = None

    def record(self, steps) -> None:
        self._steps = steps
        with self._twin.changed:
            self._twin.live.add(self)

    def replay(self) -> None:
        assert self._steps is not None, "a graph is captured before it is replayed"
        assert self.device == self._twin.current_device(), "replayed on another device than it was captured on"
        self._twin.num_replays += 1
        for step in self._steps:
            step()

    def reset(self) -> None:
        self._steps = None
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
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        read = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        if func._schema.is_mutable:
            self.steps.append(lambda: func(*args, **kwargs))
        elif fresh := [i for i, one in enumerate(made) if one.untyped_storage().data_ptr() not in read]:

            def compute_again() -> None:
                again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
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
        self._twin.synchronize()

    def elapsed_time(self, other) -> float:
        """In milliseconds: the twin's clock advances by one at every event."""
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
        self._capturing: dict[int, tuple[Graph, str]] = {}

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
            "stream": lambda _: nullcontext(),
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
        # kernels called by address are no operations of PyTorch; a GPU does not use them either
        monkeypatch.setattr("parallel.model.layers.weight.has_products", lambda: False)
        monkeypatch.setattr("parallel.model.layers.norm.has_norms", lambda: False)
        return self

    # --- devices ------------------------------------------------------------------------------------------------------

    def set_device(self, device) -> None:
        """Of the calling thread, as CUDA's is."""
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
    def capture(self, graph, pool=None, stream=None, capture_error_mode="global"):
        thread = threading.get_ident()
        assert thread not in self._capturing, "a stream captures one graph at a time"
        self._capturing[thread] = graph, capture_error_mode
        self.num_captures += 1
        try:
            with _Recorder() as recorder:
                yield
        finally:
            del self._capturing[thread]
        graph.device = self.current_device()
        graph.record(recorder.steps)

    def is_capturing(self) -> bool:
        return threading.get_ident() in self._capturing

    def capturing_graph(self) -> Graph | None:
        return self._capturing.get(threading.get_ident(), (None, ""))[0]

    def refuse_own_capture(self, what) -> None:
        if self.is_capturing():
            raise NotWhileCapturing(f"{what}: operation not permitted when stream is capturing")

    def synchronize(self, *_) -> None:
        """Refused in a capturing thread, and in others too while one captures in mode "global"."""
        self.refuse_own_capture("synchronize")
        if any(mode == "global" for _, mode in self._capturing.values()):
            raise NotWhileCapturing("synchronize: another thread captures in mode global")
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
