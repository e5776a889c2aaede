"""How much code of ours a verdict crosses at the coordinator: functions, files and bytecodes from its arrival to the
records that answer it, and to what is learned from it.

A round is short, so most of it is calls; and to follow a verdict is to read these files. Run as
`pytest -s tests/actors/coordinator/test_path_of_a_verdict.py` it prints the counts.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from actors.coordinator.clients import CLIENT
from actors.options import SchedulerConfig
from actors.protocol.messages import (
    HASH_SEED,
    DraftBatch,
    DraftPreview,
    DraftPreviewBatch,
    Proposal,
    ProposalBatch,
    Request,
    SamplingParams,
    TokenTree,
    Verdict,
    VerdictBatch,
    VerifyBatch,
    extend_hash,
)
from tests.actors.service_harness import FACTS

ROOT = Path(__file__).parents[3]
OURS = tuple(f"{ROOT}/{package}/" for package in ("actors", "cluster", "parallel"))
TOKEN = 5
"""All that the target and the drafter of these rounds ever say."""


class Crossed:
    """What this thread runs inside the block: functions of ours, of which nested ones are parts, and bytecodes, those
    of the standard library's Python included."""

    def __init__(self):
        self.functions: set[tuple[str, str]] = set()
        self.num_bytecodes = 0

    @property
    def files(self):
        return {file for file, _ in self.functions}

    def __enter__(self):
        sys.settrace(self._called)
        return self

    def __exit__(self, *exception):
        sys.settrace(None)

    def _called(self, frame, event, _):
        code = frame.f_code
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if code.co_filename.startswith(OURS):
            self.functions.add((code.co_filename, code.co_qualname.partition(".<locals>")[0]))
        return self._ran

    def _ran(self, frame, event, _):
        self.num_bytecodes += event == "opcode"
        return self._ran


class Rounds:
    """Plays a drafter and a target that always agree, as threads of the coordinator's process. The drafter may be
    `attached` to the target's rank."""

    def __init__(self, stage, *, previews, attached, num_requests=1):
        self._stage = stage
        self._previews = previews
        self._attached = attached
        self._lengths = dict.fromkeys(range(1, num_requests + 1), 2)
        self._hashes = dict.fromkeys(self._lengths, extend_hash(HASH_SEED, [TOKEN, TOKEN]))
        stage.get_ready()
        for number in self._lengths:
            stage.send(CLIENT, Request(number, (TOKEN, TOKEN), SamplingParams(max_tokens=3000, ignore_eos=True)))

    def _place(self, number):
        return number, 0, self._lengths[number], self._hashes[number]

    def verdict(self) -> VerdictBatch:
        """What the target is about to send; the drafter has answered its orders before."""
        for _ in range(1000):
            if not self._attached:
                self._draft()
            batch = self._stage.links["target-0"].receive(0.01 if self._attached else 0.0)
            if isinstance(batch, VerifyBatch) and batch.items:
                return self._verify(batch)
        raise AssertionError("no batch for the target")

    def _draft(self):
        batch = self._stage.links["draft-0"].receive(0.01)
        if isinstance(batch, DraftBatch):
            lengths = {order.request_id: order.num_draft_tokens for order in batch.orders if order.prefetched is None}
            self._stage.send("draft-0", self._proposals(batch.round, lengths))

    def _proposals(self, round_, lengths):
        now = time.monotonic()
        proposals = [
            Proposal.deterministic(*self._place(number), TokenTree.chain(TOKEN, [TOKEN] * length))
            for number, length in lengths.items()
            if length
        ]
        return ProposalBatch(round_, tuple(proposals), now, now + 1e-5)

    def _verify(self, batch):
        started = time.monotonic()
        if self._previews:
            tree = TokenTree.chain(TOKEN, [TOKEN] * 20)
            previews = [DraftPreview(*self._place(item.request_id), tree) for item in batch.items]
            self._stage.send("draft-0", DraftPreviewBatch(tuple(previews)))
        verdicts = [self._judge(item) for item in batch.items]
        lengths = {item.request_id: item.num_draft_tokens for item in batch.items}
        drafts = self._proposals(batch.round, lengths) if self._attached else None
        num_rows = sum([item.num_tokens for item in batch.items]) + sum([len(verdict.path) for verdict in verdicts])
        return VerdictBatch(batch.round, tuple(verdicts), started, time.monotonic(), num_rows, drafts=drafts)

    def _judge(self, item):
        number, length = item.request_id, 0 if item.proposal is None else item.proposal.tree.num_draft_tokens
        verdict = Verdict(number, 0, self._lengths[number], tuple(range(1, length + 1)), (TOKEN,))
        self._lengths[number] += length + 1
        self._hashes[number] = extend_hash(self._hashes[number], [TOKEN] * (length + 1))
        return verdict


MOST = {("attached", False): (56, 15, 3150), ("sync", False): (59, 16, 3100), ("branches", False): (71, 16, 4400)}
LEARNED = 45_000
"""Bytecodes of a round that the policy learns from before the next one, for which the bounds are wide."""
MOST |= {
    ("attached", True): (150, 22, LEARNED),
    ("sync", True): (160, 22, LEARNED),
    ("branches", True): (160, 23, LEARNED),
}
"""Functions, files and bytecodes of a round in each pipeline, and in `sync` with an attached drafter, with fixed draft
lengths and with the decision, which takes other branches where the machine is busy."""


def rounds_of(open_stage, monkeypatch, pipeline, adaptive, num_requests=1):
    monkeypatch.setitem(FACTS, "max_model_len", 2000)
    monkeypatch.setitem(FACTS, "kv_slots", 2000 * (num_requests + 1))
    attached, least = pipeline == "attached", 0 if adaptive else 4
    place = {"pipeline": "sync", "draft_ranks": 0, "attached": True} if attached else {"pipeline": pipeline}
    limits = SchedulerConfig(max_num_seqs=max(2, num_requests))
    stage = open_stage(near=True, adaptive=adaptive, min_draft_tokens=least, limits=limits, **place)
    rounds = Rounds(stage, previews=pipeline == "branches", attached=attached, num_requests=num_requests)
    return stage, rounds


def crossings(stage, rounds):
    """The counts of seven verdicts, behind some that are not counted, in ascending order."""
    for _ in range(30):
        stage.send("target-0", rounds.verdict())
    several = []  # what the decision does in a round depends on how long the ones before took
    for _ in range(200):
        verdict = rounds.verdict()
        with Crossed() as crossed:
            stage.send("target-0", verdict)
        if len(crossed.functions) > 50:  # or the service's thread was busy, with what it learned, and takes the verdict
            several.append((len(crossed.functions), len(crossed.files), crossed.num_bytecodes))
        if len(several) == 7:
            return sorted(several)
        time.sleep(0.001)  # a pass
    raise AssertionError("verdicts are handled in another thread")


@pytest.mark.extended
@pytest.mark.parametrize(("pipeline", "adaptive"), MOST)
def test_a_verdict_crosses_little_code(open_stage, monkeypatch, pipeline, adaptive):
    counts = crossings(*rounds_of(open_stage, monkeypatch, pipeline, adaptive))[3]
    print(f"{pipeline}, {'with the decision' if adaptive else 'fixed lengths'}: functions, files, bytecodes {counts}")
    assert all(count <= most for count, most in zip(counts, MOST[pipeline, adaptive], strict=True))


@pytest.mark.extended
@pytest.mark.parametrize(("pipeline", "most"), [("attached", 1650), ("sync", 1550), ("branches", 2350)])
def test_a_request_of_a_batch_takes_less(open_stage, monkeypatch, pipeline, most):
    """Bytecodes for each of 16."""
    *_, num_bytecodes = crossings(*rounds_of(open_stage, monkeypatch, pipeline, adaptive=False, num_requests=16))[3]
    print(f"{pipeline}, 16 requests: {num_bytecodes / 16:.0f} bytecodes for each")
    assert num_bytecodes / 16 <= most
