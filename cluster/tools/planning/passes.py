"""Measures what one pass of a draft model takes on this machine, for every way its ranks could share it.

All ways are measured by the same processes, one per rank and pinned like one, turn by turn, with weights at random of
the model's own shape: ratios between them are those of one run. Knows nothing of what the passes are worth.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parallel.comm.group import SINGLE, Group
from parallel.comm.rendezvous import connect_store, host_store, join
from parallel.kv.pass_plan import Span
from parallel.kv.pool import KVPool
from parallel.model.config import DecoderConfig
from parallel.model.decoder import Decoder
from parallel.model.layer_parallel import LayerParallelDecoder
from parallel.model.partition import LayerLayout, MlpParallel, default_partition
from parallel.runtime.layer_parallel_runner import LayerParallelRunner
from parallel.runtime.profiling import PassClock, TimedGroup, fill_at_random, watch
from parallel.runtime.runner import ModelRunner

_LOOPBACK = "127.0.0.1"
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
    """Medians over the repeats, on rank 0; `undisturbed` is the fastest tenth, for machines that others use too.

    `split` has "attention", "mlp", "communication" (waiting for a peer included) and "rest" (embedding, norms, head,
    planning); its parts add up to about `seconds`.
    """

    sharing: Sharing
    fuzzy: bool
    num_rows: int
    seconds: float
    undisturbed: float
    split: dict[str, float]

    @property
    def communication_share(self) -> float:
        return self.split.get("communication", 0.0) / sum(self.split.values())


@dataclass(frozen=True, slots=True)
class _Orders:
    config: DecoderConfig
    sharings: tuple[Sharing, ...]
    num_rows: tuple[int, ...]
    context: int
    repeats: int
    devices: tuple[str, ...]
    cores: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    port: int


def measure_passes(
    config: DecoderConfig,
    sharings: Sequence[Sharing],
    *,
    num_rows: Sequence[int] = (1,),
    context: int = 128,
    repeats: int = 40,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[PassTime]:
    """Times of an exact pass and, where layers run side by side, a fuzzy one, for every sharing and number of rows.

    On CPU rank r is pinned to the r-th core this process may use; ranks beyond them take turns.
    """
    size = max(sharing.ranks for sharing in sharings)
    own = sorted(os.sched_getaffinity(0))
    cuda = device.startswith("cuda")
    store = host_store(_LOOPBACK)
    orders = _Orders(
        config,
        tuple(sharings),
        tuple(num_rows),
        context,
        repeats,
        tuple(f"cuda:{rank}" if cuda else "cpu" for rank in range(size)),
        tuple(() if cuda else (own[rank % len(own)],) for rank in range(size)),
        dtype,
        store.port,
    )
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    ranks = [spawn.Process(target=_measure_on_rank, args=(orders, rank, sender), daemon=True) for rank in range(size)]
    for process in ranks:
        process.start()
    sender.close()
    try:
        answer = receiver.recv()
    except EOFError:
        raise RuntimeError("a measuring process died; see its traceback above") from None
    finally:
        for process in ranks:
            process.join(timeout=10)
            process.kill()
    return answer


def _measure_on_rank(orders: _Orders, rank: int, answer: Any) -> None:
    if orders.cores[rank]:
        os.sched_setaffinity(0, orders.cores[rank])
    torch.set_num_threads(1)
    store = connect_store(_LOOPBACK, orders.port)
    sizes = sorted({1, len(orders.devices), *(sharing.ranks for sharing in orders.sharings)})
    device = orders.devices[rank]
    groups = {size: join(store, f"passes-{size}", 0, rank, size, device, _TIMEOUT_S) for size in sizes if rank < size}
    subjects = [
        _Subject(orders, sharing, groups[sharing.ranks], device) if rank < sharing.ranks else None
        for sharing in orders.sharings
    ]
    everyone = groups[len(orders.devices)]
    for _ in range(orders.repeats + _WARM_UP):
        for subject in subjects:
            everyone.all_reduce(torch.zeros(1, device=device))  # nobody starts while another still measures
            if subject is not None:
                subject.run_passes()
    if rank == 0:
        answer.send([time for subject in subjects for time in subject.times()])
    everyone.all_reduce(torch.zeros(1, device=device))
    answer.close()


class _Subject:
    """One sharing under measurement on one rank."""

    def __init__(self, orders: _Orders, sharing: Sharing, group: Group, device: str) -> None:
        self.sharing = sharing
        self._orders = orders
        self._clock = PassClock(device)
        self._seconds: dict[tuple[bool, int], list[float]] = defaultdict(list)
        self._splits: dict[tuple[bool, int], list[dict[str, float]]] = defaultdict(list)
        config, dtype = orders.config, orders.dtype
        timed = TimedGroup(group, self._clock) if group.size > 1 else SINGLE
        num_slots = orders.context + max(orders.num_rows)
        if sharing.layer_group:
            partition = default_partition(config.num_layers, sharing.layer_group)
            layout = LayerLayout(partition, sharing.ranks, sharing.mlp)
            decoder: Decoder = LayerParallelDecoder(config, layout, timed, device, dtype)
            kv_heads, runner_class = config.num_kv_heads, LayerParallelRunner
        else:
            decoder = Decoder(config, timed, device, dtype)
            kv_heads, runner_class = config.local_kv_heads(group.size), ModelRunner
        fill_at_random(decoder)
        pool = KVPool(config.num_layers, num_slots, kv_heads, config.head_dim, dtype, device)
        self._runner = runner_class(decoder, pool)
        self._kinds = (False, True) if sharing.layer_group > 1 else (False,)
        self._runner.open(0)
        self._runner.forward([Span(0, orders.context, num_logits=0)], [0] * orders.context)
        self._runner.commit(0, range(orders.context))
        watch(decoder, self._clock)

    def run_passes(self) -> None:
        """One pass of every kind and number of rows."""
        for num_rows in self._orders.num_rows:
            for fuzzy in self._kinds:
                self._clock.take()
                started = time.perf_counter()
                output = self._runner.forward([Span(0, num_rows, None, num_rows)], [0] * num_rows, fuzzy=fuzzy)
                output.logits.argmax(-1).tolist()
                seconds = time.perf_counter() - started
                split = self._clock.take()
                split["rest"] += seconds - sum(split.values())
                self._seconds[fuzzy, num_rows].append(seconds)
                self._splits[fuzzy, num_rows].append(split)
                self._runner.drop_pending(0)

    def times(self) -> list[PassTime]:
        return [
            PassTime(
                self.sharing,
                fuzzy,
                num_rows,
                statistics.median(seconds[_WARM_UP:]),
                sorted(seconds[_WARM_UP:])[(len(seconds) - _WARM_UP) // 10],
                {
                    kind: statistics.median(split.get(kind, 0.0) for split in self._splits[fuzzy, num_rows][_WARM_UP:])
                    for kind in ("attention", "mlp", "communication", "rest")
                },
            )
            for (fuzzy, num_rows), seconds in self._seconds.items()
        ]
