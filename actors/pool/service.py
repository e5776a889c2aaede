"""A draft pool: one drafter for the targets of several engines, each of which holds a lease on it.

Engines connect with the pool's key, as clients, and order their leases about once a second. A lease ends when its
engine does, when neither the engine nor its coordinator was heard for `lease_s`, or when the engine orders another; its
KV rows are free then. After a lease that ended with an error the engine gets no other for `lease_s`. A pool that dies
is to every engine a lost draft role.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count

from actors.pool.merged_passes import MergeCounts
from actors.pool.tenant import Tenant
from actors.pool.tenant_drafter import LeaseCounts, SharedDrafter
from actors.protocol.leases import LeaseAnswer, LeaseOrder, LeaseQuery, LeaseTerms
from actors.transport.channel import Hub
from actors.transport.keys import CLIENTS, peer_of, public_half
from actors.worker.spec import RankSpec

_POLL_S = 0.25
_READ_S = 1.0
"""Seconds after which the clients are read again."""
WATCH_S = 2.0
"""Seconds between two snapshots."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What a pool lends: so many leases at a time, so many of them to engines with one key, each for `lease_s` seconds
    after the last sign of life, and orders of at most `num_draft_tokens`."""

    max_leases: int
    leases_per_key: int
    lease_s: float
    num_draft_tokens: int


@dataclass(frozen=True, slots=True)
class LeaseState:
    """A lease that runs, or that has just ended (`why`, one line). `client` is the name of its engine's key, `num_rows`
    its KV rows of texts."""

    number: int
    client: str
    engine: str
    seconds: float
    num_rows: int
    counts: LeaseCounts
    why: str = ""


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """What the watch of a pool receives. `share` are the KV slots of each lease, if the drafter has rows, `draft_s` the
    seconds from an order to its drafts, `num_refused` the records of engines that were refused; `pass_s` and `host_s`
    are those of `PoolTime`."""

    leases: tuple[LeaseState, ...]
    merged: MergeCounts
    share: int | None
    draft_s: float
    num_begun: int
    num_refused_leases: int
    num_refused: int
    pass_s: float = 0.0
    host_s: float = 0.0


class PoolService:
    """Serves `hub`, whose clients are engines. `spec` is the pool's own rank. `clients` returns those that are
    admitted, their public keys by name, or None, which changes nothing; leases of a key that is gone end.
    `watch` receives a snapshot every `WATCH_S` seconds and at the end."""

    def __init__(
        self,
        hub: Hub,
        spec: RankSpec,
        terms: LeaseTerms,
        limits: PoolLimits,
        shared: SharedDrafter,
        clients: Callable[[], Mapping[str, bytes] | None],
        observe: Callable[[str], None] = lambda _: None,
        watch: Callable[[PoolSnapshot], None] = lambda _: None,
    ) -> None:
        self._hub = hub
        self._spec = spec
        self._terms = terms
        self._limits = limits
        self._shared = shared
        self._read_clients = clients
        self._clients: Mapping[str, bytes] = {}
        self._clients_read_at = -math.inf
        self._observe = observe
        self._watch = watch
        self._watched_at = time.monotonic()
        self._tenants: dict[bytes, Tenant] = {}  # by the public key of the engine's draft rank
        self._num_begun = self._num_refused_leases = 0
        self._request_numbers = count()

    def serve(self, cancelled: Callable[[], bool]) -> None:
        """Serves leases until `cancelled()`, which is called a few times a second."""
        try:
            while not cancelled():
                with self._hub.turn():
                    self._admit_clients()
                received = self._hub.receive(timeout_s=_POLL_S)
                with self._hub.turn():
                    if received is not None:
                        self._take(*received)
                    self._end_old_leases()
                if time.monotonic() - self._watched_at >= WATCH_S:
                    self._publish()
        finally:
            for tenant in self._tenants.values():
                tenant.end("the pool ends")
            for tenant in self._tenants.values():
                tenant.wait()
            self._publish()

    def _publish(self) -> None:
        now = self._watched_at = time.monotonic()
        leases = [
            LeaseState(
                tenant.number,
                tenant.client,
                tenant.order.hub_address,
                now - tenant.began_at,
                tenant.num_rows,
                replace(tenant.counts),
                tenant.why,
            )
            for tenant in self._tenants.values()
        ]
        shared = self._shared
        state = shared.passes.counts, shared.share, shared.draft_s.mean
        counts = self._num_begun, self._num_refused_leases, self._hub.num_unreadable
        self._watch(PoolSnapshot(tuple(leases), *state, *counts, *shared.passes.time.spent()))

    @property
    def num_leases(self) -> int:
        return sum(tenant.is_running for tenant in self._tenants.values())

    def _admit_clients(self) -> None:
        """Admit those that their file names now; what it says badly changes nothing."""
        now = time.monotonic()
        if now - self._clients_read_at < _READ_S:
            return
        self._clients_read_at = now
        if (clients := self._read_clients()) is None:
            return
        before, self._clients = self._clients, clients
        self._hub.admit_clients({public: CLIENTS + name for name, public in self._clients.items()})
        gone = {name for name, public in before.items() if self._clients.get(name) != public}
        for tenant in self._tenants.values():
            if tenant.client in gone and tenant.is_running:
                tenant.end(f"the key {tenant.client} was taken away")

    def _take(self, link: str, record: object) -> None:
        client = peer_of(link).removeprefix(CLIENTS)
        if isinstance(record, LeaseQuery):
            self._hub.send([link], self._offer(record, client))
            return
        try:
            if not isinstance(record, LeaseOrder):
                raise ValueError(f"an engine may not send {type(record).__name__}")
            record.check()
        except ValueError as error:
            self._hub.refuse(link, error)
            return
        self._hub.send([link], self._answer(record, client))

    def _offer(self, query: LeaseQuery, client: str) -> LeaseAnswer:
        """What a lease would be answered; none begins."""
        misfit = self._terms.misfit(query.terms) or self._beyond_limits(query)
        why = misfit or self._why_full(client) or ""
        return replace(self._granted(0), why=why, is_final=misfit is not None)

    def _answer(self, order: LeaseOrder, client: str) -> LeaseAnswer:
        # The private key of an engine's rank identifies the engine: without it no lease can be ended.
        engine = public_half(order.private)
        tenant = self._tenants.get(engine)
        if tenant is not None and tenant.order.number == order.number:
            if not tenant.is_running:
                return self._refusal(order, tenant.why)
            tenant.heard()
            return self._granted(order.number)
        if (misfit := self._terms.misfit(order.terms) or self._beyond_limits(order)) is not None:
            return self._refusal(order, misfit, is_final=True)
        if (why := self._why_not_now(tenant, order, client)) is not None:
            return self._refusal(order, why)
        if tenant is not None:
            tenant.end("its engine ordered another")
        self._num_begun += 1
        known = self._num_begun, self._spec, self._shared, self._request_numbers
        self._tenants[engine] = Tenant(order, client, *known, before=tenant)
        self._observe(f"{self.num_leases} of {self._limits.max_leases} leases")
        return self._granted(order.number)

    def _why_not_now(self, tenant: Tenant | None, order: LeaseOrder, client: str) -> str | None:
        """Why the engine, whose last lease is `tenant`, gets no other at present, or None."""
        lease_s = self._limits.lease_s
        if tenant is not None and tenant.order.number > order.number:
            return f"lease {tenant.order.number} has replaced it"
        if order.is_renewal:
            return f"it knows nothing of lease {order.number}, as one that was started since"
        if tenant is not None and not tenant.has_begun:
            return "the lease before its last one has not ended yet"
        if tenant is not None and tenant.has_failed and time.monotonic() - tenant.heard_at < lease_s:
            return f"its last lease failed ({tenant.why}); another after {lease_s:g} s"
        return self._why_full(client, tenant)

    def _why_full(self, client: str, replaced: Tenant | None = None) -> str | None:
        """Why there is no lease more for engines with this key, beside the one that is `replaced`, or None."""
        taken = [one.client for one in self._tenants.values() if one.is_running and one is not replaced]
        most, per_key = self._limits.max_leases, self._limits.leases_per_key
        if len(taken) >= most:
            return f"all {most} leases are taken (job.max_leases)"
        if taken.count(client) >= per_key:
            return f"all {per_key} leases of the key {client} are taken (job.leases_per_key)"
        return None

    def _beyond_limits(self, order: LeaseOrder | LeaseQuery) -> str | None:
        most = self._limits.num_draft_tokens
        if order.num_draft_tokens > most:
            return f"drafter.num_draft_tokens={order.num_draft_tokens}: the pool drafts {most} at most; lower it"
        return None

    def _granted(self, number: int) -> LeaseAnswer:
        name, draft_s = self._spec.drafter.name, self._shared.draft_s.mean
        lease_s = self._limits.lease_s
        return LeaseAnswer(number, lease_s, drafter=name, num_leases=self.num_leases, draft_s=draft_s)

    def _refusal(self, order: LeaseOrder, why: str, *, is_final: bool = False) -> LeaseAnswer:
        self._num_refused_leases += 1
        return LeaseAnswer(order.number, why=why, is_final=is_final, num_leases=self.num_leases)

    def _end_old_leases(self) -> None:
        now = time.monotonic()
        for engine, tenant in [*self._tenants.items()]:
            silent_s = now - tenant.heard_at
            if tenant.is_running and silent_s > self._limits.lease_s:
                tenant.end(f"its engine was silent for {silent_s:.0f} s")
            if not tenant.is_running and silent_s > 2 * self._limits.lease_s:
                del self._tenants[engine]  # until then a renewal learns why it ended
                self._observe(f"{self.num_leases} of {self._limits.max_leases} leases")
