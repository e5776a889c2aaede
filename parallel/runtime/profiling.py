"""Where the seconds of a pass go: attention, MLPs, communication, and the rest.

`watch` instruments a decoder that is loaded; a `TimedGroup` in place of a group does so for what ranks send each
other, time spent waiting for a peer included. Only for measuring: the clock costs microseconds a layer, and on CUDA
it makes the host wait for every kernel.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from parallel.comm.group import SINGLE, Group
from parallel.model.config import DecoderConfig
from parallel.model.decoder import MLP, Decoder
from parallel.model.layers.weight import Layer
from parallel.model.partition import MlpParallel

_TRIALS = 15


class PassClock:
    """Seconds by kind; a span within another pauses it, so kinds add up to the whole."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.spans: dict[str, int] = defaultdict(int)
        self._waits = torch.device(device).type == "cuda"
        self._open: list[str] = []
        self._since = 0.0

    def enter(self, kind: str) -> None:
        now = self._now()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._open.append(kind)
        self.spans[kind] += 1
        self._since = now

    def leave(self) -> None:
        now = self._now()
        self.seconds[self._open.pop()] += now - self._since
        self._since = now

    def take(self) -> dict[str, float]:
        """Seconds since the last take; what was counted in `spans` begins anew."""
        seconds, self.seconds, self.spans = dict(self.seconds), defaultdict(float), defaultdict(int)
        return seconds

    def _now(self) -> float:
        if self._waits:
            torch.cuda.synchronize()
        return time.perf_counter()


class TimedGroup(Group):
    """A group whose collectives are on the clock as "communication"."""

    def __init__(self, group: Group, clock: PassClock) -> None:
        self._group = group
        self._clock = clock
        self.rank = group.rank
        self.size = group.size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._timed(self._group.all_reduce, tensor)

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return self._timed(self._group.all_gather, tensor, dim)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        return self._timed(self._group.broadcast, tensor, src)

    def close(self) -> None:
        self._group.close()

    def _timed(self, collective: Any, *arguments: object) -> Tensor:
        self._clock.enter("communication")
        try:
            return collective(*arguments)
        finally:
            self._clock.leave()


class _TimedLayer(Layer):
    def __init__(self, layer: Layer, kind: str, clock: PassClock) -> None:
        self.layer = layer
        self._kind = kind
        self._clock = clock

    def __call__(self, *arguments: object) -> Tensor:
        self._clock.enter(self._kind)
        try:
            return self.layer(*arguments)
        finally:
            self._clock.leave()


def watch(decoder: Decoder, clock: PassClock) -> None:
    """From now on the decoder's passes are on the clock: "attention", "mlp", and "rest" for all else in a forward."""
    for layer in decoder.layers:
        if layer.attention is not None:
            layer.attention = _TimedLayer(layer.attention, "attention", clock)
        layer.mlp = _TimedLayer(layer.mlp, "mlp", clock)
    for name in ("forward", "head"):
        setattr(decoder, name, _on_the_clock(getattr(decoder, name), clock))


def _on_the_clock(call: Any, clock: PassClock) -> Any:
    def timed(*arguments: object) -> Any:
        clock.enter("rest")
        try:
            return call(*arguments)
        finally:
            clock.leave()

    return timed


def fill_at_random(layer: Layer | Decoder, prefix: str = "") -> None:
    """Weights of plausible size, for measuring without a checkpoint; then packed as loaded ones are."""
    for shard in layer.shards() if isinstance(layer, Decoder) else layer.shards(prefix):
        shard.destination.normal_(std=0.02)
    if isinstance(layer, Decoder):
        layer.pack()


@torch.inference_mode()
def faster_mlp(
    config: DecoderConfig, group: Group, device: torch.device | str, dtype: torch.dtype, num_rows: int
) -> MlpParallel:
    """Measure one MLP both ways on these ranks, for passes of `num_rows` rows; all ranks get the same answer."""
    if group.size == 1 or config.intermediate_size % group.size:
        return "replicated"
    mlps = {"replicated": MLP(config, SINGLE, dtype=dtype, device=device)}
    mlps["tensor"] = MLP(config, group, dtype=dtype, device=device)
    seconds: dict[str, list[float]] = {name: [] for name in mlps}
    for mlp in mlps.values():
        fill_at_random(mlp)
        for part in (mlp.gate_up, mlp.down):
            part.weight.pack()
    x = torch.randn(num_rows, config.hidden_size, dtype=dtype, device=device)
    clock = PassClock(device)
    for trial in range(_TRIALS + 3):
        for name, mlp in mlps.items():
            group.all_reduce(torch.zeros(1, device=device))  # start together
            clock.enter(name)
            mlp(x)
            clock.leave()
            if trial >= 3:
                seconds[name].append(clock.take()[name])
            else:
                clock.take()
    medians = torch.tensor([[statistics.median(seconds[name]) for name in mlps]], dtype=torch.float64, device=device)
    slowest = group.all_gather(medians, 0).amax(0).tolist()
    return "replicated" if slowest[0] <= slowest[1] else "tensor"
