"""Log-probabilities over HTTP, with the official client: those of the engine, in OpenAI's lists, streamed or not."""

from __future__ import annotations

from itertools import chain

import pytest

from actors.protocol.messages import SamplingParams
from parallel.kernels.attention import has_attention
from tests.matrices import in_turn

PROMPT = "def médian(x):"
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
MESSAGES = [{"role": "user", "content": "Büffel"}]
BODIES = [
    {"temperature": 0, "max_tokens": 12},
    {"temperature": 1.2, "seed": 5, "max_tokens": 16, "n": 2},
    {"temperature": 0.9, "seed": 3, "max_tokens": 20, "extra_body": {"min_tokens": 9}, "stop": ["e", "a"]},
]


def same(values):
    """Compares equal to these log-probabilities: to the bit where a row's do not depend on the rows beside it."""
    tolerance = dict(rel=0, abs=0) if has_attention() else dict(rel=1e-4, abs=1e-5)
    return [value if value is None else pytest.approx(value, **tolerance) for value in values]


@pytest.mark.parametrize(("enabled", "sampling"), list(in_turn([True, False], BODIES, times={True: 3})))
def test_a_completion_lists_what_the_engine_says_of_each_token(client, server, sampling, enabled):
    extra = {"speculative": {"enabled": enabled}, **sampling.get("extra_body", {})}
    body = {**sampling, "extra_body": extra}
    reply = client.completions.create(model="tiny-chat", prompt=PROMPT, logprobs=3, **body)
    for choice in reply.choices:
        params = {name: value for name, value in sampling.items() if name not in ("n", "seed", "extra_body")}
        params |= sampling.get("extra_body", {})
        params = SamplingParams(**{**params, "stop": tuple(params.get("stop", ())), "seed": choice.seed})
        (wanted,) = server.engine.generate([PROMPT], params, drafter="none", logprobs=3)
        said = choice.logprobs
        pairs = zip(wanted.token_ids, wanted.logprobs, strict=True)
        assert said.token_logprobs == same(entry[token].logprob for token, entry in pairs)
        assert choice.text == wanted.text and len(said.tokens) == len(said.text_offset) == len(wanted.token_ids)
        for token, value, top in zip(said.tokens, said.token_logprobs, said.top_logprobs, strict=True):
            assert top[token] == value and len(top) in (3, 4) and [*top.values()] == sorted(top.values(), reverse=True)


def test_tokens_are_listed_by_their_numbers_on_request(client):
    """As vLLM names them; all else stays."""
    body = {"temperature": 0, "max_tokens": 9, "extra_body": {"return_token_ids": True}}
    by_id = {**body, "extra_body": {"return_token_ids": True, "return_tokens_as_token_ids": True}}
    completion = {"model": "tiny-chat", "prompt": PROMPT, "logprobs": 2}
    (named,), (listed,) = (client.completions.create(**completion, **one).choices for one in (body, by_id))
    assert listed.logprobs.tokens == [f"token_id:{token}" for token in listed.token_ids] != named.logprobs.tokens
    assert listed.logprobs.text_offset == named.logprobs.text_offset
    for top, other in zip(listed.logprobs.top_logprobs, named.logprobs.top_logprobs, strict=True):
        assert len(top) >= len(other) and {name.partition(":")[0] for name in top} == {"token_id"}
        assert all(same([value])[0] in top.values() for value in other.values())
    chat = {"model": "tiny-chat", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    (named,), (listed,) = (client.chat.completions.create(**chat, **one).choices for one in (body, by_id))
    for token, one, other in zip(listed.token_ids, listed.logprobs.content, named.logprobs.content, strict=True):
        assert (one.token, one.bytes) == (f"token_id:{token}", other.bytes)
        assert [one.logprob] == same([other.logprob])
        assert [top.bytes for top in one.top_logprobs] == [top.bytes for top in other.top_logprobs]
    chunks = client.chat.completions.create(**chat, **by_id, stream=True)
    parts = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs is not None]
    assert [one.token for part in parts for one in part.content] == [one.token for one in listed.logprobs.content]


@pytest.mark.extended
@pytest.mark.parametrize(("echo", "sampling"), list(in_turn([False, True], BODIES, times={False: 2, True: 2})))
def test_the_chunks_of_a_completion_list_what_its_whole_reply_lists(client, sampling, echo):
    body = {"model": "tiny-chat", "prompt": PROMPT, "logprobs": 2, "echo": echo, "seed": 1, **sampling}
    whole = client.completions.create(**body)
    for choice in whole.choices:
        chunks = [one for chunk in client.completions.create(stream=True, **body) for one in chunk.choices]
        parts = [one.logprobs for one in chunks if one.index == choice.index and one.logprobs is not None]
        listed = {field: [*chain(*[getattr(part, field) for part in parts])] for field in LISTS}
        for field in ("tokens", "text_offset"):
            assert listed[field] == getattr(choice.logprobs, field)
        assert listed["token_logprobs"] == same(choice.logprobs.token_logprobs)
        for streamed, kept in zip(listed["top_logprobs"], choice.logprobs.top_logprobs, strict=True):
            assert streamed == kept or ([*streamed] == [*kept] and [*streamed.values()] == same(kept.values()))


def test_an_echo_scores_the_prompt(client, server):
    """As harnesses ask that score texts: token ids, one token more, and the values of the prompt."""
    prompt = server.engine.tokenizer.encode(PROMPT).ids
    body = {"model": "tiny-chat", "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    (choice,) = client.completions.create(prompt=prompt, **body).choices
    (wanted,) = server.engine.generate([prompt], SamplingParams(max_tokens=1), prompt_logprobs=1, logprobs=1)
    said = choice.logprobs
    assert len(said.tokens) == len(prompt) + 1 and said.token_logprobs[0] is None and said.top_logprobs[0] is None
    pairs = zip(prompt[1:], wanted.prompt_logprobs[1:], strict=True)
    assert said.token_logprobs[1:-1] == same(entry[token].logprob for token, entry in pairs)
    assert choice.text.startswith(PROMPT) and said.text_offset[0] == 0
    texts = [token for token in said.tokens if not token.startswith("bytes:")]
    offsets = [at for at, token in zip(said.text_offset, said.tokens, strict=True) if not token.startswith("bytes:")]
    assert all(choice.text.startswith(text, at) for text, at in zip(texts[:-1], offsets, strict=False))


def test_a_prompt_may_be_scored_alone(client, server):
    body = {"model": "tiny-chat", "max_tokens": 2, "temperature": 0, "extra_body": {"prompt_logprobs": 2}}
    (choice,) = client.completions.create(prompt=PROMPT, **body).choices
    chat = client.chat.completions.create(messages=MESSAGES, **body)
    (wanted,) = server.engine.generate([PROMPT], SamplingParams(max_tokens=2), prompt_logprobs=2)
    assert choice.logprobs is None and choice.prompt_logprobs[0] is None and chat.prompt_logprobs[0] is None
    for said, row in zip(choice.prompt_logprobs[1:], wanted.prompt_logprobs[1:], strict=True):
        assert {int(i): one["rank"] for i, one in said.items()} == {i: one.rank for i, one in row.items()}
        assert [one["logprob"] for one in said.values()] == same(row[int(i)].logprob for i in said)


@pytest.mark.extended
@pytest.mark.parametrize(("top", "sampling"), list(in_turn([0, 3], BODIES, times={3: 3})))
def test_a_chat_lists_bytes_that_join_to_its_text_streamed_or_not(client, sampling, top):
    body = {"model": "tiny-chat", "messages": MESSAGES, "logprobs": True, "top_logprobs": top, "seed": 1, **sampling}
    whole = client.chat.completions.create(**body)
    chunks = [one for chunk in client.chat.completions.create(stream=True, **body) for one in chunk.choices]
    for choice in whole.choices:
        content = choice.logprobs.content
        parts = [one.logprobs.content for one in chunks if one.index == choice.index and one.logprobs is not None]
        streamed = [*chain(*parts)]
        assert [(one.token, one.bytes) for one in streamed] == [(one.token, one.bytes) for one in content]
        assert [one.logprob for one in streamed] == same(one.logprob for one in content)
        for one, kept in zip(streamed, content, strict=True):
            assert [other.token for other in one.top_logprobs] == [other.token for other in kept.top_logprobs]
            assert [other.logprob for other in one.top_logprobs] == same(other.logprob for other in kept.top_logprobs)
        text = bytes(byte for token in content for byte in token.bytes).decode(errors="replace")
        assert text.startswith(choice.message.content) and ("stop" in sampling or text == choice.message.content)
        for token in content:
            assert len(token.top_logprobs) in ((top, top + 1) if top else (0,))
            assert not top or (token.token, token.logprob) in [(one.token, one.logprob) for one in token.top_logprobs]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("completions", {"prompt": "x", "logprobs": 21}, "logprobs"),
        ("completions", {"prompt": "x", "logprobs": -1}, "logprobs"),
        ("completions", {"prompt": "x", "logprobs": True}, "logprobs"),
        ("completions", {"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
        ("completions", {"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"messages": MESSAGES, "logprobs": 2}, "logprobs"),
    ],
)
def test_what_cannot_be_listed_is_refused_by_name(server, path, body, field):
    status, _, reply = server.ask(f"/v1/{path}", body)
    assert (status, reply["error"]["param"]) == (400, field)


def test_nothing_is_listed_for_those_that_do_not_ask(client):
    (choice,) = client.completions.create(model="tiny-chat", prompt=PROMPT, max_tokens=3).choices
    assert choice.logprobs is None and not hasattr(choice, "prompt_logprobs")
