"""Draft, then verify, in turn: the whole batch is drafted for, then the whole batch is verified.

Simple and hard to beat on one device; on separate devices each side idles while the other works.
"""

from __future__ import annotations

from actors.policy.base import WholeBatch


class SyncPipeline(WholeBatch):
    """Orders as many tokens as can still be emitted and waits for all proposals, which come at once."""
