"""Requests come, are preempted and aborted, and the target is lost, at random: no draft row is left behind."""

from __future__ import annotations

import itertools
import random
from collections import deque
from typing import Any

import pytest

from actors.coordinator.attached_port import AttachedPort
from actors.coordinator.scheduler import Capacity, Scheduler
from actors.coordinator.state_machine import Coordinator
from actors.drafters.model.config import Strategy
from actors.drafters.self_speculation.config import SelfDrafterConfig
from actors.options import SchedulerConfig
from actors.policy.policy import Policy
from actors.protocol.membership import RoleBack, RoleLost
from actors.protocol.messages import Abort, VerifyBatch
from tests import matrices

SLOTS = 130
LIMITS = SchedulerConfig(4, 40, 16, prefix_cache=False)  # which keeps rows by design
TREE: dict[str, Any] = dict(strategy=Strategy.best_first, num_draft_tokens=9, depth=4, width=3)
WAYS = {
    "exit": SelfDrafterConfig(exit=1),
    "exit-tree": SelfDrafterConfig(exit=1, **TREE),
    "skip-tree": SelfDrafterConfig(skip=["1m"], **TREE),
}


@pytest.mark.extended
@pytest.mark.parametrize("way", ["exit", pytest.param("exit-tree", marks=pytest.mark.slow), "skip-tree"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_no_row_is_left_behind(open_room, make_requests, way, seed):
    choose, clock = random.Random(seed), itertools.count()
    count, max_tokens = (14, 30) if matrices.is_whole else (10, 24)
    requests = make_requests(count, max_tokens=max_tokens, temperature=1.0)
    plain = open_room(pipeline="plain").serve(requests)
    room = open_room(WAYS[way], limits=LIMITS, slots=SLOTS, attached=True)
    pool, num_draft_tokens = room.target.runner.pool, WAYS[way].num_draft_tokens
    scheduler, policy = Scheduler(LIMITS, Capacity(SLOTS, 256)), Policy("sync", num_draft_tokens)
    coordinator = Coordinator(scheduler, policy, [1], AttachedPort(policy, 0))
    coming, batches, tokens = deque(requests), deque(), {request.request_id: [] for request in requests}
    aborted, done, num_lost = set(), set(), 0

    def receive(records):
        for record in records:
            if isinstance(record, VerifyBatch):
                batches.append(record)
            else:
                tokens[record.request_id] += record.token_ids
                if record.finish_reason:
                    done.add(record.request_id)

    while len(done | aborted) < len(requests):
        action = choose.random()
        if coming and action < 0.2:
            receive(coordinator.on(coming.popleft(), next(clock)))
        elif action < 0.24 and (alive := sorted(tokens.keys() - done - aborted - {one.request_id for one in coming})):
            victim = choose.choice(alive)
            aborted.add(victim)
            receive(coordinator.on(Abort(victim), next(clock)))
        elif action < 0.27:
            batches.clear()
            room.target.forget()
            assert pool.num_free == SLOTS
            pool.check()
            receive(coordinator.on(RoleLost("target"), next(clock)))
            num_lost += 1
            receive(coordinator.on(RoleBack("target", num_lost), next(clock)))
        elif batches:
            for answer in room.target.answer(batches.popleft()):
                pool.check()
                receive(coordinator.on(answer, next(clock)))
    room.target._drafter.role.drafter.capabilities.shares_rows.release_rows()
    num_kept = sum(len(pool.slots(request_id)) for request_id in room.target.contexts)
    assert pool.num_free + num_kept == SLOTS, "rows of drafts are left"
    room.target.forget()
    assert pool.num_free == SLOTS
    pool.check()
    assert coordinator.stats.num_preemptions > 0 and coordinator.stats.num_accepted_tokens > 0 and num_lost > 0
    for request in done - aborted:
        assert tokens[request] == plain.tokens[request]
