"""Requests that no client of ours sends: each ends with a line, and the engine serves the others as before."""

from __future__ import annotations

import time
from dataclasses import replace
from math import nan

import pytest

from actors.options import VerifyConfig, VerifyRule
from actors.protocol.messages import Outputs, Request, SamplingParams, Tokens
from actors.roles.target import TargetRole
from actors.transport.channel import Link
from cluster.engine import EngineError

GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)
PROMPTS = ["def median(values):", "x", "class Stack:\n    def push"]
HARMFUL = {
    "an empty bad word": SamplingParams(bad_words=((),)),
    "a bias that is no number": SamplingParams(logit_bias=((5, nan),)),
    "a bias that overflows": SamplingParams(logit_bias=((5, 1e308),), top_p=0.9),
    "a penalty next to zero": SamplingParams(repetition_penalty=1e-300),
    "a temperature next to zero": SamplingParams(temperature=1e-300),
    "a temperature without end": SamplingParams(temperature=1e300, bad_words=((5,),)),
}


@pytest.fixture
def send():
    """Send a record as another client of this engine, over the network, and get the answers of the next moments."""
    links: list[Link] = []

    def send_and_wait(engine, *records, wait_s=20.0):
        link = Link(
            engine.address.replace("127.0.0.1", "localhost"),
            "client:default:bad",
            engine._backend.keys.of("client:default"),
        )
        links.append(link)
        for record in records:
            link.send(record)
        ends: dict[int, Tokens] = {}
        deadline = time.monotonic() + wait_s
        while len(ends) < len(records) and (left_s := deadline - time.monotonic()) > 0:
            record = link.receive(left_s)
            news = record.tokens if isinstance(record, Outputs) else ()
            ends |= {tokens.request_id: tokens for tokens in news if tokens.finish_reason is not None}
        assert len(ends) == len(records), "a request got no answer"
        return [ends[record.request_id] for record in records]

    yield send_and_wait
    for link in links:
        link.close()


def tokens_of(completions):
    return [completion.token_ids for completion in completions]


def test_requests_that_cannot_be_carried_out_are_answered_with_a_line_and_harm_no_other(open_engine, send):
    engine = open_engine("ngram")
    plain = tokens_of(engine.generate(PROMPTS, GREEDY, drafter="none"))
    running = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    answers = send(engine, *[Request(1000 + i, (5, 6), params) for i, params in enumerate(HARMFUL.values())])
    assert {answer.finish_reason for answer in answers} == {"error"}
    assert all(answer.error.startswith("sampling.") and "\n" not in answer.error for answer in answers)
    assert tokens_of(completion.result(30) for completion in running) == plain
    assert tokens_of(engine.generate(PROMPTS, GREEDY)) == plain
    assert not engine.supervisor.incidents and not engine.report().counters["num_role_losses"]


EVERY_TOKEN = tuple((token,) for token in range(257))
IMPOSSIBLE = {
    "every token a bad word": dict(bad_words=EVERY_TOKEN),
    "every token an end": dict(bad_words=EVERY_TOKEN[128:], stop_token_ids=tuple(range(128)), min_tokens=9),
    "an allowed token that may not come": dict(bad_words=((5,),), allowed_token_ids=(5,)),
    "an end alone, too early": dict(stop_token_ids=(9,), allowed_token_ids=(9,), min_tokens=9),
    "every token a bad word after some": dict(bad_words=tuple((5, token) for token in range(257))),
}


RULES = [
    pytest.param(rule, marks=[] if rule in ("coupled", "rejection", "traversal") else pytest.mark.slow)
    for rule in VerifyRule
    if rule != "auto"
]
"""By default one of each kind: of coupled draws, of chains and of trees; `tests/actors/test_contract.py` has all."""


@pytest.mark.extended
@pytest.mark.parametrize("rule", RULES)
def test_where_no_token_can_follow_the_request_ends_and_no_role_is_lost(open_engine, rule):
    engine = open_engine(verify=VerifyConfig(rule))
    plain = tokens_of(engine.generate(PROMPTS, GREEDY, drafter="none"))
    running = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    for temperature in (0.0, 0.8):
        for impossible in IMPOSSIBLE.values():
            for drafter in (None, "none"):
                sampling = SamplingParams(temperature, max_tokens=30, ignore_eos=True, top_p=0.9, **impossible)
                ruled_out = engine.submit([6, 5], sampling, drafter=drafter)
                with pytest.raises(EngineError, match=r"^target: no token can follow the first 2: .*bad_words.*"):
                    ruled_out.result(30)
                assert not ruled_out.token_ids, "a banned token came out"
    assert tokens_of(completion.result(30) for completion in running) == plain
    assert tokens_of(engine.generate(PROMPTS, GREEDY)) == plain
    counters = engine.report().counters
    assert not engine.supervisor.incidents and not counters["num_role_losses"] and not counters["num_unreadable"]


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_request_with_which_the_target_raises_ends_and_its_neighbours_do_not(open_engine, monkeypatch, tp):
    """Whatever it is that the checks let through: one death in company, one alone."""
    verify_input = TargetRole._verify_input

    def raising(self, item, **options):
        if self.contexts[item.request_id].admit.sampling.seed == 666:
            raise RuntimeError("index out of range")
        return verify_input(self, item, **options)

    monkeypatch.setattr(TargetRole, "_verify_input", raising)
    engine = open_engine("ngram", tp=tp)
    plain = tokens_of(engine.generate(PROMPTS, GREEDY, drafter="none"))
    running = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    culprit = engine.submit("x", SamplingParams(seed=666))
    with pytest.raises(EngineError, match=r"^target: 2 passes with this request failed \(RuntimeError: index out of"):
        culprit.result(60)
    assert tokens_of(completion.result(60) for completion in running) == plain
    assert tokens_of(engine.generate(PROMPTS, GREEDY)) == plain
    assert len({incident.identity for incident in engine.supervisor.incidents}) == tp
    assert all(incident.incarnation < 2 for incident in engine.supervisor.incidents), "two deaths of a rank"


def test_a_request_on_which_the_verdicts_are_refused_ends_and_its_neighbours_do_not(open_engine, monkeypatch):
    """The coordinator does not believe its own target everything."""
    verify = TargetRole._verify

    def lying(self, inputs, logits, **options):
        culprits = {one.seq_id for one in inputs if one.sampling.seed == 666}
        verdicts = verify(self, inputs, logits, **options)
        return tuple(replace(one, token_ids=(10**6,)) if one.request_id in culprits else one for one in verdicts)

    monkeypatch.setattr(TargetRole, "_verify", lying)
    engine = open_engine("ngram")
    plain = tokens_of(engine.generate(PROMPTS, GREEDY, drafter="none"))
    running = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    with pytest.raises(EngineError, match=r"^target: 2 passes with this request failed \(sent a record that was"):
        engine.submit("x", SamplingParams(seed=666)).result(60)
    assert tokens_of(completion.result(60) for completion in running) == plain
    counters = engine.report().counters
    assert counters["num_refused"] == counters["num_role_losses"] == {"target": 2}


def test_requests_that_are_complete_take_no_seat(open_engine, send):
    engine = open_engine("ngram")
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    complete = [Request(1000 + i, (5, 6), sampling, generated=(7,) * 4) for i in range(70)]
    too_long = Request(2000, (5, 6), sampling, generated=(7,) * 5)
    *ended, refused = send(engine, *complete, too_long)
    assert {answer.finish_reason for answer in ended} == {"length"}
    assert refused.error == "generated: has 5 tokens; give at most sampling.max_tokens=4"
    assert engine.generate(["x"], GREEDY)[0].finish_reason == "length"
