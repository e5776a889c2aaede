"""Emulates a slow network: delays the bytes of the control line between some `Link`s and the `Hub`, each way.

It has a connection to the hub for each connection of a link, and forwards bytes in order. When one of the two closes,
it closes the other.
"""

from __future__ import annotations

import asyncio
import threading

_CHUNK = 1 << 16


class Relay:
    """`address` is where links connect instead of the hub's. A thread, until `close`."""

    def __init__(self, hub_address: str, delay_s: float, bind: str) -> None:
        host, _, port = bind.removeprefix("tcp://").rpartition(":")
        self._hub_host, _, self._hub_port = hub_address.removeprefix("tcp://").rpartition(":")
        self._delay_s = delay_s
        self._loop = asyncio.new_event_loop()
        serving = asyncio.start_server(self._admit, host.strip("[]"), port.replace("*", "0"))
        self._server = self._loop.run_until_complete(serving)
        self._open: set[asyncio.StreamWriter] = set()
        self.address = f"tcp://{host}:{self._server.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends all connections; what is on its way is lost."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        self._server.close()
        for writer in self._open:
            writer.transport.abort()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _admit(self, from_link: asyncio.StreamReader, to_link: asyncio.StreamWriter) -> None:
        self._open.add(to_link)
        try:
            from_hub, to_hub = await asyncio.open_connection(self._hub_host.strip("[]"), self._hub_port)
        except OSError:
            to_link.close()
            self._open.discard(to_link)
            return
        self._open.add(to_hub)
        await asyncio.gather(self._forward(from_link, to_hub), self._forward(from_hub, to_link))
        self._open -= {to_link, to_hub}

    async def _forward(self, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        """The end of `source` is forwarded behind its last bytes."""
        chunk = b"-"
        while chunk:
            try:
                chunk = await source.read(_CHUNK)
            except OSError:
                chunk = b""
            if chunk:
                self._loop.call_later(self._delay_s, to.write, chunk)
        self._loop.call_later(self._delay_s, to.close)
