"""How much code of ours a verdict crosses at the coordinator: functions and files from its arrival to the records that
answer it, and to what is learned from it.

A round is short, so most of it is calls; and to follow a verdict is to read these files. Run as
`pytest -s tests/actors/coordinator/test_path_of_a_verdict.py` it prints the counts.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from actors.coordinator.clients import CLIENT
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
    """Functions of ours that this thread calls inside the block; what is nested in one belongs to it."""

    def __init__(self):
        self.functions: set[tuple[str, str]] = set()

    @property
    def files(self):
        return {file for file, _ in self.functions}

    def __enter__(self):
        sys.setprofile(self._called)
        return self

    def __exit__(self, *exception):
        sys.setprofile(None)

    def _called(self, frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS):
            name = code.co_qualname.partition(".<locals>")[0]
            self.functions.add((code.co_filename, name))


class Rounds:
    """Plays a drafter and a target that always agree, as threads of the coordinator's process, with one request. The
    drafter may be `attached` to the target's rank."""

    def __init__(self, stage, *, previews, attached):
        self._stage = stage
        self._previews = previews
        self._attached = attached
        self._text = [3, 4]
        stage.get_ready()
        stage.send(CLIENT, Request(1, (3, 4), SamplingParams(max_tokens=3000, ignore_eos=True)))

    def _place(self):
        return 1, 0, len(self._text), extend_hash(HASH_SEED, self._text)

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
            lengths = [order.num_draft_tokens for order in batch.orders if order.prefetched is None]
            self._stage.send("draft-0", self._proposals(batch.round, lengths))

    def _proposals(self, round_, lengths):
        trees = [TokenTree.chain(self._text[-1], [TOKEN] * length) for length in lengths if length]
        now = time.monotonic()
        proposals = tuple([Proposal.deterministic(*self._place(), tree) for tree in trees])
        return ProposalBatch(round_, proposals, now, now + 1e-5)

    def _verify(self, batch):
        started = time.monotonic()
        if self._previews:
            tree = TokenTree.chain(self._text[-1], [TOKEN] * 20)
            self._stage.send("draft-0", DraftPreviewBatch((DraftPreview(*self._place(), tree),)))
        (item,) = batch.items
        path = () if item.proposal is None else tuple(range(1, item.proposal.tree.num_draft_tokens + 1))
        verdict = Verdict(1, 0, len(self._text), path, (TOKEN,))
        self._text += [TOKEN] * (len(path) + 1)
        drafts = self._proposals(batch.round, [item.num_draft_tokens]) if self._attached else None
        num_rows = item.num_tokens + len(path)
        return VerdictBatch(batch.round, (verdict,), started, time.monotonic(), num_rows, drafts=drafts)


MOST = {("attached", False): (70, 15), ("sync", False): (69, 16), ("branches", False): (84, 16)}
MOST |= {("attached", True): (150, 22), ("sync", True): (160, 22), ("branches", True): (160, 23)}
"""Functions and files of a round in each pipeline, and in `sync` with an attached drafter, with fixed draft lengths and
with the decision, which takes other branches where the machine is busy."""


@pytest.mark.extended
@pytest.mark.parametrize(("pipeline", "adaptive"), MOST)
def test_a_verdict_crosses_few_functions(open_stage, monkeypatch, pipeline, adaptive):
    monkeypatch.setitem(FACTS, "max_model_len", 2000)
    monkeypatch.setitem(FACTS, "kv_slots", 4000)
    attached, least = pipeline == "attached", 0 if adaptive else 4
    place = {"pipeline": "sync", "draft_ranks": 0, "attached": True} if attached else {"pipeline": pipeline}
    stage = open_stage(near=True, adaptive=adaptive, min_draft_tokens=least, **place)
    rounds = Rounds(stage, previews=pipeline == "branches", attached=attached)
    for _ in range(30):
        stage.send("target-0", rounds.verdict())
    several = []  # what the decision does in a round depends on how long the ones before took
    for _ in range(200):
        verdict = rounds.verdict()
        with Crossed() as crossed:
            stage.send("target-0", verdict)
        if len(crossed.functions) > 50:  # or the service's thread was busy, with what it learned, and takes the verdict
            several.append((len(crossed.functions), len(crossed.files)))
        if len(several) == 7:
            break
        time.sleep(0.001)  # a pass
    assert len(several) == 7, "verdicts are handled in another thread"
    counts = sorted(several)[3]
    print(
        f"{pipeline}, {'with the decision' if adaptive else 'fixed lengths'}: {counts[0]} functions, {counts[1]} files"
    )
    most = MOST[pipeline, adaptive]
    assert counts[0] <= most[0] and counts[1] <= most[1]
