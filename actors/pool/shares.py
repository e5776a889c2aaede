"""Which requests of a lease may hold KV rows: its share of the pool's slots, in the order in which they came.

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
