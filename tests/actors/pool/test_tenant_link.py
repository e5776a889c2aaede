"""What the coordinator of a lease may say to a pool, and under which numbers and scopes the pool knows it."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from actors.drafters.interface import Context
from actors.pool import tenant_link
from actors.pool.tenant_link import TenantLink
from actors.protocol.leases import LeaseOrder, LeaseTerms
from actors.protocol.membership import Join
from actors.protocol.messages import (
    FAR_REACH,
    HASH_SEED,
    Admit,
    Commit,
    DraftBatch,
    DraftOrder,
    DraftPreview,
    DraftPreviewBatch,
    FeatureExport,
    MeasuredCosts,
    Proposal,
    ProposalBatch,
    SamplingParams,
    TokenTree,
)

ORDER = LeaseOrder(3, "tcp://10.0.0.1:7000", b"h" * 32, LeaseTerms("coupled", "branches"), 100, 40, 6, b"p" * 32)
ADMIT = Admit(7, 1, (1, 2, 3), 2, SamplingParams(), scope=4, cache_salt="salt", memory_scope=4, drafter="suffix")


class Line:
    """A link whose records are given, and that keeps what is sent."""

    def __init__(self, *records: object) -> None:
        self.records = deque(records)
        self.sent: list[Any] = []

    def receive(self, timeout_s: float | None = None) -> object | None:
        return self.records.popleft() if self.records else None

    def send(self, record: object) -> None:
        self.sent.append(record)


def link(*records: object, tenant: int = 1, first: int = 100) -> TenantLink:
    return TenantLink(Line(*records), ORDER, tenant, itertools.count(first), lambda: None)  # pyright: ignore


def batch(**parts: Any) -> DraftBatch:
    several = {name: part if isinstance(part, tuple) else (part,) for name, part in parts.items()}
    return replace(DraftBatch(1), **several)


def received(tenant: TenantLink) -> DraftBatch:
    record = tenant.receive(0)
    assert isinstance(record, DraftBatch)
    return record


def test_requests_have_the_pools_own_numbers_until_they_are_released():
    commit = Commit(7, 1, 3, (), (4,), settled_len=2)
    tenant = link(
        batch(admits=ADMIT), batch(commits=commit, orders=DraftOrder(7, 5)), batch(releases=7), batch(releases=7)
    )
    assert received(tenant).admits[0].request_id == 100
    second = received(tenant)
    assert second.commits == (replace(commit, request_id=100, settled_len=None),)
    assert second.orders == (DraftOrder(100, 5),)
    tree = TokenTree.chain(4, [5])
    own = Proposal.deterministic(100, 1, 4, HASH_SEED, tree)
    tenant.send(ProposalBatch(1, (own, replace(own, request_id=55)), 0.0, 0.0))
    tenant.send(DraftPreviewBatch((DraftPreview(100, 1, 4, HASH_SEED, tree),)))
    proposals, previews = tenant._link.sent  # pyright: ignore
    assert [proposal.request_id for proposal in proposals.proposals] == [7]
    assert [preview.request_id for preview in previews.previews] == [7]
    assert received(tenant).releases == (100,)
    assert received(tenant).releases == ()
    tenant.send(ProposalBatch(1, (own,), 0.0, 0.0))
    assert tenant._link.sent[-1].proposals == ()  # pyright: ignore


def test_no_two_leases_share_rows_or_memories():
    contexts = [
        Context.admitted(received(link(batch(admits=ADMIT), tenant=number)).admits[0], 100) for number in (1, 2)
    ]
    assert contexts[0].rows_scope != contexts[1].rows_scope
    assert contexts[0].scope != contexts[1].scope
    assert [context.drafter for context in contexts] == [None, None]


_FIRST, _ADDED, _TIMES = 2870177450012600261, 14029467366897019727, 11400714785074694791
_64 = 1 << 64


def _scope_that_hashes_as(lease: int, scope: int, other: int) -> int | None:
    """The scope with which Python's hash of (other lease, scope) is that of (lease, scope), if there is one."""

    def mixed(state: int, number: int) -> int:
        state = (state + number * _ADDED) % _64
        return (state << 31 | state >> 33) % _64 * _TIMES % _64

    after = mixed(mixed(_FIRST, lease), scope) * pow(_TIMES, -1, _64) % _64
    found = ((after >> 31 | after << 33) % _64 - mixed(_FIRST, other)) * pow(_ADDED, -1, _64) % _64
    found -= _64 * (found >= _64 // 2)
    return found if hash((other, found)) == hash((lease, scope)) else None


def test_an_engine_finds_no_scope_that_is_anothers():
    """Rows and memories of engines would be shared by one that knows how scopes are computed."""
    other, forged = next(
        (other, found) for other in range(2, 99) if (found := _scope_that_hashes_as(1, 0, other)) is not None
    )
    admits = (replace(ADMIT, scope=0, memory_scope=0), replace(ADMIT, scope=forged, memory_scope=forged))
    first, second = (
        received(link(batch(admits=admit), tenant=number)).admits[0]
        for number, admit in zip((1, other), admits, strict=True)
    )
    assert first.scope != second.scope and first.memory_scope != second.memory_scope


def test_a_new_epoch_begins_without_requests():
    tenant = link(batch(admits=ADMIT), Join(2, 1), batch(orders=DraftOrder(7, 1)))
    received(tenant)
    tenant.receive(0)
    with pytest.raises(ValueError, match="request 7: was not admitted"):
        tenant.receive(0)


BAD = [
    ({"admits": ADMIT}, "is admitted already"),
    ({"admits": replace(ADMIT, request_id=8, token_ids=(1, 100))}, "token 100"),
    ({"admits": replace(ADMIT, request_id=8, token_ids=(-1, 1))}, "token -1"),
    ({"admits": replace(ADMIT, request_id=8, token_ids=tuple(range(41)))}, "do not fit"),
    ({"admits": replace(ADMIT, request_id=8, prompt_len=0)}, "prompt_len"),
    ({"admits": replace(ADMIT, request_id=8, prompt_len=4)}, "prompt_len"),
    ({"admits": replace(ADMIT, request_id=8, reference=(500,))}, "token 500"),
    ({"admits": replace(ADMIT, request_id=8, source=tuple(range(50)))}, "do not fit"),
    ({"admits": replace(ADMIT, request_id=8, cache_salt="s" * 200)}, "cache_salt"),
    ({"admits": replace(ADMIT, request_id=8, sampling=SamplingParams(top_p=9.0))}, "top_p"),
    ({"commits": Commit(8, 1, 3, (), (4,))}, "request 8: was not admitted"),
    ({"commits": Commit(7, 2, 3, (), (4,))}, "is at epoch 1, 3 tokens"),
    ({"commits": Commit(7, 1, 2, (), (4,))}, "is at epoch 1, 3 tokens"),
    ({"commits": Commit(7, 1, 3, (), ())}, "token_ids is empty"),
    ({"commits": Commit(7, 1, 3, (), (100,))}, "token 100"),
    ({"commits": Commit(7, 1, 3, (), tuple(range(39)))}, "do not fit"),
    ({"orders": DraftOrder(8, 1)}, "request 8: was not admitted"),
    ({"orders": DraftOrder(7, 7)}, "7 draft tokens"),
    ({"orders": (DraftOrder(7, 1), DraftOrder(7, 1))}, "two are of one request"),
    ({"orders": DraftOrder(7, -1)}, "-1 draft tokens"),
    ({"orders": DraftOrder(7, 1, TokenTree((1, 2), (-1, 5)))}, "names parent 5"),
    ({"orders": DraftOrder(7, 1, TokenTree.chain(1, [100]))}, "token 100"),
    ({"orders": DraftOrder(7, 1, TokenTree.chain(1, [2] * 257))}, "more than 256 draft tokens"),
    ({"exports": FeatureExport(1, 1, 4, "float32", ((7, 0, 1),))}, "no hidden states"),
]


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_costs_that_are_none_are_refused(seconds):
    tenant = link(replace(DraftBatch(1), costs=MeasuredCosts(round_s=seconds)))
    with pytest.raises(ValueError, match="costs"):
        tenant.receive(0)


@pytest.mark.parametrize(("parts", "why"), BAD)
def test_a_record_that_the_lease_does_not_allow_ends_it(parts, why):
    tenant = link(batch(admits=ADMIT), batch(**parts))
    received(tenant)
    with pytest.raises(ValueError, match=why):
        tenant.receive(0)


def test_a_far_drafter_may_work_further_ahead_of_what_is_verified():
    tree = TokenTree.root(3)
    orders = [DraftOrder(7, FAR_REACH, tree), DraftOrder(7, FAR_REACH + 1, tree), DraftOrder(7, 7)]
    for streams, allowed in ((True, [True, False, False]), (False, [False] * 3)):
        lease = replace(ORDER, terms=replace(ORDER.terms, streams=streams))
        found = []
        for order in orders:
            line = Line(batch(admits=ADMIT), batch(orders=order))
            tenant = TenantLink(line, lease, 1, itertools.count(), lambda: None)  # pyright: ignore
            received(tenant)
            try:
                found.append(received(tenant).orders[0].num_draft_tokens == order.num_draft_tokens)
            except ValueError:
                found.append(False)
        assert found == allowed


def test_a_lease_holds_so_many_requests_and_tokens(monkeypatch):
    monkeypatch.setattr(tenant_link, "MOST_REQUESTS", 2)
    monkeypatch.setattr(tenant_link, "MOST_TOKENS", 7)
    admits = [replace(ADMIT, request_id=number) for number in range(3)]
    tenant = link(*(batch(admits=admit) for admit in admits))
    received(tenant)
    received(tenant)
    with pytest.raises(ValueError, match="at most 2 requests"):
        tenant.receive(0)
    tenant = link(batch(admits=admits[0]), batch(admits=admits[1]), batch(commits=Commit(0, 1, 3, (), (4, 5))))
    received(tenant)
    received(tenant)
    with pytest.raises(ValueError, match="at most 7 tokens"):
        tenant.receive(0)


def test_references_and_sources_are_texts_of_a_lease_too(monkeypatch):
    monkeypatch.setattr(tenant_link, "MOST_TOKENS", 9)
    admit = replace(ADMIT, reference=(1, 2), source=(1, 2, 3))
    tenant = link(
        batch(admits=admit), batch(releases=7), batch(admits=admit), batch(admits=replace(ADMIT, request_id=8))
    )
    for _ in range(3):
        received(tenant)
    with pytest.raises(ValueError, match="at most 9 tokens"):
        tenant.receive(0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hub_address": "ipc:///tmp/x"}, "hub_address"),
        ({"hub_address": "tcp://h:1\n"}, "hub_address"),
        ({"hub": b"short"}, "hub, private"),
        ({"private": b""}, "hub, private"),
        ({"number": 0}, "number"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"max_model_len": 2**40}, "max_model_len"),
        ({"num_draft_tokens": 257}, "num_draft_tokens"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused(changes, why):
    ORDER.check()
    with pytest.raises(ValueError, match=why):
        replace(ORDER, **changes).check()
