"""One request at its client: its tokens so far, their text, why it ended, and the times of all that.

`result` blocks until the end, an async iterator gives each `Token`, and `follow` what several requests gain, from any
thread or event loop. The client's reader thread fills it. It knows nothing of sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat, zip_longest
from typing import ClassVar
from weakref import WeakKeyDictionary, ref

from tokenizers import Tokenizer

from actors.protocol.logprobs import Logprob
from actors.protocol.messages import NO_TOKEN_FOLLOWS, Request, RequestStats, Tokens
from cluster.io.text import TextStream

_FIRST = (0, 0)
"""Where tokens of the weights begin that the engine was started with, and their version."""


class EngineError(RuntimeError):
    """The engine or a request failed; the message is one line for the user."""


class TooManyRequestsError(EngineError):
    """This client has as many requests in flight as it may: submit this one again once some have ended."""


class RuledOutError(EngineError):
    """The request itself leaves no token that could come next: its grammar, words, biases or least length do."""


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token; `text` is what it adds to the visible text, possibly nothing yet. `logprobs` is its entry of
    `Completion.logprobs`, `version` that of the weights which made it."""

    id: int
    text: str
    index: int
    logprobs: dict[int, Logprob] | None = None
    version: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """What a completion gained since the piece before it: tokens and visible text, each possibly nothing. The texts of
    all pieces make up `Completion.text`. `finish_reason` comes with the last one. `logprobs` are the tokens' entries of
    `Completion.logprobs`, if they are asked for; `position` is the
    place of the first, `version` that of the weights which made the newest so far, None before any."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None = None
    logprobs: tuple[dict[int, Logprob], ...] = ()
    position: int = 0
    version: int | None = None


class Completion:
    """Grows while it is generated. Times are CLOCK_MONOTONIC seconds, None until they happened.

    `logprobs` has an entry for each token of `token_ids`: what is known there by token id, the generated token first.
    `prompt_logprobs` has one for each token of the prompt, None for the first; it is there once a token is. Each is
    None unless the request asks for it. The end token, or the token of `stop_token_ids`, that ends a text is no part of
    it, as a stop string: `includes_stop`. `only_prompt` drops what is generated.
    """

    def __init__(
        self,
        request: Request,
        prompt: str | Sequence[int],
        tokenizer: Tokenizer,
        abort: Callable[[int], None],
        *,
        includes_stop: bool = False,
        skips_special: bool = True,
        only_prompt: bool = False,
    ) -> None:
        self.request_id = request.request_id
        self.prompt = prompt
        self.prompt_token_ids = list(request.source or request.prompt)
        self.sampling = sampling = request.sampling
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None if request.logprobs is None else []
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.proposers: dict[int, str] = {}  # place of a drafted token -> its drafter; places behind the end too
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
        self._texts: list[str] = []
        self._includes_stop, self._only_prompt = includes_stop, only_prompt
        self._stream = TextStream(
            tokenizer,
            request.prompt,
            sampling.stop,
            includes_stop=includes_stop,
            skips_special=skips_special,
            min_tokens=sampling.min_tokens,
        )
        self._error: str | None = None
        self._abort = abort
        self._changed = threading.Condition()
        self._waiters: list[tuple[_LoopWaker, asyncio.Event, bool]] = []

    @property
    def text(self) -> str:
        return self._stream.text

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string, or the token of `stop_token_ids`, that ended it; None for any other end."""
        if self.finish_reason != "stop" or self._stream.stopped:
            return self._stream.stop_string
        last = self.token_ids[-1] if self.token_ids else None
        return last if last in self.sampling.stop_token_ids else None

    @property
    def versions(self) -> list[int]:
        """The version of the weights that made each token of `token_ids`, as `Engine.update_weights` was given it; 0
        for the first ones."""
        return [token.version for token in self._tokens]

    @property
    def version(self) -> int | None:
        """That of the weights which made the newest token; None before the first."""
        return self._tokens[-1].version if self._tokens else None

    @property
    def token_logprobs(self) -> list[float] | None:
        """The log-probability of each token of `token_ids`, which is the first entry of its `logprobs`."""
        if self.logprobs is None:
            return None
        return [known[token].logprob for token, known in zip(self.token_ids, self.logprobs, strict=True)]

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
        self.check()
        return self

    async def __aiter__(self) -> AsyncIterator[Token]:
        """Tokens from the first on; raises EngineError if the request failed. Leaving early aborts the request."""
        index = 0
        async with contextlib.aclosing(follow([self])) as pieces:
            async for _ in pieces:
                with self._changed:
                    settled = self._tokens[index : self._num_settled]
                for token in settled:
                    yield token
                index += len(settled)

    # --- for the client that owns it ----------------------------------------------------------------------------------

    def remaining_request(self) -> Request:
        """The request, to go on after the tokens that arrived."""
        self.updated_at = time.monotonic()
        return replace(self._request, generated=tuple(self.token_ids))

    @property
    def may_wait(self) -> bool:
        """Whether what comes before its end may come later: it has begun, its parts are not followed, and no text of
        its own can end it."""
        is_followed = self._waiters and any(of_parts for *_, of_parts in self._waiters)
        return self.first_token_at is not None and not is_followed and not self.sampling.stop

    def has_gap(self, tokens: Tokens) -> bool:
        """Whether tokens before these were lost on the way."""
        return tokens.position > len(self.token_ids) and not self._stream.stopped

    def append(self, tokens: Tokens) -> bool:
        """Add those that are new; True once the request has ended."""
        now = self.updated_at = time.monotonic()
        with self._changed:
            num_known = max(0, len(self.token_ids) - tokens.position)
            added = tokens.token_ids[num_known:]
            names = chain.from_iterable([repeat(name, count) for name, count in tokens.proposers])
            self.proposers.update(enumerate(names, tokens.position))
            if added:
                self.last_token_at = now
                if self.first_token_at is None:
                    self.first_token_at = now
            if tokens.prompt_logprobs is not None and self.prompt_logprobs is None:
                self.prompt_logprobs = [None, *tokens.prompt_logprobs.entries()]
            known = () if tokens.logprobs is None else tokens.logprobs.entries()[num_known:]
            reason = tokens.finish_reason
            if not self._only_prompt:
                self._append(added, known, tokens.versions, is_ended_by_token=reason == "stop")
            elif reason == "stop":
                reason = "length"
            if reason is not None:
                self.stats = tokens.stats or self.stats
                self._end("stop" if self._stream.stopped else reason, tokens.error, now)
        self._wake(is_first=self.first_token_at == now)
        return self.finished

    def fail(self, reason: str) -> None:
        with self._changed:
            if not self.finished:
                self._end("error", reason, time.monotonic())
        self._wake()

    def piece_since(self, num_tokens: int, num_texts: int) -> tuple[Piece, int, int]:
        """What was added after so many tokens and texts, and how many there are now."""
        with self._changed:
            added, text = tuple(self.token_ids[num_tokens:]), "".join(self._texts[num_texts:])
            logprobs = tuple(self.logprobs[num_tokens:]) if self.logprobs is not None else ()
            piece = Piece(added, text, self.finish_reason, logprobs, num_tokens, self.version)
            return piece, len(self.token_ids), len(self._texts)

    def token_texts(self, piece: Piece) -> list[tuple[str, str | None]]:
        """The text of a piece by tokens, each with the name of the drafter that proposed it, "" for one without a name,
        None if the target chose it. What was held back until the end is of the last."""
        with self._changed:
            places = range(piece.position, piece.position + len(piece.token_ids))
            parts = [(self._texts[place], self.proposers.get(place)) for place in places]
        if held_back := piece.text[sum([len(text) for text, _ in parts]) :]:
            parts.append((held_back, self.proposers.get(places.stop - 1)))
        return parts

    def numbered_texts(self, piece: Piece) -> list[tuple[int, str]]:
        """The text of a piece by tokens, each with the number of tokens of the completion up to it."""
        end = piece.position + len(piece.token_ids)
        return [(min(num, end), text) for num, (text, _) in enumerate(self.token_texts(piece), piece.position + 1)]

    def add_waiter(self, waiter: asyncio.Event, *, of_parts: bool = True) -> None:
        """Set `waiter`, in the loop that runs here, whenever this completion grows or ends; without `of_parts` only
        when it begins and ends."""
        with self._changed:
            self._waiters = [*self._waiters, (_LoopWaker.of_this_loop(), waiter, of_parts)]

    def remove_waiter(self, waiter: asyncio.Event) -> None:
        with self._changed:
            self._waiters = [entry for entry in self._waiters if entry[1] is not waiter]

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def check(self) -> None:
        """Raise the EngineError of a request that failed."""
        if self._error is None:
            return
        if self._error.startswith(NO_TOKEN_FOLLOWS) and self._request.rules_out:
            raise RuledOutError(self._error)
        raise (TooManyRequestsError if self.finish_reason == "refused" else EngineError)(self._error)

    @property
    def _num_settled(self) -> int:
        """Tokens whose text is final: the last one also gets the text that is held back until the end."""
        return len(self._tokens) - (not self.finished and self._stream.holds)

    def _append(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[dict[int, Logprob]],
        versions: Sequence[tuple[int, int]],
        *,
        is_ended_by_token: bool,
    ) -> None:
        hides_last = is_ended_by_token and not self._includes_stop
        for place, (token, known) in enumerate(zip_longest(token_ids, logprobs), 1):
            if self._stream.stopped:
                return
            self.token_ids.append(token)
            if self.logprobs is not None:
                self.logprobs.append(known)
            is_hidden = hides_last and place == len(token_ids)
            self._texts.append("" if is_hidden else self._stream.push(token))
            version = max([one for one in versions if one[0] <= len(self._tokens)], default=_FIRST)[1]
            self._tokens.append(Token(token, self._texts[-1], len(self._tokens), known, version))
            if self._stream.stopped:  # only the text shows it: end the request at the coordinator, too
                self.abort()

    def _end(self, reason: str, error: str | None, now: float) -> None:
        held_back = self._stream.end()
        if held_back:
            self._texts.append(held_back)
            last = self._tokens[-1]
            self._tokens[-1] = replace(last, text=last.text + held_back)
        self.finish_reason, self._error, self.finished_at = reason, error, now
        self._changed.notify_all()  # what threads wait for: to wake one for every token takes time from the passes

    def _wake(self, *, is_first: bool = False) -> None:
        """Without the lock, which the loop wants at once."""
        for waker, waiter, of_parts in self._waiters:
            if of_parts or is_first or self.finished:
                waker.wake(waiter)


class _LoopWaker:
    """Sets events of one loop from other threads. A round brings tokens for many requests: one wake-up of the loop,
    which is a write to a pipe and a read, is enough for all that are due when it comes."""

    _known: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopWaker]] = WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)
        self._due: list[asyncio.Event] = []
        self._lock = threading.Lock()

    @staticmethod
    def of_this_loop() -> _LoopWaker:
        loop = asyncio.get_running_loop()
        return _LoopWaker._known.setdefault(loop, _LoopWaker(loop))

    def wake(self, waiter: asyncio.Event) -> None:
        with self._lock:
            self._due.append(waiter)
            if len(self._due) > 1:
                return
        loop = self._loop()
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._set_due)
        except RuntimeError:
            loop = None
        if loop is None:  # it was closed with an iterator left in it
            with self._lock:
                self._due.clear()

    def _set_due(self) -> None:
        with self._lock:
            due, self._due = self._due, []
        for waiter in due:
            waiter.set()


class Following:
    """Several completions as they grow, or without `of_parts` as each begins and ends. Use it in the loop where it was
    made; `leave` it in the end."""

    def __init__(self, completions: Sequence[Completion], *, of_parts: bool = True) -> None:
        self._completions = completions
        self._seen: dict[int, tuple[int, int]] = dict.fromkeys(range(len(completions)), (0, 0))  # tokens and texts
        self._changed = asyncio.Event()
        self._changed.set()  # they may have begun
        for completion in completions:
            completion.add_waiter(self._changed, of_parts=of_parts)

    async def gained(self) -> list[tuple[int, Piece]]:
        """(index, what it gained since the last call) of those that gained something, once one has; empty after the
        ends of all. Raises the EngineError of the first that failed."""
        while self._seen:
            await self._changed.wait()
            self._changed.clear()
            if found := self._look():
                return found
        return []

    def _look(self) -> list[tuple[int, Piece]]:
        found = list[tuple[int, Piece]]()
        for index, counts in list(self._seen.items()):
            completion = self._completions[index]
            piece, *now = completion.piece_since(*counts)
            if piece.finish_reason is not None:
                if found and completion.has_failed:  # what the others gained comes first; the next look raises
                    self._changed.set()
                    return found
                completion.check()
                del self._seen[index]
            elif tuple(now) == counts:
                continue
            else:
                self._seen[index] = (now[0], now[1])
            found.append((index, piece))
        return found

    def leave(self) -> None:
        """Abort those that still run."""
        for completion in self._completions:
            completion.remove_waiter(self._changed)
            if not completion.finished:
                completion.abort()


async def follow(completions: Sequence[Completion]) -> AsyncGenerator[tuple[int, Piece]]:
    """(index, what it gained) of these completions, as they grow and until all have ended.

    Raises the EngineError of the first that failed. Leaving early aborts those that still run.
    """
    following = Following(completions)
    try:
        while gained := await following.gained():
            for index, piece in gained:
                yield index, piece
    finally:
        following.leave()
