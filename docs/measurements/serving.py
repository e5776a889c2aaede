"""The HTTP server with more clients than it takes: `python -m docs.measurements.serving OUT.jsonl [OVERRIDE ...]`.

Starts a small `job=serve` as a process, sends it one, two and three times as many clients as it takes, which come again
after each 429 until the same completions are done, and appends a line for each. `--table` prints what the file has,
medians over starts. guidellm measures the server with as many clients as it takes (`guidellm_table.py`), and
`http_overhead.py` what it costs beside the Python API.

An inter-token latency is a mean over a request; the longest gap between two chunks is what a reader sees.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from cluster import pocket
from cluster.io.prompts import Prompt, read_prompts
from docs.measurements import lines

CAPACITY, OVERLOAD = 16, 3
"""Completions that the server runs and queues, and how many times as many clients are sent to it at most."""
SMALL = ("cluster=inprocess", f"scheduler.max_num_seqs={CAPACITY // 2}", f"server.max_waiting={CAPACITY // 2}")
COLUMNS = (
    "tokens_per_s",
    "tokens_per_s_user",
    "ttft_ms_p50",
    "ttft_ms_p99",
    "itl_ms_p50",
    "itl_ms_p99",
    "gap_ms_p50",
    "gap_ms_p99",
    "acceptance_length",
    "num_refused",
    "texts_equal",
)


@dataclass(slots=True)
class Answered:
    """One request for `prompt`: when it was sent, when each chunk with text came, and what it said. Times are in
    seconds."""

    prompt: str
    sent_at: float
    status: int = 0
    chunks_at: list[float] = field(default_factory=list)
    text: str = ""
    num_tokens: int = 0
    speculation: dict[str, Any] = field(default_factory=dict)

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.chunks_at, self.chunks_at[1:], strict=False)]


async def ask(url: str, body: dict[str, Any]) -> Answered:
    """One streamed completion, on a connection of its own."""
    host, _, port = url.removeprefix("http://").partition(":")
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    answered = Answered(body["prompt"], time.monotonic())
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        answered.status = int((await reader.readline()).split()[1])
        async for line in reader:
            if line.startswith(b"data: {"):
                _read_chunk(answered, json.loads(line[6:]))
    finally:
        writer.close()
    return answered


def _read_chunk(answered: Answered, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        raise RuntimeError(chunk["error"]["message"])
    for choice in chunk["choices"]:
        if choice["text"]:
            answered.chunks_at.append(time.monotonic())
            answered.text += choice["text"]
    if (usage := chunk.get("usage")) is not None:
        answered.num_tokens = usage["completion_tokens"]
        answered.speculation = (chunk.get("metrics") or {}).get("speculative_decoding") or {}


async def drive(
    url: str, bodies: Sequence[dict[str, Any]], streams: int, retry_s: float | None = None
) -> list[Answered]:
    """All answers, with so many requests at a time. One that is refused with 429 is sent again after `retry_s` (None:
    it is not); its refusals are among the answers."""
    answers: list[Answered] = []
    left = iter(bodies)

    async def client() -> None:
        for body in left:
            answers.append(await ask(url, body))
            while answers[-1].status == 429 and retry_s is not None:
                await asyncio.sleep(retry_s)
                answers.append(await ask(url, body))

    await asyncio.gather(*(client() for _ in range(streams)))
    return answers


def figures(answers: Sequence[Answered], wall_s: float) -> dict[str, Any]:
    """Figures of the requests that were served."""
    served = [one for one in answers if one.status == 200 and one.chunks_at]
    ttft = [one.chunks_at[0] - one.sent_at for one in served]
    itl = [(one.chunks_at[-1] - one.chunks_at[0]) / max(1, one.num_tokens - 1) for one in served]
    longest = [max(one.gaps, default=0.0) for one in served]
    steps = sum([one.speculation.get("num_spec_steps", 0) for one in served])
    accepted = sum([one.speculation.get("num_accepted_draft_tokens", 0) for one in served])
    per_user = [one.num_tokens / (one.chunks_at[-1] - one.sent_at) for one in served]
    found: dict[str, Any] = {
        "tokens_per_s": sum([one.num_tokens for one in served]) / wall_s,
        "tokens_per_s_user": median(per_user),
        "acceptance_length": 1 + accepted / steps if steps else None,
        "num_refused": sum([one.status == 429 for one in answers]),
    }
    for name, values in (("ttft", ttft), ("itl", itl), ("gap", longest)):
        found |= {f"{name}_ms_p{share}": 1e3 * quantile(values, share / 100) for share in (50, 99)}
    return found


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def launched(*overrides: str) -> subprocess.Popen[str]:
    """A launch in a process of its own."""
    command = [sys.executable, "-P", "-m", "cluster.launch", *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def address_of(server: subprocess.Popen[str]) -> str:
    """The address of a server once it serves."""
    assert server.stdout is not None
    for line in server.stdout:
        if line.startswith("serving "):
            return line.split()[3].rstrip(",").removesuffix("/v1")
    raise RuntimeError("the server did not start")


@contextmanager
def served(overrides: Sequence[str]) -> Iterator[str]:
    """The address of a server in a process of its own."""
    process = launched("job=serve", "server.port=0", *overrides)
    try:
        yield address_of(process)
    finally:
        process.terminate()
        process.wait()


def measure(options: argparse.Namespace) -> None:
    """Every start in turn, so that what else the machine does meets all numbers of clients alike."""
    prompts, texts = read_prompts(Path(options.prompts), options.limit), dict[str, str]()
    for start in range(options.starts):
        for factor in range(1, OVERLOAD + 1):
            streams = factor * CAPACITY
            with served([*SMALL, *options.overrides]) as url:
                found = of_server(url, options, prompts, streams, texts)
            lines.append(options.file, {"streams": streams, "start": start} | found)


def of_server(
    url: str, options: argparse.Namespace, prompts: Sequence[Prompt], streams: int, known: dict[str, str]
) -> dict[str, Any]:
    """The same completions whatever `streams`, so that repeated prompts help all alike; `known` collects the text that
    every prompt is to have."""
    common = {"max_tokens": options.tokens, "temperature": 0, "ignore_eos": True}
    texts = [prompts[number % len(prompts)].text for number in range(OVERLOAD * CAPACITY * options.each)]
    asyncio.run(drive(url, [{**common, "prompt": prompts[0].text}], 1))  # the first is slower
    started = time.monotonic()
    answers = asyncio.run(drive(url, [{**common, "prompt": text} for text in texts], streams, retry_s=1.0))
    found = figures(answers, time.monotonic() - started)
    same = [one.text == known.setdefault(one.prompt, one.text) for one in answers if one.status == 200]
    return found | {"texts_equal": all(same)}


def table(file: Path) -> str:
    """Markdown: a row for each number of clients, medians over starts."""
    rows = [lines.head("streams", *COLUMNS)]
    for (streams,), own in lines.grouped(lines.read(file), "streams").items():
        cells = [_cell([line[name] for line in own if line.get(name) is not None]) for name in COLUMNS]
        rows.append(lines.row(streams, *cells))
    return "\n".join(rows)


def _cell(values: Sequence[float | bool]) -> str:
    if not values:
        return ""
    if isinstance(values[0], bool):
        return "yes" if all(values) else "NO"
    return f"{median(values):.4g}"


def main() -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96, help="of each completion")
    parser.add_argument("--each", type=int, default=4, help="completions of each stream, one after the other")
    parser.add_argument("--prompts", default=str(pocket.PROMPTS))
    parser.add_argument("--limit", type=int, default=0, help="prompts of the file; 0: all")
    parser.add_argument("--table", action="store_true", help="print what the file has")
    options = parser.parse_intermixed_args()
    if options.table:
        print(table(options.file))
    else:
        measure(options)


if __name__ == "__main__":
    main()
