"""A suffix automaton over token ids that grows by one token at a time and counts occurrences.

A state stands for the strings of the text that end at the same places. Reading on from a state gives the longest match
of the latest tokens, what followed it, and how often, without a search. Five flat arrays hold the states; the likeliest
follower of a state has a cell of its own, and only states with several followers have a dictionary as well. The latest
tokens can be taken back, since the changes of each are kept. It must not know requests or drafts.

The class here is the reference, and what a machine without a C++ compiler runs. Elsewhere `suffix_automaton` gives that
of `parallel/kernels/suffixes.py`, which takes the same steps in C++.

Sources: Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985); its use for drafting is
SAM-Decoding's (arXiv 2411.10666), followers by frequency are SuffixDecoding's (arXiv 2411.04975).
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from parallel.kernels.suffixes import CompiledSuffixAutomaton

_NONE = -1
_COUNTED = 32
"""Suffixes that a token counts, at most; a periodic text has one per period, and longer ones change little."""

_Change = tuple[Any, int, Any]
"""A changed cell: its array or dictionary, its key, and its value before; None: there was no entry."""


@dataclass(slots=True)
class _TokenChanges:
    """What one token changed, to undo it: the state and number of states before, and the changed cells."""

    last: int
    num_states: int
    changes: list[_Change] = field(default_factory=list)


Automaton: TypeAlias = "SuffixAutomaton | CompiledSuffixAutomaton"


def suffix_automaton(num_revocable: int = 0) -> Automaton:
    """An automaton in C++ where this machine has kernels, else in Python."""
    from parallel.kernels.library import library

    if library() is None:
        return SuffixAutomaton(num_revocable)
    from parallel.kernels.suffixes import CompiledSuffixAutomaton

    return CompiledSuffixAutomaton(num_revocable)


class SuffixAutomaton:
    """State 0 is the empty string. `match` is the longest suffix of the latest text that occurred before.

    The latest `num_revocable` tokens can be taken back; keeping their changes costs about half as much time again.
    """

    def __init__(self, num_revocable: int = 0) -> None:
        self.num_tokens = 0
        self._revocable: deque[_TokenChanges] = deque(maxlen=num_revocable)
        self._changes: list[_Change] | None = None  # of the token being entered, if it can be taken back
        self._link = array("i", [_NONE])  # longest suffix that ends at more places
        self._length = array("i", [0])  # of the longest string of the state
        self._count = array("i", [0])  # how often its strings occurred
        self._token = array("i", [_NONE])  # the follower seen most often, the latest of equals
        self._next = array("i", [_NONE])  # the state after it
        self._others: dict[int, dict[int, int]] = {}  # further followers, by token
        self._last = 0

    @property
    def num_states(self) -> int:
        return len(self._link)

    @property
    def match(self) -> tuple[int, int]:
        """State and length; (0, 0) where nothing repeats."""
        state = self._link[self._last]
        return (state, self._length[state]) if state > 0 else (0, 0)

    def read(self, state: int, matched: int, token_ids: Sequence[int]) -> tuple[int, int]:
        """State and length of the longest match after these tokens; `state` and `matched` are those before them."""
        for token in token_ids:
            state, matched = self._read(state, matched, token)
        return state, matched

    def _read(self, state: int, matched: int, token: int) -> tuple[int, int]:
        while (follower := self._follow(state, token)) == _NONE:
            state = self._link[state]
            if state == _NONE:
                return 0, 0
            matched = self._length[state]
        return follower, matched + 1

    def followers(self, state: int, width: int) -> list[tuple[float, int, int]]:
        """Up to `width` (share, token, state), the likeliest first; where a text ended, those of a shorter suffix."""
        while (token := self._token[state]) == _NONE:
            state = self._link[state]
            if state <= 0:
                return []
        count, follower = self._count, self._next[state]
        # The current suffix was also counted at the end of the text, where nothing follows yet.
        total = count[state] - (state == self._link[self._last]) or 1
        found = [(min(1.0, count[follower] / total), token, follower)]
        if width > 1 and (others := self._others.get(state)):
            ranked = heapq.nlargest(width - 1, others.items(), key=lambda other: (count[other[1]], other[1]))
            found += [(min(1.0, count[after] / total), other, after) for other, after in ranked]
        return found

    def likeliest(self, state: int, length: int, width: int, least: float) -> tuple[list[int], list[int], float]:
        """The likeliest `length` tokens after `state`, best first, the places of their parents (0 is `state` itself, 1
        the first token), and the expected number of accepted ones.

        A path whose share of the matches is below `least` ends; a token has at most `width` children.
        """
        token_ids: list[int] = []
        parents: list[int] = []
        score, chance, age = 0.0, 1.0, 0
        offered: list[tuple[float, int, int, int, int]] = []  # (-chance, age, parent, token, state)
        while len(token_ids) < length:
            for share, token, after in self.followers(state, width):
                if chance * share >= least:
                    age += 1
                    heapq.heappush(offered, (-chance * share, age, len(token_ids), token, after))
            if not offered:
                break
            chance, _, parent, token, state = heapq.heappop(offered)
            chance = -chance
            token_ids.append(token)
            parents.append(parent)
            score += chance
        return token_ids, parents, score

    # --- growing ------------------------------------------------------------------------------------------------------

    def add_text(self, token_ids: Sequence[int]) -> None:
        """Enter a separate text: no string crosses its beginning."""
        self._last = 0
        self.extend(token_ids)
        self._last = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the latest text; amortised constant time for each."""
        for token in token_ids:
            self._enter(token)

    def _enter(self, token: int) -> None:
        before = self._last
        if self._revocable.maxlen:
            self._revocable.append(_TokenChanges(before, self.num_states))
            self._changes = self._revocable[-1].changes
        self._last = self._grow(before, token)
        self.num_tokens += 1
        self._count_suffixes(before, token)

    def take_back(self, num_tokens: int) -> bool:
        """Undo the latest `num_tokens`; False, and unchanged, if their changes are not kept any more."""
        if num_tokens > len(self._revocable):
            return False
        for _ in range(num_tokens):
            token = self._revocable.pop()
            for cells, key, before in reversed(token.changes):
                if before is None:
                    del cells[key]
                else:
                    cells[key] = before
            for state in range(token.num_states, self.num_states):
                self._others.pop(state, None)
            for cells in (self._link, self._length, self._count, self._token, self._next):
                del cells[token.num_states :]
            self._last = token.last
            self.num_tokens -= 1
        return True

    def _set(self, cells: Any, key: int, value: Any) -> None:
        """Change a cell and keep its value before, for `take_back`."""
        if self._changes is not None:
            self._changes.append((cells, key, cells.get(key) if isinstance(cells, dict) else cells[key]))
        cells[key] = value

    def _grow(self, last: int, token: int) -> int:
        """The state of the text followed by `token`."""
        after = self._follow(last, token)
        if after != _NONE:  # an earlier text began in the same way
            return self._exact(last, token, after)
        state = self._add_state(self._length[last] + 1, 0)
        suffix = last
        while suffix != _NONE and (after := self._follow(suffix, token)) == _NONE:
            if self._token[suffix] == _NONE:
                self._set(self._token, suffix, token)
                self._set(self._next, suffix, state)
            else:
                if suffix not in self._others:
                    self._set(self._others, suffix, {})
                self._set(self._others[suffix], token, state)
            suffix = self._link[suffix]
        self._link[state] = 0 if suffix == _NONE else self._exact(suffix, token, after)
        return state

    def _exact(self, suffix: int, token: int, after: int) -> int:
        """The state whose longest string is that of `suffix` and `token`: `after` itself, or a clone split off from
        it."""
        length = self._length[suffix] + 1
        if self._length[after] == length:
            return after
        clone = self._add_state(length, self._link[after])
        self._count[clone] = self._count[after]
        self._token[clone], self._next[clone] = self._token[after], self._next[after]
        if after in self._others:
            self._others[clone] = self._others[after].copy()
        self._set(self._link, after, clone)
        while suffix != _NONE and self._follow(suffix, token) == after:
            if self._token[suffix] == token:
                self._set(self._next, suffix, clone)
            else:
                self._set(self._others[suffix], token, clone)
            suffix = self._link[suffix]
        return clone

    def _count_suffixes(self, suffix: int, token: int) -> None:
        """Count every suffix of the text once more, and `token` as a follower of the suffix before it."""
        counted, count, changes = _NONE, self._count, self._changes
        for _ in range(_COUNTED):
            after = self._follow(suffix, token)
            if after != counted:
                if changes is not None:
                    changes.append((count, after, count[after]))
                count[after] += 1
                counted = after
            favourite = self._token[suffix]
            if favourite != token and count[after] >= count[self._next[suffix]]:
                others = self._others[suffix]
                if changes is not None:
                    changes.append((others, token, others[token]))
                del others[token]
                self._set(others, favourite, self._next[suffix])
                self._set(self._token, suffix, token)
                self._set(self._next, suffix, after)
            suffix = self._link[suffix]
            if suffix == _NONE:
                return

    def _add_state(self, length: int, link: int) -> int:
        self._link.append(link)
        self._length.append(length)
        self._count.append(0)
        self._token.append(_NONE)
        self._next.append(_NONE)
        return len(self._link) - 1

    def _follow(self, state: int, token: int) -> int:
        if self._token[state] == token:
            return self._next[state]
        others = self._others.get(state)
        return _NONE if others is None else others.get(token, _NONE)
