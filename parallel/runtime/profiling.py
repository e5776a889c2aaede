"""Seconds of a pass by kind: attention, MLPs, communication, and the rest.

`watch` instruments a loaded decoder; a `TimedGroup` around a group times its collectives, waits for peers included.
Only for measuring: the clock costs microseconds a layer. On CUDA it records events, so the host waits for none of the
kernels; a pass that is being captured, or is replayed, shows nothing of its parts (`ModelRunner.run_eagerly`).
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from parallel.comm.group import SINGLE, Group
from parallel.model.block import make_mlp
from parallel.model.config import DecoderConfig
from parallel.model.decoder import Decoder, pack_weights
from parallel.model.layers.weight import Layer, Shard
from parallel.model.partition import MlpParallel

_WARM_UP, _TRIALS = 3, 15
_Result = TypeVar("_Result")


class PassClock:
    """Seconds by kind; an inner span pauses the outer one, so kinds add up to the whole."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.spans: dict[str, int] = defaultdict(int)
        self._on_cuda = torch.device(device).type == "cuda"
        self._open: list[str] = []
        self._since = 0.0
        self._events: list[tuple[str, Any]] = []
        """Kind of work that ended on CUDA, "" for none, and the event behind it."""

    def enter(self, kind: str) -> None:
        if self._is_capturing():
            return
        self._mark()
        self._open.append(kind)
        self.spans[kind] += 1

    def leave(self) -> None:
        if self._is_capturing():
            return
        self._mark()
        self._open.pop()

    def pop_seconds(self) -> dict[str, float]:
        """Seconds by kind since the last call; resets `spans` too. On CUDA it waits for the last event."""
        if self._events:
            self._events[-1][1].synchronize()
            for (_, before), (kind, after) in pairwise(self._events):
                if kind:
                    self.seconds[kind] += before.elapsed_time(after) / 1e3
            self._events.clear()
        seconds, self.seconds, self.spans = dict(self.seconds), defaultdict(float), defaultdict(int)
        return seconds

    def _mark(self) -> None:
        """The present time, up to which the innermost open kind has run."""
        kind = self._open[-1] if self._open else ""
        if self._on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append((kind, event))
            return
        now = time.perf_counter()
        if kind:
            self.seconds[kind] += now - self._since
        self._since = now

    def _is_capturing(self) -> bool:
        """Whether the work is recorded for later: it does not run now, and events of it have no time."""
        return self._on_cuda and torch.cuda.is_current_stream_capturing()


class TimedGroup(Group):
    """A group whose collectives are timed as "communication"."""

    def __init__(self, group: Group, clock: PassClock) -> None:
        self.rank = group.rank
        self.size = group.size
        self.close, self.hold, self.check = group.close, group.hold, group.check
        for name in ("all_reduce", "all_gather", "broadcast"):
            setattr(self, name, _timed(getattr(group, name), "communication", clock))


class _TimedLayer(Layer):
    """A layer whose calls are timed; the layer stays within, for `walk`."""

    def __init__(self, layer: Layer, call: Callable[..., Tensor], kind: str, clock: PassClock) -> None:
        self.layer = layer
        self._call = _timed(call, kind, clock)

    def __call__(self, *arguments: object) -> Tensor:
        return self._call(*arguments)


def _timed(call: Callable[..., _Result], kind: str, clock: PassClock) -> Callable[..., _Result]:
    def timed(*arguments: object) -> _Result:
        clock.enter(kind)
        try:
            return call(*arguments)
        finally:
            clock.leave()

    return timed


def watch(decoder: Decoder, clock: PassClock) -> None:
    """Time the decoder's passes from now on: "attention", "mlp", and "rest" for everything else in a forward."""
    for layer in decoder.layers:
        for kind, part in (("attention", layer.attention), ("mlp", layer.mlp)):
            if part is not None:
                setattr(layer, kind, _TimedLayer(part, part, kind, clock))
    for name, call in (("forward", decoder.forward), ("head", decoder.head)):
        setattr(decoder, name, _timed(call, "rest", clock))


def fill_at_random(decoder: Decoder) -> None:
    """Weights of plausible size, for measuring without a checkpoint; then packed as loaded ones are."""
    _randomize(decoder.shards())
    decoder.pack()


def _randomize(shards: Iterable[Shard]) -> None:
    for shard in shards:
        shard.place().normal_(std=0.02)


@torch.inference_mode()
def faster_mlp(
    config: DecoderConfig, group: Group, device: torch.device | str, dtype: torch.dtype, num_rows: int
) -> MlpParallel:
    """Measure one MLP both ways on these ranks, for passes of `num_rows` rows; all ranks get the same answer."""
    if group.size == 1 or config.mlp_units % group.size:
        return "replicated"
    ways = {"replicated": SINGLE, "tensor": group}
    mlps = {name: make_mlp(config, ranks, dtype=dtype, device=device) for name, ranks in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in mlps}
    for mlp in mlps.values():
        _randomize(mlp.shards(""))
        pack_weights(mlp)
    x = torch.randn(num_rows, config.hidden_size, dtype=dtype, device=device)
    clock = PassClock(device)
    for _ in range(_WARM_UP + _TRIALS):
        for name, mlp in mlps.items():
            group.all_reduce(torch.zeros(1, device=device))  # start together
            clock.enter(name)
            mlp(x)
            clock.leave()
            seconds[name].append(clock.pop_seconds()[name])
    medians = [statistics.median(seconds[name][_WARM_UP:]) for name in mlps]
    slowest = group.all_gather(torch.tensor([medians], dtype=torch.float64, device=device), 0).amax(0).tolist()
    return "replicated" if slowest[0] <= slowest[1] else "tensor"
