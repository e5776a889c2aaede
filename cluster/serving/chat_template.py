"""The chat template of a checkpoint: messages in, the text of a prompt out.

A template is a Jinja program that comes with the tokenizer, as `chat_template.jinja` or in `tokenizer_config.json`. It
runs in Jinja's sandbox, with the functions and settings that transformers gives it. It must not know tokens.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from parallel.typed_json import as_type, read_json

_END = f"<{secrets.token_hex(8)}> "
"""Stands behind the message that is to go on, while the template writes it: no text has it, and its space is gone
where a template drops those."""
_DEFAULT = "default"
"""Name of the one to take, where a checkpoint has several."""
_EFFORT = "reasoning_effort"
_SWITCHES = ("enable_thinking", "thinking")
"""Names by which templates turn reasoning on and off."""


class _GenerationTag(Extension):
    """`{% generation %}`, by which training tells the model's own words apart, as in transformers; here it changes
    nothing."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


_EXTENSIONS = (loopcontrols, _GenerationTag)


class ChatTemplate:
    """Writes chats as the model was trained to read them."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._template, self._names = _compile(source)
        self._special_tokens = dict(special_tokens)

    @staticmethod
    def read(checkpoint: Path) -> ChatTemplate | None:
        """That of a checkpoint; None if it has none. Raises ValueError, one line, if it is no template."""
        settings = _settings(checkpoint)
        file = checkpoint / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}.get(_DEFAULT)
        return ChatTemplate(source, _special_tokens(settings)) if source else None

    @staticmethod
    def read_response_template(checkpoint: Path) -> dict[str, Any] | None:
        """How the text of an answer becomes a message again, where the tokenizer says so, in transformers' form."""
        found = _settings(checkpoint).get("response_template")
        return found if isinstance(found, dict) else None

    def render_open(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The text of the chat up to the end of the last message's content, without what the template writes behind it.
        Raises ValueError, one line, where the template refuses it or does not write that content."""
        *before, last = messages
        whole = self.render(
            [*before, {**last, "content": last["content"] + _END}], add_generation_prompt=False, **options
        )
        text, end, behind = whole.rpartition(_END.strip())
        if not end or last["content"].strip() not in text:
            line = "the checkpoint's chat template does not write the last one as it is, so that it cannot go on"
            raise ValueError(f"messages: {line}")
        return text if behind.startswith(" ") else text.rstrip()

    def names_of_effort(self, effort: str) -> dict[str, Any]:
        """What the template reads of an effort to reason: its name, or whether to reason at all, as in vLLM. Raises
        ValueError, one line, where it reads nothing of it."""
        switches = {name: effort != "none" for name in _SWITCHES if name in self._names}
        if _EFFORT in self._names:
            return {_EFFORT: effort, **switches}
        if not switches:
            raise ValueError(f"{_EFFORT}: the checkpoint's chat template does not read it; leave it out")
        if effort != "none":
            line = f"turns reasoning on or off ({', '.join(switches)}) and knows no degree of it"
            raise ValueError(f"{_EFFORT}: the checkpoint's chat template {line}; give none, or leave it out")
        return switches

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, **options: Any) -> str:
        """The text of the chat. Raises ValueError, one line, where the template refuses it."""
        names = {**self._special_tokens, "tools": None, "documents": None, **options}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **names)
        except (
            TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
            RecursionError,
        ) as error:
            line = str(error).strip().partition("\n")[0]
            raise ValueError(f"messages: the checkpoint's chat template refuses them ({line})") from error


def _compile(source: str) -> tuple[Template, frozenset[str]]:
    """The program, and the names that it reads and does not set."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=_EXTENSIONS)
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    try:
        names = find_undeclared_variables(environment.parse(source))
        return environment.from_string(source), frozenset(names)
    except TemplateError as error:
        raise ValueError(f"target.path: its chat template cannot be read ({error})") from error


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _settings(checkpoint: Path) -> Mapping[str, Any]:
    file = checkpoint / "tokenizer_config.json"
    return as_type(read_json(file), dict[str, Any]) if file.is_file() else {}


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and so on; some checkpoints describe a token by a record with its text in `content`."""
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
