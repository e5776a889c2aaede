"""What a rank's options become: each reaches what sizes, opens and drafts, and the facts say what was built."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest

from actors.drafters.config import Placement
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.self_speculation.config import SelfDrafterConfig
from actors.options import SchedulerConfig, VerifyConfig
from actors.roles.draft import DraftRole
from actors.roles.target import TargetRole
from actors.worker import target_rank
from actors.worker.factory import build_role
from parallel.comm.group import SINGLE
from parallel.kv.pass_plan import Span
from parallel.runtime import pacing
from parallel.runtime.kv_sizing import DeviceShare


class Calls:
    """Calls of functions that go on to the real ones."""

    def __init__(self, monkeypatch, *names):
        self.of = {}
        for name in names:
            monkeypatch.setattr(target_rank, name, self._kept(name, getattr(target_rank, name)))

    def _kept(self, name, function):
        def kept(*arguments, **options):
            self.of[name] = arguments, dict(options)
            if name == "fit_slots":  # which asks the driver of a GPU for what others leave
                options["sharing"] = None
            return function(*arguments, **options)

        return kept


@pytest.mark.parametrize(("pipeline", "rows"), [("plain", 1), ("sync", 8)])
def test_every_option_of_a_target_reaches_what_sizes_and_opens_it(spec, monkeypatch, pipeline, rows):
    """Each has a value of its own, none of them a default."""
    calls = Calls(monkeypatch, "fit_slots", "open_model", "captured_facts", "graph_shapes")
    target = replace(
        spec.target, kv_slots=123, max_model_len=77, stretch=3, weights="float32", attention="sdpa", dtype="float32"
    )
    limits = SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=41)
    drafter = replace(spec.drafter, num_draft_tokens=7)
    spec = replace(spec, target=target, scheduler=limits, drafter=drafter, neighbour_bytes=11, memory_part=0.75)
    role, facts = build_role(replace(spec, pipeline=pipeline), SINGLE)
    assert isinstance(role, TargetRole)
    positional, options = calls.of["fit_slots"]
    assert positional == (target.path, SINGLE, "cpu", "float32")
    assert calls.of["graph_shapes"][0] == (5, rows, 41) and options.pop("graphs") is calls.of["captured_facts"][0][1]
    assert options == dict(
        stretch=3,
        weights="float32",
        kv_dtype="auto",
        max_model_len=77,
        num_slots=123,
        max_num_seqs=5,
        num_logit_rows=0,
        max_num_batched_tokens=41,
        sharing=DeviceShare(11, 0.75),
        beside=(0, 0),
        invariant=False,
    )
    (path, group, device, _, num_slots, stretch), options = calls.of["open_model"]
    assert (path, group, device, num_slots, stretch) == (target.path, SINGLE, "cpu", 123, 3)
    assert options["backend"] == "sdpa"
    assert calls.of["captured_facts"][0][2] == () and role.runner.config.num_layers == 2 + 3
    assert (facts["kv_slots"], facts["max_model_len"], facts["checkpoint"]) == (123, 77, target.path)


def test_an_invariant_target_is_sized_and_opened_as_one(spec, monkeypatch):
    calls = Calls(monkeypatch, "fit_slots", "open_model")
    target = replace(spec.target, numerics="invariant")
    with suppress(ValueError):  # where there is no compiler
        build_role(replace(spec, target=target, pipeline="plain"), SINGLE)
    assert [calls.of[name][1]["invariant"] for name in ("fit_slots", "open_model")] == [True, True]


@pytest.mark.parametrize(("part", "neighbours"), [(1.0, 0), (0.5, 0), (1.0, 9)])
def test_a_device_is_shared_if_others_are_on_it(spec, monkeypatch, part, neighbours):
    calls = Calls(monkeypatch, "fit_slots")
    build_role(replace(spec, memory_part=part, neighbour_bytes=neighbours), SINGLE)
    shared = None if (part, neighbours) == (1.0, 0) else DeviceShare(neighbours, part)
    assert calls.of["fit_slots"][1]["sharing"] == shared


@pytest.mark.parametrize("drafter", [NgramDrafterConfig(), SelfDrafterConfig(exit=1)])
def test_a_target_is_paced_once_for_each_pass_whatever_drafts_with_its_layers(spec, monkeypatch, drafter):
    """Draft rows that a pass takes over cost a pass of the target's lower layers: no pace of its own."""
    sleeps = []
    monkeypatch.setattr(pacing, "time", SimpleNamespace(perf_counter=time.perf_counter, sleep=sleeps.append))
    role, _ = build_role(replace(spec, target=replace(spec.target, pace_ms=1000), drafter=drafter), SINGLE)
    assert isinstance(role, TargetRole)
    role.runner.open(1)
    for span in (Span(1, 5, num_logits=1), Span(1, 1)):
        role.runner.forward([span], [2] * span.num_tokens)
        role.runner.commit(1, range(span.num_tokens))
    assert len(sleeps) == 2 and all(0.5 < seconds <= 1 for seconds in sleeps)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_facts_of_a_process_are_its_own(spec, role):
    began = time.monotonic()
    cores = tuple(sorted(os.sched_getaffinity(0)))
    _, facts = build_role(replace(spec, role=role, cores=cores), SINGLE)
    load_s = facts["load_s"]
    assert isinstance(load_s, float)
    assert 0 < load_s <= time.monotonic() - began, "the time it took, and no more"
    assert (facts["pid"], facts["device"], facts["cores"]) == (os.getpid(), "cpu", list(cores))


@pytest.mark.parametrize("placement", [Placement.separate, Placement.attached])
def test_a_drafter_is_built_for_what_the_rank_is(spec, monkeypatch, placement):
    setups, build = [], NgramDrafterConfig.build
    monkeypatch.setattr(NgramDrafterConfig, "build", lambda self, setup: setups.append(setup) or build(self, setup))
    Calls(monkeypatch, "fit_slots")
    verify, limits = VerifyConfig(law_size=9), SchedulerConfig(max_num_seqs=3)
    is_attached = placement is Placement.attached
    spec = replace(spec, drafter=NgramDrafterConfig(placement=placement), verify=verify, scheduler=limits)
    role, _ = build_role(replace(spec, role="target" if is_attached else "draft", memory_part=0.5), SINGLE)
    (setup,) = setups
    found = setup.verify, setup.pipeline, setup.scheduler, setup.group, setup.device, setup.eos_token_ids
    assert found == (verify, "sync", limits, SINGLE, "cpu", (1,))
    assert setup.target == spec.target and setup.sharing == DeviceShare(0, 0.5)
    assert (setup.target_runner is not None) == is_attached and (not is_attached or isinstance(role, TargetRole))


@pytest.mark.parametrize(
    ("changes", "runs_ahead"),
    [
        (dict(), True),
        (dict(is_thread=True), False),
        (dict(drafter=NgramDrafterConfig(placement=Placement.separate)), False),
        (dict(size=2), False),
    ],
)
def test_a_target_runs_ahead_where_it_drafts_and_waits_for_another_process(spec, changes, runs_ahead):
    spec = replace(spec, drafter=NgramDrafterConfig(placement=Placement.attached))
    role, _ = build_role(replace(spec, **changes), SINGLE)
    assert isinstance(role, TargetRole)
    assert (role._ahead is not None) is runs_ahead


@pytest.mark.parametrize("adapts", [True, False])
def test_a_drafter_adapts_if_the_policy_does(spec, adapts):
    role, _ = build_role(replace(spec, role="draft", adaptive=adapts, pipeline="tree"), SINGLE)
    assert isinstance(role, DraftRole)
    assert (role._width_chooser is not None) is adapts
