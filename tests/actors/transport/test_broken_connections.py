"""A connection that breaks while its records wait ends neither process.

ZeroMQ stops reading a connection of which as many records wait as its limit allows. If the connection is reset then,
the next heartbeat, its own or one that lies behind those records, ends the process by an assertion
(github.com/zeromq/libzmq, issues 3937 and 4767). So no socket has such a limit.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PRELUDE = """
import socket, struct, threading, time
from actors.protocol.membership import Hello
from actors.protocol.messages import Abort
from actors.transport import channel
from actors.transport.channel import Hub, Link
from tests.actors.service_harness import KEYS, link_to

channel.BEAT_MS = 50

class Line:
    '''Forwards both directions, except that what one end sends is held while `holds` is set. `reset` breaks it.'''

    def __init__(self, address):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.place, self.held, self.holds = (host, int(port)), b"", False
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        self.link_end, _ = self.listener.accept()
        self.listener.close()
        self.hub_end = socket.create_connection(self.place)
        threading.Thread(target=self.forward, args=(self.hub_end, self.link_end), daemon=True).start()
        while chunk := self.link_end.recv(1 << 16):
            self.held += chunk
            if not self.holds:
                self.let_go()

    def let_go(self):
        held, self.held = self.held, b""
        self.hub_end.sendall(held)

    def forward(self, source, to):
        try:
            while chunk := source.recv(1 << 16):
                to.sendall(chunk)
        except OSError:
            pass

    def reset(self, end):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RD)
        end.close()

hub = Hub("tcp://127.0.0.1:*", KEYS)
line = Line(hub.client_address)
link = link_to(line.address, "client:1")
link.send(Hello())
assert hub.receive(20.0)
"""
TO_HUB = """
line.holds = True
for number in range(60):
    link.send(Abort(number))
    time.sleep(0.01)  # some heartbeats lie between
line.let_go()
assert hub._client_socket.poll(20_000)  # the first has come
time.sleep(0.3)
line.reset(line.hub_end)
time.sleep(0.2)
arrived = sum(hub.receive(0.2) is not None for _ in range(40))
assert arrived, "nothing came"
"""
TO_LINK = """
for number in range(20_000):
    hub.send(["client:1"], Abort(number))
assert link._socket.poll(20_000)  # the first has come
time.sleep(1.0)
line.reset(line.link_end)
time.sleep(0.3)
assert link.receive(20.0) == Abort(0)
"""


@pytest.mark.extended
@pytest.mark.parametrize("case", [TO_HUB, TO_LINK], ids=["to a hub", "to a link"])
def test_a_reset_while_records_wait_does_not_end_the_process(case):
    ending = "link.close()\nhub.close()\nprint('alive')"
    command = [sys.executable, "-c", PRELUDE + case + ending]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "alive\n" and not done.returncode, done.stderr[-500:]
