"""What online learning keeps: windows of text with the target's law at their last positions, bounded in number.

Every position of a text is verified once: the accepted rows of a round, its first rejected one and the root of the next
follow each other without a gap. So the rows of one request are joined to windows, of which one pass of the draft model
learns all positions at once, instead of one prefix for every rejected token. Knows no model.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from actors.drafters.interface import Context
from actors.protocol.messages import Commit, TopTokens

POSITIONS = 32
"""Learned positions of a window."""
READ_BEFORE = 32
"""Tokens read before them, at most."""
FEWEST = 8
"""Positions of a window at the end of a request, at least."""
USES = 3
"""How often a window is learned; then it is dropped, so that a drafter without traffic comes to rest."""


@dataclass(slots=True, eq=False)
class LawWindow:
    """token_ids [T]; the target's `likely` tokens [n, k] and their `probs` after each of the last n of them."""

    token_ids: Tensor
    likely: Tensor
    probs: Tensor
    greedy: bool
    num_uses: int = 0

    def __len__(self) -> int:
        return len(self.likely)


@dataclass(slots=True)
class _TextRows:
    """Laws at consecutive positions of a text; the first is that of the token after `start` tokens."""

    start: int
    likely: list[np.ndarray] = field(default_factory=list)
    probs: list[np.ndarray] = field(default_factory=list)


class TextLaws:
    """Joins the rows of every request to windows."""

    def __init__(self) -> None:
        self._verified: dict[int, tuple[int, np.ndarray, np.ndarray, np.ndarray]] = {}  # (text, tokens, likely, probs)
        self._rows: dict[int, _TextRows] = {}

    def read(self, top_tokens: TopTokens, known: Container[int]) -> None:
        """The rows of a pass, of known requests; which of them are of the text is known with the verdicts."""
        tokens = np.frombuffer(top_tokens.contexts, np.int32)[1::2]
        likely = np.frombuffer(top_tokens.token_ids, np.int32).reshape(-1, top_tokens.k)
        probs = np.frombuffer(top_tokens.probs, np.float32).reshape(-1, top_tokens.k)
        start = 0
        for request_id, text_len, size in top_tokens.spans:
            rows = slice(start, start + size)
            if request_id in known:
                self._verified[request_id] = text_len, tokens[rows], likely[rows], probs[rows]
            start += size

    def observe(self, context: Context, commit: Commit) -> LawWindow | None:
        """The verdict on the verified rows of a request, whose text is not extended yet; a window if one is full."""
        nothing = np.empty(0)
        text_len, tokens, likely, probs = self._verified.pop(context.request_id, (-1, nothing, nothing, nothing))
        path = [0, *commit.path][: len(commit.token_ids)]  # rows of the tree's nodes are in their order
        read = [context.token_ids[-1], *commit.token_ids][: len(path)]
        fits = text_len == len(context.token_ids) and max(path) < len(tokens) and tokens[path].tolist() == read
        if not fits:
            self._rows.pop(context.request_id, None)
            return None
        rows = self._rows.setdefault(context.request_id, _TextRows(text_len))
        if rows.start + len(rows.likely) != text_len:
            rows = self._rows[context.request_id] = _TextRows(text_len)
        rows.likely += list(likely[path])
        rows.probs += list(probs[path])
        if len(rows.likely) < POSITIONS:
            return None
        return self._window(context, [*context.token_ids, *commit.token_ids], POSITIONS)

    def release(self, context: Context) -> LawWindow | None:
        """The request ended: what is left of its rows, if it is worth a pass."""
        self._verified.pop(context.request_id, None)
        rows = self._rows.get(context.request_id)
        size = 0 if rows is None else min(len(rows.likely), len(context.token_ids) - rows.start + 1)
        window = self._window(context, context.token_ids, size) if size >= FEWEST else None
        self._rows.pop(context.request_id, None)
        return window

    def _window(self, context: Context, text: list[int], size: int) -> LawWindow:
        """The first `size` rows of the request, which are dropped."""
        rows = self._rows.pop(context.request_id)
        end = rows.start + size - 1  # tokens of the text that the last row has read
        token_ids = text[max(0, rows.start - READ_BEFORE) : end]
        self._rows[context.request_id] = _TextRows(rows.start + size, rows.likely[size:], rows.probs[size:])
        likely, probs = np.stack(rows.likely[:size]).astype(np.int64), np.stack(rows.probs[:size])
        is_greedy = context.sampling.temperature == 0
        return LawWindow(torch.tensor(token_ids), torch.from_numpy(likely), torch.from_numpy(probs), is_greedy)


class WindowMemory:
    """At most `num_positions` of windows that are still to be learned, the oldest dropped first."""

    def __init__(self, num_positions: int, seed: int = 0) -> None:
        self._num_positions = num_positions
        self._random = random.Random(seed)
        self._used: deque[LawWindow] = deque()
        self._fresh: deque[LawWindow] = deque()

    @property
    def num_positions(self) -> int:
        return sum(map(len, self._used)) + sum(map(len, self._fresh))

    def __len__(self) -> int:
        return len(self._used) + len(self._fresh)

    def add(self, window: LawWindow) -> None:
        self._fresh.append(window)
        while self.num_positions > self._num_positions:
            (self._used or self._fresh).popleft()

    def take(self) -> LawWindow:
        """The next window to learn: the newest that was not learned yet, then others at random."""
        if self._fresh:
            window = self._fresh.pop()  # where time is short, what is served now
        else:
            place = self._random.randrange(len(self._used))
            window = self._used[place]
            del self._used[place]
        window.num_uses += 1
        if window.num_uses < USES:
            self._used.append(window)
        return window
