"""Marks in texts that are cut anywhere. It must not know what they mark."""

from __future__ import annotations


def without_beginning_of(mark: str, text: str) -> str:
    """The text without what could be the beginning of the mark at its end."""
    return text[: len(text) - next(n for n in range(len(mark) - 1, -1, -1) if text.endswith(mark[:n]))]
