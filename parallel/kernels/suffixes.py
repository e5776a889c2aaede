"""A suffix automaton over token ids, by the kernel in `suffixes.cpp`: an automaton in C++ with the functions of one in
Python, and the same results.

What they are is said in `actors/drafters/lookup/suffix_automaton.py`. A call reads a whole list of tokens. Knows no
requests.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Sequence
from ctypes import Structure, addressof, c_bool, c_double, c_int64, c_void_p
from functools import cache
from typing import Any, NamedTuple

from parallel.kernels.library import function

_MOST_STATES = (1 << 31) - 1


class _Record(Structure):
    """What C++ writes at each call; the record of the source, field by field."""

    _fields_ = [
        ("automaton", c_void_p),
        *((name, c_int64) for name in ("num_tokens", "num_states", "match", "match_len", "state", "matched", "found")),
        ("score", c_double),
    ]


class _Calls(NamedTuple):
    """The functions of the C++ source."""

    open: Callable[..., Any]
    close: Callable[..., Any]
    extend: Callable[..., Any]
    take_back: Callable[..., Any]
    read: Callable[..., Any]
    followers: Callable[..., Any]
    likeliest: Callable[..., Any]
    num_bytes: Callable[..., Any]


@cache
def _calls() -> _Calls:
    arguments = {
        "open": (c_int64,),
        "close": (),
        "extend": (c_void_p, c_int64, c_bool),
        "take_back": (c_int64,),
        "read": (c_void_p, c_int64),
        "followers": (c_int64, c_int64, c_void_p, c_void_p, c_void_p),
        "likeliest": (c_int64, c_int64, c_int64, c_double, c_void_p, c_void_p),
        "num_bytes": (),
    }
    found: dict[str, Any] = {name: function(f"suffixes_{name}", c_void_p, *types) for name, types in arguments.items()}
    if None in found.values():
        raise LookupError("suffixes")
    return _Calls(**found)


class CompiledSuffixAutomaton:
    """An automaton in C++; raises LookupError where there are no kernels.

    Tokens are int32 and not negative; states are those that it returned and that were not taken back.
    """

    def __init__(self, num_revocable: int = 0) -> None:
        self._calls, self._record = _calls(), _Record()
        self._at = addressof(self._record)
        self._calls.open(self._at, num_revocable)
        weakref.finalize(self, self._calls.close, self._record.automaton)

    @property
    def num_tokens(self) -> int:
        return self._record.num_tokens

    @property
    def num_states(self) -> int:
        return self._record.num_states

    @property
    def num_bytes(self) -> int:
        """Memory that C++ holds for it."""
        self._calls.num_bytes(self._at)
        return self._record.found

    @property
    def match(self) -> tuple[int, int]:
        """State and length; (0, 0) where nothing repeats."""
        return self._record.match, self._record.match_len

    def read(self, state: int, matched: int, token_ids: Sequence[int]) -> tuple[int, int]:
        """State and length of the longest match after these tokens; `state` and `matched` are those before them."""
        self._check(state)
        record, tokens = self._record, array("i", token_ids)
        record.state, record.matched = state, matched
        self._calls.read(self._at, *tokens.buffer_info())
        return record.state, record.matched

    def followers(self, state: int, width: int) -> list[tuple[float, int, int]]:
        """Up to `width` (share, token, state), the likeliest first; where a text ended, those of a shorter suffix."""
        self._check(state)
        room = min(width, self.num_states)  # each follower is a state
        shares, tokens, states = _room("d", room), _room("i", room), _room("i", room)
        self._calls.followers(self._at, state, room, *(one.buffer_info()[0] for one in (shares, tokens, states)))
        return list(zip(shares, tokens, states, strict=True))[: self._record.found]

    def likeliest(self, state: int, length: int, width: int, least: float) -> tuple[list[int], list[int], float]:
        """The likeliest tokens after `state`, the places of their parents, and the expected number of accepted ones."""
        self._check(state)
        tokens, parents = _room("i", length), _room("i", length)
        at_tokens, at_parents = tokens.buffer_info()[0], parents.buffer_info()[0]
        self._calls.likeliest(self._at, state, length, width, least, at_tokens, at_parents)
        found = self._record.found
        return tokens[:found].tolist(), parents[:found].tolist(), self._record.score

    def add_text(self, token_ids: Sequence[int]) -> None:
        """Enter a separate text: no string crosses its beginning."""
        self._enter(token_ids, is_text=True)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the latest text."""
        self._enter(token_ids, is_text=False)

    def take_back(self, num_tokens: int) -> bool:
        """Undo the latest `num_tokens`; False, and unchanged, if their changes are not kept any more."""
        before = self.num_tokens
        self._calls.take_back(self._at, num_tokens)
        return before - self.num_tokens == num_tokens

    def _enter(self, token_ids: Sequence[int], *, is_text: bool) -> None:
        tokens = array("i", token_ids)
        assert min(tokens, default=0) >= 0, "a token below 0"
        assert self.num_states + 2 * len(tokens) <= _MOST_STATES, "more states than have a number"
        self._calls.extend(self._at, *tokens.buffer_info(), is_text)

    def _check(self, state: int) -> None:
        assert 0 <= state < self._record.num_states, f"state {state}: there are {self._record.num_states}"


def _room(kind: str, length: int) -> array[Any]:
    return array(kind, [0]) * length
