"""Shares of KV slots: all leases have the same, and what does not fit makes way for what does."""

from __future__ import annotations

from actors.pool.shares import share_of, within_share


def test_leases_have_equal_shares():
    assert [share_of(1000, n) for n in (0, 1, 3, 2000)] == [1000, 1000, 333, 0]


def test_requests_fit_in_the_order_of_their_admission():
    lengths = [(1, 50), (2, 100), (3, 30), (4, 10)]
    assert within_share(lengths, 110, room=10) == {1, 3}
    assert within_share(lengths, 120, room=10) == {1, 3, 4}
    assert within_share(lengths, 59, room=10) == {3}
    assert within_share(lengths, 1000, room=10) == {1, 2, 3, 4}
