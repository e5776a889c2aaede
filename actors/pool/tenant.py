"""One lease of a pool: a draft rank of the coordinator that ordered it, in a thread of the pool.

To the coordinator it is a rank like any other (`actors/worker/draft_rank_loop.py`): it sends heartbeats, joins epochs,
and a pool that dies or freezes is a lost role. It ends with the engine, with the lease, or with a record that the lease
does not allow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

from actors.logs import log_event, logger_of
from actors.pool.tenant_drafter import LeaseCounts, SharedDrafter, TenantDrafter
from actors.pool.tenant_link import TenantLink
from actors.protocol.leases import LeaseOrder
from actors.protocol.membership import Death, Join, identity_of
from actors.roles.draft import DraftRole
from actors.topology import seat_role
from actors.transport.channel import heart_of, link_name, open_link
from actors.transport.keys import LinkKey
from actors.worker.draft_rank_loop import DraftRankLoop
from actors.worker.heartbeat import Heartbeat
from actors.worker.spec import RankSpec
from parallel.comm.group import SINGLE, Group


@dataclass(eq=False)
class Tenant:
    """Runs from construction until `end`, or until it ends by itself. `client` is the name of its engine's key, `spec`
    that of the pool's own rank. It begins once `before`, the engine's last lease, has given its rows back."""

    order: LeaseOrder
    client: str
    number: int
    spec: RankSpec
    shared: SharedDrafter
    numbers: Iterator[int]
    before: Tenant | None = None
    now: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.why = ""
        """Why it ended, one line; empty while it runs."""
        self.has_failed = False
        """Whether it ended with an error of a pass or of a record."""
        self.counts = LeaseCounts()
        self.began_at = self.heard_at = self.now()
        """When its engine or coordinator was last heard."""
        self._drafter: TenantDrafter | None = None
        self._ends = threading.Event()
        name = f"lease-{self.number}"
        self._logger = logger_of(self.spec.identity)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def heard(self) -> None:
        self.heard_at = self.now()

    def end(self, why: str) -> None:
        """It has ended, and gives its rows back as soon as the pass that runs is over; `wait` waits for that."""
        self.why = self.why or why
        self._ends.set()

    def wait(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        if self.before is not None:
            self.before.wait()
            self.before = None
        order = self.order
        role = seat_role(order.seat)
        identity = identity_of(role, 0)
        key = LinkKey(identity, order.hub, order.private)
        spec = replace(
            self.spec, role=role, rank=0, size=1, hub_address=order.hub_address, incarnation=order.number, key=key
        )
        drafter = self._drafter = self.shared.join(self.counts, streams=order.terms.streams)
        log_event(self._logger, "lease-begins", lease=self.number, engine=order.hub_address)
        try:
            name = link_name(identity, order.number)
            time_of = self.shared.passes.time
            known = order, self.number, self.numbers, self.heard, time_of.resting
            link = TenantLink(open_link(order.hub_address, name, key), *known)

            def build(spec: RankSpec, _group: Group) -> tuple[DraftRole, dict[str, object]]:
                facts: dict[str, object] = {"drafter": spec.drafter.name, "device": spec.device, "lease": self.number}
                return DraftRole(drafter, adapts=spec.adaptive), facts

            loop = DraftRankLoop(spec, link, _alone, build, lambda _: None, self._ends.is_set)
            heart = open_link(order.hub_address, heart_of(name), key, keeps="newest")
            heartbeat = Heartbeat(heart, loop.heartbeat, loop.interrupt)
            try:
                with time_of.serving():
                    loop.serve()
                self.why = self.why or "its engine has ended"
            finally:
                heartbeat.stop()
                self.counts.num_refused_records = link.num_refused
                link.close()
        except Exception as error:
            self.has_failed = True
            self.why = Death.by(identity, error).text
            self._logger.exception("lease-failed", extra={"facts": {"lease": self.number}})
        finally:
            self.shared.leave(drafter)
            log_event(self._logger, "lease-ended", lease=self.number, why=self.why, **asdict(self.counts))

    @property
    def num_rows(self) -> int:
        """KV rows of the texts of its requests. From any thread."""
        return 0 if self._drafter is None else self._drafter.num_rows

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive() and not self._ends.is_set()

    @property
    def has_begun(self) -> bool:
        return self.before is None


def _alone(_spec: RankSpec, _order: Join) -> Group:
    return SINGLE
