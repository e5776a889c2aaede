"""Mixed traffic at the HTTP server while roles are killed:

    python -m docs.measurements.mixed_traffic [options] [OVERRIDE ...]

Starts `job=serve` on Ray as a process, and lets `--clients` threads send whatever comes next of a seeded mixture:
completions (greedy and sampled, 1 to 3 choices, streamed and whole, with a schema, a list of allowed tokens or neither,
speculation off, bounded or free), clients that leave in the middle of a stream, bad requests, and bodies over the
limit. Every `--kill-s` seconds one role of the engine gets SIGKILL or SIGSTOP.

A setting of a completion (prompt and sampling, without what must not change a token: speculation, streaming, priority)
has the same text each time, whoever died meanwhile; a bad request is a 4xx; nothing is a 5xx. At the end nothing is in
flight, the server ends with code 0, and no process is left. Prints one JSON object; exit code 1 if anything differed.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import pocket
from cluster.io.prompts import read_prompts
from docs.measurements import lines
from docs.measurements.serving import address_of, launched

ON_RAY = ("cluster.dashboard=false", "cluster.oversubscribe=true", "cluster.max_restarts=100000", "cluster.silence_s=5")
"""Overrides of every run; a starved heartbeat on busy cores is not to look like a hang."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["bread", "butter"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
BAD: tuple[dict[str, Any], ...] = (
    {"prompt": 7},
    {"prompt": "a", "temperature": -1},
    {"prompt": "a", "max_tokens": 10**9},
    {"prompt": "a", "unknown_field": True},
    {"prompt": "a", "allowed_token_ids": []},
    {"prompt": [1, 2, 10**9]},
    {"prompt": "a", "model": "another"},
    {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}},
    {"prompt": "a", "speculative": {"drafter": "another"}},
)
OVERSIZE = b'{"prompt": "' + b"a" * (17 << 20) + b'"}'
"""Above the default of `server.max_body_mb`."""
END_S = 60.0
"""Seconds after the server's end in which its processes may end: one that is starting notices it late on a busy
machine."""
_TITLES = ("ray::coordinator", "ray::target", "ray::draft")
BUSY = (429, 503)
"""Statuses that say "come again": both are documented, 503 while a successor of the engine's roles is not there yet."""


@dataclass(slots=True)
class Seen:
    """What all clients saw; `texts` has the first text of every setting."""

    counts: Counter[str] = field(default_factory=Counter)
    texts: dict[str, list[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)
    """The server has ended before its time."""

    def count(self, what: str) -> None:
        with self.lock:
            self.counts[what] += 1

    def compare(self, setting: str, texts: list[str]) -> None:
        with self.lock:
            first = self.texts.setdefault(setting, texts)
            if first != texts:
                self.wrong.append(f"{setting}: {first} is now {texts}")

    def refuse(self, what: str) -> None:
        with self.lock:
            self.wrong.append(what)


class Client:
    """One thread's requests to the server at `port`, drawn by `seed`."""

    def __init__(self, port: int, prompts: list[str], seed: int, seen: Seen) -> None:
        self._port, self._prompts, self._draw, self._seen = port, prompts, random.Random(seed), seen

    def run(self, deadline: float) -> None:
        while time.monotonic() < deadline and not self._seen.ended.is_set():
            kind = self._draw.choices(("complete", "leave", "bad", "oversize"), (70, 15, 13, 2))[0]
            try:
                getattr(self, f"_{kind}")()
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._seen.refuse(f"{kind}: {type(error).__name__}: {error}")

    def _complete(self) -> None:
        setting, body = self._setting()
        with self._post(json.dumps(body).encode()) as reply:
            if reply.status in BUSY:
                self._seen.count(f"refused with {reply.status}")
                return time.sleep(0.5)
            if reply.status != 200:
                return self._seen.refuse(f"{body}: {reply.status} {reply.read()[:300]!r}")
            texts = _streamed(reply, body["n"]) if body["stream"] else _whole(reply)
        self._seen.count("completions")
        self._seen.compare(setting, texts)

    def _leave(self) -> None:
        """Reads some lines of a stream, and closes the connection."""
        _, body = self._setting()
        with self._post(json.dumps(body | {"stream": True, "max_tokens": 300, "ignore_eos": True}).encode()) as reply:
            for _ in range(self._draw.randrange(12)):
                reply.readline()
        self._seen.count("clients that left")

    def _bad(self) -> None:
        body = self._draw.choice(BAD)
        with self._post(json.dumps(body).encode()) as reply:
            if not (400 <= reply.status < 500 or reply.status == 503):
                self._seen.refuse(f"{body}: {reply.status}")
        self._seen.count("bad requests")

    def _oversize(self) -> None:
        try:
            with self._post(OVERSIZE) as reply:
                if reply.status != 413:
                    self._seen.refuse(f"an oversize body: {reply.status}")
        except (BrokenPipeError, ConnectionResetError):
            pass  # refused before it was sent to its end
        self._seen.count("oversize bodies")

    def _setting(self) -> tuple[str, dict[str, Any]]:
        """The part of a body that decides about its texts, as JSON, and the whole body."""
        draw = self._draw
        fixed: dict[str, Any] = {"prompt": draw.choice(self._prompts), "max_tokens": draw.choice((8, 48, 160))}
        fixed |= {"n": draw.choice((1, 1, 1, 3)), "seed": draw.randrange(3)}
        fixed |= draw.choice(({"temperature": 0}, {"temperature": 1}, {"temperature": 0.8, "top_p": 0.9}))
        if draw.random() < 0.2:
            fixed["response_format"] = {"type": "json_schema", "json_schema": {"name": "order", "schema": SCHEMA}}
        elif draw.random() < 0.1:
            fixed["allowed_token_ids"] = list(range(100, 1000, 9))
        free: dict[str, Any] = {"stream": draw.random() < 0.5, "priority": draw.choice((0, 0, -5, 5))}
        free |= draw.choice(({}, {}, {"speculative": {"enabled": False}}, {"speculative": {"num_draft_tokens": 2}}))
        return json.dumps(fixed, sort_keys=True), fixed | free

    @contextmanager
    def _post(self, content: bytes) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=900)
        try:
            connection.request("POST", "/v1/completions", content, {"content-type": "application/json"})
            yield connection.getresponse()
        finally:
            connection.close()


def _whole(reply: http.client.HTTPResponse) -> list[str]:
    return [choice["text"] for choice in json.loads(reply.read())["choices"]]


def _streamed(reply: http.client.HTTPResponse, num_choices: int) -> list[str]:
    """Raises ValueError if the stream does not end as it should."""
    texts, ended = [""] * num_choices, False
    for line in reply:
        if line.startswith(b"data: {"):
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise ValueError(chunk["error"]["message"])
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        ended = ended or line.startswith(b"data: [DONE]")
    if not ended:
        raise ValueError("the stream ended without [DONE]")
    return texts


def roles(server: int) -> dict[str, int]:
    """The process of every role of the engine on Ray below this process, by the actor's name in the process's title."""
    titles, parents = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes().rstrip(b"\0 ").decode()
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if title.startswith(_TITLES):
            titles[int(folder.name)] = title.removeprefix("ray::")

    def ancestors(pid: int) -> Iterator[int]:
        while (pid := parents.get(pid, 0)) > 0:
            yield pid

    return {title: pid for pid, title in titles.items() if server in ancestors(pid)}


def kill(server: int, every_s: float, deadline: float, seed: int, seen: Seen) -> None:
    """Sends a signal to a role drawn by `seed`, again and again."""
    draw = random.Random(seed)
    while time.monotonic() + every_s < deadline and not seen.ended.wait(every_s):
        alive = roles(server)
        if alive:
            name = draw.choice(sorted(alive))
            number = draw.choice((signal.SIGKILL, signal.SIGSTOP))
            os.kill(alive[name], number)
            seen.count(f"{number.name} to {name}")


def resident_mib(pid: int) -> float:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _alive(processes: dict[str, int]) -> list[str]:
    return [name for name, pid in processes.items() if Path(f"/proc/{pid}").exists()]


def _in_flight(port: int) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    return sum(
        float(line.split()[-1])
        for line in lines
        if line.startswith(("specdec_num_requests_running{", "specdec_num_requests_waiting{"))
    )


def main() -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--kill-s", type=float, default=20, help="seconds between two signals; 0: none is sent")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_intermixed_args()
    server = launched("job=serve", "server.port=0", *ON_RAY, *options.overrides)
    port = int(address_of(server).rpartition(":")[2])
    assert server.stdout is not None
    threading.Thread(target=server.stdout.read, daemon=True).start()
    seen = Seen()
    prompts = [prompt.text for prompt in read_prompts(pocket.PROMPTS, options.prompts)]
    deadline = time.monotonic() + 60 * options.minutes
    threads = [
        threading.Thread(target=Client(port, prompts, options.seed + number, seen).run, args=(deadline,))
        for number in range(options.clients)
    ]
    if options.kill_s:
        threads.append(threading.Thread(target=kill, args=(server.pid, options.kill_s, deadline, options.seed, seen)))
    for thread in threads:
        thread.start()
    resident = [resident_mib(server.pid)]
    while any(thread.is_alive() for thread in threads):
        time.sleep(15)
        if server.poll() is not None:
            seen.ended.set()
            sys.exit(f"the server ended with code {server.returncode}; its run directory says why")
        resident.append(resident_mib(server.pid))
        sys.stderr.write(f"{dict(seen.counts)} wrong: {len(seen.wrong)} resident MiB: {resident[-1]:.0f}\n")
    time.sleep(3)
    in_flight = _in_flight(port)
    processes = roles(server.pid)
    server.send_signal(signal.SIGTERM)
    rc = server.wait(120)
    ended = time.monotonic()
    while (left := _alive(processes)) and time.monotonic() < ended + END_S:
        time.sleep(0.5)
    found = {
        **dict(sorted(seen.counts.items())),
        "settings": len(seen.texts),
        "wrong": len(seen.wrong),
        "examples": seen.wrong[:10],
        "in_flight": in_flight,
        "exit_code": rc,
        "left": left,
        "resident_mib": [round(value) for value in resident[:: max(1, len(resident) // 10)]],
    }
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    sys.exit(bool(seen.wrong or in_flight or rc or left))


if __name__ == "__main__":
    main()
