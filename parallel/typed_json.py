"""JSON of files that others wrote, held against a type before it is used. What is wrong is a ValueError of one line.

The type is an annotation: a TypedDict, a dataclass, a union, with ranges as `Annotated[int, Meta(ge=1)]`. Knows no
format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_SHOWN = 40
"""Characters of a wrong value in an error line."""


def parse_json(text: str | bytes) -> Any:
    """The value that a JSON text stands for; ValueError, one line, if it stands for none."""
    try:
        content = json.loads(text)
        source = text.lower()
        if b"\\ud" in source if isinstance(source, bytes) else "\\ud" in source:  # an escaped surrogate, or half of one
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in error.doc else ""
        raise ValueError(f"is not JSON ({error.msg} at {line}column {error.colno})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text (byte {error.start})") from None
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        raise ValueError(f"is not Unicode text ({half} is half of a character)") from None
    except ValueError as error:  # a number of too many digits
        raise ValueError(f"is not JSON ({error})") from None


def read_text(path: Path, where: str) -> str:
    """The text of a file; ValueError, one line that begins with `where`, if it has none."""
    try:
        return path.read_text(encoding="utf-8-sig")  # with or without the mark that some editors put first
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise ValueError(f"{where}: cannot be read ({error.strerror}); give a file that can") from None


def json_lines(text: str, kind: type[T], where: str) -> Iterator[tuple[str, T]]:
    """The record of every line of a JSONL text that is not blank, behind its place: `where` and the line's number.

    ValueError, one line that begins with the place, for the first line that holds none of this type.
    """
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{where}: line {number}"
            try:
                yield place, as_type(parse_json(line), kind)
            except ValueError as error:
                is_whole = str(error).startswith("is ")
                raise ValueError(f"{place}{' ' if is_whole else ': '}{error}; correct or remove it") from None


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in the file; ValueError, one line, if there is none."""
    try:
        content = parse_json(file.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{file}: no such file; save the checkpoint with it") from None
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror}); save the checkpoint again") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}; save the checkpoint again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: holds no JSON object; save the checkpoint again")
    return content


_PREPARING = Lock()


def prepare(kind: Any) -> None:
    """Let msgspec read the annotations of a type, which it does at the first use, and keep what it made of them.

    A second thread that uses the type meanwhile ends the process (msgspec 0.22), and the ranks of one process read the
    same types at the same time.
    """
    with _PREPARING:
        msgspec.msgpack.Decoder(kind)


def as_type(content: Any, kind: type[T]) -> T:
    """A value of JSON as this type, without fields that the type does not have; ValueError, one line, that names the
    first wrong field."""
    prepare(kind)
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise ValueError(_line(str(error), content)) from None


def _line(message: str, content: Any) -> str:
    """``FIELD=VALUE: must be int >= 1`` from msgspec's ``Expected `int` >= 1 - at `$.FIELD```; ``[...]`` is any key
    of a mapping."""
    what, _, path = message.replace("`", "").replace(" - at key in $", " as a key - at $").partition(" - at $")
    wanted, field = what.replace("Expected ", "must be ").replace(" | null", " or null"), path.removeprefix(".")
    if not field:
        return wanted
    for key in re.findall(r"[^.\[\]]+|\.\.\.", field):
        inside = content[int(key)] if isinstance(content, list) and key.isdecimal() else None
        content = content.get(key) if isinstance(content, dict) else inside
    shown = f"={content!r}" if content is not None and len(repr(content)) <= _SHOWN else ""
    return f"{field}{shown}: {wanted.partition(', got')[0] if shown else wanted}"
