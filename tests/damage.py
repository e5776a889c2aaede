"""Damaged files, from a seed: what an editor, a full disk, a broken download or another program makes of a good one.

`damaged` gives one at random; the same seed gives the same damages. Knows no format but JSON, and nothing of the
programs that read the files.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

SUBSTITUTES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    3,
    -1,
    2**31,
    2**63,
    -(2**63),
    10**400,
    0.5,
    -0.5,
    1e-300,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "7",
    "words",
    "\udc80",
    [],
    [0],
    [None],
    ["words"],
    [[[]]],
    {},
    {"words": 1},
)
"""What a value is replaced by: other types, and numbers out of every range."""

DEEP = 100_000
"""Levels of nesting beyond every parser's."""

Place = tuple[str | int, ...]
"""Keys and indices from the top of a JSON value to one within it."""


def places(value: Any, above: Place = ()) -> Iterator[Place]:
    """Places of everything within a JSON value, itself first; of long lists the first entries."""
    yield above
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*above, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value[:4]):
            yield from places(inner, (*above, i))


def replaced(value: Any, place: Place, put: Any) -> Any:
    """A copy of a JSON value with something else in one place."""
    if not place:
        return put
    content = copy.deepcopy(value)
    within = content
    for key in place[:-1]:
        within = within[key]
    within[place[-1]] = put
    return content


def _deleted(value: Any, place: Place) -> Any:
    content = copy.deepcopy(value)
    within = content
    for key in place[:-1]:
        within = within[key]
    del within[place[-1]]
    return content


def damaged_value(value: Any, rng: random.Random) -> tuple[str, Any]:
    """A JSON value with one place deleted, replaced, nested, retyped or scaled, and what was done."""
    place = rng.choice([*places(value)][1:] or [()])
    old = value
    for key in place:
        old = old[key]
    puts: dict[str, Any] = {"list": [old], "object": {"value": old}, "text": str(old)}
    if type(old) in (int, float):
        puts |= {"negated": -old, "more": old + 1, "less": old - 1, "doubled": 2 * old, "much": old * 10**7}
    if isinstance(old, list):
        puts |= {"longer": old + old[:1], "shorter": old[1:], "many": old * 1000}
    kind = rng.choice(["deleted", "replaced", "replaced", "replaced", *puts]) if place else "replaced"
    where = ".".join(map(str, place))
    if kind == "deleted":
        return f"{where} deleted", _deleted(value, place)
    put = rng.choice(SUBSTITUTES) if kind == "replaced" else puts[kind]
    return f"{where} {kind}: {str(put)[:40]!r}", replaced(value, place, put)


def _flipped(content: bytes, rng: random.Random) -> bytes:
    if not content:
        return content
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]


def _overwritten(content: bytes, rng: random.Random) -> bytes:
    at, length = rng.randrange(len(content) + 1), rng.randrange(1, 64)
    return content[:at] + bytes([rng.choice([0, 0xFF])]) * length + content[at + length :]


def _inserted(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + b"\x00\xff{" + content[at:]


BYTE_DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "truncated": lambda content, rng: content[: rng.randrange(max(1, len(content)))],
    "a bit flipped": _flipped,
    "overwritten": _overwritten,
    "bytes inserted": _inserted,
    "written twice": lambda content, _: content + content,
    "emptied": lambda _content, _rng: b"",
    "nested too deep": lambda _content, _rng: b"[" * DEEP,
    "no text": lambda _content, rng: rng.randbytes(200),
}
"""Damages of any file."""


def damaged_bytes(content: bytes, rng: random.Random) -> tuple[str, bytes]:
    kind = rng.choice([*BYTE_DAMAGES])
    return kind, BYTE_DAMAGES[kind](content, rng)


def damaged_json(content: str, rng: random.Random, *, in_bytes: float = 0.15) -> tuple[str, bytes]:
    """A damaged JSON file: mostly still JSON, otherwise damaged in its bytes."""
    if rng.random() < in_bytes:
        return damaged_bytes(content.encode(), rng)
    kind, value = damaged_value(json.loads(content), rng)
    return kind, json.dumps(value).encode()


def tried(read: Callable[[], T]) -> tuple[T | None, str]:
    """What was read and no line, or nothing and the one line that refuses it."""
    try:
        return read(), ""
    except ValueError as error:
        line = str(error)
    assert line and "\n" not in line, line
    return None, line
