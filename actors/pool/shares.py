"""How leases share a drafter: which of its requests may hold KV rows, in the order in which they came, and which part
of their texts is read next, so that a long text delays the drafts of others by one part at most.

Pure arithmetic over lengths; it must not know drafters or passes.
"""

from __future__ import annotations

from collections.abc import Iterable


def share_of(num_slots: int, num_leases: int) -> int:
    """KV slots of each lease: all have the same."""
    return num_slots // max(1, num_leases)


def within_share(lengths: Iterable[tuple[int, int]], share: int, room: int) -> set[int]:
    """The requests that fit: `lengths` are (request, tokens of its text) in the order of their admission, `room` the
    slots that each needs beside its text. One that does not fit makes way for later, shorter ones."""
    held, fitting = 0, set[int]()
    for request_id, length in lengths:
        if held + length + room <= share:
            held += length + room
            fitting.add(request_id)
    return fitting


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
