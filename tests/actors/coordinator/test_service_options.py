"""What the engine's options and the target's facts become: each reaches the part of the coordinator that it is for."""

from __future__ import annotations

import time
from typing import Any

import pytest

from actors.coordinator import service
from actors.coordinator.clients import CLIENT
from actors.coordinator.scheduler import Capacity
from actors.coordinator.separate_port import SeparatePort
from actors.coordinator.service import EPOCHS_PER_INCARNATION, ROUNDS_AT_ONCE, ROUNDS_PER_INCARNATION
from actors.coordinator.spec import CoordinatorSpec
from actors.options import SchedulerConfig
from actors.protocol.membership import Hello
from actors.protocol.messages import Request
from tests.actors.service_harness import FACTS


@pytest.fixture
def calls(monkeypatch):
    """Arguments of what the service makes, by name; it is made all the same."""
    found = {}

    def keep(name, make):
        def kept(*arguments, **options):
            found[name] = arguments, options
            return make(*arguments, **options)

        monkeypatch.setattr(service, name, kept)

    for name in ("make_policy", "Coordinator", "Scheduler", "open_port"):
        keep(name, getattr(service, name))
    return found


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("chooses", [False, True])
def test_every_option_reaches_its_part(open_stage, calls, adaptive, chooses):
    began = time.monotonic()
    limits = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=31)
    kind = dict(adaptive=adaptive, chooses_lengths=chooses, scores_drafts=adaptive, runs_passes=chooses)
    stage = open_stage(limits=limits, min_draft_tokens=2, **kind)
    stage.get_ready()
    drafter = dict(longest_only=chooses, waits=True, scores=adaptive, runs_passes=chooses, rounds_at_once=1)
    assert calls["make_policy"] == (("sync", 2, 4), dict(adaptive=adaptive) | drafter)
    assert calls["Scheduler"] == ((limits, Capacity(FACTS["kv_slots"], FACTS["max_model_len"])), {})
    (scheduler, policy, ends, port), options = calls["Coordinator"]
    assert scheduler.limits is limits and policy.longest_draft == 4 and ends == (1,)
    assert began <= options.pop("now") <= time.monotonic() and options == {"weights": None}
    kind = dict(drafts=True, attached=False, bridged=False, num_seats=1, first_round=0, local_drafter="none")
    assert calls["open_port"] == ((policy, limits.prefill_chunk), kind) and type(port) is SeparatePort


def test_a_successor_counts_on_where_its_predecessors_cannot_have_come(open_stage, calls):
    stage = open_stage(draft_ranks=0, incarnation=3, attached=True)
    epoch = stage.join("target-0")
    stage.send(CLIENT, Hello())
    assert stage.receive(CLIENT).facts == FACTS and epoch == 3 * EPOCHS_PER_INCARNATION + 1
    options = calls["open_port"][1]
    assert (options["drafts"], options["attached"]) == (False, True)
    assert calls["make_policy"][1]["rounds_at_once"] == ROUNDS_AT_ONCE, "nothing else is hidden behind a pass"
    assert options["first_round"] == 3 * ROUNDS_PER_INCARNATION


def test_a_request_for_a_drafter_that_is_not_there_is_refused_with_the_names(open_stage):
    stage = open_stage(drafters=("ngram",))
    stage.get_ready()
    stage.send(CLIENT, Request(1, (3,), drafter="medusa" * 50))
    outputs: Any = stage.receive(CLIENT)
    (answer,) = outputs.tokens
    assert answer.error.startswith("drafter: this engine has no 'medusa") and len(answer.error) < 120
    assert answer.error.endswith("; name one of ngram, none, or leave it out")
    stage.send(CLIENT, Request(2, (3,), drafter="ngram"))
    batch: Any = stage.receive("target-0")
    assert [admit.drafter for admit in batch.admits] == ["ngram"]


def test_roles_have_as_many_ranks_as_were_asked_for():
    spec = CoordinatorSpec("sync", 4, 2, 3, (1,), level_ranks=(4, 5))
    assert spec.sizes == {"target": 2, "draft": 3, "draft2": 4, "draft3": 5}
    assert CoordinatorSpec("plain", 4, 2, 0, (1,)).sizes == {"target": 2}
