"""`job=chat`: a chat with the target in the terminal; after each answer its speed, and what speculation did for it.

Ctrl-C ends an answer, Ctrl-D the chat, `/new` forgets it. Where standard input is no terminal, every line of it is
answered. It must not know HTTP.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.completion import Completion, follow
from cluster.config.jobs import ChatConfig
from cluster.config.schema import LaunchConfig
from cluster.engine import Client, Engine
from cluster.io.console import Terminal, percent

if TYPE_CHECKING:
    from cluster.serving.chat_template import ChatTemplate

_PROMPT = "> "
_FORGET = "/new"
_HOWTO = f"Ctrl-C ends an answer, Ctrl-D the chat; {_FORGET} forgets what was said"


class _LineDropped(Exception):
    """Ctrl-C where a line is typed."""


def run(config: LaunchConfig, run_dir: Path) -> None:
    """Raises ValueError for a checkpoint without a chat template, EngineError if the engine or an answer failed."""
    assert isinstance(config.job, ChatConfig)
    terminal, template = Terminal(), _template(config.target.path)
    with terminal.starting() as progress:
        engine = Engine(config, progress=progress, log_dir=run_dir / "logs")
    with engine:
        converse(Chat(engine, template, config.job.system), terminal)


def converse(chat: Chat, terminal: Terminal) -> None:
    """Answer every line of standard input."""
    lines = _typed_lines(terminal) if sys.stdin.isatty() else _piped_lines(terminal)
    for line in filter(None, map(str.strip, lines)):
        if line == _FORGET:
            chat.forget()
            continue
        try:
            completion = chat.ask(line)
        except ValueError as error:
            terminal.line(str(error))
            continue
        with _on_interrupt(completion.abort):
            asyncio.run(_show(completion, terminal))
        chat.answered(completion.text)
        terminal.line(f"\n[{summary(completion)}]\n")


class Chat:
    """The messages so far, and the next answer of the engine to them, as its `sampling.*` say."""

    def __init__(self, client: Client, template: ChatTemplate, system: str = "") -> None:
        facts = client.ready["target-0"].facts
        self._longest = min(int(facts["max_model_len"]), int(facts["kv_slots"]))
        self._client = client
        self._template = template
        self._first = [{"role": "system", "content": system}] if system else []
        self._turns: list[dict[str, str]] = []

    def ask(self, text: str) -> Completion:
        """Start the answer to this message. The oldest turns are forgotten as far as the context has no room for the
        longest answer. Raises ValueError, one line, for a message that does not fit alone or that the chat template
        refuses; the chat is then as before."""
        before = self._turns
        self._turns = [*before, {"role": "user", "content": text}]
        try:
            return self._submit()
        except ValueError:
            self._turns = before
            raise

    def answered(self, text: str) -> None:
        self._turns.append({"role": "assistant", "content": text})

    def forget(self) -> None:
        self._turns.clear()

    def _submit(self) -> Completion:
        sampling = self._client.sampling
        while len(tokens := self._tokens()) + sampling.max_tokens > self._longest and len(self._turns) > 1:
            del self._turns[:2]
        if (room := self._longest - len(tokens)) < 1:
            raise ValueError(f"the message has {len(tokens)} tokens, the context {self._longest}; shorten it")
        return self._client.submit(tokens, replace(sampling, max_tokens=min(sampling.max_tokens, room)))

    def _tokens(self) -> list[int]:
        text = self._template.render([*self._first, *self._turns], add_generation_prompt=True)
        return self._client.tokenizer.encode(text, add_special_tokens=False).ids


def summary(completion: Completion) -> str:
    """Tokens, speed after the first token, and what speculation did for it."""
    num, first, last = len(completion.token_ids), completion.first_token_at, completion.last_token_at
    words = [f"{num} tokens, {completion.finish_reason}"]
    if first is not None and last is not None:
        words.append(f"first after {first - completion.submitted_at:.2f} s")
        if last > first:
            words.append(f"then {(num - 1) / (last - first):.1f} tokens/s")
    stats = completion.stats
    if stats.num_draft_tokens:
        length = 1 + stats.num_accepted_tokens / stats.num_spec_steps
        words.append(f"{length:.2f} tokens per verified draft")
        words.append(f"{percent(stats.num_accepted_tokens / stats.num_draft_tokens)} of draft tokens accepted")
    return "; ".join(words)


async def _show(completion: Completion, terminal: Terminal) -> None:
    async with aclosing(follow([completion])) as pieces:
        async for _, piece in pieces:
            terminal.text(piece.text)


def _template(path: str) -> ChatTemplate:
    try:
        from cluster.serving.chat_template import ChatTemplate
    except ModuleNotFoundError as error:
        raise ValueError(f"job=chat: needs {error.name}; install it with pip install specdec[serve]") from error
    template = ChatTemplate.read(Path(path))
    if template is None:
        where = "chat_template.jinja or tokenizer_config.json"
        raise ValueError(f"target.path={path}: has no chat template ({where}); use job=generate")
    return template


def _typed_lines(terminal: Terminal) -> Iterator[str]:
    with suppress(ImportError):
        import readline  # noqa: F401  (input() then edits and remembers lines)
    terminal.line(_HOWTO)
    while True:
        try:
            with _on_interrupt(_drop_line):
                line = input(_PROMPT)
        except _LineDropped:
            terminal.line(f"\n{_HOWTO}")
            continue
        except EOFError:
            return
        yield _readable(line)


def _piped_lines(terminal: Terminal) -> Iterator[str]:
    for line in map(_readable, sys.stdin):
        terminal.line(_PROMPT + line.strip())
        yield line


def _readable(line: str) -> str:
    """Without the bytes that are no UTF-8, which Python reads as halves of surrogate pairs in some locales."""
    return line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _drop_line() -> None:
    raise _LineDropped


@contextmanager
def _on_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C does this, and nothing else."""
    before = signal.signal(signal.SIGINT, lambda _number, _frame: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
