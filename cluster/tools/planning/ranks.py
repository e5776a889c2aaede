"""Runs work on the ranks of one role or of both at once, where the engine would place them.

Each rank is a process of its own, or a thread where the engine's would be (`cluster=inprocess`), pinned and grouped
like the engine's. Knows nothing of what is measured there. This machine only.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from actors.worker import openmp
from actors.worker.factory import SWITCH_INTERVAL_S
from actors.worker.spec import RankSpec
from cluster.config.schema import ClusterName, LaunchConfig
from cluster.placement.ranks import RankPlacement
from cluster.runtime.specs import rank_spec
from parallel.comm.group import Group
from parallel.comm.rendezvous import connect_store, host_store, join

_LOOPBACK = "127.0.0.1"
_MEETING_S = 120.0
ACTS = 2
"""Times that two roles may play in turn."""


class Primitives(Protocol):
    """What `threading` and a context of `multiprocessing` both make."""

    Barrier: Callable[[int], Any]
    Event: Callable[[], Any]
    Semaphore: Callable[[int], Any]


class Turns:
    """The leads of two crews alternate until the first one's time is up."""

    def __init__(self, primitives: Primitives, roles: Sequence[str]) -> None:
        self._over = primitives.Event()
        self._first = roles[0]
        self._turns = {role: primitives.Semaphore(int(role == roles[0])) for role in roles}

    def take(self, role: str, until: float) -> bool:
        """Wait until the other lead is through; False if it is over, which the first crew decides by the clock."""
        self._turns[role].acquire()
        if role == self._first and time.monotonic() >= until:
            self.end()
        return not self._over.is_set()

    def give(self, role: str) -> None:
        for other, turn in self._turns.items():
            if other != role:
                turn.release()

    def end(self) -> None:
        self._over.set()
        for turn in self._turns.values():
            turn.release()


class Meeting:
    """Where the ranks of all crews wait for each other, and what they do in turn, act by act.

    `store_port` is that of the store at which the ranks of a crew form their group.
    """

    def __init__(
        self, primitives: Primitives, num_ranks: int, roles: Sequence[str], store_port: int, *, in_turn: bool
    ) -> None:
        self.in_turn = in_turn
        self.store_port = store_port
        self.acts = tuple(Turns(primitives, roles) for _ in range(ACTS))
        self._barrier = primitives.Barrier(num_ranks)

    def start(self) -> None:
        """Wait until the last rank is ready."""
        self._barrier.wait(_MEETING_S)

    def abort(self) -> None:
        """Nobody waits any longer."""
        self._barrier.abort()
        for turns in self.acts:
            turns.end()


Work = Callable[[RankSpec, Group, Meeting], Any]
"""What one rank does; importable by name, because another process will."""


@dataclass(frozen=True, slots=True)
class Crew:
    """All ranks of a role in one configuration, and their work."""

    config: LaunchConfig
    places: tuple[RankPlacement, ...]
    work: Work


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank of a crew, and what part of its cores is its own."""

    spec: RankSpec
    work: Work
    share: float


def run_crews(crews: Sequence[Crew], eos_token_ids: tuple[int, ...], *, in_turn: bool = False) -> list[Any]:
    """What the lead of each crew brought back; two crews work at the same time or `in_turn`. Raises what the first
    rank that failed had raised."""
    store = host_store(_LOOPBACK)
    ranks = [
        _Rank(rank_spec(crew.config, place, "", _LOOPBACK, eos_token_ids), crew.work, place.share)
        for crew in crews
        for place in crew.places
    ]
    as_threads = crews[0].config.cluster.name == ClusterName.inprocess
    context = multiprocessing.get_context("spawn")
    roles = [crew.places[0].role for crew in crews]
    meeting = Meeting(threading if as_threads else context, len(ranks), roles, store.port, in_turn=in_turn)
    results = _in_threads(ranks, meeting) if as_threads else _in_processes(ranks, meeting, context)
    failures = [result for result in results if isinstance(result, BaseException)]
    if failures:
        # those who waited for the one that failed say less than it does
        raise next((f for f in failures if not isinstance(f, threading.BrokenBarrierError)), failures[0])
    return [result for rank, result in zip(ranks, results, strict=True) if rank.spec.rank == 0]


def _in_threads(ranks: Sequence[_Rank], meeting: Meeting) -> list[Any]:
    results: list[Any] = [None] * len(ranks)

    def run(index: int, rank: _Rank) -> None:
        results[index] = _serve(rank.spec, rank.work, meeting)

    before, interval, cores = torch.get_num_threads(), sys.getswitchinterval(), os.sched_getaffinity(0)
    threads = [threading.Thread(target=run, args=(i, rank), daemon=True) for i, rank in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(before)
    sys.setswitchinterval(interval)
    os.sched_setaffinity(0, cores)
    return results


def _in_processes(ranks: Sequence[_Rank], meeting: Meeting, context: multiprocessing.context.SpawnContext) -> list[Any]:
    started = []
    try:
        for rank in ranks:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_answer, args=(theirs, rank.spec, rank.work, meeting), daemon=True)
            with openmp.configured_children(shared=rank.share < 1):
                process.start()
            theirs.close()
            started.append((process, ours))
        return [_received(connection, rank.spec) for (_, connection), rank in zip(started, ranks, strict=True)]
    finally:
        for process, _ in started:
            process.terminate()
        for process, _ in started:
            process.join()


def _answer(connection: Connection, spec: RankSpec, work: Work, meeting: Meeting) -> None:
    connection.send(_serve(spec, work, meeting))


def _received(connection: Connection, spec: RankSpec) -> Any:
    try:
        return connection.recv()
    except EOFError:
        return RuntimeError(f"{spec.identity}: its process died while it measured")


def _serve(spec: RankSpec, work: Work, meeting: Meeting) -> Any:
    """The work's result, or what it raised."""
    group: Group | None = None
    try:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        if spec.cores:
            os.sched_setaffinity(0, spec.cores)
        torch.set_num_threads(max(1, spec.num_threads))
        store = connect_store(_LOOPBACK, meeting.store_port) if spec.size > 1 else None
        group = join(store, spec.role, 0, spec.rank, spec.size, spec.device, host=spec.host)
        return work(spec, group, meeting)
    except Exception as error:
        meeting.abort()
        return error
    finally:
        if group is not None:
            group.close()
