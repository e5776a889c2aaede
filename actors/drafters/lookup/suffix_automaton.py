"""A suffix automaton over token ids that grows by one token at a time and knows how often everything occurred.

A state stands for the strings of the text that end at the same places; from any state the text can be read on, so that
the longest match of what was read last, and what followed it how often, are there without a search. Transitions lie in
five flat arrays, where the likeliest follower of every state has its own cell; only states with several followers have
a dictionary as well. The latest tokens can be taken back: what each of them changed is kept. It must not know requests
or drafts.

Sources: Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985); its use for drafting is
SAM-Decoding's (arXiv 2411.10666), followers by frequency are SuffixDecoding's (arXiv 2411.04975).
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass, field

_NONE = -1
_COUNTED = 32
"""Suffixes whose counts follow a token; a periodic text has one per period, the others differ by little."""

_Change = tuple[MutableSequence[int] | MutableMapping[int, object], int, object]
"""A cell that a token changed: of which array or dictionary, which one, and what was there; None: nothing."""


@dataclass(slots=True)
class _Token:
    """What `extend` changed, and how it was before."""

    last: int
    num_states: int
    changes: list[_Change] = field(default_factory=list)


class SuffixAutomaton:
    """State 0 is the empty string. `match` is the longest suffix of the latest text that occurred before.

    Of the latest `num_revocable` tokens it knows how to take them back; that costs about half as much time again.
    """

    def __init__(self, num_revocable: int = 0) -> None:
        self.num_tokens = 0
        self._revocable: deque[_Token] = deque(maxlen=num_revocable)
        self._changes: list[_Change] | None = None  # of the token that is being entered, if it can be taken back
        self._link = array("i", [_NONE])  # longest suffix that ends at more places
        self._length = array("i", [0])  # of the longest string of the state
        self._count = array("i", [0])  # how often its strings occurred
        self._token = array("i", [_NONE])  # the follower seen most often, the latest of equals
        self._next = array("i", [_NONE])  # the state behind it
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

    def count(self, state: int) -> int:
        return self._count[state]

    def read(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """The longest match after one more token was read by somebody whose match was `matched` long."""
        while (follower := self._follow(state, token)) == _NONE:
            state = self._link[state]
            if state == _NONE:
                return 0, 0
            matched = self._length[state]
        return follower, matched + 1

    def followers(self, state: int, width: int) -> list[tuple[float, int, int]]:
        """Up to `width` (share, token, state), the likeliest first; where a text ends, those of a shorter suffix."""
        while (token := self._token[state]) == _NONE:
            state = self._link[state]
            if state <= 0:
                return []
        count, follower = self._count, self._next[state]
        # The suffix that is being continued was counted when it ended the text, too; that time nothing followed.
        total = count[state] - (state == self._link[self._last]) or 1
        found = [(min(1.0, count[follower] / total), token, follower)]
        if width > 1 and (others := self._others.get(state)):
            ranked = heapq.nlargest(width - 1, others.items(), key=lambda other: (count[other[1]], other[1]))
            found += [(min(1.0, count[behind] / total), other, behind) for other, behind in ranked]
        return found

    # --- growing ------------------------------------------------------------------------------------------------------

    def add_text(self, token_ids: Sequence[int]) -> None:
        """A text of its own: nothing is learnt across its beginning."""
        self._last = 0
        for token in token_ids:
            self.extend(token)
        self._last = 0

    def extend(self, token: int) -> None:
        """The latest text goes on. Amortised constant, at most a fixed number of suffixes are counted."""
        before = self._last
        if self._revocable.maxlen:
            self._revocable.append(_Token(before, self.num_states))
            self._changes = self._revocable[-1].changes
        self._last = self._grow(before, token)
        self.num_tokens += 1
        self._count_suffixes(before, token)

    def take_back(self, num_tokens: int) -> bool:
        """Be as before the latest `num_tokens`; False, and unchanged, if that is not known any more."""
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

    def _set(self, cells: MutableSequence[int] | MutableMapping[int, object], key: int, value: object) -> None:
        """Change a cell of a state that an earlier token may have made."""
        if self._changes is not None:
            self._changes.append((cells, key, cells.get(key) if isinstance(cells, dict) else cells[key]))
        cells[key] = value

    def _grow(self, last: int, token: int) -> int:
        """The state of the text with `token` behind it."""
        behind = self._follow(last, token)
        if behind != _NONE:  # an earlier text began alike
            return self._exact(last, token, behind)
        state = self._add_state(self._length[last] + 1, 0)
        suffix = last
        while suffix != _NONE and (behind := self._follow(suffix, token)) == _NONE:
            if self._token[suffix] == _NONE:
                self._set(self._token, suffix, token)
                self._set(self._next, suffix, state)
            else:
                if suffix not in self._others:
                    self._set(self._others, suffix, {})
                self._set(self._others[suffix], token, state)
            suffix = self._link[suffix]
        self._link[state] = 0 if suffix == _NONE else self._exact(suffix, token, behind)
        return state

    def _exact(self, suffix: int, token: int, behind: int) -> int:
        """The state whose longest string is that of `suffix` with `token`: `behind`, or what is split off from it."""
        length = self._length[suffix] + 1
        if self._length[behind] == length:
            return behind
        clone = self._add_state(length, self._link[behind])
        self._count[clone] = self._count[behind]
        self._token[clone], self._next[clone] = self._token[behind], self._next[behind]
        if behind in self._others:
            self._others[clone] = self._others[behind].copy()
        self._set(self._link, behind, clone)
        while suffix != _NONE and self._follow(suffix, token) == behind:
            if self._token[suffix] == token:
                self._set(self._next, suffix, clone)
            else:
                self._set(self._others[suffix], token, clone)
            suffix = self._link[suffix]
        return clone

    def _count_suffixes(self, suffix: int, token: int) -> None:
        """Every suffix of the text occurred once more, and so did `token` behind what came before it."""
        counted, count, changes = _NONE, self._count, self._changes
        for _ in range(_COUNTED):
            behind = self._follow(suffix, token)
            if behind != counted:
                if changes is not None:
                    changes.append((count, behind, count[behind]))
                count[behind] += 1
                counted = behind
            favourite = self._token[suffix]
            if favourite != token and count[behind] >= count[self._next[suffix]]:
                others = self._others[suffix]
                if changes is not None:
                    changes.append((others, token, others[token]))
                del others[token]
                self._set(others, favourite, self._next[suffix])
                self._set(self._token, suffix, token)
                self._set(self._next, suffix, behind)
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
