"""Emulates a slow network: delays every frame of the control line between some `Link`s and the `Hub`, each way.

It has a connection to the hub for each connection of a link, and forwards frames in order. When one of the two closes,
it closes the other. Decodes nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from actors.transport import framing
from actors.transport.channel import HUB_GIVE_UP_S
from actors.transport.framing import ConnectionClosed, Poller, Stream

_CHECK_S = 0.2


class Relay:
    """`address` is where links connect instead of the hub's. A thread, until `close`."""

    def __init__(self, hub_address: str, delay_s: float, bind: str) -> None:
        self._hub = framing.resolve(hub_address)
        self._delay_s = delay_s
        self._listener = framing.listen(bind, HUB_GIVE_UP_S)
        self.address = framing.address_of(self._listener)
        self._poller = Poller()
        self._streams: dict[int, Stream] = {}
        self._other_end: dict[Stream, Stream] = {}
        self._held: deque[tuple[float, Stream, bytes | None]] = deque()
        """When to forward a frame, or None for the end, to which stream."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        self._poller.watch(self._listener.fileno())
        while not self._closing.is_set():
            now = time.monotonic()
            while self._held and self._held[0][0] <= now:
                _, stream, frame = self._held.popleft()
                self._deliver(stream, frame)
            wait_s = min(_CHECK_S, self._held[0][0] - now) if self._held else _CHECK_S
            for descriptor in self._poller.wait(wait_s):
                if descriptor == self._listener.fileno():
                    self._admit()
                elif (stream := self._streams.get(descriptor)) is not None:
                    self._read(stream)
        for stream in self._streams.values():
            stream.close()
        self._listener.close()
        self._poller.close()

    def _admit(self) -> None:
        if (link := framing.accept(self._listener)) is None:
            return
        connection = framing.connect(self._hub, HUB_GIVE_UP_S)
        if connection is None:
            link.close()
            return
        hub = Stream(connection)
        self._other_end |= {link: hub, hub: link}
        for stream in (link, hub):
            self._streams[stream.fileno()] = stream
            self._poller.watch(stream.fileno())

    def _read(self, stream: Stream) -> None:
        due = time.monotonic() + self._delay_s
        try:
            self._poller.flush(stream)
            if stream.fill():
                self._held.extend((due, self._other_end[stream], framing.framed(frame)) for frame in stream.frames())
        except ConnectionClosed:
            self._held.append((due, self._other_end[stream], None))
            self._drop(stream)

    def _deliver(self, stream: Stream, frame: bytes | None) -> None:
        if self._streams.get(stream.fileno()) is not stream:
            return
        if frame is None:
            self._drop(stream)
        else:
            stream.outgoing.append(frame)
            self._poller.flush(stream)

    def _drop(self, stream: Stream) -> None:
        self._poller.unwatch(stream.fileno())
        del self._streams[stream.fileno()], self._other_end[stream]
        stream.close()
