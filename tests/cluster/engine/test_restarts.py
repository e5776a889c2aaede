"""What dies in an engine in this process is replaced, and the tokens stay those of plain decoding."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace

import pytest

from actors.coordinator import membership
from actors.coordinator.scheduler import Scheduler
from actors.drafters.auto.config import AutoDrafterConfig
from actors.drafters.cascade.config import CascadeDrafterConfig, LevelLengths, LevelsPlacement
from actors.drafters.cascade.level import CascadeDrafter
from actors.drafters.config import Placement
from actors.drafters.lookup.ngram import NgramDrafter, NgramDrafterConfig
from actors.drafters.lookup.suffix import SuffixDrafterConfig
from actors.drafters.model.ahead_drafter import AheadDrafter
from actors.drafters.model.config import LengthRule, ModelDrafterConfig
from actors.drafters.model.drafter import ModelDrafter
from actors.options import Parallel, PipelineConfig, PipelineName
from actors.protocol.messages import SamplingParams
from actors.roles.target import TargetRole
from actors.worker.draft_rank_loop import DraftRankLoop
from actors.worker.rank_loop import RankLoop
from cluster.config.schema import ClusterConfig, ClusterName
from cluster.engine import EngineError
from cluster.runtime.inprocess import InprocessBackend

PROMPTS = ["def median(values):", "x", "class Stack:\n    def push"]
LONG = SamplingParams(max_tokens=56, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=56, ignore_eos=True, temperature=0.8, repetition_penalty=1.2, min_tokens=40)
WAIT_S = 60
FAR = PipelineConfig(PipelineName.tree, adaptive=False, local_drafter="ngram")


pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.fixture
def break_at(monkeypatch):
    """Make a method raise at these of its calls, counted over all objects of the class."""

    def break_(owner, method, *calls, only=lambda self: True):
        right, count = getattr(owner, method), 0

        def wrong(self, *arguments, **options):
            nonlocal count
            count += only(self)
            if count in calls and only(self):
                raise RuntimeError(f"{method} broke at call {count}")
            return right(self, *arguments, **options)

        monkeypatch.setattr(owner, method, wrong)

    return break_


@pytest.fixture(scope="module")
def plain_tokens():
    """Temperature -> token ids of plain decoding per prompt, filled by the first test that needs them."""
    return {}


@pytest.fixture
def plain(open_engine, plain_tokens):
    if not plain_tokens:
        with open_engine("none") as engine:
            for sampling in (LONG, SAMPLED):
                completions = engine.generate(PROMPTS, sampling)
                plain_tokens[sampling.temperature] = [completion.token_ids for completion in completions]
    return plain_tokens


FAULTS = {
    "drafter": (dict(drafter="model"), ModelDrafter, "propose", (9, 24), "draft-0"),
    "lookup": (dict(drafter="ngram"), NgramDrafter, "propose", (9,), "draft-0"),
    "branches": (
        dict(drafter="model", pipeline=PipelineConfig(PipelineName.branches, adaptive=False)),
        ModelDrafter,
        "_with_room",
        (9,),
        "draft-0",
    ),
    "far": (dict(drafter="model", pipeline=FAR), AheadDrafter, "work", (9, 24), "draft-0"),
    "target": (dict(drafter="model"), TargetRole, "answer", (9, 24), "target-0"),
    "plain-target": (dict(drafter="none"), TargetRole, "answer", (25,), "target-0"),
    "coordinator": (dict(drafter="model"), Scheduler, "plan", (12, 32), "coordinator"),
}


SLOW = "branches", "lookup", "far", "plain-target"
"""Not by default: whose roles are those of others, or of the rank ahead whose pass never returns (below)."""


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in FAULTS]
)
def test_what_dies_is_replaced_and_the_tokens_are_the_same(open_engine, break_at, plain, fault):
    layout, owner, method, calls, identity = FAULTS[fault]
    engine = open_engine(**layout)
    break_at(owner, method, *calls)
    incidents, deadline = engine.supervisor.incidents, time.monotonic() + WAIT_S
    while len(incidents) < len(calls):  # texts may end before a drafter, or its successor, gets so far
        for sampling in (LONG, SAMPLED):
            assert [one.token_ids for one in engine.generate(PROMPTS, sampling)] == plain[sampling.temperature]
        assert time.monotonic() < deadline
    assert [incident.identity for incident in incidents] == [identity] * len(calls)
    assert f"{method} broke at call" in incidents[0].cause
    if identity != "coordinator":
        role, counters, deadline = identity[:-2], engine.report().counters, time.monotonic() + WAIT_S
        # the last text may end before the loss is counted, and before it is back
        while role not in counters["resume_s"] or counters["num_role_losses"] != {role: len(calls)}:
            assert time.monotonic() < deadline, counters["num_role_losses"]
            time.sleep(0.05)
            counters = engine.report().counters
        assert all(0 < seconds < WAIT_S for seconds in counters["resume_s"][role])


def drafters_on_two_ranks(path, which):
    model = ModelDrafterConfig(path=str(path), device="cpu", num_draft_tokens=3, ranks=2, parallel=Parallel.tensor)
    small, lookup = replace(model, num_draft_tokens=2), NgramDrafterConfig(min_ngram=1)
    if which == "cascade":
        return CascadeDrafterConfig(levels=(small, model), num_draft_tokens=3)
    return AutoDrafterConfig(drafters=(lookup, model), placement=Placement.separate, num_draft_tokens=3)


@pytest.mark.extended
@pytest.mark.parametrize("which", ["auto", "cascade"])
def test_one_of_two_ranks_with_several_drafters_is_replaced(open_engine, break_at, plain, half_agreeing_drafter, which):
    """Its successor takes over how many KV rows each model has, which the two had measured together."""
    engine = open_engine(drafters_on_two_ranks(half_agreeing_drafter, which), pipeline=PipelineConfig(adaptive=False))
    break_at(DraftRankLoop, "_answers", 9, only=lambda loop: loop.spec.rank == 1)
    deadline, counters = time.monotonic() + WAIT_S, {"resume_s": {}}
    while "draft" not in counters["resume_s"]:
        assert time.monotonic() < deadline
        assert [one.token_ids for one in engine.generate(PROMPTS, LONG)] == plain[0.0]
        counters = engine.report().counters
    assert [incident.identity for incident in engine.supervisor.incidents] == ["draft-1"]
    before = counters["num_accepted_tokens"]
    assert [one.token_ids for one in engine.generate(PROMPTS, LONG)] == plain[0.0]
    assert engine.report().counters["num_accepted_tokens"] > before


def learning_drafter(path, which):
    """What they keep between requests: answers, measured lengths, and how sure the model was when it was right."""
    model = ModelDrafterConfig(path=str(path), device="cpu", ranks=2, parallel=Parallel.tensor, num_draft_tokens=5)
    return {
        "suffix": CascadeDrafterConfig(levels=(SuffixDrafterConfig(), model), num_draft_tokens=3),
        "lengths": CascadeDrafterConfig(
            levels=(replace(model, num_draft_tokens=2), model), num_draft_tokens=4, lengths=LevelLengths.auto
        ),
        "threshold": replace(model, length_rule=LengthRule.threshold),
        "ahead": model,
        "attached": ModelDrafterConfig(path=str(path), length_rule=LengthRule.threshold, num_draft_tokens=5),
    }[which]


@pytest.mark.extended
@pytest.mark.parametrize(
    "which",
    ["suffix", "attached", *(pytest.param(one, marks=pytest.mark.slow) for one in ("lengths", "threshold", "ahead"))],
)
def test_ranks_beside_one_that_is_replaced_forget_what_their_drafter_learned(
    open_engine, break_at, plain, half_agreeing_drafter, which
):
    """The successor has learned nothing, and ranks that draft differently would wait for each other's rows."""
    role = "target" if which == "attached" else "draft"
    pipeline = PipelineName.branches if which == "ahead" else PipelineName.sync
    options = {"tp": 2} if which == "attached" else {}
    drafter = learning_drafter(half_agreeing_drafter, which)
    engine = open_engine(drafter, pipeline=PipelineConfig(pipeline, adaptive=False), **options)
    for _ in range(3):
        assert [one.token_ids for one in engine.generate(PROMPTS, LONG)] == plain[0.0]
    break_at(RankLoop, "_check", 5, only=lambda loop: loop.spec.identity == f"{role}-1")
    deadline, counters = time.monotonic() + WAIT_S, {"resume_s": {}}
    while role not in counters["resume_s"]:
        assert time.monotonic() < deadline
        assert [one.token_ids for one in engine.generate(PROMPTS, LONG)] == plain[0.0]
        counters = engine.report().counters
    before = counters["draft_busy_s"]
    for _ in range(3):
        assert [one.token_ids for one in engine.generate(PROMPTS, LONG)] == plain[0.0]
    counters = engine.report().counters
    assert counters["draft_busy_s"] > before
    assert [incident.identity for incident in engine.supervisor.incidents] == [f"{role}-1"]
    assert counters["num_role_losses"] == {role: 1}


LEVELS = {
    "lowest": (ModelDrafter, None, "draft3-0"),
    "middle": (CascadeDrafter, 1, "draft2-0"),
    "last": (CascadeDrafter, 2, "draft-0"),
}
NAMES = ("0-model", "1-model", "2-model")


@pytest.mark.extended
@pytest.mark.parametrize(
    "dead, pipeline",
    [
        ("middle", PipelineName.branches),
        pytest.param("lowest", PipelineName.branches, marks=pytest.mark.slow),
        pytest.param("middle", PipelineName.sync, marks=pytest.mark.slow),
        pytest.param("last", PipelineName.branches, marks=pytest.mark.slow),
    ],
)
def test_a_level_of_a_cascade_that_dies_is_replaced_and_used_again(
    open_engine, break_at, plain, half_agreeing_drafter, dead, pipeline
):
    owner, level, identity = LEVELS[dead]
    levels = [ModelDrafterConfig(path=str(half_agreeing_drafter), num_draft_tokens=k, device="cpu") for k in (2, 3, 4)]
    cascade = CascadeDrafterConfig(levels=levels, num_draft_tokens=4, placement=LevelsPlacement.separate)
    engine = open_engine(cascade, pipeline=PipelineConfig(pipeline, adaptive=False))
    break_at(owner, "_with_room", 6, only=lambda drafter: level is None or drafter._spec.number == level)
    assert [one.token_ids for one in engine.generate(PROMPTS, LONG)] == plain[0.0]
    worked, deadline = {}, time.monotonic() + WAIT_S
    # its successor may join during any of them
    while not (engine.supervisor.incidents and all(worked.get(name, {}).get("num_drafts") for name in NAMES)):
        assert time.monotonic() < deadline, f"a level was never used again: {worked}"
        engine.report(reset=True)
        assert [one.token_ids for one in engine.generate(PROMPTS, SAMPLED)] == plain[0.8]
        worked = engine.report().counters["levels"]
    assert [incident.identity for incident in engine.supervisor.incidents] == [identity]


@pytest.mark.extended
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_ranks_beside_the_one_that_died_keep_their_weights(open_engine, break_at, plain, monkeypatch, rank):
    loads, roles = [], []
    import actors.worker.factory

    right = actors.worker.factory.build_role

    def build(spec, *arguments):
        loads.append(spec.rank)
        role, facts = right(spec, *arguments)
        roles.append(role)
        return role, facts

    monkeypatch.setattr(actors.worker.factory, "build_role", build)
    engine = open_engine(tp=2)
    loads.clear()
    break_at(TargetRole, "answer", 9, only=lambda role: role._is_lead == (rank == 0))
    assert [one.token_ids for one in engine.generate(PROMPTS, LONG)] == plain[0.0]
    assert loads == [rank] and [one.identity for one in engine.supervisor.incidents] == [f"target-{rank}"]
    engine.close()
    for runner in (role.runner if isinstance(role, TargetRole) else role.drafter.runner for role in roles):
        runner.pool.check()
        assert runner.pool.can_reserve(runner.pool.num_slots), "a KV slot leaked"


def test_too_many_deaths_of_who_is_needed_end_the_engine_with_the_reason(open_engine, break_at):
    engine = open_engine(cluster=ClusterConfig(ClusterName.inprocess, oversubscribe=True, max_restarts=2))
    break_at(TargetRole, "answer", *range(5, 1000))
    with pytest.raises(EngineError, match="^target: 2 passes with this request failed"):
        engine.submit("one", LONG).result(WAIT_S)
    with pytest.raises(EngineError) as caught:
        engine.submit("two", LONG).result(WAIT_S)
    assert str(caught.value) == (
        "target-0: RuntimeError: answer broke at call 7; replaced 2 times within the hour (cluster.max_restarts=2)"
    )
    with pytest.raises(EngineError) as caught:
        engine.submit("three", LONG)
    assert "in wrong" in str(caught.value.__cause__), "where it broke is at hand"


def test_a_drafter_that_dies_too_often_is_left_out_and_decoding_goes_on_plainly(open_engine, break_at, plain):
    engine = open_engine(cluster=ClusterConfig(ClusterName.inprocess, oversubscribe=True, max_restarts=1))
    break_at(ModelDrafter, "propose", *range(5, 1000))
    while len(engine.supervisor.incidents) < 2:  # its successor may join during any of them
        assert [one.token_ids for one in engine.generate(PROMPTS, LONG)] == plain[0.0]
    engine.report(reset=True)
    assert [one.token_ids for one in engine.generate(PROMPTS, SAMPLED)] == plain[0.8]
    assert [(one.identity, one.replaced) for one in engine.supervisor.incidents] == [
        ("draft-0", True),
        ("draft-0", False),
    ]
    assert engine.report().counters["num_draft_tokens"] == 0


@pytest.mark.extended
@pytest.mark.parametrize(
    "owner, method, identity, sections",
    [
        (TargetRole, "answer", "target-0", {}),
        pytest.param(ModelDrafter, "propose", "draft-0", {}, marks=pytest.mark.slow),  # a draft role, as the next one
        (AheadDrafter, "prefetched", "draft-0", {"pipeline": FAR}),
    ],
)
def test_a_rank_whose_pass_never_returns_is_replaced_and_the_tokens_are_the_same(
    open_engine, plain, monkeypatch, owner, method, identity, sections
):
    """Its heart goes on beating. Here a thread that is ended leaves its wait with an error."""
    ended, calls, right = threading.Event(), itertools.count(1), getattr(owner, method)

    def stick(self, *arguments):
        if next(calls) == 9:
            ended.wait()
            raise RuntimeError("ended")
        return right(self, *arguments)

    monkeypatch.setattr(owner, method, stick)
    monkeypatch.setattr(membership, "FLOOR_S", 2.0)
    monkeypatch.setattr(InprocessBackend, "can_kill", True)
    monkeypatch.setattr(InprocessBackend, "kill", lambda backend, who, pid: ended.set() if who == identity else None)
    cluster = ClusterConfig(ClusterName.inprocess, oversubscribe=True, silence_s=1000.0)
    engine = open_engine(cluster=cluster, **sections)
    assert [one.token_ids for one in engine.generate(PROMPTS, LONG)] == plain[0.0]
    until = time.monotonic() + WAIT_S
    while not engine.supervisor.incidents and time.monotonic() < until:  # a drafter may be asked less than nine times
        assert [one.token_ids for one in engine.generate(PROMPTS, LONG)] == plain[0.0]
        time.sleep(0.05)
    assert [(one.identity, one.cause) for one in engine.supervisor.incidents] == [(identity, "hung and was ended")]


def test_an_end_waits_for_no_watch(open_engine, monkeypatch):
    """The first process that ends wakes the supervisor."""
    monkeypatch.setattr("cluster.runtime.supervisor._POLL_S", 10 * WAIT_S)
    engine = open_engine()
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(WAIT_S)
    assert not closing.is_alive() and not engine.supervisor.incidents


def test_requests_that_come_or_are_aborted_during_an_outage_are_answered(open_engine, break_at, plain, monkeypatch):
    engine, answer, is_aborted = open_engine(), TargetRole.answer, threading.Event()

    def answer_afterwards(role, batch):
        assert not engine.supervisor.incidents or is_aborted.wait(WAIT_S)
        return answer(role, batch)

    monkeypatch.setattr(TargetRole, "answer", answer_afterwards)  # or the successor may end them all before
    break_at(Scheduler, "plan", 8)
    first = engine.submit(PROMPTS[0], LONG)
    while not engine.supervisor.incidents:
        time.sleep(0.001)
    second, third = engine.submit(PROMPTS[1], LONG), engine.submit(PROMPTS[2], LONG)
    third.abort()
    is_aborted.set()
    assert [first.result(WAIT_S).token_ids, second.result(WAIT_S).token_ids] == plain[0.0][:2]
    assert third.result(WAIT_S).finish_reason == "abort"
    engine.close()


def test_an_engine_may_be_closed_while_a_role_is_away(open_engine, break_at):
    engine = open_engine(pace_ms=20)
    break_at(TargetRole, "answer", 5)
    too_long = replace(LONG, max_tokens=480)  # for the successor to end it before `close`
    completion = engine.submit(PROMPTS[0], too_long)
    while not engine.supervisor.incidents:
        time.sleep(0.001)
    engine.close()
    with pytest.raises(EngineError, match="^the engine was closed$"):
        completion.result(WAIT_S)


@pytest.mark.extended
@pytest.mark.parametrize(
    "owner, method, within_s, reason",
    [(Scheduler, "plan", WAIT_S, "coordinator: RuntimeError"), (TargetRole, "answer", 0.5, "is ending")],
)
def test_an_engine_that_winds_down_waits_for_no_successor(open_engine, break_at, owner, method, within_s, reason):
    """Ctrl-C or a batch system may end the rest of the cluster too: what there is must be written, and soon."""
    engine = open_engine(pace_ms=20)
    completion = engine.submit(PROMPTS[0], replace(LONG, max_tokens=480))
    engine.wind_down(within_s)
    break_at(owner, method, 2)
    with pytest.raises(EngineError, match=reason):
        completion.result(WAIT_S)
    with pytest.raises(EngineError, match=reason):
        engine.report()
    assert not engine.supervisor.incidents
    engine.close()
