"""What a rank says of itself: its lines and levels, its state for those who watch it, and what its heartbeat holds."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from actors.logs import logger_of
from actors.options import TargetConfig
from actors.protocol.membership import Bridge, Join, Recall
from actors.protocol.messages import DraftBatch, FeatureExport, ProposalBatch, VerifyBatch
from actors.roles.bridge import FeatureReceiver, FeatureSender
from actors.roles.draft import DraftRole
from actors.worker import factory
from actors.worker.draft_rank_loop import DraftRankLoop
from actors.worker.rank_loop import RankLoop
from parallel.comm.group import SINGLE, NcclGroup
from tests.actors.worker.test_rank_loop import FACTS, LoggedGroup, Nccl, Role, Script


class Lines(logging.Handler):
    """(level, event, facts) of every line."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str, dict[str, Any]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        facts = dict(record.__dict__["facts"])
        self.found.append((record.levelname, facts.pop("event", record.msg), facts))


@pytest.fixture
def lines():
    loggers, handler = [logger_of(name) for name in ("target-0", "draft-0")], Lines()
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    yield handler
    for logger, level in zip(loggers, levels, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)


def spec_of(role):
    return SimpleNamespace(role=role, rank=0, incarnation=3, identity=f"{role}-0", device="cpu")


def test_every_change_of_an_epoch_is_a_line_and_a_state(lines):
    log, states = [], []
    records = [Join(1, 4), VerifyBatch(5, after=4), VerifyBatch(8, after=7)]
    records += [Join(2, 8), VerifyBatch(9, after=8, items=("loses its peer",))]
    loop = RankLoop(
        *(spec_of("target"), Script(records, log), lambda _, join: LoggedGroup(log, join.epoch)),
        *(lambda *_: (Role(log, lambda: loop.status), FACTS), states.append, lambda: False),
    )
    loop.serve()
    assert lines.found == [
        ("INFO", "ready", {"epoch": 1, **FACTS}),
        ("WARNING", "missed", {"round": 7, "last_round": 5}),
        ("INFO", "ready", {"epoch": 2, **FACTS}),
        ("WARNING", "peer-lost", {"epoch": 2, "why": "a peer is gone"}),
    ]
    waits = "waiting for its role"
    assert states == [waits, "epoch 1", "round 5", waits, "epoch 2", waits]
    assert (loop.status.epoch, loop.status.round, loop.status.busy, loop.status.waiting) == (2, 9, False, True)


def test_a_process_that_ends_with_its_epoch_says_why(lines):
    loop: Any = RankLoop(spec_of("target"), *[None] * 5, end_process=lambda: None)
    loop._group = NcclGroup(Nccl(), SimpleNamespace())
    loop.status = loop.status.__class__("target", 0, 3, 7, epoch=1, waiting=False)
    loop.interrupt(Recall(2))
    ((level, event, facts),) = lines.found
    assert (level, event, facts["epoch"]) == ("WARNING", "ends", 1) and "symmetric" in facts["why"]


class End:
    """An end of a bridge, without a thread."""

    number = 6

    def __init__(self):
        self.log, self.group = [], None

    def form(self, order):
        self.log.append(order)

    def close(self):
        self.log.append("closed")


def test_the_end_of_a_bridge_is_of_the_epoch_and_in_the_heartbeat():
    end, log = End(), []
    order = Bridge(6, ("127.0.0.1", 1))
    link, groups = Script([Join(1, 0), order], log), []
    loop: Any = RankLoop(
        *(spec_of("target"), link, lambda _, join: groups.append(LoggedGroup(log, join.epoch)) or groups[-1]),
        *(lambda *_: (Role(log, lambda: loop.status), FACTS), lambda _: None, lambda: False, end),
    )
    assert loop.heartbeat().bridge == 6
    loop.serve()
    assert end.log == [order, "closed"] and end.group is groups[0]


class Parts(DraftRole):
    """Answers in two parts."""

    wants_work = False

    def __init__(self):
        self.is_closed = False

    def answer(self, batch, features=()):
        for missing in (1, 0):
            yield ProposalBatch(batch.round, (), 0.0, 0.0, missing)

    def forget(self):
        pass

    def close(self):
        self.is_closed = True


def test_the_receipt_of_tensors_is_reported_with_the_first_part():
    bridge, log, role = FeatureReceiver("127.0.0.1", "cpu", logging.getLogger("test")), [], Parts()
    bridge.receive = lambda exports: []
    exports = (FeatureExport(1, 1, 5, "float32", ()),)
    records = [Join(1, 0), DraftBatch(1, after=0), DraftBatch(2, after=1, exports=exports)]
    loop = DraftRankLoop(
        *(spec_of("draft"), Script(records, log), lambda _, join: LoggedGroup(log, join.epoch)),
        *(lambda *_: (role, FACTS), lambda _: None, lambda: False, bridge),
    )
    loop.serve()
    sent = [entry[1] for entry in log if entry[0] == "sent"]
    assert [(one.round, one.num_missing, one.imported is None) for one in sent] == [
        *((1, 1, True), (1, 0, True)),
        *((2, 1, False), (2, 0, True)),
    ]
    started, finished = sent[2].imported
    assert started <= finished and role.is_closed


@pytest.mark.parametrize(
    ("role", "rank", "bridged", "end"),
    [
        ("target", 0, True, FeatureSender),
        ("target", 1, True, None),
        ("draft", 0, True, FeatureReceiver),
        ("draft", 1, True, FeatureReceiver),
        ("target", 0, False, None),
        ("draft", 0, False, None),
    ],
)
def test_the_lead_of_the_target_and_all_draft_ranks_have_an_end_of_the_bridge(role, rank, bridged, end):
    drafter = SimpleNamespace(is_bridged=lambda pipeline: bridged and pipeline == "pearl")
    spec: Any = SimpleNamespace(role=role, rank=rank, pipeline="pearl", drafter=drafter, host="h", device="cpu")
    found = factory._bridge_end(spec, logging.getLogger("test"))
    assert (found if end is None else type(found)) is end


@pytest.mark.parametrize(
    ("role", "all_reduce", "symmetric"),
    [("target", "symmetric", True), ("target", "nccl", False), ("draft", "symmetric", False)],
)
@pytest.mark.parametrize(("device", "meeting_s"), [("cpu", factory.MEETING_S), ("cuda:1", factory.NCCL_MEETING_S)])
def test_a_group_is_joined_at_the_store_of_its_order(monkeypatch, role, all_reduce, symmetric, device, meeting_s):
    calls, there = [], "parallel.comm.rendezvous"
    monkeypatch.setattr(f"{there}.connect_store", lambda *place, timeout_s: calls.append((place, timeout_s)) or "store")
    monkeypatch.setattr(f"{there}.join", lambda *place, **options: (place, options))
    spec: Any = SimpleNamespace(
        role=role, rank=1, size=2, device=device, host="h", target=TargetConfig(all_reduce=all_reduce)
    )
    alone: Any = SimpleNamespace(size=1)
    found: Any = factory._join_group(spec, Join(5, 0, ("there", 9)))
    (store, *place, device_), options = found
    assert (store, place, str(device_)) == ("store", [role, 5, 1, 2], device)
    assert options == {"host": "h", "meeting_s": meeting_s, "symmetric": symmetric}
    assert calls == [(("there", 9), factory.MEETING_S / 2)], "it tries twice within the limit"
    assert factory._join_group(alone, Join(5, 0)) is SINGLE
