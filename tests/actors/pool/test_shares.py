"""Shares of KV slots: all leases have the same, and what does not fit makes way for what does; parts of texts that are
read, until nothing is left."""

from __future__ import annotations

from actors.pool.shares import next_part, share_of, within_share


def test_leases_have_equal_shares():
    assert [share_of(1000, n) for n in (0, 1, 3, 2000)] == [1000, 1000, 333, 0]


def test_requests_fit_in_the_order_of_their_admission():
    lengths = [(1, 50), (2, 100), (3, 30), (4, 10)]
    assert within_share(lengths, 110, room=10) == {1, 3}
    assert within_share(lengths, 120, room=10) == {1, 3, 4}
    assert within_share(lengths, 59, room=10) == {3}
    assert within_share(lengths, 1000, room=10) == {1, 2, 3, 4}


def test_parts_are_of_so_many_tokens_in_all():
    assert next_part([(1, 0, 5), (2, 0, 5), (3, 0, 5)], 8) == [(1, 5), (2, 3)]
    assert next_part([(1, 5, 5), (2, 3, 5), (3, 0, 5)], 8) == [(2, 5), (3, 5)]
    assert next_part([(1, 4, 20)], 8) == [(1, 12)]
    assert next_part([(1, 5, 5), (2, 0, 0)], 8) == []


def test_parts_end_with_the_texts():
    lengths, read = {1: 30, 2: 3, 3: 17}, {1: 0, 2: 0, 3: 0}
    sizes = []
    while part := next_part([(number, read[number], length) for number, length in lengths.items()], 7):
        sizes.append(sum(end - read[number] for number, end in part))
        read |= dict(part)
    assert read == lengths
    assert sizes == [7] * 7 + [1]
