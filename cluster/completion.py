"""One request at its client: its tokens so far, their text, why it ended, and the times of all that.

`result` blocks until the end, and an async iterator gives each `Token`, from any thread or event loop. The client's
reader thread fills it. It knows nothing of sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from actors.protocol.messages import Request, RequestStats, Tokens
from cluster.io.text import TextStream


class EngineError(RuntimeError):
    """The engine or a request failed; the message is one line for the user."""


class TooManyRequestsError(EngineError):
    """This client has as many requests in flight as it may: submit this one again once some have ended."""


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token; `text` is what it adds to the visible text, possibly nothing yet."""

    id: int
    text: str
    index: int


class Completion:
    """Grows while it is generated. Times are CLOCK_MONOTONIC seconds, None until they happened."""

    def __init__(
        self, request: Request, prompt: str | Sequence[int], tokenizer: Tokenizer, abort: Callable[[int], None]
    ) -> None:
        self.request_id = request.request_id
        self.prompt = prompt
        self.prompt_token_ids = list(request.prompt)
        self.sampling = sampling = request.sampling
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stats = RequestStats()
        self.submitted_at = time.monotonic()
        self.first_token_at: float | None = None
        self.finished_at: float | None = None
        self.updated_at = self.submitted_at
        self.last_token_at: float | None = None
        self.is_aborted = False
        self._request = request
        self._tokens: list[Token] = []
        self._stream = TextStream(tokenizer, request.prompt, sampling.stop)
        self._error: str | None = None
        self._abort = abort
        self._changed = threading.Condition()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    @property
    def text(self) -> str:
        return self._stream.text

    @property
    def finished(self) -> bool:
        return self.finished_at is not None

    def abort(self) -> None:
        """Ask for the request to end early; it ends with finish_reason "abort", unless it ended first."""
        self.is_aborted = True
        self._abort(self.request_id)

    def result(self, timeout_s: float | None = None) -> Completion:
        """Wait for the end. Raises EngineError if the request failed (TooManyRequestsError if it may be submitted again
        later), TimeoutError after `timeout_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.finished, timeout_s):
                raise TimeoutError(f"request {self.request_id} is still running")
        self._check()
        return self

    async def __aiter__(self) -> AsyncIterator[Token]:
        """Tokens from the first on; raises EngineError if the request failed. Leaving early aborts the request."""
        waiter = asyncio.Event()
        entry = (asyncio.get_running_loop(), waiter)
        with self._changed:
            self._waiters.append(entry)
        index = 0
        try:
            while True:
                waiter.clear()
                finished = self.finished
                # With stop strings a token waits for its successor: the last one also carries the text held back.
                held = 0 if finished or not self.sampling.stop else 1
                while index < len(self._tokens) - held:
                    yield self._tokens[index]
                    index += 1
                if finished:
                    break
                await waiter.wait()
            self._check()
        finally:
            with self._changed:
                self._waiters.remove(entry)
            if not self.finished:
                self.abort()

    # --- for the client that owns it ----------------------------------------------------------------------------------

    def remaining_request(self) -> Request:
        """The request, to go on after the tokens that arrived."""
        self.updated_at = time.monotonic()
        return replace(self._request, generated=tuple(self.token_ids))

    def has_gap(self, tokens: Tokens) -> bool:
        """Whether tokens before these were lost on the way."""
        return tokens.position > len(self.token_ids) and not self._stream.stopped

    def append(self, tokens: Tokens) -> bool:
        """Add those that are new; True once the request has ended."""
        now = self.updated_at = time.monotonic()
        with self._changed:
            added = tokens.token_ids[max(0, len(self.token_ids) - tokens.position) :]
            if added:
                self.last_token_at = now
                if self.first_token_at is None:
                    self.first_token_at = now
            self._append(added)
            if tokens.finish_reason is not None:
                self.stats = tokens.stats or self.stats
                self._end("stop" if self._stream.stopped else tokens.finish_reason, tokens.error, now)
            self._wake()
            return self.finished

    def fail(self, reason: str) -> None:
        with self._changed:
            if not self.finished:
                self._end("error", reason, time.monotonic())
            self._wake()

    def _check(self) -> None:
        if self._error is not None:
            raise (TooManyRequestsError if self.finish_reason == "refused" else EngineError)(self._error)

    def _append(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if self._stream.stopped:
                return
            self.token_ids.append(token)
            self._tokens.append(Token(token, self._stream.push(token), len(self._tokens)))
            if self._stream.stopped:  # only the text shows it: end the request at the coordinator, too
                self.abort()

    def _end(self, reason: str, error: str | None, now: float) -> None:
        held_back = self._stream.end()
        if held_back:
            last = self._tokens[-1]
            self._tokens[-1] = replace(last, text=last.text + held_back)
        self.finish_reason, self._error, self.finished_at = reason, error, now

    def _wake(self) -> None:
        self._changed.notify_all()
        for loop, waiter in self._waiters:
            with contextlib.suppress(RuntimeError):  # the loop was closed with an iterator left in it
                loop.call_soon_threadsafe(waiter.set)
