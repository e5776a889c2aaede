"""What the garbage collector of a process of the engine looks through. It knows nothing of what the objects are."""

from __future__ import annotations

import gc
from functools import cache


@cache
def freeze_libraries() -> None:
    """Leave what was imported by now out of garbage collection: it lives as long as the process, and to look through
    200,000 objects of libraries takes 140 ms, in the middle of a round.

    Once in a process: a later call would also keep what an engine that was closed has left behind.
    """
    gc.freeze()
