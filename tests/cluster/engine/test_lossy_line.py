"""The control line loses, doubles, delays, swaps and cuts records: every pipeline gives plain decoding's tokens."""

from __future__ import annotations

import random
import threading
import time

import pytest

from actors.drafters.cascade.config import CascadeDrafterConfig, LevelsPlacement
from actors.drafters.model.config import ModelDrafterConfig
from actors.options import PipelineConfig, PipelineName
from actors.protocol import membership
from actors.protocol.messages import (
    DraftBatch,
    Outputs,
    ProposalBatch,
    Request,
    SamplingParams,
    VerdictBatch,
    VerifyBatch,
)
from actors.transport import channel
from actors.worker import heartbeat
from cluster import client as client_module
from cluster.runtime import inprocess

PROMPTS = ["def median(values):", "x", "class Stack:\n    def push"]
SAMPLING = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, frequency_penalty=0.2)
ROUNDS = (VerifyBatch, VerdictBatch, DraftBatch, ProposalBatch, Outputs, Request)
LIFE = (membership.Join, membership.Recall, membership.Ready, membership.Alive)


class LossyLine:
    """What becomes of a packed record on its way, decided by a seed; `worst` bounds how often it is lost or torn."""

    def __init__(self, seed: int, worst: float) -> None:
        self._choose, self._lock = random.Random(seed), threading.Lock()
        self._worst = worst
        self._late: dict[object, list[bytes]] = {}
        self.num_bad = 0
        self.is_calm = True

    def carry(self, line: object, packed: bytes) -> list[bytes]:
        """What arrives instead, in its order."""
        with self._lock:
            late = self._late.pop(line, [])
            if self.is_calm or not isinstance(channel.CODEC.decode(packed), ROUNDS + LIFE):
                return [*late, packed]
            fate = self._choose.random() / self._worst
            self.num_bad += fate < 5
            if fate < 1:
                return late
            if fate < 2:
                return [packed, packed, *late]
            if fate < 3:  # it is overtaken by the next one
                self._late[line] = [*late, packed]
                return []
            if fate < 4:
                return [*late, packed[: self._choose.randrange(len(packed))]]
            if fate < 5:
                time.sleep(self._choose.random() * 0.05)
            return [*late, packed]


@pytest.fixture
def lossy(monkeypatch):
    """Losses on every connection of this process, which are those between processes: what threads hand over cannot be
    lost. Heartbeats are faster, so that what is lost is soon missed."""
    lossy = LossyLine(seed=1, worst=0.015)

    def link_send(self, record):
        for packed in lossy.carry(self, channel.CODEC.encode(record)):
            self._post(packed)

    def hub_send(self, identities, record):
        packed = channel.CODEC.encode(record)
        for identity in identities:
            self._unsent.extend([(identity, part) for part in lossy.carry((self, identity), packed)])
        self._send_waiting()  # one thread at a time

    def with_sockets(*arguments, **options):
        return channel.Hub(*arguments, **(options | {"near": False}))

    monkeypatch.setattr(inprocess, "Hub", with_sockets)
    monkeypatch.setattr(channel.Link, "send", link_send)
    monkeypatch.setattr(channel.Hub, "send", hub_send)
    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 0.03)
    monkeypatch.setattr("actors.coordinator.membership.MISSED_BEATS", 3)  # as usual
    monkeypatch.setattr(client_module, "_RESUME_S", 0.5)
    return lossy


@pytest.mark.extended
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("pipeline", "drafter"),
    [
        (PipelineName.tree, "model"),
        pytest.param(PipelineName.sync, "model", marks=pytest.mark.slow),
        *(
            pytest.param(name, drafter, marks=pytest.mark.slow)
            for name in (PipelineName.pearl, PipelineName.branches, PipelineName.pingpong)
            for drafter in ("model", "ngram")
        ),
    ],
)
def test_tokens_are_those_of_plain_decoding(open_engine, lossy, pipeline, drafter):
    engine = open_engine(drafter, pipeline=PipelineConfig(pipeline, adaptive=False))
    plain = [one.token_ids for one in engine.generate(PROMPTS, SAMPLING, drafter="none")]
    lossy.is_calm = False
    for _ in range(2):
        assert [one.token_ids for one in engine.generate(PROMPTS, SAMPLING)] == plain
    lossy.is_calm = True
    assert lossy.num_bad > 5, "too few losses to show anything"
    counters = engine.report().counters
    if pipeline is not PipelineName.plain:
        assert counters["num_stale"] + counters["num_lost_records"] + counters["num_unreadable"] > 0
    assert not engine.supervisor.incidents, "a role was replaced"


@pytest.mark.timeout(120)
@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [PipelineName.sync, PipelineName.branches])
def test_levels_of_a_cascade_resume_after_losses(open_engine, lossy, half_agreeing_drafter, pipeline):
    """Records between a level and the level below it are lost and damaged like all others."""
    levels = [ModelDrafterConfig(path=str(half_agreeing_drafter), num_draft_tokens=length) for length in (2, 3, 4)]
    cascade = CascadeDrafterConfig(levels=levels, num_draft_tokens=4, placement=LevelsPlacement.separate)
    engine = open_engine(cascade, pipeline=PipelineConfig(pipeline, adaptive=False))
    plain = [one.token_ids for one in engine.generate(PROMPTS, SAMPLING, drafter="none")]
    lossy.is_calm = False
    for _ in range(2):
        assert [one.token_ids for one in engine.generate(PROMPTS, SAMPLING)] == plain
    lossy.is_calm = True
    assert lossy.num_bad > 5, "too few losses to show anything"
    assert [one.token_ids for one in engine.generate(PROMPTS, SAMPLING)] == plain
    assert not engine.supervisor.incidents, "a role was replaced"
