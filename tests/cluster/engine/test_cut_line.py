"""The control line between two hosts that lose sight of each other: no packet says so, and both ends find out."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import network, port_of

pytestmark = [pytest.mark.multinode, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
HUB = """
from actors.transport.channel import Hub
from actors.transport.keys import HubKeys
hub = Hub("tcp://{address}:7000", HubKeys(bytes(32), ("draft-0",)))
while True:
    identity, record = hub.receive()
    hub.send([identity], record)
"""
LINK = """
import time
from actors.protocol.messages import Abort
from actors.transport.channel import Link
from actors.transport.keys import HubKeys
link = Link("tcp://{address}:7000", "draft-0", HubKeys(bytes(32)).of("draft-0"))
while True:
    link.send(Abort(0))
    if link.receive(0.1) is not None:
        print(flush=True)
        time.sleep(0.1)
"""


def test_a_link_is_back_sooner_than_tcp_would_ask_again(tmp_path):
    """Unanswered for 8 s, TCP by itself waits until second 12.6 before it sends the next packet."""
    with network(tmp_path, "n1", "n2") as (switch, (first, second)):
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", HUB.format(address=first.address)]
        first.start(*command, log=tmp_path / "hub.log", env=environment)
        command = [sys.executable, "-c", LINK.format(address=first.address)]
        script = subprocess.Popen(
            second.enter(command), stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        heard: list[float] = []
        reader = threading.Thread(target=lambda: heard.extend(time.monotonic() for _ in script.stdout))
        reader.start()
        await_more(heard, 0)
        switch.run("ip", "link", "set", port_of(first), "nomaster")
        time.sleep(8.0)
        count = len(heard)
        switch.run("ip", "link", "set", port_of(first), "master", "br0")
        restored = time.monotonic()
        await_more(heard, count)
        assert restored - heard[count - 1] > 7.0 and heard[count] - restored < 3.0
    script.wait()
    reader.join()
    script.stdout.close()


def await_more(heard: list[float], count: int) -> None:
    deadline = time.monotonic() + 30
    while len(heard) <= count:
        assert time.monotonic() < deadline
        time.sleep(0.05)
