"""The order in which an engine asks its pools for a lease, and what ends one."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from actors.drafters.pool.config import PoolDrafterConfig
from actors.protocol.leases import LeaseAnswer, LeaseOrder, LeaseQuery, LeaseTerms
from actors.transport.keys import LinkKey
from cluster.runtime import pool_leases
from cluster.runtime.backend import LOOPBACK, make_backend
from cluster.runtime.pool_leases import FASTER_S, PoolLeases, PoolOffer, host_for, offer_of, ranked
from tests.cluster.config.quick_loading import load_quickly

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


@pytest.mark.parametrize(
    "nonsense",
    [
        {"draft_s": math.nan},
        {"draft_s": -1.0},
        {"lease_s": math.inf},
        {"why": "two\nlines"},
        {"drafter": "\x1b[2J"},
        {"why": "x" * 5000},
    ],
)
def test_a_pool_whose_answer_makes_no_sense_has_answered_nothing(nonsense):
    """One whose seconds are no number would end the comparison of all pools, and with it the thread that orders."""
    pool: Any = Granting(**nonsense)
    query = LeaseQuery(LeaseTerms("coupled", "sync"), 4)
    good: Any = Granting(draft_s=0.2)
    offers = [offer_of(one, query) for one in (pool, good)]
    assert [offer.is_usable for offer in offers] == [False, True]
    assert ranked(offers) == [1, 0]


# --- where an engine listens ------------------------------------------------------------------------------------------

NEAR, FAR, UNKNOWN = "tcp://127.0.0.1:1", "tcp://10.0.0.2:1", "tcp://nowhere:1"


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of the network 10.0.0.0, where one host is not known."""

    def host_towards(address: str) -> str:
        if address == UNKNOWN:
            raise ValueError(f"drafter.pools={address}: cannot be reached")
        return "127.0.0.1" if address == NEAR else "10.0.0.1"

    monkeypatch.setattr(pool_leases, "host_towards", host_towards)


@pytest.mark.parametrize("name", ["local", "inprocess"])
@pytest.mark.parametrize(
    ("pools", "host"),
    [
        ([NEAR], "127.0.0.1"),
        ([FAR], "10.0.0.1"),
        ([NEAR, FAR], "10.0.0.1"),
        ([FAR, NEAR], "10.0.0.1"),
        ([UNKNOWN, NEAR], "127.0.0.1"),
    ],
)
def test_every_pool_finds_the_engine_that_orders_a_lease(routes, name, pools, host):
    """One on another machine too, whatever starts the engine's processes."""
    drafter = PoolDrafterConfig(pools=pools, key_files=[__file__])
    config = replace(load_quickly([f"cluster={name}", "pipeline=branches"]), drafter=drafter)
    assert make_backend(config, None, print)._hub_host(LOOPBACK) == host


def test_an_engine_whose_pools_are_all_unknown_does_not_start(routes):
    with pytest.raises(ValueError, match="nowhere:1: cannot be reached"):
        host_for([UNKNOWN])


# --- what ends a lease ------------------------------------------------------------------------------------------------


class Granting:
    """A pool that grants whatever is ordered, as one that was started again at its address does with a renewal."""

    address = "tcp://127.0.0.1:1"

    def __init__(self, **answer: Any) -> None:
        self.orders: list[int] = []
        self._answer = answer

    def open(self) -> Granting:
        return self

    def send(self, order: LeaseOrder | LeaseQuery) -> None:
        if isinstance(order, LeaseOrder):
            assert order.is_renewal is (order.number in self.orders)
        self.orders.append(order.number if isinstance(order, LeaseOrder) else 0)

    def receive(self, timeout_s: float) -> LeaseAnswer:
        return LeaseAnswer(self.orders[-1], **self._answer)

    def close(self) -> None:
        pass

    def renewed(self, times: int = 2) -> int:
        """The number of the lease after so many further orders."""
        wanted, deadline = len(self.orders) + times, time.monotonic() + 60
        while len(self.orders) < wanted:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        return self.orders[-1]


@pytest.fixture
def granted(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Granting, PoolLeases]]:
    monkeypatch.setattr(pool_leases, "RENEW_S", 0.005)
    monkeypatch.setattr(pool_leases, "PATIENCE_S", 1e3)  # a lease is new for as long as a test takes
    pool: Any = Granting()
    order = LeaseOrder(0, "tcp://127.0.0.1:2", b"", LeaseTerms("coupled", "sync"), 100, 100, 4)
    leases = PoolLeases([pool], lambda: order)
    assert leases.wait(60) and pool.renewed() == 1
    yield pool, leases
    leases.close()


def test_a_lease_whose_rank_is_lost_is_replaced_however_soon_and_though_the_pool_renews_it(granted, caplog) -> None:
    caplog.set_level(logging.WARNING)
    pool, leases = granted
    assert not caplog.records, "the first lease is no news beside a warning"
    leases.lost(1)
    assert pool.renewed() == 2
    leases.lost(1)  # said again of the lease that is gone
    assert pool.renewed() == 2
    said = [record.getMessage().split(": ")[1] for record in caplog.records if record.levelname == "WARNING"]
    assert said == ["its drafter was lost", "lends drafter="], "who reads of the loss reads of its end"


def test_that_no_rank_is_there_yet_ends_no_new_lease_but_an_old_one(granted, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, leases = granted
    leases.lost(None)
    assert pool.renewed() == 1
    monkeypatch.setattr(pool_leases, "PATIENCE_S", 0.0)
    leases.lost(None)
    assert pool.renewed() == 2


class Silent(Granting):
    """A pool that is gone."""

    def receive(self, timeout_s: float) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Nothing comes."""

    def is_refused(self, timeout_s: float, num_times: int) -> bool:
        return False


def test_a_pool_that_is_gone_for_long_is_said_to_be_once(monkeypatch, caplog) -> None:
    for name in ("RENEW_S", "PATIENCE_S"):
        monkeypatch.setattr(pool_leases, name, 0.001)
    pool: Any = Silent()
    order = LeaseOrder(0, "tcp://127.0.0.1:2", b"", LeaseTerms("coupled", "sync"), 100, 100, 4)
    pool.key = LinkKey.made_for("default", b"h" * 32)
    leases = PoolLeases([pool], lambda: order)
    deadline = time.monotonic() + 60
    while len(set(pool.orders)) < 10:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    leases.close()
    assert caplog.text.count("does not answer") == 1
