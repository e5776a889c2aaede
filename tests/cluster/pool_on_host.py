"""What a test runs on one of its hosts: a draft pool that also remembers what it sent; answers in JSON.

Arguments are the run directory and overrides. The first line on stdout is the pool's address. Each line on stdin is
answered: `leases` with the number, the engine, the KV rows and the end of each; `plant ADDRESS` sends the coordinator
there, under the name of each earlier lease, a heartbeat and what that lease had drafted, for rounds gone and to come,
and answers how many records. It is a script and no test: it must run where the pool is.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import actors.pool.tenant
from actors.pool.tenant_link import TenantLink
from actors.protocol.leases import LeaseOrder
from actors.protocol.membership import Alive, identity_of
from actors.protocol.messages import ProposalBatch
from actors.topology import TOP
from actors.transport.channel import Link, link_name
from actors.transport.keys import LinkKey
from cluster.config.compose import load_config
from cluster.draft_pool import DraftPool

SENT: list[tuple[LeaseOrder, ProposalBatch]] = []
LATEST, ROUNDS = 10, 100
"""Batches of a lease that are planted, and rounds around the present one for which each is."""


class RememberingLink(TenantLink):
    def send(self, record: Any) -> None:
        if isinstance(record, ProposalBatch):
            SENT.append((self._lease, replace(record, proposals=self._named(record.proposals))))
        super().send(record)


def leases(pool: DraftPool) -> list[list[object]]:
    tenants = pool._service._tenants.values()
    return [[one.order.number, one.order.hub_address, one.num_rows, one.why] for one in tenants]


def plant(hub_address: str) -> int:
    """Records of all leases of this engine but its last one."""
    sent = [(order, batch) for order, batch in SENT if order.hub_address == hub_address]
    (last, latest), num_planted = sent[-1], 0
    for number in sorted({order.number for order, _ in sent if order.number < last.number}):
        identity = identity_of(TOP, 0)
        key = LinkKey(identity, last.hub, last.private)
        link = Link(hub_address, link_name(identity, number), key)
        link.send(Alive(TOP, 0, number, 1, epoch=latest.round, waiting=True))
        for batch in [batch for order, batch in sent if order.number == number and batch.proposals][-LATEST:]:
            for round_ in range(latest.round - ROUNDS, latest.round + ROUNDS):
                link.send(replace(batch, round=round_))
                num_planted += 1
        time.sleep(1)
        link.close()
    return num_planted


def main() -> None:
    run_dir, *overrides = sys.argv[1:]
    Path(run_dir).mkdir()
    actors.pool.tenant.TenantLink = RememberingLink
    cancelled = threading.Event()
    with DraftPool(load_config(overrides), Path(run_dir)) as pool:
        serving = threading.Thread(target=pool.serve, args=(cancelled.is_set,), daemon=True)
        serving.start()
        say(pool.address)
        for line in sys.stdin:
            words = line.split()
            say(plant(words[1]) if words[0] == "plant" else leases(pool))
        cancelled.set()
        serving.join()


def say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
