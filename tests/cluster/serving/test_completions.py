"""Completions over HTTP, with the official client: the text and tokens of the engine, streamed or not."""

from __future__ import annotations

import json

import openai
import pytest

from actors.protocol.messages import SamplingParams
from tests.cluster.serving.conftest import NUM_DRAFT_TOKENS, RunningServer

PROMPT = "def médian(x):"
SAMPLED = {"temperature": 0.8, "seed": 7, "max_tokens": 24}


def streamed(client: openai.OpenAI, **body) -> tuple[dict[int, str], dict[int, str], list]:
    """Texts and reasons by choice, and all chunks."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    chunks = list(client.completions.create(model="tiny-chat", stream=True, **body))
    for choice in [choice for chunk in chunks for choice in chunk.choices]:
        assert choice.index not in reasons
        texts[choice.index] = texts.get(choice.index, "") + choice.text
        if choice.finish_reason is not None:
            reasons[choice.index] = choice.finish_reason
    return texts, reasons, chunks


def test_the_model_is_listed(client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.max_model_len) == ("tiny-chat", "model", 512)
    assert client.models.retrieve("tiny-chat") == model


@pytest.mark.parametrize("sampling", [{"temperature": 0, "max_tokens": 24}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("enabled", [True, False], ids=["speculation", "plain"])
def test_the_text_is_the_engines(client, server: RunningServer, sampling, enabled):
    body = {"prompt": PROMPT, **sampling, "extra_body": {"speculative": {"enabled": enabled}}}
    reply = client.completions.create(model="tiny-chat", **body)
    (choice,) = reply.choices
    (wanted,) = server.engine.generate([PROMPT], SamplingParams(**sampling), drafter="none")
    assert (choice.text, choice.finish_reason, choice.index) == (wanted.text, wanted.finish_reason, 0)
    num_prompt, num_tokens = len(wanted.prompt_token_ids), len(wanted.token_ids)
    usage = (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens)
    assert usage == (num_prompt, num_tokens, num_prompt + num_tokens)
    assert reply.object == "text_completion" and reply.id.startswith("cmpl-") and reply.model == "tiny-chat"
    speculation = reply.metrics["speculative_decoding"]
    assert len(speculation["acceptance_histogram"]) == speculation["num_spec_tokens"] + 1 == NUM_DRAFT_TOKENS + 1
    assert (speculation["num_spec_steps"] > 0) == enabled and type(speculation["mean_acceptance_length"]) is float
    texts, reasons, _ = streamed(client, **body)
    assert (texts, reasons) == ({0: choice.text}, {0: choice.finish_reason})


@pytest.mark.extended
def test_a_request_may_bound_its_drafts(client):
    replies = {}
    for options in ({"enabled": False}, {}, {"num_draft_tokens": 1}, {"num_draft_tokens": NUM_DRAFT_TOKENS}):
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 40, "extra_body": {"speculative": options}}
        replies[str(options)] = client.completions.create(model="tiny-chat", **body)
    assert len({reply.choices[0].text for reply in replies.values()}) == 1
    histograms = [reply.metrics["speculative_decoding"]["acceptance_histogram"] for reply in replies.values()]
    assert sum(histograms[1][2:]) > 0 == sum(histograms[2][2:]) and histograms[1] == histograms[3]
    assert sum(histograms[2][:2]) > 0


def test_every_stream_joins_to_the_reply_that_is_not_streamed(client):
    """Random weights write bytes that make no character, characters of several bytes, and text cut within one."""
    for seed in range(2):
        body = {"prompt": PROMPT, "temperature": 1.2, "seed": seed, "max_tokens": 20 + 3 * seed, "n": 2}
        whole = client.completions.create(model="tiny-chat", **body)
        texts, reasons, chunks = streamed(client, **body, stream_options={"include_usage": True})
        assert texts == {choice.index: choice.text for choice in whole.choices}
        assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
        assert chunks[-1].usage.total_tokens == whole.usage.total_tokens and not chunks[-1].choices
        assert all(chunk.usage is None for chunk in chunks[:-1])


def test_usage_can_come_with_every_chunk(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    texts, _, chunks = streamed(client, prompt=PROMPT, **SAMPLED, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and 0 < counts[0] < 24 and counts[-1] == counts[-2] == 24 and texts


def test_usage_says_how_much_of_the_prompt_was_known(client):
    """A prompt counts once, and as known if all its choices had it; a salt keeps it apart."""
    prompt = list(range(3, 43))
    body = {"prompt": prompt, "max_tokens": 4}

    def cached(**changes):
        usage = client.completions.create(model="tiny-chat", **body | changes).usage
        return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens

    salted, second = {"extra_body": {"cache_salt": "mine"}}, [4, *prompt]
    assert [cached(), cached(), cached(n=3), cached(**salted), cached(**salted)] == [
        (40, c) for c in (0, 39, 39, 0, 39)
    ]
    assert cached(prompt=[prompt, second], n=2) == (81, 39)
    _, _, chunks = streamed(client, **body, stream_options={"include_usage": True})
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 39


def test_the_last_chunk_has_the_metrics(client):
    body = {"prompt": PROMPT, **SAMPLED}
    _, _, chunks = streamed(client, **body, stream_options={"include_usage": True})
    whole = client.completions.create(model="tiny-chat", **body)
    assert chunks[-1].metrics == whole.metrics


def test_a_stream_ends_as_openai_s_does(server: RunningServer):
    _, headers, text = server.ask("/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 3, "seed": 1})
    *events, done, end = text.split("\n\n")
    assert headers.get_content_type() == "text/event-stream" and (done, end) == ("data: [DONE]", "")
    assert all(json.loads(event.removeprefix("data: "))["object"] == "text_completion" for event in events)


@pytest.mark.extended
def test_prompts_are_texts_or_tokens_or_several(client, server: RunningServer):
    ids = [server.engine.tokenizer.encode(text).ids for text in ("abc", "xyz")]
    one = [client.completions.create(model="tiny-chat", prompt=p, **SAMPLED).choices[0].text for p in ("abc", "xyz")]
    for prompts in (["abc", "xyz"], ids):
        reply = client.completions.create(model="tiny-chat", prompt=prompts, **SAMPLED)
        assert [choice.text for choice in reply.choices] == one
        assert reply.usage.prompt_tokens == 6 and reply.metrics is None
    assert client.completions.create(model="tiny-chat", prompt=ids[0], **SAMPLED).choices[0].text == one[0]


@pytest.mark.extended
def test_each_choice_has_a_seed_of_its_own_that_gives_it_again(client):
    for given in ({}, {"seed": 2**63 - 1}):
        body = {"prompt": ["abc", "xyz"], "temperature": 1, "max_tokens": 12, **given}
        choices = client.completions.create(model="tiny-chat", n=3, **body).choices
        assert [choice.index for choice in choices] == list(range(6))
        assert len({choice.text for choice in choices[:3]}) == 3
        for choice in (choices[0], choices[4]):  # the second has a seed behind the largest one
            alone = {**body, "prompt": body["prompt"][choice.index // 3], "seed": choice.seed}
            assert client.completions.create(model="tiny-chat", **alone).choices[0].text == choice.text
    seeds = [client.completions.create(model="tiny-chat", prompt="a", max_tokens=1).choices[0].seed for _ in range(2)]
    assert seeds[0] != seeds[1]


def test_a_stop_string_ends_the_text_wherever_drafts_end(client, server: RunningServer):
    text = client.completions.create(model="tiny-chat", prompt=PROMPT, **SAMPLED).choices[0].text
    for start in range(2, len(text) - 4, 11):
        stop = text[start : start + 3]
        body = {"prompt": PROMPT, **SAMPLED, "stop": [stop]}
        whole = client.completions.create(model="tiny-chat", **body).choices[0]
        assert (whole.text, whole.finish_reason) == (text[: text.index(stop)], "stop")
        texts, reasons, _ = streamed(client, **body)
        assert (texts, reasons) == ({0: whole.text}, {0: "stop"})
    assert server.num_running() == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_end_says_what_stopped_it(client, stream):
    """As vLLM's `stop_reason`: the string, the token, or null; the string is shown on request."""

    def last(**fields):
        body = {"model": "tiny-chat", "prompt": PROMPT, **SAMPLED, **fields}
        reply = client.completions.create(**body, stream=stream)
        choices = [chunk.choices[0] for chunk in reply] if stream else [reply.choices[0]]
        assert all(not hasattr(choice, "stop_reason") for choice in choices[:-1])
        return "".join(choice.text for choice in choices), choices[-1].finish_reason, choices[-1].stop_reason

    text, *end = last()
    assert end == ["length", None]
    cut = text.index(text[9:12])
    stops = {"stop": ["no such", text[9:12]]}
    assert last(**stops) == (text[:cut], "stop", text[9:12])
    assert last(**stops, extra_body={"include_stop_str_in_output": True}) == (text[: cut + 3], "stop", text[9:12])
    known = client.completions.create(
        model="tiny-chat", prompt=PROMPT, **SAMPLED, extra_body={"return_token_ids": True}
    )
    token = known.choices[0].token_ids[5]
    assert last(extra_body={"stop_token_ids": [1, token]})[1:] == ("stop", token)


def test_tokens_come_on_request(client, server: RunningServer):
    """Those of the prompt once, with the first tokens of a stream: in a completion's choices, and in a chat's reply."""
    tokenizer, asked = server.engine.tokenizer, {"return_token_ids": True}
    body = {"model": "tiny-chat", "prompt": ["abc", "x"], **SAMPLED, "n": 2, "extra_body": asked}
    whole = client.completions.create(**body)
    assert whole.usage.completion_tokens == sum(len(choice.token_ids) for choice in whole.choices) > 0
    assert [choice.prompt_token_ids for choice in whole.choices] == [
        tokenizer.encode(t).ids for t in ("abc",) * 2 + ("x",) * 2
    ]
    tokens, prompts = {}, {}
    for choice in [chunk.choices[0] for chunk in client.completions.create(**body, stream=True)]:
        tokens[choice.index] = tokens.get(choice.index, []) + choice.token_ids
        prompts[choice.index] = [*prompts.get(choice.index, []), getattr(choice, "prompt_token_ids", None)]
    assert tokens == {choice.index: choice.token_ids for choice in whole.choices}
    assert all(found[0] and set(map(str, found[1:])) <= {"None"} for found in prompts.values())
    chat = {"model": "tiny-chat", "messages": [{"role": "user", "content": "a"}], **SAMPLED, "extra_body": asked}
    reply = client.chat.completions.create(**chat)
    chunks = list(client.chat.completions.create(**chat, stream=True))
    assert [token for chunk in chunks[1:] for token in chunk.choices[0].token_ids] == reply.choices[0].token_ids
    assert [chunk.prompt_token_ids for chunk in chunks if hasattr(chunk, "prompt_token_ids")] == [
        reply.prompt_token_ids
    ]
    assert len(reply.prompt_token_ids) == reply.usage.prompt_tokens
    assert not hasattr(client.completions.create(model="tiny-chat", prompt="a", max_tokens=1).choices[0], "token_ids")


@pytest.mark.extended
def test_echo_puts_the_prompt_first(client):
    for prompt in ("abc", [97, 98]):
        body = {"prompt": prompt, **SAMPLED}
        plain = client.completions.create(model="tiny-chat", **body).choices[0].text
        whole = client.completions.create(model="tiny-chat", echo=True, **body).choices[0].text
        assert whole.endswith(plain) and len(whole) == len(plain) + len(prompt)
        assert streamed(client, echo=True, **body)[0] == {0: whole}


def test_sampling_fields_reach_the_engine(client, server: RunningServer):
    fields = {"top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    further = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 5, "ignore_eos": True}
    bias = {"97": 3.0, "98": -100.0}
    reply = client.completions.create(
        model="tiny-chat",
        prompt=PROMPT,
        **SAMPLED,
        **fields,
        logit_bias=bias,
        extra_body=further | {"bad_words": ["é"]},
    )
    words = tuple(tuple(server.engine.tokenizer.encode(word).ids) for word in ("é", " é"))
    params = SamplingParams(**SAMPLED, **fields, **further, logit_bias=((97, 3.0), (98, -100.0)), bad_words=words[:1])
    (wanted,) = server.engine.generate([PROMPT], params)
    assert reply.choices[0].text == wanted.text


def test_defaults_are_openai_s(client):
    reply = client.completions.create(model="tiny-chat", prompt="abc")
    assert reply.usage.completion_tokens <= 16
    texts = {client.completions.create(model="tiny-chat", prompt="abc").choices[0].text for _ in range(3)}
    assert len(texts) == 3  # temperature 1, and a seed of its own each time
