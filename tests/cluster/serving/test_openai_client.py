"""The official client: all that it can be asked for works or is refused by its name, and so do its own readers of
replies and streams."""

from __future__ import annotations

import asyncio
from typing import Any, get_type_hints

import openai
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import BaseModel, Field

from cluster.serving.requests import NEUTRAL, ChatRequest, CompletionRequest
from tests.cluster.serving.conftest import KEY, RunningServer

MESSAGES: Any = [{"role": "user", "content": "a"}]
CHAT: Any = {"model": "tiny-chat", "messages": MESSAGES, "seed": 2, "max_completion_tokens": 60}
WHOLE = {**CHAT, "max_completion_tokens": 300}
"""For replies that are to come to their end."""
FUNCTION = {"name": "now", "parameters": {"type": "object", "properties": {}}}
WORKS: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "logit_bias": {"65": -100},
    "logprobs": True,
    "max_completion_tokens": 3,
    "max_tokens": 3,
    "metadata": {"a": "b"},
    "modalities": ["text"],
    "n": 2,
    "parallel_tool_calls": False,
    "presence_penalty": 0.5,
    "prompt_cache_key": "k",
    "prompt_cache_retention": "in_memory",
    "response_format": {"type": "json_object"},
    "safety_identifier": "s",
    "seed": 1,
    "service_tier": "auto",
    "stop": ["x"],
    "store": False,
    "stream": False,
    "temperature": 0.5,
    "tool_choice": "none",
    "tools": [],
    "top_p": 0.9,
    "user": "u",
    "verbosity": "medium",
}
"""What a chat may be asked for, and a value that it is asked for with."""
REFUSED: dict[str, list[Any]] = {
    "audio": [{"voice": "alloy", "format": "wav"}],
    "function_call": [{"name": "now"}],
    "functions": [[FUNCTION]],
    "messages": [
        [{"role": "function", "name": "now", "content": "1"}],
        [{"role": "user", "content": [{"type": "file"}]}],
    ],
    "modalities": [["text", "audio"]],
    "moderation": [{"model": "omni"}],
    "prediction": [{"type": "content", "content": "a"}],  # no drafter here copies
    "prompt_cache_options": [{"mode": "explicit"}],
    "prompt_cache_retention": ["24h"],
    "reasoning_effort": ["low"],  # the template does not read it
    "response_format": [{"type": "grammar"}],
    "service_tier": ["flex", "priority"],
    "store": [True],
    "stream_options": [{"include_usage": True}],  # of what is no stream
    "tool_choice": ["required", {"type": "custom", "custom": {"name": "a"}}],
    "tools": [[{"type": "custom", "custom": {"name": "a"}}]],
    "top_logprobs": [3],  # without logprobs
    "verbosity": ["low", "high"],
    "web_search_options": [{}, {"search_context_size": "low"}],
}
"""What is refused, with values."""


class Point(BaseModel):
    x: int = Field(ge=0, le=9)


def fields_of(*forms: Any) -> set[str]:
    """The names that the client sends."""
    return {name for form in forms for name in get_type_hints(form)}


def test_a_chat_does_what_it_is_asked_for_or_names_what_it_does_not(server: RunningServer):
    """Whatever the client can send: what is new in it is refused, too."""
    chat = {"messages": MESSAGES, "max_tokens": 2}
    for name, value in WORKS.items():
        body = {**chat, name: value}
        if name == "max_completion_tokens":
            del body["max_tokens"]
        status, _, reply = server.ask("/v1/chat/completions", body)
        assert status == 200, reply
    known = fields_of(chat_create_params.CompletionCreateParamsNonStreaming)
    assert len(known) > 30
    new = {name: ["x"] for name in known - {*REFUSED, *WORKS, "model"}}
    for name, values in {**new, **REFUSED}.items():
        for value in values:
            status, _, reply = server.ask("/v1/chat/completions", {**chat, name: value})
            assert status == 400, (name, value)
            assert reply["error"]["param"].partition(".")[0] == name, reply


def test_a_completion_does_so_too(server: RunningServer):
    names = fields_of(completion_create_params.CompletionCreateParamsNonStreaming)
    assert names - {"stream_options"} <= {*CompletionRequest.model_fields, "best_of", "suffix"}
    for name, value in {"best_of": 3, "suffix": "a", "stream_options": {"include_usage": True}}.items():
        status, _, reply = server.ask("/v1/completions", {"prompt": "a", "max_tokens": 1, name: value})
        assert (status, reply["error"]["param"]) == (400, name)


def test_no_field_that_all_have_is_among_those_that_are_not_supported():
    assert {*NEUTRAL} & {*ChatRequest.model_fields} & {*CompletionRequest.model_fields} == set()


# --- the client's own readers -----------------------------------------------------------------------------------------


@pytest.mark.extended
def test_the_events_of_a_stream_are_those_of_the_whole_reply(client):
    body = {**WHOLE, "n": 2, "logprobs": True, "logit_bias": {"0": 4}}  # the end token
    whole = client.chat.completions.create(**body)
    with client.chat.completions.stream(**body, stream_options={"include_usage": True}) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    for choice, other in zip(whole.choices, final.choices, strict=True):
        assert (choice.message.content, choice.finish_reason) == (other.message.content, other.finish_reason)
        assert [one.token for one in choice.logprobs.content] == [one.token for one in other.logprobs.content]
    done = [event.content for event in events if event.type == "content.done"]
    assert sorted(done) == sorted(choice.message.content for choice in whole.choices)
    assert final.usage.completion_tokens == whole.usage.completion_tokens


def test_schemas_and_tools_of_the_client_are_followed_and_read(client):
    parsed = client.chat.completions.parse(**WHOLE, response_format=Point).choices[0].message.parsed
    assert isinstance(parsed, Point)
    with client.chat.completions.stream(**WHOLE, response_format=Point) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed
    tools = [openai.pydantic_function_tool(Point, name="put"), openai.pydantic_function_tool(Point, name="take")]
    for choice in ("required", {"type": "function", "function": {"name": "put"}}):
        body = {**WHOLE, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
        (call,) = client.chat.completions.parse(**body).choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, Point)
        with client.chat.completions.stream(**body) as stream:
            names = [event.name for event in stream if event.type == "tool_calls.function.arguments.done"]
            (other,) = stream.get_final_completion().choices[0].message.tool_calls
        assert (names, other.function) == ([call.function.name], call.function)


def test_raw_replies_have_headers_and_bodies(client):
    raw = client.chat.completions.with_raw_response.create(**CHAT, extra_headers={"x-request-id": "mine.2"})
    assert raw.headers["x-request-id"] == raw.request_id == "mine.2"
    assert raw.parse()._request_id == "mine.2" and raw.parse().id == "chatcmpl-mine.2"
    with client.completions.with_streaming_response.create(model="tiny-chat", prompt="a", stream=True) as streamed:
        lines = [line for line in streamed.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: {") for line in lines[:-1])


def test_models_are_listed_and_found(client):
    (model,) = client.models.list().data
    found = client.models.retrieve(model.id)
    assert found == model and found.max_model_len == 512
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_the_client_may_be_asynchronous_and_its_address_end_with_a_slash(server: RunningServer, client):
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1/", api_key=KEY, max_retries=0) as own:
            reply = own.chat.completions.create(**CHAT, extra_query={"api-version": "1"})
            chunks = await own.chat.completions.create(**CHAT, stream=True)
            text = "".join([choice.delta.content or "" async for chunk in chunks for choice in chunk.choices])
            return [(await reply).choices[0].message.content or "", text]

    wanted = client.chat.completions.create(**CHAT).choices[0].message.content
    assert asyncio.run(ask()) == [wanted, wanted]


@pytest.mark.parametrize(
    ("name", "ask"),
    [
        ("/v1/responses", lambda client: client.responses.create(model="tiny-chat", input="a")),
        ("/v1/embeddings", lambda client: client.embeddings.create(model="tiny-chat", input="a")),
        ("/v1/files", lambda client: client.files.list()),
        ("/v1/moderations", lambda client: client.moderations.create(input="a")),
        ("/v1/chat/completions/x", lambda client: client.chat.completions.retrieve("x")),
    ],
)
def test_a_route_that_there_is_not_is_named(client, name, ask):
    with pytest.raises(openai.NotFoundError, match=f"there is no route {name}"):
        ask(client)
