"""Which part of the texts that a lease has still to read comes next, so that a long text delays the drafts of others by
one part at most.

Pure arithmetic over lengths; it must not know drafters or passes.
"""

from __future__ import annotations

from collections.abc import Iterable


def next_part(unread: Iterable[tuple[int, int, int]], most: int) -> list[tuple[int, int]]:
    """(request, tokens of its text that are read then), in order, until `most` tokens more are read in all.

    `unread` are (request, tokens that are read, tokens of its text); a request that is read to its end is left out.
    """
    part = []
    for request_id, num_read, length in unread:
        end = min(length, num_read + most)
        if end > num_read:
            part.append((request_id, end))
            most -= end - num_read
    return part
