"""Streams of scripted events: what is sent in which call, and what is left to the task, in every order."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
from starlette.types import Message

from cluster.completion import EngineError
from cluster.serving.streams import EventStream, Part


class Scripted:
    """Events that the test brings, and a connection and `send` that it blocks. `sent` has (body, whether the last)."""

    def __init__(self) -> None:
        self.new: list[bytes] = []
        self.is_last = self.takes_long = False
        self.error: Exception | None = None
        self.looker: Callable[[], None] | None = None
        self.sent: list[tuple[bytes, bool]] = []
        self.wrote = list[str]()
        self.num_closed = 0
        self._reads = asyncio.Event()
        self._reads.set()

    # what the stream is given

    def notify(self, looker: Callable[[], None]) -> None:
        self.looker = looker
        looker()

    def look(self) -> Part | None:
        if self.error is not None:
            raise self.error
        if not self.new:
            return None
        new, self.new = self.new, []
        return Part(partial(self._write, new), self.takes_long, self.is_last)

    def _write(self, new: list[bytes]) -> bytes:
        self.wrote.append(threading.current_thread().name)
        return b"".join(new)

    @property
    def is_full(self) -> bool:
        return not self._reads.is_set()

    async def send(self, message) -> None:
        await self._reads.wait()
        if message["type"] == "http.response.body":
            self.sent.append((message["body"], not message["more_body"]))

    async def receive(self) -> Message:
        """The client stays."""
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    def close(self) -> None:
        self.num_closed += 1

    # what the test does

    def bring(self, event: bytes, *, is_last: bool = False) -> None:
        self.new.append(event)
        self.is_last |= is_last
        self.tell()

    def tell(self) -> None:
        assert self.looker is not None
        self.looker()

    def block(self) -> None:
        self._reads.clear()

    def go_on(self) -> None:
        self._reads.set()


@asynccontextmanager
async def streaming(timeout_s: float = 60.0):
    """A stream that has begun, and its task."""
    script = Scripted()
    stream = EventStream(script, script.close, timeout_s)
    state = {"send": script.send, "connection": script}
    task = asyncio.ensure_future(stream({"type": "http", "state": state}, script.receive, script.send))
    while script.looker is None:
        await asyncio.sleep(0)
    yield script, task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_a_part_is_sent_in_the_call_that_brings_it():
    """No step of a task lies between, each of which costs as much as the writing."""

    async def run():
        async with streaming() as (script, task):
            script.bring(b"a")
            assert script.sent == [(b"a", False)]
            script.tell()
            assert script.sent == [(b"a", False)], "nothing came"
            script.bring(b"b", is_last=True)
            assert script.sent == [(b"a", False), (b"b", True)] and script.num_closed == 0
            await asyncio.wait_for(task, 10)
            assert script.num_closed == 1
            script.bring(b"c")
            assert len(script.sent) == 2, "it has ended"

    asyncio.run(run())


def test_what_a_client_does_not_read_waits_and_is_gathered():
    async def run():
        async with streaming() as (script, task):
            script.block()
            for event in (b"a", b"b", b"c"):
                script.bring(event)
                await asyncio.sleep(0.01)
            assert not script.sent and script.new == [b"b", b"c"], "one part waits, the others are not made"
            script.go_on()
            script.bring(b"d", is_last=True)
            await asyncio.wait_for(task, 10)
            assert script.sent == [(b"a", False), (b"bcd", True)]

    asyncio.run(run())


def test_what_takes_long_is_written_in_a_thread():
    async def run():
        async with streaming() as (script, task):
            own = threading.current_thread().name
            script.bring(b"a")
            script.takes_long = True
            script.bring(b"b")
            assert script.sent == [(b"a", False)]
            script.bring(b"c", is_last=True)
            await asyncio.wait_for(task, 10)
            assert b"".join([body for body, _ in script.sent]) == b"abc"
            assert [is_last for _, is_last in script.sent].count(True) == 1 and script.sent[-1][1]
            assert script.wrote[0] == own and own not in script.wrote[1:] and len(script.wrote) > 1

    asyncio.run(run())


@pytest.mark.parametrize("is_full", [False, True])
def test_an_error_of_the_engine_is_the_last_event(is_full):
    async def run():
        async with streaming() as (script, task):
            script.bring(b"a")
            if is_full:
                script.block()
            script.error = EngineError("lost")
            script.tell()
            assert len(script.sent) == 1, "the task sends it"
            await asyncio.sleep(0.01)
            script.go_on()
            await asyncio.wait_for(task, 10)
            (_, (body, is_last)) = script.sent
            assert b"lost" in body and is_last and script.num_closed == 1

    asyncio.run(run())


def test_a_fault_while_a_part_is_made_is_raised_by_the_task():
    """Not in the call, which serves other streams too; and the stream does not end as if it were whole."""

    async def run():
        async with streaming() as (script, task):
            script.error = ZeroDivisionError("a fault")
            script.tell()
            with pytest.raises(ZeroDivisionError):
                await asyncio.wait_for(task, 10)
            assert not script.sent and script.num_closed == 1

    asyncio.run(run())


def test_time_that_runs_out_ends_a_stream_once():
    async def run():
        async with streaming(timeout_s=0.05) as (script, task):
            script.bring(b"a")
            await asyncio.wait_for(task, 10)
            script.bring(b"b")
            (_, (body, is_last)) = script.sent
            assert b"timeout" in body and is_last

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(40))
def test_every_event_is_sent_once_and_in_order(seed):
    """However arrivals, a client that stops reading, and parts for threads meet."""
    draw = random.Random(seed)

    async def run():
        async with streaming() as (script, task):
            for number in range(30):
                draw.choice([script.block, script.go_on, script.go_on])()
                script.takes_long = draw.random() < 0.3
                script.bring(b"%d " % number, is_last=number == 29)
                for _ in range(draw.randrange(4)):
                    await asyncio.sleep(draw.choice([0, 0, 0.001]))
            script.go_on()
            await asyncio.wait_for(task, 10)
            assert b"".join([body for body, _ in script.sent]) == b"".join([b"%d " % number for number in range(30)])
            assert [is_last for _, is_last in script.sent] == [False] * (len(script.sent) - 1) + [True]

    asyncio.run(run())
