"""A slower network on a machine that has none: holds every record of the control line back, each way.

Sits between the `Link`s of some ranks and the coordinator's `Hub`, known to the hub under their names, and passes on
what it gets, in order, late. Reads nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque

import zmq

_CLOSING_LOOK_S = 0.2
_SPIN_S = 5e-4
"""Less than this is not slept: the clock of a poll has milliseconds."""


class Relay:
    """`address` is where links connect instead of the hub's. A thread, until `close`."""

    def __init__(self, hub_address: str, delay_s: float, bind: str) -> None:
        self._hub_address = hub_address
        self._delay_s = delay_s
        self._front = self._open(zmq.ROUTER)
        self._front.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._front.bind(bind)
        self.address: str = self._front.getsockopt_string(zmq.LAST_ENDPOINT)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._pass_on, name="relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=5)

    def _pass_on(self) -> None:
        held: deque[tuple[float, zmq.Socket, list[bytes]]] = deque()
        towards_hub: dict[bytes, zmq.Socket] = {}
        name_of: dict[zmq.Socket, bytes] = {}
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        while not self._closing.is_set():
            now = time.monotonic()
            while held and held[0][0] <= now:
                _, socket, frames = held.popleft()
                socket.send_multipart(frames)
            wait_s = min(_CLOSING_LOOK_S, held[0][0] - now) if held else _CLOSING_LOOK_S
            for socket, _ in poller.poll(0 if wait_s < _SPIN_S else wait_s * 1000):
                frames, due = socket.recv_multipart(), time.monotonic() + self._delay_s
                if socket is not self._front:
                    held.append((due, self._front, [name_of[socket], *frames]))
                    continue
                name, *frames = frames
                if name not in towards_hub:
                    towards_hub[name] = line = self._open(zmq.DEALER)
                    line.setsockopt(zmq.IDENTITY, name)
                    line.connect(self._hub_address)
                    name_of[line] = name
                    poller.register(line, zmq.POLLIN)
                held.append((due, towards_hub[name], frames))
        for socket in (self._front, *towards_hub.values()):
            socket.close()

    @staticmethod
    def _open(kind: int) -> zmq.Socket:
        socket = zmq.Context.instance().socket(kind)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            socket.setsockopt(option, 0)
        return socket
