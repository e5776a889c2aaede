"""One table of equality: what a client is sent does not depend on drafts, on kept rows, on lost places or on the
requests beside it.

Its axes are drafters, the state of the rows, samplings and what is asked for. A cell of the first two is a batch of
every combination of the last two, and each request has the tokens, and the bits of the log-probabilities, that it has
alone under plain decoding without a prefix tree.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest
import torch
from tokenizers import Tokenizer

from actors.coordinator.scheduler import RoundPlan, Scheduler
from actors.grammars.masks import GrammarMasks
from actors.options import SchedulerConfig
from actors.protocol.grammar import Grammar
from actors.protocol.messages import PLAIN_DECODING
from actors.roles.target import TargetRole
from actors.verification.logprobs import LogprobReader
from parallel.kernels.attention import has_attention
from tests.actors.conftest import EOS, VOCAB_SIZE, byte_level_tokenizer
from tests.actors.test_contract import DRAFTERS, EVERY_KIND, ON_TARGET
from tests.actors.test_prefix_contract import lend_any_rows
from tests.matrices import in_turn

SHAPE = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "of": {"enum": ["a", "bc", "bd"]}},
    "required": ["n"],
    "additionalProperties": False,
}
CALLS = {
    "type": "array",
    "items": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for name, parameters in (("f", SHAPE), ("g", {"type": "boolean"}))
        ]
    },
    "minItems": 1,
    "maxItems": 1,
}
"""What the server prescribes for `tool_choice=required`; how calls are read from the text is no part of this table."""
SCHEMA, TOOLS = (Grammar("json_schema", json.dumps(schema)) for schema in (SHAPE, CALLS))
SAMPLINGS = {"greedy": {}, "seeded": {"temperature": 1.0}}
ASKED = {
    "free": {},
    "schema": {"grammar": SCHEMA},
    "tools": {"grammar": TOOLS},
    "logprobs": {"logprobs": 3},
    "allowed tokens": {"logprobs": 1},
    "schema and logprobs": {"grammar": SCHEMA, "logprobs": 3},
    "tools and logprobs": {"grammar": TOOLS, "logprobs": 0},
}
LIMITED = {"allowed tokens": {"allowed_token_ids": (EOS, *range(9, VOCAB_SIZE, 5))}}
"""What of the sampling is asked for."""
COLUMNS = list(product(SAMPLINGS, ASKED))
LIMITS = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=180, prefill_chunk=24)
ROWS = {
    "cold": dict(limits=replace(LIMITS, prefix_cache=False)),
    "hit": dict(limits=LIMITS),
    "preempted": dict(limits=LIMITS, slots=300),
}
MIXED = {"mixed": DRAFTERS["auto"], "mixed-attached": EVERY_KIND}
"""Requests of one batch name a drafter each, plain decoding, or nothing."""
SINGLE = {name: config for name, config in (DRAFTERS | ON_TARGET).items() if config.name != "auto"}
USUAL = {config.name: name for name, config in reversed(SINGLE.items())}.values()
"""The first of each method."""
LIKE_OTHERS = "suffix", "copy", "aded", "rest", "lookahead", "maxgram", "routed"
"""Rows of USUAL whose drafts are lookups, guesses or a draft model's, as those of rows that run by default."""


def prompt_of(request):
    """Long enough to find rows of."""
    return (*range(2, 22), *request.prompt)


@pytest.fixture
def requests(make_requests):
    """One for each column, in their order."""
    made = []
    for one, (sampling, asked) in zip(make_requests(len(COLUMNS), longest=40), COLUMNS, strict=True):
        most = 48 if "grammar" in ASKED[asked] else 12
        params = replace(one.sampling, max_tokens=most, **SAMPLINGS[sampling], **LIMITED.get(asked, {}))
        made.append(replace(one, prompt=prompt_of(one), sampling=params, **ASKED[asked]))
    return made


def said(room, request_id):
    """What a client was sent; of log-probabilities their number, where a row's bits depend on the rows beside it."""
    logprobs = room.logprobs.get(request_id)
    shown = logprobs if room.has_exact_rows or logprobs is None else len(logprobs)
    return room.tokens[request_id], room.ends[request_id], shown


@pytest.fixture(scope="module")
def rooms():
    return {}


@pytest.fixture
def alone(open_room, requests, rooms):
    """The room, by column, of a request that has a target of its own and no drafter."""
    for column, one in zip(COLUMNS, requests, strict=True):
        if column not in rooms:
            rooms[column] = open_room(pipeline="plain", **ROWS["cold"]).serve([one])
    return rooms


def serve(open_room, requests, drafter, rows):
    if drafter == "off":
        return open_room(pipeline="plain", **ROWS[rows]).serve(requests)
    config = (SINGLE | MIXED)[drafter]
    if drafter in MIXED:
        names = *config.member_names, PLAIN_DECODING, None
        requests = [replace(one, drafter=names[one.request_id % len(names)]) for one in requests]
    is_attached = drafter in ON_TARGET or drafter == "mixed-attached"
    return open_room(config, attached=is_attached, **ROWS[rows]).serve(requests)


def take_places_once(monkeypatch):
    """Every request loses its place behind its first tokens, as one does to another client's, if not before."""
    plan_pass = Scheduler.plan

    def planned(scheduler, *bounds):
        lost = RoundPlan()
        victims = [one for one in scheduler.running if one.num_generated and not one.num_preemptions]
        scheduler._vacate(victims, lost)
        plan = plan_pass(scheduler, *bounds)
        plan.preempted[:0] = lost.preempted
        return plan

    monkeypatch.setattr(Scheduler, "plan", planned)


def differing(room, alone, first=0):
    """The columns of a batch, whose first request has this number, in which something else was said than alone."""
    return {column for i, column in enumerate(COLUMNS) if said(room, first + i) != said(alone[column], i)}


TIMES = dict.fromkeys(SINGLE, 0) | dict.fromkeys(USUAL, 1) | dict.fromkeys(LIKE_OTHERS, 0) | {"chain": 3}
"""A method of each kind with one state of the rows, the draft model with all: `test_prefix_contract.py` has hits, and
`test_contract.py` preemption, of others."""


@pytest.mark.parametrize(("drafter", "rows"), list(in_turn(("off", *SINGLE, *MIXED), ROWS, times=TIMES)))
def test_a_request_is_sent_what_it_is_sent_alone(open_room, requests, alone, drafter, rows, monkeypatch):
    again = [replace(one, request_id=len(COLUMNS) + i) for i, one in enumerate(requests)] if rows == "hit" else []
    if rows == "preempted":
        take_places_once(monkeypatch)
    room = serve(open_room, [*requests, *again], drafter, rows)
    assert not differing(room, alone)
    if rows == "hit":
        assert not differing(room, alone, len(COLUMNS))
        assert all(room.cached[one.request_id] == len(one.prompt) - 1 for one in again)
    assert all(bool(times) == (rows == "preempted") for times in room.preempted.values())
    assert drafter == "off" or room.stats.num_draft_tokens > 0


@pytest.mark.parametrize("column", COLUMNS)
def test_log_probabilities_are_of_the_raw_logits(alone, requests, models, column):
    """They are compared with those of transformers, where tokens are ruled out and where none are: one that is stays as
    likely as it was."""
    i = COLUMNS.index(column)
    if requests[i].logprobs is None:
        assert i not in alone[column].logprobs
        return
    tokens, logprobs = alone[column].tokens[i], alone[column].logprobs[i]
    with torch.no_grad():
        logits = models["reference"](torch.tensor([[*requests[i].prompt, *tokens]])).logits[0]
    expected = logits.log_softmax(-1)[len(requests[i].prompt) - 1 : -1]
    ranks = []
    for token, row, (token_ids, values, rank) in zip(tokens, expected, logprobs, strict=True):
        listed = memoryview(token_ids).cast("i").tolist()
        assert listed[0] == token and listed[1:] == row.topk(requests[i].logprobs).indices.tolist()
        torch.testing.assert_close(torch.tensor(memoryview(values).cast("f").tolist()), row[listed], rtol=0, atol=1e-4)
        ranks += memoryview(rank).cast("i").tolist()
    if column[0] == "greedy":
        assert (max(ranks) > 1) == (requests[i].grammar is not None or column[1] in LIMITED)


@pytest.mark.parametrize("column", [column for column in COLUMNS if "grammar" in ASKED[column[1]]])
def test_texts_under_a_grammar_are_whole(alone, models, column):
    """So that the table is one of JSON."""
    i = COLUMNS.index(column)
    tokens = alone[column].tokens[i]
    assert alone[column].ends[i] == "stop" and tokens[-1] == EOS
    tokenizer = Tokenizer.from_str(byte_level_tokenizer(models["target"]))
    value = json.loads(tokenizer.decode(tokens[:-1]))
    assert isinstance(value, dict if "schema" in column[1] else list) and value


# --- negative controls ------------------------------------------------------------------------------------------------


def _masked_in_place(monkeypatch):
    masked = torch.inference_mode()(GrammarMasks.masked)
    in_place = torch.inference_mode()(torch.Tensor.copy_)
    monkeypatch.setattr(
        GrammarMasks, "masked", lambda own, inputs, logits: in_place(logits, masked(own, inputs, logits))
    )


def _grammar_begins_anew(monkeypatch):
    admit = TargetRole._admit
    monkeypatch.setattr(TargetRole, "_admit", lambda own, one: admit(own, replace(one, prompt_len=len(one.token_ids))))


def _value_off(monkeypatch):
    rows = LogprobReader._rows
    monkeypatch.setattr(LogprobReader, "_rows", lambda own, *of: rows(own, *of) * (1 + 1e-6))


PLANTS = {
    "masked in place": ("cold", _masked_in_place, {"schema and logprobs", "tools and logprobs"}),
    "a grammar begins anew": (
        "preempted",
        _grammar_begins_anew,
        {asked for asked in ASKED if "grammar" in ASKED[asked]},
    ),
    "rows of another text": ("hit", lend_any_rows, set(ASKED)),
    "a millionth off": ("cold", _value_off, {asked for asked in ASKED if "logprobs" in ASKED[asked]}),
}


@pytest.mark.skipif(not has_attention(), reason="PyTorch's products depend on the rows beside")
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_mistake_shows_where_it_is(open_room, requests, alone, monkeypatch, name):
    rows, plant, where = PLANTS[name]
    if rows == "preempted":
        take_places_once(monkeypatch)
    plant(monkeypatch)
    found = differing(serve(open_room, requests, "chain", rows), alone)
    assert found and {asked for _, asked in found} <= where
