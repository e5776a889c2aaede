"""What HTTP costs beside the Python API: `python -m docs.measurements.http_overhead [options] [OVERRIDE ...]`.

One engine in this process, always drafting, completes the same prompts `--turns` times by `Engine.submit` and over
HTTP, as streams or `--whole`, in turn, each time without known rows. The clients of HTTP are one process more, which
only keeps what it reads until the clock has stopped; with `--client sockets` it has no event loop, and with `asleep` it
does not wake before a reply has ended, so that what is left of the cost is the server's. Prints tokens/s, CPU time a
token of the engine's process, the server in it, of the server's own thread, of the thread that receives tokens, and of
the clients, and the ratios turn by turn. Exit code 1 if a text differed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from actors.protocol.messages import SamplingParams
from cluster import pocket
from cluster.config import load_config
from cluster.engine import Engine
from cluster.io.prompts import Prompt, read_prompts
from cluster.run_prompts import serve_prompts
from cluster.serving.app import HttpService
from cluster.serving.server import HttpServer, bind
from docs.measurements import lines

HEAD = (
    "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    "content-length: {}\r\n\r\n"
)
THREADS = ("http-server", "engine-reader")


@dataclass(slots=True)
class CpuTimes:
    process: float = 0.0
    by_thread: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Turn:
    """All completions once. Times are in seconds; `client_cpu` is that of the process which asked over HTTP,
    `by_thread` what `THREADS` took of `cpu`."""

    wall: float
    cpu: float
    by_thread: dict[str, float]
    client_cpu: float
    num_tokens: int
    texts: list[str]

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall

    @property
    def cpu_us_a_token(self) -> float:
        return 1e6 * self.cpu / self.num_tokens


def by_api(engine: Engine, prompts: Sequence[Prompt], tokens: int, streams: int, salt: str) -> Turn:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    with cpu_times() as times:
        run = serve_prompts(engine, prompts, sampling, speculate=True, concurrency=streams, cache_salt=salt)
    return Turn(
        run.wall_s, times.process, times.by_thread, 0.0, run.num_tokens, sorted([one.text for one in run.requests])
    )


def by_http(
    ask: Callable[[dict[str, Any]], dict[str, Any]],
    is_stream: bool,
    prompts: Sequence[Prompt],
    tokens: int,
    streams: int,
    salt: str,
) -> Turn:
    common = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "cache_salt": salt, "stream": is_stream}
    bodies = [{**common, "prompt": prompt.text} for prompt in prompts]
    with cpu_times() as times:
        answer = ask({"streams": streams, "bodies": bodies})
    return Turn(
        answer["wall"], times.process, times.by_thread, answer["cpu"], tokens * len(prompts), sorted(answer["texts"])
    )


@contextmanager
def cpu_times() -> Iterator[CpuTimes]:
    """What is done meanwhile takes: seconds of this process, and of its `THREADS` by name."""
    times = CpuTimes()
    before = time.process_time(), _cpu_by_thread()
    yield times
    after = time.process_time(), _cpu_by_thread()
    times.process = after[0] - before[0]
    times.by_thread = {name: after[1][name] - before[1][name] for name in THREADS}


def _cpu_by_thread() -> dict[str, float]:
    files = {thread.name: Path(f"/proc/self/task/{thread.native_id}/schedstat") for thread in threading.enumerate()}
    return {name: 1e-9 * int(files[name].read_text().split()[0]) for name in THREADS}


@contextmanager
def clients(port: int, kind: str) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """A process that sends the requests it is given, and answers with their texts and times."""
    command = [sys.executable, "-P", __file__, "--clients-of", str(port), "--client", kind]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def ask(line: dict[str, Any]) -> dict[str, Any]:
        stdin.write(json.dumps(line) + "\n")
        stdin.flush()
        return json.loads(stdout.readline())

    try:
        yield ask
    finally:
        process.terminate()
        process.wait()


def be_clients(port: int, kind: str) -> None:
    """The process of `clients`."""
    ask_all = CLIENTS[kind]
    for line in sys.stdin:
        asked = json.loads(line)
        wall, cpu = time.monotonic(), time.process_time()
        replies = ask_all(port, asked["bodies"], asked["streams"])
        times = {"wall": time.monotonic() - wall, "cpu": time.process_time() - cpu}
        sys.stdout.write(json.dumps({"texts": list(map(text_of, replies)), **times}) + "\n")
        sys.stdout.flush()


def ask_by_loop(port: int, bodies: Sequence[dict[str, Any]], streams: int) -> list[bytes]:
    """The replies, with so many requests at a time, each on a connection of its own."""
    return asyncio.run(_ask_by_loop(port, bodies, streams))


async def _ask_by_loop(port: int, bodies: Sequence[dict[str, Any]], streams: int) -> list[bytes]:
    left, replies = iter(bodies), list[bytes]()

    async def client() -> None:
        for body in left:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(_request(body))
            replies.append(await reader.read())
            writer.close()

    await asyncio.gather(*(client() for _ in range(streams)))
    return replies


def ask_by_sockets(port: int, bodies: Sequence[dict[str, Any]], streams: int, *, least_read: int = 1) -> list[bytes]:
    """As `ask_by_loop`, with nothing between this and the sockets; it wakes for so many bytes, or an end."""
    left, replies = iter(bodies), list[bytes]()
    with selectors.DefaultSelector() as selector:

        def start() -> None:
            if (body := next(left, None)) is not None:
                connection = socket.create_connection(("127.0.0.1", port))
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least_read)
                connection.sendall(_request(body))
                selector.register(connection, selectors.EVENT_READ, list[bytes]())

        for _ in range(streams):
            start()
        while selector.get_map():
            for key, _ in selector.select():
                assert isinstance(key.fileobj, socket.socket)
                if part := key.fileobj.recv(1 << 20):
                    key.data.append(part)
                else:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
                    replies.append(b"".join(key.data))
                    start()
    return replies


def _request(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    return HEAD.format(len(content)).encode() + content


CLIENTS = {
    "loop": ask_by_loop,
    "sockets": ask_by_sockets,
    "asleep": partial(ask_by_sockets, least_read=1 << 20),
}


def text_of(reply: bytes) -> str:
    """Raises RuntimeError for a reply that failed, or a stream without its end."""
    if reply.startswith(b"HTTP/1.1 200") and b"\r\ncontent-type: application/json\r\n" in reply:
        return json.loads(reply.partition(b"\r\n\r\n")[2])["choices"][0]["text"]
    lines = [line[6:] for line in reply.splitlines() if line.startswith(b"data: ")]
    if not reply.startswith(b"HTTP/1.1 200") or not lines or lines[-1] != b"[DONE]":
        raise RuntimeError(reply[-300:].decode(errors="replace"))
    return "".join([json.loads(line)["choices"][0]["text"] for line in lines[:-1]])


def compare(options: argparse.Namespace) -> bool:
    """Prints the figures of each number of streams; whether all texts were equal."""
    prompts = read_prompts(Path(options.prompts), options.limit)
    config = load_config(["cluster=inprocess", "job=serve", "pipeline.adaptive=false", *options.overrides])
    is_equal = True
    with Engine(config) as engine:
        service = HttpService(engine, config)
        server = HttpServer(service.application, bind("127.0.0.1", 0))
        try:
            with clients(server.port, options.client) as ask:
                for streams in options.streams:
                    asked = [prompts[number % len(prompts)] for number in range(streams * options.each)]
                    ways = partial(by_api, engine, asked), partial(by_http, ask, not options.whole, asked)
                    is_equal &= in_turn(*ways, options, streams)
        finally:
            server.close()
            service.close()
    return is_equal


def in_turn(
    api: Callable[[int, int, str], Turn],
    http: Callable[[int, int, str], Turn],
    options: argparse.Namespace,
    streams: int,
) -> bool:
    """Each of them first in every other turn; the first turn is slower and does not count."""
    turns = list[tuple[Turn, Turn]]()
    for number in range(options.turns + 1):
        order = (api, http) if number % 2 else (http, api)
        found = {way: way(options.tokens, streams, f"{streams} {number} {way is api}") for way in order}
        turns.append((found[api], found[http]))
    counted = turns[1:]
    for name, place in (("API", 0), ("HTTP", 1)):
        sys.stdout.write(
            f"{streams} streams, {name}: {_spread([turn[place].tokens_per_s for turn in counted], '.0f')} tokens/s, "
            f"{_spread([turn[place].cpu_us_a_token for turn in counted], '.0f')} us of CPU a token\n"
        )
        for thread in THREADS:
            us = [1e6 * turn[place].by_thread[thread] / turn[place].num_tokens for turn in counted]
            sys.stdout.write(f"{streams} streams, {name}, {thread}: {_spread(us, '.1f')} us of CPU a token\n")
    clients_us = [1e6 * http.client_cpu / http.num_tokens for _, http in counted]
    sys.stdout.write(f"{streams} streams, clients: {_spread(clients_us, '.0f')} us of CPU a token\n")
    for name in ("tokens_per_s", "cpu_us_a_token"):
        ratios = [getattr(http, name) / getattr(api, name) for api, http in counted]
        sys.stdout.write(f"{streams} streams, HTTP by API, {name}: {_spread(ratios, '.3f')}\n")
    sys.stdout.flush()
    return all(api.texts == http.texts for api, http in turns)


def _spread(values: Sequence[float], form: str) -> str:
    """Median, the quarters around it, and the ends."""
    ordered = sorted(values)
    quarter = len(ordered) // 4
    parts = [median(ordered), ordered[quarter], ordered[-1 - quarter], ordered[0], ordered[-1]]
    return "{} (half {} to {}, all {} to {})".format(*[format(part, form) for part in parts])


def main() -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=96, help="of each completion")
    parser.add_argument("--each", type=int, default=4, help="completions of each stream, one after the other")
    parser.add_argument("--whole", action="store_true", help="replies that are not streamed")
    parser.add_argument("--client", choices=CLIENTS, default="loop")
    parser.add_argument("--prompts", default=str(pocket.PROMPTS))
    parser.add_argument("--limit", type=int, default=0, help="prompts of the file; 0: all")
    parser.add_argument("--clients-of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    if options.clients_of:
        be_clients(options.clients_of, options.client)
    else:
        sys.exit(not compare(options))


if __name__ == "__main__":
    main()
