"""What online learning keeps: windows of text with the target's distributions at their last positions, not too many.

Every position of a text is verified once: the accepted rows of a round, its first rejected one and the root of the next
follow each other without a gap. So the rows of one request are joined to windows, of which one pass of the draft model
learns all positions at once, instead of one prefix for every rejected token. Knows no model.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
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
MOST_UNMATCHED = 8
"""Verdicts of a request whose rows may still come."""
USES = 3
"""How often a window is learned; then it is dropped, so that a drafter without traffic comes to rest."""


@dataclass(slots=True, eq=False)
class TargetWindow:
    """token_ids [T]; the target's `likely` tokens [n, k] and their `probs` after each of the last n of them.

    `start` is the position of the first token in its text. `features` [T, F] are the target's one place before each
    token, for a learner that reads them.
    """

    token_ids: Tensor
    likely: Tensor
    probs: Tensor
    greedy: bool
    num_uses: int = 0
    start: int = 0
    features: Tensor | None = None

    def __len__(self) -> int:
        return len(self.likely)


@dataclass(slots=True)
class _TextRows:
    """Distributions at consecutive positions of a text; the first is that of the token after `start` tokens."""

    start: int
    likely: list[np.ndarray] = field(default_factory=list)
    probs: list[np.ndarray] = field(default_factory=list)


class WindowBuilder:
    """Joins the rows of every request to windows. Rows of a pass may come before its verdict or after it."""

    def __init__(self) -> None:
        self._verified: dict[int, tuple[int, np.ndarray, np.ndarray, np.ndarray]] = {}  # (text, tokens, likely, probs)
        self._verdicts: dict[int, dict[int, tuple[list[int], list[int]]]] = {}  # text -> (accepted rows, their tokens)
        self._rows: dict[int, _TextRows] = {}

    def read(self, top_tokens: TopTokens, known: Mapping[int, Context]) -> list[tuple[int, TargetWindow]]:
        """The rows of a pass, of known requests; windows that are full now, each with its request."""
        windows = []
        tokens = np.frombuffer(top_tokens.contexts, np.int32)[1::2]
        likely = np.frombuffer(top_tokens.token_ids, np.int32).reshape(-1, top_tokens.k)
        probs = np.frombuffer(top_tokens.probs, np.float32).reshape(-1, top_tokens.k)
        start = 0
        for request_id, text_len, size in top_tokens.spans:
            rows = slice(start, start + size)
            if request_id in known:
                self._verified[request_id] = text_len, tokens[rows], likely[rows], probs[rows]
                window = self._join(known[request_id], known[request_id].token_ids)
                windows += [] if window is None else [(request_id, window)]
            start += size
        return windows

    def observe(self, context: Context, commit: Commit) -> TargetWindow | None:
        """The verdict on the verified rows of a request, whose text is not extended yet; a window if one is full."""
        path = [0, *commit.path][: len(commit.token_ids)]  # rows of the tree's nodes are in their order
        read = [context.token_ids[-1], *commit.token_ids][: len(path)]
        verdicts = self._verdicts.setdefault(context.request_id, {})
        verdicts[len(context.token_ids)] = path, read
        if len(verdicts) > MOST_UNMATCHED:
            del verdicts[min(verdicts)]
        return self._join(context, [*context.token_ids, *commit.token_ids])

    def _join(self, context: Context, text: list[int]) -> TargetWindow | None:
        """If rows and verdict of a pass over the request are there, the rows of its text; `text` ends behind them."""
        request_id = context.request_id
        verdicts = self._verdicts.get(request_id, {})
        if request_id not in self._verified or self._verified[request_id][0] not in verdicts:
            return None
        text_len, tokens, likely, probs = self._verified.pop(request_id)
        path, read = verdicts[text_len]
        self._verdicts[request_id] = {later: verdicts[later] for later in verdicts if later > text_len}
        if max(path) >= len(tokens) or tokens[path].tolist() != read:
            return None
        rows = self._rows.setdefault(request_id, _TextRows(text_len))
        if rows.start + len(rows.likely) != text_len:
            rows = self._rows[request_id] = _TextRows(text_len)
        rows.likely += list(likely[path])
        rows.probs += list(probs[path])
        return self._window(context, text, POSITIONS) if len(rows.likely) >= POSITIONS else None

    def release(self, context: Context) -> TargetWindow | None:
        """The request ended: what is left of its rows, if it is worth a pass."""
        self._verified.pop(context.request_id, None)
        self._verdicts.pop(context.request_id, None)
        rows = self._rows.get(context.request_id)
        size = 0 if rows is None else min(len(rows.likely), len(context.token_ids) - rows.start + 1)
        window = self._window(context, context.token_ids, size) if size >= FEWEST else None
        self._rows.pop(context.request_id, None)
        return window

    def _window(self, context: Context, text: list[int], size: int) -> TargetWindow:
        """The first `size` rows of the request, which are dropped."""
        rows = self._rows.pop(context.request_id)
        end = rows.start + size - 1  # tokens of the text that the last row has read
        start = max(0, rows.start - READ_BEFORE)
        self._rows[context.request_id] = _TextRows(rows.start + size, rows.likely[size:], rows.probs[size:])
        likely, probs = np.stack(rows.likely[:size]).astype(np.int64), np.stack(rows.probs[:size])
        is_greedy = context.sampling.temperature == 0
        likeliest = torch.from_numpy(likely), torch.from_numpy(probs)
        return TargetWindow(torch.tensor(text[start:end]), *likeliest, is_greedy, start=start)


class WindowMemory:
    """Keeps at most `num_positions` of windows that are still to be learned, the oldest dropped first."""

    def __init__(self, num_positions: int, seed: int = 0) -> None:
        self._num_positions = num_positions
        self._random = random.Random(seed)
        self._used: deque[TargetWindow] = deque()
        self._fresh: deque[TargetWindow] = deque()

    @property
    def num_positions(self) -> int:
        return sum(map(len, self._used)) + sum(map(len, self._fresh))

    def __len__(self) -> int:
        return len(self._used) + len(self._fresh)

    def add(self, window: TargetWindow) -> None:
        self._fresh.append(window)
        while self.num_positions > self._num_positions:
            (self._used or self._fresh).popleft()

    def take(self) -> TargetWindow:
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
