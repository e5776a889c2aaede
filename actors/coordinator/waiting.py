"""Requests that wait for a place in the batch: clients take turns, and within a client the first due is first served.

A request is due at its arrival, later or earlier by its priority and its expected length (`Sequence.due`), so that
those that wait overtake in the end whatever comes after them. A client with many waiting requests delays another's by
at most one of its own for each of the other's. Requests that lost their place come before all that never had one, the
oldest first. Knows nothing of places.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from operator import attrgetter

from actors.coordinator.sequence import Sequence

_DUE = attrgetter("due")
MOST_PASSED = 64
"""Requests of a client that others of it may overtake."""


class WaitingQueue:
    """Requests that wait for a place in the batch: one queue for each client, which `Request.scope` tells apart."""

    def __init__(self) -> None:
        self._returned: deque[Sequence] = deque()
        self._queues: OrderedDict[int, list[Sequence]] = OrderedDict()  # the next in turn first; each as they are due
        self.size = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Sequence]:
        """Yields the requests in the order in which they are served, if none is added."""
        yield from self._returned
        turns = deque(iter(queue) for queue in self._queues.values())
        while turns:
            queue = turns.popleft()
            if (sequence := next(queue, None)) is not None:
                yield sequence
                turns.append(queue)

    def add(self, sequence: Sequence) -> None:
        """A request arrived; that of a client with none waiting is after one of every other client."""
        insort(self._queues.setdefault(sequence.request.scope, []), sequence, key=_DUE)
        self.size += 1

    def put_back(self, sequences: Iterable[Sequence]) -> None:
        """They lost their place, the oldest first."""
        returned = [*sequences]
        self._returned.extendleft(reversed(returned))
        self.size += len(returned)

    @property
    def counts(self) -> Counter[int]:
        """Requests here of each client that has any."""
        counts = Counter({scope: len(queue) for scope, queue in self._queues.items()})
        counts.update([sequence.request.scope for sequence in self._returned])
        return counts

    def first(
        self, full: Collection[int] = (), is_held: Callable[[Sequence], bool] = lambda _: False
    ) -> Sequence | None:
        """The next to be served, those of the clients in `full` left out, and those that are held: they are overtaken
        by others of their client."""
        able = (queue for scope, queue in self._queues.items() if scope not in full)
        returned = (sequence for sequence in self._returned if sequence.request.scope not in full)
        for queue in (returned, *able):
            for sequence in islice(queue, MOST_PASSED):
                if not is_held(sequence):
                    return sequence
        return None

    def take(self, sequence: Sequence) -> None:
        """It is served: take it out; if it never had a place, the turn passes to the next client."""
        if self._place(sequence) is not None:
            self._queues.move_to_end(sequence.request.scope)
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It ended, if it was here."""
        if (place := self._place(sequence)) is not None:
            queue = self._queues[sequence.request.scope]
            del queue[place]
            self.size -= 1
            if not queue:
                del self._queues[sequence.request.scope]
        elif sequence in self._returned:
            self._returned.remove(sequence)
            self.size -= 1

    def _place(self, sequence: Sequence) -> int | None:
        """Index in the queue of its client; None if it is not there or has had a place in the batch before."""
        queue = self._queues.get(sequence.request.scope, [])
        place = bisect_left(queue, sequence.due, key=_DUE)
        while place < len(queue) and queue[place] is not sequence:
            place = place + 1 if queue[place].due == sequence.due else len(queue)
        return place if place < len(queue) else None
