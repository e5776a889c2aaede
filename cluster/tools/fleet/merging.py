"""How a pool merges: which of its targets one pass computes rows for."""

from __future__ import annotations

from enum import StrEnum


class Merging(StrEnum):
    """What a pass of a pool has rows of."""

    passes = "passes"
    """Whatever every role has next, so that one joins in the middle of the drafts of others: the engine's pools
    where a draft model works ahead (`actors/pool/merged_passes.py`)."""
    calls = "calls"
    """All drafts that were ordered when the first of them begins, to their end; else a part of a text to read and a
    step of draft-ahead of all in turns: the engine's pools with other drafters."""
    none = "none"
    """One role's work, to its end."""
