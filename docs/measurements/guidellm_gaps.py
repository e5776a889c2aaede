"""guidellm, which also keeps the longest time between two chunks of each stream:

    python -m docs.measurements.guidellm_gaps run --backend ... --output ...

takes what `guidellm` takes. guidellm itself keeps when the first and the last chunk of a stream came, and their number;
with this file `info.timings` of each request in its JSON has `longest_gap_s` too: seconds between two chunks with text
that follow each other, of a stream that has two. It is for guidellm 0.8, and is read again by each of its processes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from guidellm.backends.openai.http import OpenAIHTTPBackend  # pyright: ignore[reportMissingImports]

_resolve = OpenAIHTTPBackend._resolve_streaming


class TimedLines:
    """The reader of one stream's lines, with the time between those that had text."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._last: float | None = None
        self.longest_s: float | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def add_streaming_line(self, line: str) -> int | None:
        now = time.perf_counter()
        num = self._handler.add_streaming_line(line)
        if num:
            if self._last is not None:
                self.longest_s = max(self.longest_s or 0.0, now - self._last)
            self._last = now
        return num


async def _resolve_timed(
    self: OpenAIHTTPBackend, request: Any, info: Any, handler: Any, arguments: Any, request_kwargs: dict[str, Any]
) -> AsyncIterator[tuple[Any, Any]]:
    """What `_resolve_streaming` yields; the last one has the longest gap."""
    timed = TimedLines(handler)
    async for reply, now in _resolve(self, request, info, timed, arguments, request_kwargs):
        if reply is not None and timed.longest_s is not None:
            now.timings.longest_gap_s = timed.longest_s
        yield reply, now


OpenAIHTTPBackend._resolve_streaming = _resolve_timed

if __name__ == "__main__":
    from guidellm.__main__ import cli  # pyright: ignore[reportMissingImports]

    cli()
