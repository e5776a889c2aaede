"""The public Python API: an engine starts the processes that turn prompts into tokens, and is their first client.

    with Engine(load_config(["drafter=ngram", "cluster=inprocess"])) as engine:
        for completion in engine.generate(["def median(values):"]):
            print(completion.text)
        async for token in engine.submit("class Stack:"):   # inside a coroutine
            print(token.text, end="")

    with connect(engine.address, engine.secret) as client:   # in another thread or process, while the engine runs
        client.generate(["class Stack:"])

It owns the backend and the supervisor; `cluster/client.py` has the requests. It knows neither models nor rounds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.protocol.membership import Ready, Silent, Stop, identity_of
from actors.protocol.messages import Request, WeightsUpdated
from actors.transport.keys import FIRST_CLIENT, OWNER
from cluster.client import Client, Connection, RemoteTrace, connect
from cluster.completion import Completion, EngineError, TooManyRequestsError
from cluster.config.compose import load_config
from cluster.config.schema import ClusterName, LaunchConfig
from cluster.io.checkpoints import check_checkpoints
from cluster.io.text import load_tokenizer, read_eos_token_ids
from cluster.observability.startup_time import StartUp
from cluster.placement.memory import describe_layout, footprints, load_allowance_s
from cluster.placement.ranks import RankPlacement
from cluster.runtime.backend import coordinator_spec, is_lent, lent_ranks, make_backend
from cluster.runtime.supervisor import Supervisor
from parallel.model.families.registry import read_config

if TYPE_CHECKING:
    from torch import Tensor

    from cluster.keys import ClientFile, ClientFileWatch
    from cluster.runtime.pool_leases import DraftLease
    from cluster.weight_updates import WeightUpdates

__all__ = ["Client", "Completion", "Engine", "EngineError", "RemoteTrace", "TooManyRequestsError", "connect"]

_POLL_S = 0.2
_STOP_S = 5.0
_CLOSED = "the engine was closed"


class Engine(Client):
    """Starts on construction and is ready when the constructor returns; `close` (or `with`) ends it.

    Its roles log to `log_dir`, where one is given and their hosts can write it. `submit`, `generate` and `report` are
    those of `Client`; other clients `connect` to `address` with `secret`, which is in a file `secret` of `log_dir` too,
    readable by its owner alone.
    """

    def __init__(
        self,
        config: LaunchConfig | None = None,
        *,
        progress: Callable[[str], None] = lambda _: None,
        log_dir: Path | None = None,
    ) -> None:
        self.config = config = config if config is not None else load_config([])
        self.startup = StartUp()
        self.startup.mark("imports")
        checkpoint = Path(config.target.path)
        tokenizer = load_tokenizer(checkpoint)
        check_checkpoints(checkpoint, config.drafter)
        eos_token_ids = read_eos_token_ids(checkpoint)
        sampling = config.sampling_params(tokenizer)
        Request(0, (0,), sampling).check(read_config(checkpoint).vocab_size)
        self._end_timer: threading.Timer | None = None
        self._client_file: ClientFile | None = None
        self._key_watch: ClientFileWatch | None = None
        self._lease = _lease(config)
        self._lent_ranks = lent_ranks(config)  # none of the engine's own processes
        self._backend = make_backend(config, log_dir, progress)
        try:
            places = self._backend.place()
            self.startup.mark("cluster")
            sizes = footprints(config, places)
            self._startup_s = config.cluster.startup_timeout_s + load_allowance_s(places, sizes)
            progress(describe_layout(config, places, sizes))
            progress("starting " + ", ".join(place.identity for place in places))
            self._backend.start(coordinator_spec(config, places, eos_token_ids), places)
        except BaseException:
            self._backend.close()
            raise
        self.startup.mark("processes")
        connection = Connection(self._backend.address, OWNER, self._backend.keys.of(OWNER))
        self._weight_updates: WeightUpdates | None = None
        self._updating = threading.Lock()
        limits = replace(config.cluster, startup_timeout_s=self._startup_s)
        self.supervisor = Supervisor(
            self._backend, limits, on_lost=connection.send, on_moved=connection.move, on_final=self._end
        )
        # longer than the supervisor takes to replace the coordinator or to give up
        super().__init__(connection, tokenizer, sampling, silence_s=self._startup_s + config.cluster.wait_s)
        self.supervisor.start()
        try:
            if log_dir is not None:
                progress(f"listening at {self.address}, secret in {self._write_key(log_dir)}")
            self._await_ranks(places, progress)
            if self._lease is not None:
                self._lease.obtain(self._backend, self._lent_ranks, self.ready["target-0"], progress)
        except BaseException:
            self.close()
            raise
        self.startup.mark("loading")
        self.supervisor.begin_replacing({place.identity: self.ready[place.identity].facts for place in places})

    @property
    def address(self) -> str:
        """The address to which other clients `connect`."""
        return self._backend.client_address

    @property
    def secret(self) -> str:
        """The key with which other clients `connect`, as one named default; `cluster/keys.py` makes further ones."""
        return self._backend.keys.of(FIRST_CLIENT).text

    @property
    def places(self) -> list[RankPlacement]:
        """Where each rank is; ranks whose node was lost move."""
        return self._backend.places

    def pids(self) -> dict[str, int]:
        """Process ids of the coordinator and the ranks, by identity, as far as they are known and ready."""
        ours = {name: ready.facts["pid"] for name, ready in self.ready.items() if name not in self._lent_ranks}
        return self.supervisor.coordinator_pid() | ours

    def update_weights(self, source: str | Path | Mapping[str, Tensor], version: int | None = None) -> int:
        """Let the target serve other weights from the next round on; returns once it does, with their `version`.

        `source` is a checkpoint of the same shape and type, or all of its tensors by name; `version`, by default one
        more than the last, must be above that. Requests in flight go on from their text so far, whose KV rows are
        computed again. What drafts keeps its weights. The checkpoint must stay where it is until the next update,
        since processes that are replaced read it; tensors are kept in a file meanwhile, where ranks are on this
        machine. Raises ValueError for a checkpoint that is refused, EngineError if a process was lost or the engine
        has failed; in both cases the target serves the weights that it had.
        """
        with self._updating:
            if self._weight_updates is None:
                from cluster.weight_updates import WeightUpdates  # most engines serve the weights they start with

                self._weight_updates = WeightUpdates(
                    self.config.target.path,
                    self._connection.send,
                    self.check_alive,
                    self._backend.serves,
                    share_files=self.config.cluster.name in (ClusterName.inprocess, ClusterName.local),
                )
            return self._weight_updates.update(source, version)

    def publish(self, file: Path) -> None:
        """Copy `file` to the Logs page of the dashboard, where the cluster outlives this engine."""
        self._backend.publish(file)

    def wind_down(self, within_s: float = 3.0) -> None:
        """Fail what is still running after this time, and replace no process from now on.

        For an end that may take the rest of the cluster with it, as a batch system's does.
        """
        self.supervisor.end_replacing()
        self._end_timer = threading.Timer(within_s, self._fail, ("the engine is ending",))
        self._end_timer.daemon = True
        self._end_timer.start()

    def close(self) -> None:
        """End the engine; requests in flight end with an error, those of other clients too. Safe to call twice."""
        if self._stopped.is_set():
            return
        if self._end_timer is not None:
            self._end_timer.cancel()
        self.supervisor.stop()
        if self._weight_updates is not None:
            self._weight_updates.close()
        if self._lease is not None:
            self._lease.close()
        if self._key_watch is not None:
            self._key_watch.close()
        self._connection.send(Stop(_CLOSED))
        self._reader.join(timeout=0 if self._error is not None else _STOP_S)
        has_stopped = not self._reader.is_alive()
        self._stop_reader()
        self.supervisor.wait()
        is_complete = len(self.ready) >= len(self.places)  # a rank that imports or loads hears nothing
        self._backend.close(graceful=has_stopped and is_complete)
        self._connection.close()
        if self._client_file is not None:
            self._client_file.delete()
        self._fail(_CLOSED)

    def _write_key(self, directory: Path) -> Path:
        """Where clients find the key of the first of them, and where further ones are named."""
        from cluster.keys import ClientFile, ClientFileWatch  # an engine without a folder has its first client alone

        clients = ClientFile(directory)
        file = clients.create(self._backend.keys.of(FIRST_CLIENT))
        self._client_file, self._key_watch = clients, ClientFileWatch(clients, self._connection.send)
        return file

    def _end(self, reason: str, trace: str) -> None:
        """The engine cannot go on. Every client learns why from the coordinator; if that is what failed, the others
        notice its silence."""
        self._fail(reason, trace)
        self._connection.send(Stop(reason))

    def _await_ranks(self, places: list[RankPlacement], progress: Callable[[str], None]) -> None:
        timeout_s = self.config.cluster.startup_timeout_s
        deadline = time.monotonic() + self._startup_s
        with self._changed:
            while len(self.ready) < len(places) and self._error is None:
                if time.monotonic() > deadline:
                    missing = ", ".join(place.identity for place in places if place.identity not in self.ready)
                    remedy = "see logs/ of the run's directory for the reason, or raise the limit"
                    raise EngineError(f"cluster.startup_timeout_s={timeout_s}: {missing} not ready by then; {remedy}")
                self._changed.wait(timeout=_POLL_S)
                progress(f"importing libraries, loading weights ({len(self.ready)} of {len(places)} ranks are ready)")
            self.check_alive()
        for line in slow_kernels(self.ready):
            progress(line)

    def _on_record(self, record: Any) -> None:
        if isinstance(record, Ready | Silent) and identity_of(record.role, record.rank) in self._lent_ranks:
            if isinstance(record, Silent) and self._lease is not None:
                self._lease.lost(identity_of(record.role, record.rank), record.incarnation)
        elif isinstance(record, WeightsUpdated) and self._weight_updates is not None:
            self._weight_updates.ended(record)
        else:
            self.supervisor.observe(record)
        super()._on_record(record)

    def _on_successor(self) -> None:
        super()._on_successor()
        if self._weight_updates is not None:
            self._weight_updates.repeat()


def _lease(config: LaunchConfig) -> DraftLease | None:
    """The lease of the drafter, if pools lend it."""
    if not is_lent(config):
        return None
    from cluster.runtime.pool_leases import DraftLease

    return DraftLease(config)


def slow_kernels(ready: Mapping[str, Ready]) -> list[str]:
    """Why ranks have no compiled kernels: for each reason their names, what that means, and the remedy."""
    ranks: dict[str, list[str]] = {}
    for name, rank in ready.items():
        if why := rank.facts.get("no_kernels"):
            ranks.setdefault(why, []).append(name)
    return [
        f"{', '.join(sorted(names))}: no compiled kernels, so passes take several times longer\n  {why}"
        for why, names in ranks.items()
    ]
