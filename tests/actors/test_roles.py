"""One rank from start to end, served in a thread and spoken to as the coordinator would."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from dataclasses import replace

import pytest

from actors.lifecycle import Failure, Ready, Stop
from actors.messages import (
    Admit,
    DraftBatch,
    DraftOrder,
    ProposalBatch,
    SamplingParams,
    VerdictBatch,
    VerifyBatch,
    VerifyItem,
)
from actors.options import (
    ModelDrafterConfig,
    NgramDrafterConfig,
    SchedulerConfig,
    TargetConfig,
    VerifyConfig,
)
from actors.roles import RankSpec, serve
from actors.wire import Hub
from parallel.rendezvous import host_store

_names = itertools.count()
WAIT_S = 30.0
PROMPT = (3, 4, 5, 3, 4)
ADMIT = Admit(1, 0, PROMPT, len(PROMPT), SamplingParams())
VERIFY = VerifyBatch(7, admits=(ADMIT,), items=(VerifyItem(1, len(PROMPT)),))
DRAFT = DraftBatch(7, admits=(ADMIT,), orders=(DraftOrder(1, 3),))


class Served:
    """Ranks of one role in their threads, and the hub they report to."""

    def __init__(self, specs, observe=None) -> None:
        self.hub = Hub(f"inproc://test-roles-{next(_names)}")
        self.errors: list[BaseException] = []
        self.stopped = False
        self.store = host_store() if len(specs) > 1 else None
        store = ("127.0.0.1", self.store.port) if self.store else None
        self.specs = [replace(spec, hub_address=self.hub.address, store=store) for spec in specs]
        self.threads = [threading.Thread(target=self.serve, args=(spec, observe)) for spec in self.specs]
        for thread in self.threads:
            thread.start()

    def serve(self, spec, observe) -> None:
        try:
            serve(spec, observe)
        except Exception as error:
            self.errors.append(error)

    def hear(self, timeout_s=WAIT_S):
        received = self.hub.receive(timeout_s)
        return received and received[1]

    def say(self, record) -> None:
        self.hub.send([spec.identity for spec in self.specs], record)

    def stop(self) -> None:
        if self.stopped:
            return
        self.stopped = True
        self.say(Stop())
        for thread in self.threads:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in self.threads)
        self.hub.close()


@pytest.fixture
def open_ranks():
    opened = []

    def open_(*specs, observe=None):
        opened.append(Served(specs, observe))
        return opened[-1]

    yield open_
    for served in opened:
        served.stop()


@pytest.fixture
def spec(models):
    return RankSpec(
        role="target",
        rank=0,
        size=1,
        epoch=0,
        device="cpu",
        num_threads=1,
        cores=(),
        hub_address="",
        store=None,
        host="127.0.0.1",
        eos_token_ids=(1,),
        target=TargetConfig(path=str(models["target"]), kv_slots=300),
        drafter=ModelDrafterConfig(path=str(models["drafter"])),
        verify=VerifyConfig(),
        pipeline="sync",
        scheduler=SchedulerConfig(max_num_seqs=2),
    )


def test_a_target_loads_reports_and_verifies(open_ranks, spec):
    seen = []
    ranks = open_ranks(spec, observe=seen.append)
    ready = ranks.hear()
    assert isinstance(ready, Ready) and (ready.role, ready.rank) == ("target", 0)
    assert ready.facts["kv_slots"] == 300 and ready.facts["max_model_len"] == 256 and ready.facts["vocab_size"] == 97
    assert ready.facts["device"] == "cpu" and ready.facts["weight_bytes"] > 0 and ready.facts["load_s"] > 0
    ranks.say(VERIFY)
    answer = ranks.hear()
    assert isinstance(answer, VerdictBatch) and answer.round == 7 and answer.num_tokens == len(PROMPT)
    (verdict,) = answer.verdicts
    assert (verdict.request_id, verdict.prefix_len, verdict.path) == (1, len(PROMPT), ())
    ranks.stop()
    assert seen == ["round 7"] and not ranks.errors


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_a_drafter_loads_reports_and_proposes(open_ranks, spec, drafter):
    spec = replace(spec, role="draft")
    if drafter == "ngram":
        spec = replace(spec, drafter=NgramDrafterConfig())
    ranks = open_ranks(spec)
    ready = ranks.hear()
    assert isinstance(ready, Ready) and ready.role == "draft"
    assert ("kv_slots" in ready.facts) == (drafter == "model"), "a lookup needs no memory to speak of"
    ranks.say(DRAFT)
    answer = ranks.hear()
    assert isinstance(answer, ProposalBatch) and answer.round == 7
    assert answer.proposals[0].tree.num_draft_tokens == 3


def test_ranks_of_a_role_work_together_and_the_lead_alone_answers(open_ranks, spec):
    single = open_ranks(spec)
    single.hear()
    single.say(VERIFY)
    expected = single.hear().verdicts
    ranks = open_ranks(*(replace(spec, rank=rank, size=2) for rank in range(2)))
    assert {ranks.hear().rank, ranks.hear().rank} == {0, 1}
    ranks.say(VERIFY)
    assert ranks.hear().verdicts == expected
    assert ranks.hear(0.2) is None, "one answer a round"


def test_a_rank_that_cannot_load_says_why_in_one_line(open_ranks, spec, models, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(models["target"], broken)
    (broken / "model.safetensors").write_bytes(b"not weights")
    ranks = open_ranks(replace(spec, target=replace(spec.target, path=str(broken))))
    failure = ranks.hear()
    assert isinstance(failure, Failure) and (failure.role, failure.rank) == ("target", 0)
    assert str(broken) in failure.text and "\n" not in failure.text
    ranks.stop()
    assert len(ranks.errors) == 1


def test_a_rank_that_fails_later_says_so_too(open_ranks, spec):
    ranks = open_ranks(spec)
    ranks.hear()
    ranks.say(VerifyBatch(1, items=(VerifyItem(99, 1),)))
    failure = ranks.hear()
    assert failure.text == "KeyError: 99" and "self.contexts" in failure.trace


def test_a_rank_keeps_to_its_cores_and_leaves_the_others_theirs(open_ranks, spec):
    before = os.sched_getaffinity(0)
    core, inside = min(before), []
    ranks = open_ranks(replace(spec, cores=(core,)), observe=lambda status: inside.append(os.sched_getaffinity(0)))
    assert ranks.hear().facts["cores"] == (core,)
    ranks.say(VERIFY)
    ranks.hear()
    ranks.stop()
    assert inside == [{core}] and os.sched_getaffinity(0) == before
