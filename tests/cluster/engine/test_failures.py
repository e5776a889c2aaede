"""Failures in an engine in this process are recovered from or reported in one line; no caller waits."""

from __future__ import annotations

import shutil
import threading
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.coordinator.state_machine import Coordinator
from actors.drafters.model.drafter import ModelDrafter
from actors.options import TargetConfig, VerifyConfig, VerifyRule
from actors.protocol.messages import SamplingParams
from actors.roles.target import TargetRole
from actors.verification.verifier import Verifier
from actors.worker import factory
from cluster.config.schema import ClusterConfig, ClusterName
from cluster.engine import EngineError, connect
from cluster.runtime.inprocess import InprocessBackend
from tests.matrices import in_turn

LONG = SamplingParams(max_tokens=450, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8)
WAIT_S = 60
FINAL = ClusterConfig(ClusterName.inprocess, oversubscribe=True, max_restarts=0)
"""The first death ends the engine."""


pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.fixture
def break_after(monkeypatch):
    """Make a role's method raise at its n-th call."""

    def break_(owner, method, calls, error):
        right, count = getattr(owner, method), 0

        def wrong(self, *arguments, **options):
            nonlocal count
            count += 1
            if count >= calls:
                raise error
            return right(self, *arguments, **options)

        monkeypatch.setattr(owner, method, wrong)

    return break_


def until_it_raises(call):
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        call()
        time.sleep(0.05)


@pytest.fixture
def broken_target(tiny_checkpoint, tmp_path):
    path = tmp_path / "broken"
    shutil.copytree(tiny_checkpoint("Llama"), path)
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return TargetConfig(path=str(path), device="cpu")


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_rank_that_cannot_load_ends_the_start(open_engine, broken_target, tp):
    with pytest.raises(EngineError, match=r"^target-\d: .*broken.* tensor model.norm.weight holds NaN") as caught:
        open_engine(target=broken_target, tp=tp)
    assert "\n" not in str(caught.value)


def test_a_start_that_takes_too_long_names_who_is_missing(open_engine, monkeypatch):
    cluster, build_role = ClusterConfig(ClusterName.inprocess, startup_timeout_s=1e-9), factory.build_role
    is_given_up, right = threading.Event(), InprocessBackend.close

    def close(backend, **options):
        is_given_up.set()
        right(backend, **options)

    def build_late(*args, **options):
        assert is_given_up.wait(WAIT_S)
        return build_role(*args, **options)

    monkeypatch.setattr(factory, "build_role", build_late)
    monkeypatch.setattr(InprocessBackend, "close", close)
    with pytest.raises(
        EngineError, match=r"^cluster\.startup_timeout_s=1e-09: .*(target|draft)-0.* not ready by then; see"
    ):
        open_engine(cluster=cluster)


@pytest.mark.parametrize(
    ("owner", "method", "error", "line"),
    [
        (ModelDrafter, "propose", RuntimeError("boom\nat line 7"), "draft-0: RuntimeError: boom"),
        (TargetRole, "answer", AssertionError(), "target-0: AssertionError"),
        (TargetRole, "answer", ValueError("field: wrong; do this"), "target-0: field: wrong; do this"),
    ],
    ids=["drafter", "assertion", "user-error"],
)
def test_a_role_that_fails_ends_what_is_in_flight_and_what_comes(open_engine, break_after, owner, method, error, line):
    engine = open_engine(cluster=FINAL)
    break_after(owner, method, 5, error)
    asked = [engine.submit(prompt, LONG) for prompt in ("one", "two", "three")]
    for completion in asked:
        with pytest.raises(EngineError) as caught:
            completion.result(WAIT_S)
        assert str(caught.value) == line and completion.finish_reason == "error"
    for call in (lambda: engine.submit("four", SHORT), lambda: engine.generate(["five"], SHORT), engine.report):
        with pytest.raises(EngineError) as caught:
            call()
        assert str(caught.value) == line and "raise error" in str(caught.value.__cause__)


@pytest.mark.extended
@pytest.mark.parametrize(("rule", "temperature"), list(in_turn(["coupled", "rejection"], [0.0, 1.0])))
def test_logits_that_are_no_numbers_fail_their_request_alone(open_engine, monkeypatch, rule, temperature):
    engine = open_engine(verify=VerifyConfig(VerifyRule(rule)))
    sampling = replace(LONG, temperature=temperature, top_p=0.9)
    (right,) = engine.generate(["one"], SHORT)
    verify = Verifier.verify

    def poisoned(self, inputs, logits, *rest):
        for one in inputs:
            if one.sampling == sampling and len(one.token_ids) > 30:
                logits = torch.full_like(logits, float("nan"))
        return verify(self, inputs, logits, *rest)

    monkeypatch.setattr(Verifier, "verify", poisoned)
    broken = engine.submit("one", sampling)
    with pytest.raises(EngineError, match=r"^target: no token can follow the first 3\d: .*target.dtype or"):
        broken.result(WAIT_S)
    assert broken.finish_reason == "error" and len(broken.token_ids) >= 28
    assert engine.generate(["one"], SHORT)[0].token_ids == right.token_ids


def test_a_rank_beside_others_that_fails_ends_the_engine(open_engine, monkeypatch):
    engine = open_engine(tp=2, cluster=FINAL)
    right = TargetRole.answer

    def wrong(self, batch):
        if not self._is_lead and batch.round >= 3:
            raise RuntimeError("lost its device")
        return right(self, batch)

    monkeypatch.setattr(TargetRole, "answer", wrong)
    with pytest.raises(EngineError, match=r"^target-[01]: "):
        engine.submit("one", LONG).result(WAIT_S)
    engine.close()


def test_a_coordinator_that_fails_ends_the_engine(open_engine, monkeypatch):
    from actors.coordinator.scheduler import Scheduler

    engine = open_engine(cluster=FINAL)
    monkeypatch.setattr(Scheduler, "plan", lambda *_: 1 / 0)
    with pytest.raises(EngineError, match="^coordinator: ZeroDivisionError: division by zero$"):
        engine.submit("one", LONG).result(WAIT_S)
    engine.close()  # and the ranks were stopped, or their threads would be left


def test_every_client_learns_why_the_engine_failed_for_good(open_engine, break_after):
    engine = open_engine(cluster=FINAL)
    with connect(engine.address, engine.secret) as client, connect(engine.address, engine.secret) as idle:
        break_after(TargetRole, "answer", 3, RuntimeError("lost its device"))
        submitted = [one.submit("x", LONG) for one in (engine, client)]
        for completion in submitted:
            with pytest.raises(EngineError, match=r"^target-0: RuntimeError: lost its device$"):
                completion.result(WAIT_S)
        with pytest.raises(EngineError, match="lost its device"):
            until_it_raises(lambda: idle.submit("x", SHORT))


@pytest.mark.slow
def test_where_the_coordinator_failed_for_good_the_others_notice_its_silence(open_engine, break_after):
    """By default a client notices silence (`test_client.py`), and a coordinator that fails ends the engine (above)."""
    engine = open_engine(cluster=FINAL)
    with connect(engine.address, engine.secret) as client:
        break_after(Coordinator, "on", 3, RuntimeError("broken"))
        submitted = [one.submit("x", LONG) for one in (engine, client)]
        client._silence_s = 2.0
        with pytest.raises(EngineError, match=r"^coordinator: RuntimeError: broken$"):
            submitted[0].result(WAIT_S)
        with pytest.raises(EngineError, match=r"^tcp://127.*: no heartbeat of the engine for \d+ s$"):
            submitted[1].result(WAIT_S)


def test_closing_ends_what_is_in_flight_with_an_error_and_keeps_its_tokens(open_engine):
    engine = open_engine(pace_ms=50)
    completions = [engine.submit(prompt, LONG) for prompt in ("one", "two")]
    while not all(completion.token_ids for completion in completions):
        time.sleep(0.001)
    engine.close()
    for completion in completions:
        with pytest.raises(EngineError, match="^the engine was closed$"):
            completion.result(0)
        assert 0 < len(completion.token_ids) < LONG.max_tokens and completion.finish_reason == "error"
        assert completion.text == engine.tokenizer.decode(completion.token_ids)[: len(completion.text)]


def test_a_closed_engine_says_so_and_closes_once(open_engine):
    engine = open_engine("ngram")
    (completion,) = engine.generate(["one"], SHORT)
    engine.close()
    engine.close()
    completion.abort()
    for call in (lambda: engine.submit("two", SHORT), engine.report):
        with pytest.raises(EngineError, match="^the engine was closed$"):
            call()


def test_an_error_inside_the_block_closes_the_engine(open_engine):
    with pytest.raises(KeyError), open_engine("ngram") as engine:
        raise KeyError
    with pytest.raises(EngineError, match="closed"):
        engine.submit("one", SHORT)


def test_a_failed_request_shows_the_text_it_had_held_back(open_engine):
    """The last characters wait for a stop string; an error ends the waiting."""
    engine = open_engine(pace_ms=50)
    completion = engine.submit("one", replace(LONG, stop=("a stop string that is never seen",)))
    while len(completion.token_ids) < 10:
        time.sleep(0.001)
    engine.close()
    decoded = engine.tokenizer.decode(completion.token_ids)
    assert completion.text and decoded.startswith(completion.text) and len(decoded) - len(completion.text) <= 3
