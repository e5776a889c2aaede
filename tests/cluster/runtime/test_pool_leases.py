"""The order in which an engine asks its pools for a lease."""

from __future__ import annotations

from actors.protocol.leases import LeaseAnswer
from cluster.runtime.pool_leases import FASTER_S, PoolOffer, ranked

SILENT = PoolOffer()


def offer(delay_s: float, draft_s: float = 0.0, why: str = "") -> PoolOffer:
    return PoolOffer(LeaseAnswer(0, 10.0, why=why, draft_s=draft_s), delay_s)


def test_the_pool_whose_drafts_come_soonest_is_first():
    assert ranked([offer(0.03), offer(0.001, 0.012), offer(0.02, 0.02)]) == [1, 0, 2]


def test_the_configured_order_decides_between_pools_that_are_about_equal():
    assert ranked([offer(0.9 * FASTER_S), offer(0.0), offer(0.5 * FASTER_S)]) == [0, 1, 2]
    assert ranked([offer(1.1 * FASTER_S), offer(0.0), offer(0.5 * FASTER_S)]) == [1, 0, 2]


def test_pools_that_lend_nothing_are_last():
    assert ranked([SILENT, offer(0.001, why="all 1 leases are taken"), offer(0.5)]) == [2, 0, 1]
    assert ranked([SILENT]) == [0]
