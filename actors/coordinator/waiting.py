"""Requests that wait for a place in the batch: clients take turns, and within a client the first come is first served.

A client with many waiting requests delays another's by at most one of its own for each of the other's. Requests that
lost their place come before all that never had one, the oldest first. Knows nothing of places.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator

from actors.coordinator.sequence import Sequence


class WaitingQueue:
    """By the `scope` of the requests, which tells clients apart."""

    def __init__(self) -> None:
        self._returned: deque[Sequence] = deque()
        self._queues: OrderedDict[int, OrderedDict[int, Sequence]] = OrderedDict()  # the next in turn first
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Sequence]:
        """In the order in which they are served, if none is added."""
        yield from self._returned
        turns = deque(iter(queue.values()) for queue in self._queues.values())
        while turns:
            queue = turns.popleft()
            if (sequence := next(queue, None)) is not None:
                yield sequence
                turns.append(queue)

    def add(self, sequence: Sequence) -> None:
        """A request arrived; that of a client with none waiting is after one of every other client."""
        self._queues.setdefault(sequence.request.scope, OrderedDict())[sequence.request_id] = sequence
        self._len += 1

    def put_back(self, sequences: Iterable[Sequence]) -> None:
        """They lost their place, the oldest first."""
        returned = [*sequences]
        self._returned.extendleft(reversed(returned))
        self._len += len(returned)

    @property
    def counts(self) -> Counter[int]:
        """Requests here of each client that has any."""
        counts = Counter({scope: len(queue) for scope, queue in self._queues.items()})
        counts.update([sequence.request.scope for sequence in self._returned])
        return counts

    def first(self, full: Collection[int] = ()) -> Sequence | None:
        """The next to be served, those of the clients in `full` left out."""
        for sequence in self._returned:
            if sequence.request.scope not in full:
                return sequence
        scope = next((scope for scope in self._queues if scope not in full), None)
        return None if scope is None else next(iter(self._queues[scope].values()))

    def take(self, sequence: Sequence) -> None:
        """It is served: take it out; if it never had a place, the turn passes to the next client."""
        if sequence.request_id in self._queues.get(sequence.request.scope, ()):
            self._queues.move_to_end(sequence.request.scope)
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It ended, if it was here."""
        queue = self._queues.get(sequence.request.scope, {})
        if queue.pop(sequence.request_id, None) is not None:
            self._len -= 1
            if not queue:
                del self._queues[sequence.request.scope]
        elif sequence in self._returned:
            self._returned.remove(sequence)
            self._len -= 1
