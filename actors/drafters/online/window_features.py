"""The target's features for windows of a drafter that reads them: each token is paired with those one place before it.

A window is full when its last verdict is there; the features of these tokens may come with the next batch. So windows
wait for them; what has none when its request ends is cut off. Knows no model.
"""

from __future__ import annotations

from dataclasses import replace

from actors.drafters.interface import FeatureRows
from actors.drafters.online import windows
from actors.drafters.online.windows import TargetWindow
from parallel.speculators.features import TextFeatures

KEPT = 4 * (windows.POSITIONS + windows.READ_BEFORE)
"""Newest positions of a text whose features are kept; a window that waits reaches back less far."""


class WindowFeatures:
    """The features of the windows, by request."""

    def __init__(self) -> None:
        self._texts: dict[int, TextFeatures] = {}
        self._waiting: dict[int, list[TargetWindow]] = {}

    def open(self, request_id: int) -> None:
        self._texts[request_id], self._waiting[request_id] = TextFeatures(), []

    def read(self, features: FeatureRows) -> list[TargetWindow]:
        """Keep them; returns the windows that have all theirs now."""
        text = self._texts[features.request_id]
        text.append(features.start, features.rows)
        text.forget(text.end - KEPT)
        waiting, self._waiting[features.request_id] = self._waiting[features.request_id], []
        return [found for window in waiting for found in self.add(features.request_id, window)]

    def add(self, request_id: int, window: TargetWindow) -> list[TargetWindow]:
        """The window with its features, if they are there; else it waits for them."""
        if window.start + len(window.token_ids) - 1 > self._texts[request_id].end:
            self._waiting[request_id].append(window)
            return []
        return self._paired(request_id, window)

    def release(self, request_id: int) -> list[TargetWindow]:
        """The request ended: what is left of the windows that wait."""
        text, waiting = self._texts[request_id], self._waiting.pop(request_id)
        cut = [_without_last(window, window.start + len(window.token_ids) - 1 - text.end) for window in waiting]
        found = [one for window in cut if len(window) >= windows.FEWEST for one in self._paired(request_id, window)]
        del self._texts[request_id]
        return found

    def _paired(self, request_id: int, window: TargetWindow) -> list[TargetWindow]:
        """A text's first token has nothing before it, and is left out."""
        text, tokens = self._texts[request_id], window.token_ids
        first = max(1, window.start)
        tokens = tokens[first - window.start :]
        if first - 1 < text.start or len(tokens) < len(window):
            return []
        rows = text.rows(range(first - 1, first - 1 + len(tokens)))
        return [replace(window, token_ids=tokens, start=first, features=rows.clone())]


def _without_last(window: TargetWindow, count: int) -> TargetWindow:
    if count <= 0:
        return window
    likeliest = window.likely[:-count], window.probs[:-count]
    return replace(window, token_ids=window.token_ids[:-count], likely=likeliest[0], probs=likeliest[1])
