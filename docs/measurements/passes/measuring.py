"""Measures one pass of a draft model on this machine for every way its ranks could share it.

All ways are measured by the same ranks, each pinned to a core, in turn, with random weights of the model's own shape:
ratios between them are those of one run.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from cluster.placement.ranks import RankPlacement
from cluster.tools.planning.ranks import RankSync, RoleWork, run_on_ranks
from cluster.tools.planning.tables import PARTS
from docs.measurements.passes.read_bandwidth import ReadBandwidth
from parallel.comm.group import SINGLE, Group
from parallel.comm.rendezvous import connect_store, join
from parallel.kv.pass_plan import Span
from parallel.model.config import DecoderConfig
from parallel.model.decoder import Decoder
from parallel.model.layer_parallel import LayerParallelDecoder
from parallel.model.layers.weight import Stored
from parallel.model.partition import LayerLayout, MlpParallel, default_partition
from parallel.runtime.layer_parallel_runner import LayerParallelRunner
from parallel.runtime.model_bytes import STORED_BYTES, kv_bytes_per_slot, weight_bytes
from parallel.runtime.profiling import PassClock, TimedGroup, fill_at_random, watch
from parallel.runtime.recorded_passes import WORTH_RECORDING
from parallel.runtime.runner import ModelRunner

_TIMEOUT_S = 300.0
_WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Sharing:
    """One way to run a draft model: on one rank, tensor-parallel (`layer_group` 0), or layer-parallel."""

    ranks: int = 1
    layer_group: int = 0
    mlp: MlpParallel = "replicated"

    @property
    def name(self) -> str:
        if not self.layer_group:
            return "single" if self.ranks == 1 else f"tensor x{self.ranks}"
        return f"layer x{self.ranks}, {self.layer_group} side by side, {self.mlp} MLPs"


@dataclass(frozen=True, slots=True)
class PassTime:
    """Medians over the repeats, on rank 0, in seconds; `undisturbed` is the fastest tenth, for a machine with load.

    `split` has the `PARTS`: "communication" includes the wait for a peer, "rest" is embedding, norms, head and
    planning. They add up to about `seconds`; where passes are CUDA graphs, they have the shares of an eager pass.
    `bytes_read` is the weights and the KV rows of the context, and `bandwidth` the bytes per second that the rank reads
    at, measured in turn with the passes; both are known of a model that one rank holds.
    """

    sharing: Sharing
    fuzzy: bool
    num_rows: int
    seconds: float
    undisturbed: float
    split: dict[str, float]
    bytes_read: int | None = None
    bandwidth: float | None = None

    @property
    def bandwidth_share(self) -> float | None:
        """Bytes per second of the median pass, over those of a plain read."""
        if self.bytes_read is None or self.bandwidth is None:
            return None
        return self.bytes_read / self.seconds / self.bandwidth

    @property
    def communication_share(self) -> float:
        return self.split["communication"] / sum(self.split.values())


@dataclass(frozen=True, slots=True)
class PassTask:
    """What every rank measures."""

    config: DecoderConfig
    sharings: tuple[Sharing, ...]
    num_rows: tuple[int, ...]
    context: int
    repeats: int
    dtype: torch.dtype = torch.float32
    weights: Stored | None = None


def measure_passes(task: PassTask, device: str = "cpu") -> list[PassTime]:
    """Times of an exact pass and, where layers run side by side, a fuzzy one, for every sharing and number of rows.

    On CPU rank r is pinned to the r-th core this process may use; ranks beyond them share cores.
    """
    size = max(sharing.ranks for sharing in task.sharings)
    cores = sorted(os.sched_getaffinity(0))
    if device.startswith("cuda"):
        homes = [(f"cuda:{rank}", ()) for rank in range(size)]
    else:
        homes = [("cpu", (cores[rank % len(cores)],)) for rank in range(size)]
    places = tuple(RankPlacement("draft", rank, size, *home, 1, 1.0) for rank, home in enumerate(homes))
    (times,) = run_on_ranks([RoleWork(places, partial(_measure, task))], as_threads=False)
    return times


def _measure(task: PassTask, place: RankPlacement, _group: Group, sync: RankSync) -> list[PassTime]:
    device, store = torch.device(place.device), connect_store(*sync.store)
    sizes = sorted({place.size, *(sharing.ranks for sharing in task.sharings if place.rank < sharing.ranks)})
    groups = {size: join(store, f"passes-{size}", 0, place.rank, size, device, _TIMEOUT_S) for size in sizes}
    all_ranks = groups[place.size]
    measured = [
        _SharingClock(task, sharing, groups[sharing.ranks], device) if place.rank < sharing.ranks else None
        for sharing in task.sharings
    ]
    memory = ReadBandwidth(device) if place.rank == 0 else None
    for _ in range(task.repeats + _WARM_UP):
        if memory is not None:
            memory.measure()
        for sharing in measured:
            all_ranks.all_reduce(torch.zeros(1, device=device))  # no rank starts while another still measures
            if sharing is not None:
                sharing.run_passes()
    all_ranks.all_reduce(torch.zeros(1, device=device))
    bandwidth = memory.bytes_per_s if memory is not None else None
    return [one for sharing in measured if sharing is not None for one in sharing.times(bandwidth)]


class _SharingClock:
    """One sharing under measurement on one rank."""

    def __init__(self, task: PassTask, sharing: Sharing, group: Group, device: torch.device) -> None:
        self._task, self._sharing, self._num_rows = task, sharing, task.num_rows
        self._clock = PassClock(device)
        self._seconds: dict[tuple[bool, int], list[float]] = defaultdict(list)
        self._splits: dict[tuple[bool, int], list[dict[str, float]]] = defaultdict(list)
        timed = TimedGroup(group, self._clock) if group.size > 1 else SINGLE
        num_slots = task.context + max(task.num_rows)
        if sharing.layer_group:
            partition = default_partition(task.config.num_layers, sharing.layer_group)
            layout = LayerLayout(partition, sharing.ranks, sharing.mlp)
            decoder = LayerParallelDecoder(task.config, timed, device, task.dtype, layout, task.weights)
            self._runner: ModelRunner = LayerParallelRunner(decoder, decoder.make_pool(num_slots))
        else:
            decoder = Decoder(task.config, timed, device, task.dtype, weights=task.weights)
            self._runner = ModelRunner(decoder, decoder.make_pool(num_slots))
        fill_at_random(decoder)
        self._runner.open(0)
        self._runner.forward([Span(0, task.context, num_logits=0)], [0] * task.context)
        self._runner.commit(0, range(task.context))
        for _ in range(WORTH_RECORDING):  # before its parts are watched
            self._pass_s(task.num_rows[0], fuzzy=False)
        watch(decoder, self._clock)

    def run_passes(self) -> None:
        """One pass of every kind and number of rows."""
        for num_rows in self._num_rows:
            for fuzzy in (False, True) if self._sharing.layer_group > 1 else (False,):
                seconds = self._pass_s(num_rows, fuzzy)
                with self._runner.eagerly():  # a captured or recorded pass is one call, which shows no parts
                    whole = self._pass_s(num_rows, fuzzy)
                split = self._clock.pop_seconds()
                split["rest"] += whole - sum(split.values())
                self._seconds[fuzzy, num_rows].append(seconds)
                self._splits[fuzzy, num_rows].append({part: spent * seconds / whole for part, spent in split.items()})

    def _pass_s(self, num_rows: int, fuzzy: bool) -> float:
        """Seconds of one pass, until the host has read a result of it."""
        self._clock.pop_seconds()
        started = time.perf_counter()
        output = self._runner.forward([Span(0, num_rows, None, num_rows)], [0] * num_rows, fuzzy=fuzzy)
        output.logits.argmax(-1).tolist()
        seconds = time.perf_counter() - started
        self._runner.drop_pending(0)
        return seconds

    def times(self, bandwidth: float | None) -> list[PassTime]:
        found = []
        bytes_read = _bytes_read(self._task)
        if self._sharing != Sharing():
            bytes_read = bandwidth = None
        for (fuzzy, num_rows), seconds in self._seconds.items():
            counted, splits = sorted(seconds[_WARM_UP:]), self._splits[fuzzy, num_rows][_WARM_UP:]
            split = {part: median(each.get(part, 0.0) for each in splits) for part in PARTS}
            tenth = counted[len(counted) // 10]
            found.append(PassTime(self._sharing, fuzzy, num_rows, median(counted), tenth, split, bytes_read, bandwidth))
        return found


def _bytes_read(task: PassTask) -> int:
    """Bytes that an exact pass on one rank reads at least: weights, without the embeddings of other tokens, and KV."""
    config, weights = task.config, str(task.weights or task.dtype).removeprefix("torch.")
    stored = weight_bytes(config, 1, task.dtype.itemsize, weights=weights)
    if not config.tied:
        stored -= config.vocab_size * config.hidden_size * STORED_BYTES[weights]
    return stored + task.context * kv_bytes_per_slot(config, 1, task.dtype.itemsize)
