"""The loop of a rank on random orders of records, old ones and gaps among them, against a list of what it must do."""

from __future__ import annotations

import logging
import random
import threading
import time
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from actors.coordinator.membership import RECALL_LIMIT_S
from actors.protocol.membership import Alive, Bridge, Join, PassFailed, Ready, Recall, Stop
from actors.protocol.messages import DraftBatch, FeatureExport, ProposalBatch, VerifyBatch
from actors.roles import bridge as bridge_module
from actors.roles.bridge import FeatureReceiver, FeatureSender
from actors.roles.draft import DraftRole
from actors.worker import factory
from actors.worker.draft_rank_loop import DraftRankLoop
from actors.worker.heartbeat import Heartbeat
from actors.worker.rank_loop import CHECK_S, RankLoop
from parallel.comm.group import SINGLE, Group, NcclGroup, PeerLost

WAIT_S = 20.0
FACTS = {"vocab_size": 9}


class Script:
    """A link whose records are given; None is a time in which none arrives. After the last one comes `Stop`."""

    def __init__(self, records, log) -> None:
        self._records, self.log = list(records), log

    def send(self, record) -> None:
        match record:
            case Ready():
                assert record.facts == FACTS and record.incarnation == 3
                self.log.append(("ready", record.rank, record.epoch))
            case Alive():
                state = record.incarnation, record.epoch, record.waiting, record.round, record.busy
                assert record.off_schedule
                self.log.append(("alive", *state))
            case _:
                self.log.append(("sent", record))

    def receive(self, timeout_s):
        self.log.append(("received", timeout_s)) if timeout_s != CHECK_S else None
        return self._records.pop(0) if self._records else Stop()


class Role:
    """A target: answers twice, with what its loop says of itself meanwhile."""

    def __init__(self, log, status) -> None:
        self.log, self.status = log, status

    def answer(self, batch):
        assert self.status().busy and self.status().round == batch.round
        if batch.items == ("loses its peer",):
            raise PeerLost("a peer is gone")
        if batch.items == ("raises",):
            raise RuntimeError("out of memory\nof a device")
        yield from ((batch.round, part) for part in range(2))

    def forget(self) -> None:
        self.log.append("forgot")

    def rejoin(self, weights) -> None:
        self.log.append("rejoined")


class LoggedGroup(Group):
    rank, size, is_abortable = 0, 2, True

    def __init__(self, log, epoch) -> None:
        self.log, self.epoch = log, epoch

    def adopt(self, other) -> None:
        self.epoch = other.epoch

    def close(self) -> None:
        self.log.append(("left", self.epoch))

    def check(self) -> None:
        pass

    def broadcast(self, tensor, src=0):
        self.log.append(("broadcast", tensor.tolist()))
        return tensor


def run(records, *, rank=0, make_role=Role, cancelled=lambda: False):
    """What the loop did, and its status."""
    log = []
    role = "target" if make_role is Role else "draft"
    spec = SimpleNamespace(role=role, rank=rank, incarnation=3, identity=f"{role}-{rank}", device="cpu")

    def build(*_):
        log.append("built")
        return make_role(log, lambda: loop.status), FACTS

    link = Script(records, log)
    loop_type = RankLoop if make_role is Role else DraftRankLoop
    loop = loop_type(spec, link, lambda _, join: LoggedGroup(log, join.epoch), build, lambda _: None, cancelled)
    loop.serve()
    return log, loop.status


def expected_log(records, rank):
    """The rules, one record after the other."""
    log, epoch, last, inside, built = [("alive", 3, 0, True, 0, False)], 0, 0, False, False

    def leave():
        log.extend([("left", epoch), "forgot"])

    def wait():
        log.append(("alive", 3, epoch, True, last, False))

    for record in records:
        match record:
            case Join() if record.epoch > epoch:
                if inside:
                    leave()
                epoch, last, inside = record.epoch, record.round, True
                log.append("rejoined" if built else "built")
                built = True
                log.append(("ready", rank, epoch))
            case Join() if inside and record.epoch == epoch:
                log.append(("ready", rank, epoch))
            case Recall() if inside and record.epoch > epoch:
                leave()
                wait()
                inside = False
            case VerifyBatch() if inside and record.round > last:
                loses = record.items == ("loses its peer",)
                if record.after != last or loses:
                    last = record.round if record.after == last else last
                    leave()
                    wait()
                    inside = False
                else:
                    last = record.round
                    log.extend(("sent", (last, part)) for part in range(2) if rank == 0)
            case Stop():
                break
    if inside:
        leave()
    return log


def random_record(draw, likely_after):
    kind = draw.random()
    if kind < 0.15:
        return Join(draw.randrange(1, 5), draw.randrange(4))
    if kind < 0.25:
        return Recall(draw.randrange(1, 5))
    if kind < 0.35:
        return None
    after = likely_after if draw.random() < 0.8 else draw.randrange(8)
    return VerifyBatch(after + draw.randrange(3), after=after, items=("loses its peer",) * (draw.random() < 0.05))


@pytest.mark.parametrize("seed", range(60))
def test_records_are_obeyed_in_order_and_old_ones_change_nothing(seed):
    draw = random.Random(seed)
    records, after = [Join(1, draw.randrange(3))], 0
    after = records[0].round
    for _ in range(30):
        record = random_record(draw, after)
        records.append(record)
        if isinstance(record, VerifyBatch | Join):
            after = record.round
    if draw.random() < 0.2:
        records.insert(draw.randrange(len(records)), Stop())
    rank = draw.randrange(2)
    log, status = run(records, rank=rank)
    assert log == expected_log(records, rank)
    assert not status.busy


def test_a_rank_that_raises_reports_the_batch_and_ends():
    log: list[object] = []
    loop = None

    def build(*_):
        return Role(log, lambda: loop.status), FACTS

    spec = SimpleNamespace(role="target", rank=1, incarnation=3, identity="target-1", device="cpu")
    link = Script([Join(1, 0), VerifyBatch(1, after=0), VerifyBatch(4, after=1, items=("raises",))], log)
    loop = RankLoop(spec, link, lambda _, join: LoggedGroup(log, join.epoch), build, lambda _: None, lambda: False)
    with pytest.raises(RuntimeError):
        loop.serve()
    (report,) = [entry[1] for entry in log if entry[0] == "sent"]
    assert report == PassFailed("target", 1, 3, 4, "RuntimeError: out of memory")


def test_a_rank_that_was_cancelled_ends():
    for records in ([None], [Join(1, 0), None]):
        answers = iter([False] * len(records) + [True] * 9)
        log, _ = run([*records, Join(2, 0)], cancelled=lambda answers=answers: next(answers))
        assert ("ready", 0, 2) not in log


@pytest.mark.parametrize("kind", ["batches", "outdated"])
def test_a_rank_whose_records_never_cease_can_be_cancelled(kind):
    """A pool ends its leases so, whatever their engines send."""
    rounds = range(1, 100) if kind == "batches" else [1] * 99
    records = [Join(1, 0), *(VerifyBatch(round_, after=round_ - 1) for round_ in rounds)]
    answers = iter([False] * 10 + [True] * 9)
    _, status = run(records, cancelled=lambda: next(answers))
    assert status.round == (9 if kind == "batches" else 1)


class Drafter(DraftRole):
    """Wants two steps after each batch; `pauses` are the seconds before each step."""

    def __init__(self, log, status, pauses=(0.0, 0.25)) -> None:
        self.log, self.pauses, self.steps = log, pauses, 0

    @property
    def wants_work(self):
        return self.steps > 0

    def pause_s(self):
        return self.pauses[2 - self.steps]

    def width(self):
        return 7

    def num_passes(self):
        return 3

    def preview(self, *, last):
        return ("preview", last)

    def work(self, width, num_passes):
        self.log.append(("work", width, num_passes))
        self.steps -= 1

    def answer(self, batch):
        self.steps = 2
        return []

    def forget(self):
        self.steps = 0

    def rejoin(self, weights):
        pass

    def close(self):
        assert self.steps == 0, "a rank that ends drops its requests first"


def test_between_batches_all_ranks_take_the_steps_that_the_lead_takes():
    join, batch = Join(1, 0), DraftBatch(1, after=0)
    log, _ = run([join, batch, None, None], make_role=Drafter)
    steps = [
        *(("sent", ("preview", False)), ("received", 0.0), ("broadcast", [7, 3]), ("work", 7, 3)),
        *(
            ("sent", ("preview", True)),
            ("received", 0.25),
            ("broadcast", [7, 3]),
            ("work", 7, 3),
            ("sent", ("preview", True)),
        ),
    ]
    begin = log.index(("ready", 0, 1)) + 1
    assert log[begin : begin + len(steps)] == steps
    log, _ = run([join, batch, None, DraftBatch(2, after=1), None, None], make_role=Drafter)
    interrupted = [*steps[:6], ("broadcast", [-1, 1]), *steps]
    assert log[begin : begin + len(interrupted)] == interrupted, "a record that came ends the steps of all ranks"


def test_a_rank_without_peers_reads_no_number_back_from_its_device():
    class Alone(LoggedGroup):
        size = 1

        def broadcast(self, tensor, src=0):
            raise AssertionError("the host waits for the device")

    log = []
    spec = SimpleNamespace(role="draft", rank=0, incarnation=3, identity="draft-0", device="cpu")
    link, role = Script([Join(1, 0), DraftBatch(1, after=0), None, None], log), Drafter(log, None)
    loop = DraftRankLoop(spec, link, lambda *_: Alone(log, 1), lambda *_: (role, FACTS), lambda _: None, lambda: False)
    loop.serve()
    assert [entry for entry in log if entry[0] == "work"] == [("work", 7, 3)] * 2


class Stuck:
    """A target whose kernel waits for a dead peer until the group is aborted, and which then returns what it has."""

    def __init__(self, nccl, error) -> None:
        self.nccl, self.error, self.begun, self.forgotten = nccl, error, threading.Event(), 0

    def answer(self, batch):
        self.begun.set()
        assert self.nccl.ended.wait(WAIT_S), "nothing ended the kernel"
        if self.error is not None:
            raise self.error
        yield "rubbish"

    def forget(self) -> None:
        self.forgotten += 1

    def rejoin(self, weights) -> None:
        pass


class Nccl:
    def __init__(self) -> None:
        self.ended = threading.Event()
        self.abort = self.ended.set

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


@pytest.mark.parametrize("error", [None, IndexError("of what the pass left behind")])
def test_a_recall_ends_a_pass_that_waits_for_a_dead_peer(error):
    """The main thread reads no record meanwhile; the survivor keeps its weights and joins the next epoch."""
    nccls, log, built = [Nccl(), Nccl()], [], []
    role = Stuck(nccls[0], error)
    spec = SimpleNamespace(role="target", rank=0, incarnation=3, identity="target-0", device="cuda:0")
    link = Script([Join(1, 0), VerifyBatch(1, after=0, items=(1,)), Recall(2), Join(2, 1)], log)

    def build(*_):
        built.append(1)
        return role, FACTS

    groups = iter(nccls)
    loop = RankLoop(spec, link, lambda *_: NcclGroup(next(groups)), build, lambda _: None, lambda: False)
    thread = threading.Thread(target=loop.serve, daemon=True)
    thread.start()
    assert role.begun.wait(WAIT_S)
    loop.interrupt(Recall(1))
    assert not nccls[0].ended.is_set(), "an old recall changes nothing"
    loop.interrupt(Recall(2))
    thread.join(WAIT_S)
    assert not thread.is_alive() and len(built) == 1 and role.forgotten == 2
    assert ("ready", 0, 2) in log and ("sent", "rubbish") not in log


class Bridged(DraftRole):
    """A drafter that answers with what it was sent."""

    def __init__(self) -> None:
        pass

    wants_work = False

    def answer(self, batch, features):
        yield ProposalBatch(batch.round, features, 0.0, 0.0)

    def forget(self) -> None:
        pass

    def rejoin(self, weights) -> None:
        pass

    close = forget


def bridge_over(nccl, number, end=FeatureReceiver):
    """An end whose transfers end only with the abort, and then leave what was there."""
    nccl.recv = lambda *_: begun.set() or SimpleNamespace(wait=lambda: nccl.ended.wait(WAIT_S))
    begun, bridge = threading.Event(), end("127.0.0.1", "cpu", logging.getLogger("test"))
    bridge._formed = number, NcclGroup(nccl)
    return bridge, begun


def test_a_recall_ends_a_transfer_that_waits_for_the_other_end_of_the_bridge():
    """The drafter's group of one would not be interrupted, and its rubbish is not sent."""
    nccl, log = Nccl(), []
    bridge, begun = bridge_over(nccl, 1)
    spec = SimpleNamespace(role="draft", rank=0, incarnation=3, identity="draft-0", device="cpu")
    batch = DraftBatch(1, after=0, exports=(FeatureExport(1, 1, 5, "float32", ((1, 0, 2),)),))
    link = Script([Join(1, 0), batch, Recall(2), Join(2, 1)], log)
    build = lambda *_: (Bridged(), FACTS)  # noqa: E731
    loop = DraftRankLoop(spec, link, lambda *_: SINGLE, build, lambda _: None, lambda: False, bridge)
    thread = threading.Thread(target=loop.serve, daemon=True)
    thread.start()
    assert begun.wait(WAIT_S)
    loop.interrupt(Recall(1))
    assert not nccl.ended.is_set(), "an old recall changes nothing"
    loop.interrupt(Recall(2))
    thread.join(WAIT_S)
    assert not thread.is_alive() and ("ready", 0, 2) in log
    assert not [entry for entry in log if entry[0] == "sent"]


def test_a_recall_ends_both_groups_at_once():
    """The end of the ranks' group waits for a kernel of the bridge here, as for one that a lost node left behind."""
    nccl, across, log = Nccl(), Nccl(), []
    bridge, _ = bridge_over(across, 1)
    nccl.abort = lambda: nccl.ended.set() if across.ended.wait(WAIT_S) else None
    role = Stuck(nccl, None)
    spec = SimpleNamespace(role="target", rank=0, incarnation=3, identity="target-0", device="cuda:0")
    link = Script([Join(1, 0), VerifyBatch(1, after=0, items=(1,)), Recall(2)], log)
    groups = [NcclGroup(nccl), SINGLE]
    loop = RankLoop(
        spec, link, lambda *_: groups.pop(0), lambda *_: (role, FACTS), lambda _: None, lambda: False, bridge
    )
    thread = threading.Thread(target=loop.serve, daemon=True)
    thread.start()
    assert role.begun.wait(WAIT_S)
    loop.interrupt(Recall(2))
    assert nccl.ended.is_set() and across.ended.is_set()
    thread.join(WAIT_S)


def test_a_meeting_ends_before_a_recall_that_it_ignores_kills_its_rank():
    assert max(factory.NCCL_MEETING_S, factory.MEETING_S, bridge_module.MEETING_S) < RECALL_LIMIT_S


def test_a_process_whose_sums_cannot_be_aborted_does_not_outlive_its_epoch():
    """Neither a recall, which finds it waiting in a kernel, nor a batch that it missed lets it join another."""
    spec = SimpleNamespace(role="target", rank=0, incarnation=3, identity="target-0", device="cuda:0")

    def loop_of(*records):
        nccl, log = Nccl(), []
        role = SimpleNamespace(forget=lambda: None, answer=lambda batch: [])
        join_group = lambda *_: NcclGroup(nccl, symmetric=SimpleNamespace())  # noqa: E731
        loop = RankLoop(
            *(spec, Script(records, log), join_group, lambda *_: (role, FACTS), lambda _: None, lambda: False),
            end_process=lambda: log.append("ended"),
        )
        return loop, log

    for missed in (VerifyBatch(5, after=4), Recall(2)):
        loop, log = loop_of(Join(1, 0), missed, Join(2, 1))
        with pytest.raises(PeerLost, match="all_reduce=symmetric"):
            loop.serve()
        assert ("ready", 0, 1) in log and ("ready", 0, 2) not in log and not loop.status.waiting
    loop, log = loop_of(Join(1, 0))
    loop.serve()
    assert "ended" not in log, "a stop is no recall"
    loop._group, loop.status = NcclGroup(Nccl(), SimpleNamespace()), Alive("target", 0, 3, 7, epoch=1, waiting=False)
    loop.interrupt(Recall(1))
    assert "ended" not in log
    loop.interrupt(Recall(2))
    assert log[-1] == "ended"


def test_the_order_for_the_next_bridge_ends_transfers_over_the_last_one_and_not_the_target():
    nccl, group = Nccl(), NcclGroup(Nccl())
    bridge, _ = bridge_over(nccl, 3, FeatureSender)
    spec = SimpleNamespace(role="target", rank=0, incarnation=3, identity="target-0", device="cuda:0")
    loop = RankLoop(spec, None, None, None, None, None, bridge)
    loop._group, loop.status = group, Alive("target", 0, 3, 7, epoch=1, waiting=False)
    loop.interrupt(Bridge(3, ("127.0.0.1", 1)))
    assert not nccl.ended.is_set(), "it stands"
    loop.interrupt(Bridge(4, ("127.0.0.1", 1)))
    assert nccl.ended.is_set()
    group.check()


def test_another_error_still_ends_the_rank():
    role = Stuck(SimpleNamespace(ended=SimpleNamespace(wait=lambda _: True)), IndexError("a mistake"))
    spec = SimpleNamespace(role="target", rank=0, incarnation=3, identity="target-0", device="cpu")
    link = Script([Join(1, 0), VerifyBatch(1, after=0, items=(1,))], [])
    loop = RankLoop(spec, link, lambda *_: NcclGroup(Nccl()), lambda *_: (role, FACTS), lambda _: None, lambda: False)
    with pytest.raises(IndexError, match="a mistake"):
        loop.serve()


def test_the_thread_of_the_heartbeats_passes_orders_on():
    sent, orders, heard = [], [], threading.Event()

    class Heart:
        records: ClassVar = [None, Recall(5), Bridge(6, ("127.0.0.1", 1))]

        def send(self, record) -> None:
            sent.append(record)

        def receive(self, timeout_s):
            if not self.records:
                heard.set()
                time.sleep(timeout_s)
                return None
            return self.records.pop(0)

        def close(self) -> None:
            sent.append("closed")

    heartbeat = Heartbeat(Heart(), lambda: Alive("target", 0, 3, 7), orders.append)
    assert heard.wait(WAIT_S)
    heartbeat.stop()
    assert orders == [Recall(5), Bridge(6, ("127.0.0.1", 1))] and sent[-1] == "closed"


def test_another_rank_follows_the_lead():
    steps = iter([[3, 2], [0, 1], [-1, 1]])

    class Following(LoggedGroup):
        def broadcast(self, tensor, src=0):
            assert tensor.tolist() == [-1, 1], "only the lead chooses"
            return torch.tensor(next(steps))

    log = []
    spec = SimpleNamespace(role="draft", rank=1, incarnation=3, identity="draft-1", device="cpu")
    role = Drafter(log, None)
    link = Script([Join(1, 0), DraftBatch(1, after=0), DraftBatch(2, after=1)], log)
    role.answer = lambda batch: setattr(role, "steps", 2 if batch.round == 1 else 1) or []
    loop = DraftRankLoop(
        spec, link, lambda *_: Following(log, 1), lambda *_: (role, FACTS), lambda _: None, lambda: False
    )
    loop.serve()
    assert [entry for entry in log if entry[0] in ("work", "sent", "received")] == [("work", 3, 2), ("work", 0, 1)]
