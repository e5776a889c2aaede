"""Roles replayed along known text behave as in the engine; ranks synchronise, and their errors are raised."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from actors.drafters.model.config import ModelDrafterConfig
from actors.protocol.messages import SamplingParams
from actors.worker import openmp
from actors.worker.factory import build_role
from cluster.config.jobs import PlanConfig
from cluster.config.schema import ClusterConfig, ClusterName
from cluster.engine import Engine
from cluster.placement.ranks import Devices, lay_out
from cluster.runtime.backend import rank_spec
from cluster.tools.planning.fidelity import measure_acceptance
from cluster.tools.planning.layouts import Layout, Shape
from cluster.tools.planning.measuring import derive_costs, measure, parts_of, role_pair, time_collectives
from cluster.tools.planning.prediction import Workload, predict
from cluster.tools.planning.ranks import RoleWork, run_on_ranks
from cluster.tools.planning.rounds import (
    KnownText,
    ReplayRank,
    ReplayScript,
    _Requests,
    replay_drafts,
    replay_verdicts,
)
from cluster.tools.planning.transcript import record
from parallel.comm.group import SINGLE
from parallel.model.decoder import Decoder
from parallel.model.families.registry import read_config

SAMPLING = SamplingParams(max_tokens=48, ignore_eos=True)
LENGTH = 4


PAIRS = []
"""The one pair of all tests here, once it is made: its fixtures are each test's own."""


@pytest.fixture
def pair(tiny_launch, half_agreeing_drafter, one_free_thread):
    """A target, a drafter that is right about half of the time, and what the target writes."""
    if PAIRS:
        return PAIRS[0]
    drafter = ModelDrafterConfig(path=str(half_agreeing_drafter), num_draft_tokens=LENGTH, device="cpu")
    config = tiny_launch(PlanConfig(draft_lengths=[1, LENGTH], seconds=0.1), drafter=drafter)
    with Engine(config) as engine:
        prompts = [engine.tokenizer.encode(text).ids for text in ("Name a bird.", "Write of a bird.")]
        answers = engine.generate(prompts, SAMPLING)
        texts = tuple(KnownText((*p, *a.token_ids), len(p)) for p, a in zip(prompts, answers, strict=True))
        counters = engine.report().counters
    PAIRS.append((config, texts, counters))
    return PAIRS[0]


def role_of(config, name: str):
    (place,) = [place for place in lay_out(config, Devices((0, 1))) if place.role == name]
    return build_role(rank_spec(config, place, "", "", ()), SINGLE)[0]


def engine_length(counters) -> float:
    return 1 + counters["num_accepted_tokens"] / counters["num_spec_steps"]


def script(texts, batch: int = 1, seconds: float = 0.0) -> ReplayScript:
    return ReplayScript(texts, SAMPLING, batch, (LENGTH,), seconds)


@pytest.mark.extended
def test_drafts_are_accepted_as_often_as_in_the_engine(pair):
    config, texts, counters = pair
    played = replay_drafts(role_of(config, "draft"), script(texts), ReplayRank())
    assert played.num_rounds > 20 and played.drafted[0] == played.num_rounds
    measured = [kept / offered for kept, offered in zip(played.accepted, played.drafted, strict=True)]
    engine = [
        kept / offered
        for kept, offered in zip(counters["num_accepted_per_pos"], counters["num_drafted_per_pos"], strict=True)
    ]
    assert measured == pytest.approx(engine, abs=0.15) and 0.05 < measured[0] < 0.98
    assert {one.rows for one in played.passes} == {1, 2}, "one token, or two after a draft that was all accepted"
    assert len(played.passes) == LENGTH * played.num_rounds and all(one.seconds > 0 for one in played.passes)


def test_a_drafter_ahead_works_between_its_rounds(pair):
    config, texts, _ = pair
    ahead = Layout(1, "branches", "separate", Shape()).configure(config, LENGTH)
    played = replay_drafts(role_of(ahead, "draft"), script(texts), ReplayRank(), work_steps=3)
    assert max(one.rows for one in played.passes) > 2 and played.accepted[0] > 0


@pytest.mark.parametrize("batch", [1, 2])
def test_the_target_verifies_drafts_of_every_length(pair, batch: int):
    config, texts, _ = pair
    role, verdicts = role_of(config, "target"), []
    answer = role.answer

    def recording(record):
        for given in answer(record):
            verdicts.extend(
                (len(verdict.path), item.proposal.tree.num_draft_tokens)
                for verdict, item in zip(given.verdicts, record.items, strict=True)
                if item.proposal
            )
            yield given

    role.answer = recording
    played = replay_verdicts(role, replace(script(texts, batch), lengths=(1, LENGTH)), ReplayRank())
    assert {one.rows for one in played.passes} == {batch, 2 * batch, (LENGTH + 1) * batch}
    assert verdicts and all(accepted == drafted for accepted, drafted in verdicts), "each is the target's text"


@pytest.mark.extended
def test_costs_and_text_predict_the_acceptance_of_the_engine(pair):
    config, texts, counters = pair
    todo = role_pair(Layout(1, "sync", "colocated", Shape()), config, Devices((0, 1)))
    assert todo.draft and not todo.overlaps
    acceptance, accepted = measure_acceptance(config.drafter, [1, 1], 1, texts, SAMPLING)
    assert 1 + accepted == pytest.approx(engine_length(counters), rel=0.15)
    measured = measure(todo, config, texts, SAMPLING)
    rounds = [one.num_rounds for one in (measured.target.watched, measured.draft.watched)]
    assert min(rounds) > 0 and max(rounds) - min(rounds) <= 1, "they take turns when watched too"
    for part, one in zip(parts_of([measured]), (measured.target, measured.draft), strict=True):
        assert {"attention", "mlp", "rest"} <= set(part["parts_ms"]) and min(part["parts_ms"].values()) > 0
        assert sum(part["parts_ms"].values()) == pytest.approx(part["watched_ms"]), "a pass and nothing else"
        assert one.watched.blocks["attention"] == one.watched.blocks["mlp"] == 2 * len(one.watched.passes)
        assert part["collective_ms"] == {}, "one rank"
    costs = derive_costs([measured], 2, 1e-4, {(): acceptance})
    assert costs.acceptance == acceptance and costs.of_drafter(Shape(), 1, 2, beside=False) is not None
    assert [cost.cores for cost in costs.target] == [2] and costs.link_s == 1e-4
    transcript = record(config.drafter, "cpu", texts, SAMPLING, ())
    assert len(transcript.tokens) == 2 * SAMPLING.max_tokens
    found = predict(Layout(1, "sync", "colocated", Shape()), LENGTH, costs, Workload(config.drafter, 1, transcript))
    assert found.tokens_per_round == pytest.approx(engine_length(counters), rel=0.15)


# --- ranks ------------------------------------------------------------------------------------------------------------


def time_on_ranks(path, place, group, sync):
    runner = SimpleNamespace(decoder=Decoder(read_config(Path(path)), group))
    return time_collectives(group, runner, 3)


def test_collectives_are_timed_on_the_group_itself(tiny_launch, one_free_thread):
    config = tiny_launch(PlanConfig())
    (found, *_) = run_on_ranks(roles_on_two_ranks(config, partial(time_on_ranks, config.target.path)), as_threads=True)
    assert set(found) == {"all_gather", "all_reduce"} and min(found.values()) > 0


def add_ranks(place, group, sync):
    sync.wait()
    return group.all_reduce(torch.tensor([float(place.rank + 1)])).item(), place.role


def fail_on_rank_one(place, group, sync):
    if place.rank == 1:
        raise ValueError("drafter.path: cannot be split; lower drafter.ranks")
    sync.wait()


def roles_on_two_ranks(config, work) -> list[RoleWork]:
    layout = Layout(2, "branches", "separate", Shape("tensor", 2))
    config = replace(config, cluster=replace(config.cluster, oversubscribe=True))
    places = lay_out(layout.configure(config, 1), Devices((0, 1)))
    return [RoleWork(tuple(place for place in places if place.role == role), work) for role in ("target", "draft")]


def test_each_role_has_its_own_group(tiny_launch, one_free_thread):
    roles = roles_on_two_ranks(tiny_launch(PlanConfig()), add_ranks)
    assert run_on_ranks(roles, as_threads=True) == [(3.0, "target"), (3.0, "draft")]


def count_turns(place, group, sync):
    times = []
    for turns in sync.phases:
        sync.wait()
        taken = []
        while turns.acquire(place.role, time.monotonic() if len(taken) == 3 else math.inf):
            taken.append(time.monotonic())
            turns.release(place.role)
        times.append(taken)
    return times


def test_two_leads_take_turns(tiny_launch, one_free_thread):
    places = lay_out(tiny_launch(PlanConfig()), Devices((0, 1)))
    alternating = [RoleWork((place,), count_turns) for place in places]
    for first, second in zip(*run_on_ranks(alternating, as_threads=True, in_turn=True), strict=True):
        assert len(first) == len(second) == 3
        assert sorted(first + second) == [at for pair in zip(first, second, strict=True) for at in pair]


def test_the_error_of_the_rank_that_failed_is_raised(tiny_launch, one_free_thread):
    with pytest.raises(ValueError, match="^drafter.path: cannot be split"):
        run_on_ranks(roles_on_two_ranks(tiny_launch(PlanConfig()), fail_on_rank_one), as_threads=True)


@pytest.mark.slow
def test_ranks_may_be_processes(tiny_launch):
    config = tiny_launch(PlanConfig(), cluster=ClusterConfig(ClusterName.local))
    target, _ = roles_on_two_ranks(config, add_ranks_and_report)
    expected = (3.0, openmp.settings_for(shared=target.places[0].share < 1))
    assert run_on_ranks([target], as_threads=False) == [expected]
    alone = [place for place in lay_out(config, Devices((0, 1))) if place.role == "target"]
    with pytest.raises(RuntimeError, match="died while it measured"):
        run_on_ranks([RoleWork(tuple(alone), partial(leave, 3))], as_threads=False)


def add_ranks_and_report(place, group, sync):
    return add_ranks(place, group, sync)[0], openmp.in_effect()


def leave(code, place, group, sync):
    os._exit(code)


def test_requests_replay_the_texts_in_turn_up_to_their_ends():
    texts = tuple(KnownText(tuple(range(100 * i, 100 * i + 9)), 2) for i in range(3))
    requests = _Requests(ReplayScript(texts, SAMPLING, 2, (2,), 0))
    seen = [text for text, _ in requests.live.values()]
    for _ in range(12):
        assert [admit.token_ids for admit in requests.admits()] == [(100 * i, 100 * i + 1) for i in _numbers(requests)]
        requests.begin()
        for text, length in requests.live.values():
            assert length + 2 < len(text.token_ids), "there is text for another round"
        requests.finish_round([requests.commit(i, (1, 2)) for i in requests.live])
        seen += [requests.live[i][0] for i in requests.begun]
        assert {commit.request_id for commit in requests.commits} == set(requests.live) - set(requests.begun)
    assert len(seen) > 6 and seen == [texts[i % 3] for i in range(len(seen))]


def _numbers(requests):
    return [request_id % 3 for request_id in requests.begun]
