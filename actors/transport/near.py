"""Records between threads of one process: handed over as they are, frozen, without a network, bytes or a wake-up.

What a link sends is handled by the thread that sends it, one record at a time: while another thread handles one, that
thread goes on with this one afterwards. So a rank that has sent its verdicts finds its next batch in its inbox when it
looks there, and the coordinator's own thread sleeps. Knows neither what records mean nor who may send them.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakValueDictionary

Handle = Callable[[str, Any], None]
"""Called with the name of a link and its record."""
HELD_S = 0.02
"""Seconds after a reader was woken in which records that may wait do not wake it again."""


class PatientInbox:
    """A `SimpleQueue` whose reader sleeps through the records that `may_wait`: it gets them with the next one that may
    not, with the first one `HELD_S` after it was last woken, or when it looks by itself, in their order.

    To wake a thread takes longer than to make a record, and it then wants Python's lock.
    """

    def __init__(self, may_wait: Callable[[Any], bool]) -> None:
        self._may_wait = may_wait
        self._lock = threading.Lock()
        self._held: list[Any] = []
        self._given_at = -math.inf
        self._due = SimpleQueue[list[Any]]()
        self._taken: deque[Any] = deque()  # of the reader alone

    def put(self, record: Any) -> None:
        with self._lock:
            self._held.append(record)
            now = time.monotonic()
            if now - self._given_at >= HELD_S or not self._may_wait(record):
                self._given_at = now
                self._due.put(self._take_held())

    def get(self, timeout: float | None = None) -> Any:
        if not self._taken:
            try:
                self._taken.extend(self._due.get(timeout=timeout))
            except Empty:
                with self._lock:
                    self._taken.extend(self._take_held() if self._due.empty() else self._due.get())
        if not self._taken:
            raise Empty
        return self._taken.popleft()

    def _take_held(self) -> list[Any]:
        held, self._held = self._held, []
        return held


Inbox = SimpleQueue[Any] | PatientInbox


class Exchange:
    """Connects the threads of one process with the hub at one address; it outlives the hub while it has links.

    `turn` is held while a record is handled. `wake` ends the wait of the thread that receives.
    """

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.wake: Callable[[], None] = lambda: None
        self._handle: Handle | None = None
        self._unhandled: deque[tuple[str, Any]] = deque()
        self._error: Exception | None = None
        self._inboxes: dict[str, Inbox] = {}
        self._known: dict[str, None] = {}  # links that have sent a record

    # --- links --------------------------------------------------------------------------------------------------------

    def open(self, identity: str, may_wait: Callable[[Any], bool] | None = None) -> Inbox:
        """The inbox of a link, which takes the place of an earlier link of this name."""
        inbox = self._inboxes[identity] = SimpleQueue[Any]() if may_wait is None else PatientInbox(may_wait)
        return inbox

    def close(self, identity: str, inbox: Inbox) -> None:
        if self._inboxes.get(identity) is inbox:
            del self._inboxes[identity]
            self._known.pop(identity, None)

    def send(self, identity: str, record: Any) -> None:
        """Send from a link; the record waits where nothing handles records."""
        self._known[identity] = None
        self._unhandled.append((identity, record))
        if self._handle is None:
            self.wake()
        else:
            self.serve_waiting()

    def serve_waiting(self) -> None:
        """Handle what waits, unless another thread is at it: that one looks again when it is done."""
        while self._unhandled and self._handle is not None and self.turn.acquire(blocking=False):
            try:
                while self._unhandled and self._handle is not None:
                    self._handle(*self._unhandled.popleft())
            except Exception as error:  # of the coordinator, not of the rank whose thread this is
                self._handle, self._error = None, error
                self.wake()
            finally:
                self.turn.release()

    # --- the hub ------------------------------------------------------------------------------------------------------

    @property
    def identities(self) -> list[str]:
        """Links that have sent a record and are open."""
        return [*self._known]

    def put(self, identities: Iterable[str], record: Any) -> list[str]:
        """Give the record to the links of these names; returns the names without one."""
        others = []
        for identity in identities:
            if (inbox := self._inboxes.get(identity)) is not None:
                inbox.put(record)
            else:
                others.append(identity)
        return others

    def serve_with(self, handle: Handle | None) -> None:
        """Handle records so from now on; with None they wait for `take`."""
        with self.turn:
            self._handle, self._error = handle, None
        self.serve_waiting()

    @property
    def has_left(self) -> bool:
        """Whether `take` has something."""
        return self._error is not None or (self._handle is None and bool(self._unhandled))

    def take(self) -> tuple[str, Any] | None:
        """The next record, where nothing handles them. Raises what the handling of one has raised."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._handle is None and self._unhandled:
            return self._unhandled.popleft()
        return None


class NearLink:
    """The end of a rank or of the owner in the process of the hub; as `Link`."""

    num_unreadable = 0

    def __init__(self, exchange: Exchange, identity: str, may_wait: Callable[[Any], bool] | None = None) -> None:
        self.identity = identity
        self._exchange = exchange
        self._inbox = exchange.open(identity, may_wait)

    def send(self, record: Any) -> None:
        self._exchange.send(self.identity, record)

    def receive(self, timeout_s: float | None = None) -> Any | None:
        try:
            return self._inbox.get(timeout=None if timeout_s is None else max(0.0, timeout_s))
        except Empty:
            return None

    def is_refused(self, timeout_s: float) -> bool:  # noqa: ARG002 (who may connect was asked when it was made)
        return False

    def close(self) -> None:
        self._exchange.close(self.identity, self._inbox)


_EXCHANGES: WeakValueDictionary[tuple[int, str, bytes], Exchange] = WeakValueDictionary()
"""Exchanges by process, address and public half of the hub's key; by process, since a fork shares no thread."""


def exchange_at(address: str, public: bytes) -> Exchange:
    """That of the hub which this process has, or has had, at this address with this key."""
    return _EXCHANGES.setdefault((os.getpid(), address, public), Exchange())
