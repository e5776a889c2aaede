"""One rank from start to end, served in a thread, with a hub in place of the coordinator's."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from dataclasses import replace

import pytest

from actors.drafters.config import Placement
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import Strategy
from actors.drafters.self_speculation.config import SelfDrafterConfig
from actors.drafters.speculator.config import SpeculatorDrafterConfig
from actors.options import VerifyConfig, VerifyRule
from actors.protocol.membership import Alive, Join, Ready, Recall, Stop
from actors.protocol.messages import (
    Admit,
    Commit,
    DraftBatch,
    DraftOrder,
    ProposalBatch,
    SamplingParams,
    TokenTree,
    VerdictBatch,
    VerifyBatch,
    VerifyItem,
)
from actors.roles.draft import DraftRole
from actors.roles.target import TargetRole
from actors.transport.channel import Hub
from actors.worker import factory
from actors.worker.factory import build_role, serve
from parallel.comm.group import SINGLE
from parallel.comm.rendezvous import host_store
from tests.actors.service_harness import KEYS
from tests.matrices import in_turn
from tests.parallel import host_kernels
from tests.parallel.cuda_twin import CudaTwin
from tests.parallel.fake_accelerator import FakeAccelerator

WAIT_S = 30.0
PROMPT = (3, 4, 5, 3, 4)
ADMIT = Admit(1, 0, PROMPT, len(PROMPT), SamplingParams())
VERIFY = VerifyBatch(7, admits=(ADMIT,), items=(VerifyItem(1, len(PROMPT)),))
DRAFT = DraftBatch(7, admits=(ADMIT,), orders=(DraftOrder(1, 3),))


class Served:
    """Ranks of one role in their threads, and the hub they report to."""

    def __init__(self, specs, observe) -> None:
        self.hub = Hub("tcp://127.0.0.1:*", KEYS)
        self.errors: list[BaseException] = []
        self.stopped = False
        self.store = host_store() if len(specs) > 1 else None
        self.specs = [replace(spec, hub_address=self.hub.address, key=KEYS.of(spec.identity)) for spec in specs]
        self.threads = [threading.Thread(target=self.serve, args=(spec, observe)) for spec in self.specs]
        for thread in self.threads:
            thread.start()

    def serve(self, spec, observe) -> None:
        try:
            serve(spec, observe)
        except Exception as error:
            self.errors.append(error)

    def receive(self, timeout_s=WAIT_S, *, heartbeats=False):
        """The next record; heartbeats only if `heartbeats`."""
        deadline = time.monotonic() + timeout_s
        while not self.errors and (left := deadline - time.monotonic()) > 0:
            received = self.hub.receive(min(left, 0.1))
            if received is None and left > 0.1:
                continue
            if received is None or heartbeats or not isinstance(received[1], Alive):
                return received and received[1]

    def send(self, record) -> None:
        self.hub.send([f"{spec.identity}#{spec.incarnation}" for spec in self.specs], record)

    def wait_for(self, count, **state) -> None:
        """Waits until so many ranks have sent a heartbeat with this state."""
        ranks_seen = set()
        while len(ranks_seen) < count:
            alive = self.receive(heartbeats=True)
            if isinstance(alive, Alive) and all(getattr(alive, name) == value for name, value in state.items()):
                ranks_seen.add(alive.rank)

    def join(self, epoch=1, last_round=0):
        """Send `Join` once all ranks wait; returns their `Ready`s."""
        self.wait_for(len(self.specs), waiting=True)
        self.send(Join(epoch, last_round, ("127.0.0.1", self.store.port) if self.store else None))
        readies = [self.receive() for _ in self.specs]
        assert not self.errors, self.errors
        return readies

    def stop(self) -> None:
        if self.stopped:
            return
        self.stopped = True
        self.send(Stop())
        for thread in self.threads:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in self.threads)
        self.hub.close()


@pytest.fixture
def open_ranks():
    opened = []

    def open_(*specs, observe=lambda status: None):
        opened.append(Served(specs, observe))
        return opened[-1]

    yield open_
    for served in opened:
        served.stop()


def test_a_target_loads_reports_and_verifies(open_ranks, spec):
    seen = []
    ranks = open_ranks(spec, observe=seen.append)
    (ready,) = ranks.join()
    assert isinstance(ready, Ready) and (ready.role, ready.rank, ready.epoch) == ("target", 0, 1)
    assert ready.facts["kv_slots"] == 300 and ready.facts["max_model_len"] == 256 and ready.facts["vocab_size"] == 97
    assert ready.facts["device"] == "cpu" and ready.facts["weight_bytes"] > 0 and ready.facts["load_s"] > 0
    ranks.send(VERIFY)
    answer = ranks.receive()
    assert isinstance(answer, VerdictBatch) and answer.round == 7 and answer.num_tokens == len(PROMPT)
    (verdict,) = answer.verdicts
    assert (verdict.request_id, verdict.prefix_len, verdict.path) == (1, len(PROMPT), ())
    ranks.stop()
    assert seen[-1] == "round 7" and not ranks.errors


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_a_drafter_loads_reports_and_proposes(open_ranks, spec, drafter):
    spec = replace(spec, role="draft")
    if drafter == "ngram":
        spec = replace(spec, drafter=NgramDrafterConfig())
    ranks = open_ranks(spec)
    (ready,) = ranks.join()
    assert isinstance(ready, Ready) and ready.role == "draft"
    assert ("kv_slots" in ready.facts) == (drafter == "model"), "a lookup needs no memory to speak of"
    ranks.send(DRAFT)
    answer = ranks.receive()
    assert isinstance(answer, ProposalBatch) and answer.round == 7
    assert answer.proposals[0].tree.num_draft_tokens == 3


def test_ranks_of_a_role_work_together_and_the_lead_alone_answers(open_ranks, spec):
    single = open_ranks(spec)
    single.join()
    single.send(VERIFY)
    expected = single.receive().verdicts
    ranks = open_ranks(*(replace(spec, rank=rank, size=2) for rank in range(2)))
    assert {ready.rank for ready in ranks.join()} == {0, 1}
    ranks.send(VERIFY)
    assert ranks.receive().verdicts == expected
    assert ranks.receive(0.2) is None, "one answer a round"


def drafted_rounds(ranks, first_round, count=3):
    """(path, next token, draft) of rounds in which an attached drafter drafts 3 tokens for the next."""
    ranks.send(VerifyBatch(first_round, (ADMIT,), items=(VerifyItem(1, len(PROMPT), None, 3),), after=first_round - 1))
    length, seen = len(PROMPT), list[tuple[tuple[int, ...], tuple[int, ...], TokenTree]]()
    for number in range(first_round + 1, first_round + count + 1):
        answer = ranks.receive()
        (verdict,), (proposal,) = answer.verdicts, answer.drafts.proposals
        previous = seen[-1][2].token_ids if seen else ()
        tokens = (*(previous[node] for node in verdict.path), *verdict.token_ids)
        seen.append((verdict.path, verdict.token_ids, proposal.tree))
        commit = Commit(1, 0, length, verdict.path, tokens)
        length += len(tokens)
        assert (proposal.prefix_len, proposal.tree.token_ids[0]) == (length, verdict.token_ids[-1])
        item = VerifyItem(1, 1, proposal, 3)
        ranks.send(VerifyBatch(number, commits=(commit,), items=(item,), after=number - 1))
    ranks.receive()
    return seen


@pytest.mark.extended
@pytest.mark.parametrize(
    "drafter", ["model", "eagle3", "exit", *(pytest.param(one, marks=pytest.mark.slow) for one in ("ngram", "skip"))]
)
def test_an_attached_drafter_drafts_alike_on_one_rank_and_on_two(open_ranks, spec, speculator, drafter):
    attached = {
        "ngram": NgramDrafterConfig(placement=Placement.attached, min_ngram=1),
        "model": replace(spec.drafter, placement=Placement.attached),
        "eagle3": SpeculatorDrafterConfig(path=str(speculator("eagle3")), kv_slots=256),
        "exit": SelfDrafterConfig(exit=1),
        "skip": SelfDrafterConfig(skip=["1m"], strategy=Strategy.tree),
    }
    spec = replace(spec, drafter=attached[drafter])
    single = open_ranks(spec)
    (ready,) = single.join()
    assert (ready.facts["drafter"].get("weight_bytes", 0) > 0) == (drafter in ("model", "eagle3"))
    expected = drafted_rounds(single, 1)
    assert any(draft.num_draft_tokens for *_, draft in expected)
    ranks = open_ranks(*(replace(spec, rank=rank, size=2) for rank in range(2)))
    ranks.join()
    assert drafted_rounds(ranks, 1) == expected
    ranks.send(Recall(2))
    ranks.join(epoch=2, last_round=20)
    assert drafted_rounds(ranks, 21) == expected, "an epoch begins without requests"
    assert not ranks.errors


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_recalled_role_keeps_its_weights_and_forgets_every_request(open_ranks, spec, role):
    batch = VERIFY if role == "target" else DRAFT
    ranks = open_ranks(*(replace(spec, role=role, rank=rank, size=2) for rank in range(2)))
    ranks.join()
    ranks.send(batch)
    first = ranks.receive()
    ranks.send(Recall(1))
    ranks.send(Recall(2))
    readies = ranks.join(epoch=2, last_round=20)
    assert [ready.epoch for ready in readies] == [2, 2]
    ranks.send(batch)
    assert ranks.receive(0.2) is None, "a batch of the epoch before is stale"
    ranks.send(replace(batch, round=21, after=20))
    second = ranks.receive()
    timeless = dict.fromkeys(("started", "finished", *(["committed"] if role == "target" else [])), 0.0)
    assert replace(second, **timeless, round=7) == replace(first, **timeless)
    assert readies[0].facts["load_s"] > 0 and not ranks.errors


@pytest.mark.extended
def test_ranks_called_to_a_coordinator_that_is_gone_come_back_and_follow_its_successor(open_ranks, spec, monkeypatch):
    """The coordinator died between `Join` and the forming of the group; the store, which it hosts, died with it."""
    ranks = open_ranks(*(replace(spec, rank=rank, size=2) for rank in range(2)))
    ranks.join()
    monkeypatch.setattr(factory, "MEETING_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        unused_address = server.getsockname()
    ranks.send(Join(2, 7, unused_address))
    ranks.wait_for(2, epoch=2, waiting=True)
    monkeypatch.setattr(factory, "MEETING_S", WAIT_S)
    readies = ranks.join(epoch=3, last_round=7)
    assert [ready.epoch for ready in readies] == [3, 3] and not ranks.errors
    ranks.send(replace(VERIFY, round=8, after=7))
    assert ranks.receive().verdicts


def test_the_heart_beats_through_a_long_pass_and_says_what_it_is(open_ranks, spec, monkeypatch):
    right, was_heard = TargetRole.answer, threading.Event()

    def slow(self, batch):
        was_heard.wait()
        return right(self, batch)

    monkeypatch.setattr(TargetRole, "answer", slow)
    ranks = open_ranks(spec)
    ranks.join()
    ranks.send(VERIFY)
    ranks.wait_for(1, busy=True, round=7, epoch=1, waiting=False)
    was_heard.set()
    assert isinstance(ranks.receive(), VerdictBatch)
    ranks.wait_for(1, busy=False, round=7)


def test_a_rank_without_a_coordinator_ends_by_itself(spec):
    hub = Hub("tcp://127.0.0.1:*", KEYS)
    serve(replace(spec, hub_address=hub.address), cancelled=lambda: True)
    hub.close()


def test_a_rank_that_cannot_load_says_why(open_ranks, spec, models, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(models["target"], broken)
    (broken / "model.safetensors").write_bytes(b"not weights")
    ranks = open_ranks(replace(spec, target=replace(spec.target, path=str(broken))))
    ranks.wait_for(1, waiting=True)
    ranks.send(Join(1, 0))
    ranks.threads[0].join(WAIT_S)
    (error,) = ranks.errors
    assert str(broken) in str(error)


def test_a_rank_that_fails_later_raises(open_ranks, spec):
    ranks = open_ranks(spec)
    ranks.join()
    ranks.send(VerifyBatch(1, items=(VerifyItem(99, 1),)))
    ranks.threads[0].join(WAIT_S)
    (error,) = ranks.errors
    assert isinstance(error, KeyError)


def test_a_rank_keeps_to_its_cores_and_leaves_the_others_theirs(open_ranks, spec):
    before = os.sched_getaffinity(0)
    core, inside = min(before), []
    ranks = open_ranks(replace(spec, cores=(core,)), observe=lambda status: inside.append(os.sched_getaffinity(0)))
    (ready,) = ranks.join()
    assert ready.facts["cores"] == [core]
    ranks.send(VERIFY)
    ranks.receive()
    ranks.stop()
    assert set(map(frozenset, inside)) == {frozenset({core})} and os.sched_getaffinity(0) == before


def test_a_rank_uses_its_device_before_it_waits_for_anyone(spec, monkeypatch):
    """One whose role has no group too; what is started in its thread later takes the current device."""
    twin = CudaTwin().install(monkeypatch)
    with pytest.raises(ValueError, match="nowhere: not an address"):
        serve(replace(spec, device="cuda:1", hub_address="nowhere"))
    assert twin.current_device() == 1


@pytest.fixture
def device_only(monkeypatch):
    """The kernels in C++ compute on a CPU; without them a device gives the same bits."""
    host_kernels.use_none(monkeypatch)


@pytest.mark.extended
@pytest.mark.parametrize(("rule", "temperature"), list(in_turn(["coupled", "rejection", "traversal"], [0.9, 0.0])))
def test_roles_on_a_device_answer_what_they_answer_on_a_cpu(spec, device_only, rule, temperature):
    """Passes, drawing, drafts and verification; a tensor of the host among those of the device raises there."""
    params = SamplingParams(temperature=temperature, top_p=0.9, seed=3)
    drafter = replace(spec.drafter, kv_slots=300)
    spec = replace(spec, verify=VerifyConfig(rule=VerifyRule(rule)), drafter=drafter)

    def answers(device, accelerator=None):
        target, draft = (build_role(replace(spec, role=role, device=device), SINGLE)[0] for role in ("target", "draft"))
        admit = replace(ADMIT, sampling=params)
        (first,) = target.answer(VerifyBatch(7, admits=(admit,), items=(VerifyItem(1, len(PROMPT)),)))
        token = first.verdicts[0].token_ids[0]
        known = replace(admit, token_ids=(*PROMPT, token))
        if accelerator is not None:
            accelerator.forget()
        (drafted,) = draft.answer(DraftBatch(7, admits=(known,), orders=(DraftOrder(1, 3),)))
        commit = Commit(1, 0, len(PROMPT), (), (token,))
        item = VerifyItem(1, 1, drafted.proposals[0])
        (second,) = target.answer(VerifyBatch(8, after=7, commits=(commit,), items=(item,)))
        return first.verdicts, drafted.proposals[0].tree, second.verdicts

    expected = answers("cpu")
    with FakeAccelerator() as accelerator:
        assert answers(str(accelerator.device), accelerator) == expected
    assert not accelerator.blocking_uploads, accelerator.blocking_uploads
    # of a draft, by levels where a ratio rule asks for its probabilities, and of a verdict
    by_levels = temperature and rule != "coupled"
    num_waits = (3 if by_levels else 1) + (1 if rule == "coupled" else 2)
    assert accelerator.num_syncs == num_waits, accelerator.syncs


@pytest.mark.parametrize("pipeline", ["branches", "tree"])
def test_a_step_of_draft_ahead_waits_for_the_device_once(spec, device_only, pipeline):
    with FakeAccelerator() as accelerator:
        drafter = replace(spec.drafter, kv_slots=300)
        spec = replace(spec, role="draft", pipeline=pipeline, device=str(accelerator.device), drafter=drafter)
        draft, _ = build_role(spec, SINGLE)
        assert isinstance(draft, DraftRole)
        list(draft.answer(DRAFT))
        waits = []
        while draft.wants_work and len(waits) < 4:
            accelerator.forget()
            draft.work(4)
            waits.append(accelerator.num_syncs)
            assert not accelerator.blocking_uploads, accelerator.blocking_uploads
    assert waits and set(waits) <= {0, 1} and sum(waits), "0: a step that found nothing worth a pass"


@pytest.mark.extended
@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"temperature": 0.9}, marks=pytest.mark.slow),
        {"temperature": 0.9, "top_k": 20, "top_p": 0.9},
    ],
)
def test_the_host_waits_for_the_device_twice_a_round(spec, device_only, sampling):
    """Once for drafted chains, whatever their lengths, and once for the verdicts."""
    admits = [replace(ADMIT, request_id=i, sampling=SamplingParams(seed=i, **sampling)) for i in (1, 2)]
    lengths = {1: 6, 2: 3}
    spec = replace(spec, drafter=replace(spec.drafter, kv_slots=300, num_draft_tokens=6))
    with FakeAccelerator() as accelerator:
        on_device = replace(spec, device=str(accelerator.device))
        target, draft = (build_role(replace(on_device, role=role), SINGLE)[0] for role in ("target", "draft"))
        items = tuple(VerifyItem(i, len(PROMPT)) for i in lengths)
        (first,) = target.answer(VerifyBatch(7, admits=tuple(admits), items=items))
        tokens = {verdict.request_id: verdict.token_ids[0] for verdict in first.verdicts}
        known = tuple(replace(one, token_ids=(*PROMPT, tokens[one.request_id])) for one in admits)
        accelerator.forget()
        orders = tuple(DraftOrder(*order) for order in lengths.items())
        (drafted,) = draft.answer(DraftBatch(7, admits=known, orders=orders))
        waited = accelerator.num_syncs
        commits = tuple(Commit(i, 0, len(PROMPT), (), (tokens[i],)) for i in lengths)
        items = tuple(VerifyItem(one.request_id, 1, one) for one in drafted.proposals)
        (second,) = target.answer(VerifyBatch(8, after=7, commits=commits, items=items))
        assert len(second.verdicts) == 2 and (waited, accelerator.num_syncs) == (1, 2), accelerator.syncs
        assert not accelerator.blocking_uploads, accelerator.blocking_uploads
    assert [one.tree.num_draft_tokens for one in drafted.proposals] == [6, 3]


def test_a_prompt_costs_one_wait_and_launches_by_its_passes(spec, device_only):
    """A chunk costs what another of any length costs; the host reads the last one's verdict alone."""
    chunks, launches = (64, 8, 40, 20), []
    text = tuple(2 + i % 90 for i in range(sum(chunks)))
    with FakeAccelerator() as accelerator:
        padded = replace(spec.target, attention="padded")
        target, _ = build_role(replace(spec, device=str(accelerator.device), target=padded), SINGLE)
        assert isinstance(target, TargetRole)
        admits, waits = (replace(ADMIT, token_ids=text, prompt_len=len(text)),), []
        for i, chunk in enumerate(chunks):
            accelerator.forget()
            list(target.answer(VerifyBatch(7 + i, admits, items=(VerifyItem(1, chunk),), after=6 + i)))
            assert not accelerator.blocking_uploads, accelerator.blocking_uploads
            admits = ()
            waits.append(accelerator.num_syncs)
            launches.append(accelerator.launches.total())
    assert waits == [0, 0, 0, 1]
    assert launches[0] == launches[1] == launches[2] == launches[3] - 10, "the head and the choice of a token"


def test_a_pass_without_a_verdict_is_over_when_its_time_is_taken(spec, monkeypatch):
    """Nothing of a chunk of a prompt is read, so a GPU would still be at it."""
    waited = []
    monkeypatch.setattr("actors.roles.target.wait_for", lambda device: waited.append(time.monotonic()))
    target, _ = build_role(spec, SINGLE)
    (chunk,) = target.answer(VerifyBatch(7, admits=(ADMIT,), items=(VerifyItem(1, 3),)))
    assert not chunk.verdicts and chunk.started < waited[0] <= chunk.finished
    (last,) = target.answer(VerifyBatch(8, after=7, items=(VerifyItem(1, len(PROMPT) - 3),)))
    assert last.verdicts and len(waited) == 1
