"""Runs work on the ranks of one role, or of two at once, where the engine would place them.

Each rank is a process, or a thread where the engine's would be (`cluster=inprocess`), pinned and grouped like the
engine's. Knows nothing of what is measured there. This machine only.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from actors.worker import openmp
from actors.worker.factory import SWITCH_INTERVAL_S
from cluster.placement.ranks import RankPlacement
from cluster.runtime.backend import LOOPBACK
from parallel.comm.group import Group
from parallel.comm.rendezvous import connect_store, join, store_in_file, store_in_memory

_BARRIER_S = 120.0
NUM_PHASES = 2
"""Phases in which two roles may alternate."""


class AlternatingTurns:
    """The lead ranks of two roles compute in turn until the time of the first role is up.

    `primitives`: `threading` or a multiprocessing context, for ranks that are threads or processes.
    """

    def __init__(self, primitives: Any, roles: Sequence[str]) -> None:
        self._over = primitives.Event()
        self._first = roles[0]
        self._turns = {role: primitives.Semaphore(int(role == roles[0])) for role in roles}

    def acquire(self, role: str, until: float) -> bool:
        """Wait for the other lead to end its turn; False once the first role, at its turn, is past `until`."""
        self._turns[role].acquire()
        if role == self._first and time.monotonic() >= until:
            self.end()
        return not self._over.is_set()

    def release(self, role: str) -> None:
        for other, turn in self._turns.items():
            if other != role:
                turn.release()

    def end(self) -> None:
        self._over.set()
        for turn in self._turns.values():
            turn.release()


class RankSync:
    """What all ranks share: a barrier, the turns of each phase, and the store where the ranks of a role form a group.

    `in_turn`: two roles compute in turn instead of at the same time.
    """

    def __init__(
        self, primitives: Any, num_ranks: int, roles: Sequence[str], store: tuple[str, int], *, in_turn: bool
    ) -> None:
        self.in_turn = in_turn
        self.store = store
        self.phases = tuple(AlternatingTurns(primitives, roles) for _ in range(NUM_PHASES))
        self._barrier = primitives.Barrier(num_ranks)

    def wait(self) -> None:
        """Wait until all ranks are here."""
        self._barrier.wait(_BARRIER_S)

    def abort(self) -> None:
        """Release every rank that waits: threading.BrokenBarrierError, or the end of its turns."""
        self._barrier.abort()
        for turns in self.phases:
            turns.end()


RankWork = Callable[[RankPlacement, Group, RankSync], Any]
"""What one rank does; picklable, because a rank may be another process."""


@dataclass(frozen=True, slots=True)
class RoleWork:
    """All ranks of a role, and their work."""

    places: tuple[RankPlacement, ...]
    work: RankWork


def run_on_ranks(roles: Sequence[RoleWork], *, as_threads: bool, in_turn: bool = False) -> list[Any]:
    """The results of the lead rank of each role. Raises the error of the first rank that failed."""
    ranks = [(place, role.work) for role in roles for place in role.places]
    context = multiprocessing.get_context("spawn")
    names = [role.places[0].role for role in roles]
    with tempfile.TemporaryDirectory(prefix="specdec-") as folder:
        store = store_in_memory() if as_threads else store_in_file(Path(folder))
        sync = RankSync(threading if as_threads else context, len(ranks), names, store.place, in_turn=in_turn)
        results = _in_threads(ranks, sync) if as_threads else _in_processes(ranks, sync, context)
    failures = [result for result in results if isinstance(result, BaseException)]
    if failures:  # a broken barrier only follows from the failure of another rank
        raise next((f for f in failures if not isinstance(f, threading.BrokenBarrierError)), failures[0])
    return [result for (place, _), result in zip(ranks, results, strict=True) if place.rank == 0]


def _in_threads(ranks: Sequence[tuple[RankPlacement, RankWork]], sync: RankSync) -> list[Any]:
    results: list[Any] = [None] * len(ranks)

    def run(index: int) -> None:
        results[index] = _serve(*ranks[index], sync)

    num_threads, interval, cores = torch.get_num_threads(), sys.getswitchinterval(), os.sched_getaffinity(0)
    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(num_threads)
    sys.setswitchinterval(interval)
    os.sched_setaffinity(0, cores)
    return results


def _in_processes(
    ranks: Sequence[tuple[RankPlacement, RankWork]], sync: RankSync, context: multiprocessing.context.SpawnContext
) -> list[Any]:
    processes, connections = [], []
    try:
        for place, work in ranks:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_serve_and_send, args=(theirs, place, work, sync), daemon=True)
            with openmp.configured_children(shared=place.share < 1):
                process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        return [_received(connection, place) for connection, (place, _) in zip(connections, ranks, strict=True)]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _received(connection: Connection, place: RankPlacement) -> Any:
    try:
        return connection.recv()
    except EOFError:
        return RuntimeError(f"{place.identity}: its process died while it measured")


def _serve_and_send(connection: Connection, place: RankPlacement, work: RankWork, sync: RankSync) -> None:
    connection.send(_serve(place, work, sync))


def _serve(place: RankPlacement, work: RankWork, sync: RankSync) -> Any:
    """The result of the work, or the exception it raised."""
    group: Group | None = None
    try:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        if place.cores:
            os.sched_setaffinity(0, place.cores)
        torch.set_num_threads(max(1, place.num_threads))
        store = connect_store(*sync.store) if place.size > 1 else None
        group = join(store, place.role, 0, place.rank, place.size, torch.device(place.device), host=LOOPBACK)
        return work(place, group, sync)
    except Exception as error:
        sync.abort()
        return error
    finally:
        if group is not None:
            group.close()
