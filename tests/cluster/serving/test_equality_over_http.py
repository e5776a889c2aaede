"""The table of equality over HTTP, where tools are: a chat has the content, the calls and the log-probabilities that it
has alone without a drafter, whatever drafts, rows are known, places are lost and chats are served beside it.

`tests/actors/test_equality_table.py` has every drafter; here are the forms of replies, streamed or not.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import chain, product

import pytest

from actors.drafters.auto.config import AutoDrafterConfig
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from cluster.serving.logprobs import LogprobWriter
from parallel.kernels.attention import has_attention
from tests import matrices
from tests.actors.test_equality_table import take_places_once
from tests.cluster.serving.conftest import serving

SHAPE = {
    "type": "object",
    "properties": {"n": {"enum": [1, 23, True]}},
    "required": ["n"],
    "additionalProperties": False,
}
FUNCTION = {"name": "f", "parameters": SHAPE}
TOOLS = [{"type": "function", "function": one} for one in (FUNCTION, {"name": "now"})]
SAMPLINGS = {"greedy": {"temperature": 0}, "seeded": {"temperature": 1.0, "seed": 3}}
FORMS = {
    "free": {},
    "allowed": {"extra_body": {"allowed_token_ids": [*range(60, 90)]}},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": SHAPE}}},
    "required": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "named": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
}
ENDLESS = "free", "allowed"
LOGPROBS = {"": {}, "logprobs": {"logprobs": True, "top_logprobs": 2}}
COLUMNS = [
    tuple(value for _, value in cells)
    for cells in product(enumerate(SAMPLINGS), enumerate(FORMS), enumerate(LOGPROBS))
    if matrices.is_whole or sum(place for place, _ in cells) % 2 == 0
]
"""By default half of them, with every two values of two kinds."""
DRAFTERS = {
    "off": [{"enabled": False}],
    "ngram": [{"drafter": "ngram"}],
    "model": [{"drafter": "model"}],
    "mixed": [{"drafter": "ngram"}, {"enabled": False}, {"drafter": "model"}, {}, {"num_draft_tokens": 1}],
}
ROWS = ("cold", "hit", "preempted")


@pytest.fixture(scope="module")
def server(chat_checkpoint, half_agreeing_drafter):
    """A server with several drafters, and places for all columns."""
    members = [
        NgramDrafterConfig(min_ngram=1),
        ModelDrafterConfig(path=str(half_agreeing_drafter), num_draft_tokens=4, device="cpu"),
    ]
    config = AutoDrafterConfig(drafters=members, num_draft_tokens=4)
    with serving(chat_checkpoint, config, max_waiting=len(COLUMNS)) as running:
        running.service.warm_up()
        yield running


def body_of(column, salt, speculative):
    """Each form has a prompt of its own."""
    sampling, form, logprobs = column
    return {
        "model": "tiny-chat",
        "messages": [{"role": "user", "content": f"{form} things, and how many"}],
        "max_tokens": 12 if form in ENDLESS else 200,
        **SAMPLINGS[sampling],
        **FORMS[form],
        **LOGPROBS[logprobs],
        "extra_body": {"cache_salt": salt, "speculative": speculative, **FORMS[form].get("extra_body", {})},
    }


def shown(logprobs):
    """Their number, where a row's bits depend on the rows beside it."""
    return logprobs if has_attention() else len(logprobs)


def ask(client, body):
    """Content, calls, finish reason and log-probabilities of a chat; and the tokens of its prompt that were known."""
    reply = client.chat.completions.create(**body)
    (choice,) = reply.choices
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    logprobs = choice.logprobs.model_dump()["content"] if choice.logprobs is not None else []
    said = choice.message.content or "", calls, choice.finish_reason, shown(logprobs)
    return said, reply.usage.prompt_tokens_details.cached_tokens


def streamed(client, body):
    """The same of a stream, whose last chunk has the usage."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**body))
    parts = [one for chunk in chunks for one in chunk.choices]
    deltas = [call for one in parts for call in one.delta.tool_calls or ()]
    arguments = "".join([call.function.arguments or "" for call in deltas])
    calls = [(call.function.name, arguments) for call in deltas if call.id]  # no form here has more than one
    logprobs = [*chain(*[one.logprobs.model_dump()["content"] for one in parts if one.logprobs is not None])]
    content, reason = "".join([one.delta.content or "" for one in parts]), parts[-1].finish_reason
    return (content, calls, reason, shown(logprobs)), chunks[-1].usage.prompt_tokens_details.cached_tokens


@pytest.fixture(scope="module")
def alone(client):
    """The answers by column, one after the other, each as if it were the first."""
    bodies = {column: body_of(column, f"alone {column}", {"enabled": False}) for column in COLUMNS}
    return {column: ask(client, body)[0] for column, body in bodies.items()}


def batch(client, drafter, rows, how):
    """What all columns say at once, and what was known of their prompts."""
    if rows == "hit":
        for form in FORMS:
            ask(client, {**body_of(("greedy", form, ""), "known", {"enabled": False}), "max_tokens": 1})
    choices = DRAFTERS[drafter]
    bodies = [
        body_of(column, "known" if rows == "hit" else f"{drafter} {rows} {how} {column}", choices[i % len(choices)])
        for i, column in enumerate(COLUMNS)
    ]
    with ThreadPoolExecutor(len(bodies)) as threads:
        replies = [*threads.map(lambda body: how(client, body), bodies)]
    return {column: said for column, (said, _) in zip(COLUMNS, replies, strict=True)}, [known for _, known in replies]


def cells():
    """Drafts of all kinds in one batch by default; each by itself has all of its row with `-m slow`."""
    for i, (drafter, rows) in enumerate(product(DRAFTERS, ROWS)):
        for j, how in enumerate((ask, streamed)):
            is_usual = drafter == "mixed" and (i + j) % 2 == 0
            yield pytest.param(drafter, rows, how, marks=[] if is_usual else pytest.mark.slow)


@pytest.mark.extended
@pytest.mark.parametrize(("drafter", "rows", "how"), list(cells()))
def test_a_chat_says_what_it_says_alone(server, client, alone, drafter, rows, how, monkeypatch):
    before = server.engine.report().counters
    if rows == "preempted":
        take_places_once(monkeypatch)
    said, known = batch(client, drafter, rows, how)
    assert said == alone
    assert all(bool(num_tokens) == (rows == "hit") for num_tokens in known)
    num_preemptions, num_drafts = (
        server.engine.report().counters[name] - before[name] for name in ("num_preemptions", "num_draft_tokens")
    )
    assert num_preemptions >= len(COLUMNS) if rows == "preempted" else num_preemptions == 0
    assert bool(num_drafts) == (drafter != "off")


@pytest.mark.extended
def test_the_table_has_texts_of_each_form(alone):
    for (_, form, logprobs), (content, calls, reason, listed) in alone.items():
        wanted = dict.fromkeys(ENDLESS, "length") | {"required": "tool_calls"}
        assert reason == wanted.get(form, "stop")
        assert bool(calls) == (form in ("required", "named")) and bool(content) != bool(calls)
        assert bool(listed) == bool(logprobs)


@pytest.mark.extended
def test_a_planted_mistake_shows_where_it_is(client, alone, monkeypatch):
    """The control: the log-probability of each chunk's last token is lost."""
    part = LogprobWriter.part
    monkeypatch.setattr(LogprobWriter, "part", lambda own, i, text, found: part(own, i, text, found[:-1]))
    said, _ = batch(client, "mixed", "cold", streamed)
    assert {column for column in COLUMNS if said[column] != alone[column]} == {one for one in COLUMNS if one[2]}
