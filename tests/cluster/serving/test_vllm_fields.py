"""Fields that OpenAI's API does not have, as vLLM has them: allowed tokens, what of the ends of texts is shown, prompts
that are cut, and prompts that are scored alone."""

from __future__ import annotations

from itertools import product

import openai
import pytest
from tokenizers import Tokenizer, processors

from actors.protocol.messages import SamplingParams
from tests.cluster.serving.conftest import RunningServer
from tests.cluster.serving.test_logprobs import LISTS, same
from tests.matrices import in_turn

END, NAME = 0, "<|endoftext|>"
PROMPT = "def median(x):"
SAMPLED = {"model": "tiny-chat", "prompt": PROMPT, "temperature": 1.5, "seed": 2, "max_tokens": 60}
ENABLED = pytest.mark.parametrize("enabled", [True, False], ids=["speculation", "plain"])
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def ask(client: openai.OpenAI, *, stream: bool = False, **body):
    """Text and tokens of a completion, and its last choice with reasons."""
    extra = {"return_token_ids": True, **body.pop("extra_body", {})}
    reply = client.completions.create(**{**SAMPLED, **body}, extra_body=extra, stream=stream)
    choices = [chunk.choices[0] for chunk in reply] if stream else reply.choices
    tokens = [token for choice in choices for token in getattr(choice, "token_ids", ())]
    return "".join(choice.text for choice in choices), tokens, choices[-1]


@pytest.fixture
def letters(server: RunningServer):
    """Tokens of which each is a character."""
    return server.engine.tokenizer.encode("abcdefgh ").ids


@pytest.mark.parametrize(("enabled", "stream"), list(in_turn([True, False], [True, False])))
def test_only_allowed_tokens_come(client, server: RunningServer, letters, enabled, stream):
    """A text ends before its limit only where its end token is one of them, and `min_tokens` lets it."""

    def said(tokens, **fields):
        extra = {"allowed_token_ids": tokens, "speculative": {"enabled": enabled}, **fields}
        _, output, last = ask(client, stream=stream, extra_body=extra)
        return output, last.finish_reason

    output, reason = said(letters)
    assert {*output} <= {*letters} and len({*output}) > 3 and (len(output), reason) == (60, "length")
    params = SamplingParams(temperature=1.5, seed=2, max_tokens=60, allowed_token_ids=tuple(letters))
    assert server.engine.generate([PROMPT], params, drafter="none")[0].token_ids == output
    output, reason = said([*letters, END])
    assert output[-1] == END and len(output) < 40 and reason == "stop"
    output, reason = said([*letters, END], min_tokens=40)
    assert END not in output[:40] and len(output) > 40
    assert said([END]) == ([END], "stop")


@STREAM
def test_where_no_allowed_token_may_come_the_request_is_refused(client, letters, stream):
    for fields in ({"min_tokens": 1}, {"structured_outputs": {"regex": "[x-z]{3}"}}, {"bad_words": ["a"]}):
        tokens = letters[:1] if "bad_words" in fields else [END]
        with pytest.raises(openai.APIError) as caught:
            ask(client, stream=stream, extra_body={"allowed_token_ids": tokens, **fields})
        assert caught.value.code == "no_token_allowed" and "allowed_token_ids" in caught.value.message


@ENABLED
def test_allowed_tokens_and_a_grammar_both_hold(client, letters, enabled):
    """The end token is needed, too: without it no token is left behind the text."""
    fields = {"structured_outputs": {"regex": "[b-d]{3}"}, "speculative": {"enabled": enabled}}
    for tokens, only in ((letters[:2], "b"), (letters, "bcd")):
        text, _, last = ask(client, extra_body={**fields, "allowed_token_ids": [*tokens, END]})
        assert len(text) == 3 and {*text} <= {*only} and last.finish_reason == "stop"
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body={**fields, "allowed_token_ids": letters})
    assert caught.value.code == "no_token_allowed"


@STREAM
def test_special_tokens_are_shown_on_request(client, stream):
    """That which ends the text is no part of it, unless `include_stop_str_in_output`."""

    def said(**fields):
        body = {"prompt": "ab", "max_tokens": 4, "logit_bias": {str(END): 100}}
        if "prompt" in fields:
            body |= {"prompt": fields.pop("prompt"), "echo": True}
        return ask(client, stream=stream, **body, extra_body=fields)[0]

    shown = {"skip_special_tokens": False}
    assert said(ignore_eos=True) == "" and said(ignore_eos=True, **shown) == 4 * NAME
    assert said(**shown) == "" and said(**shown, include_stop_str_in_output=True) == NAME
    assert said(include_stop_str_in_output=True) == ""
    assert said(prompt=[66, END]) == "b" and said(prompt=[66, END], **shown) == "b" + NAME


@STREAM
def test_a_stop_token_is_no_part_of_the_text_on_its_own(client, letters, stream):
    allowed = {"allowed_token_ids": letters}
    text, tokens, _ = ask(client, extra_body=allowed)
    assert len(text) == len(tokens)
    at = next(i for i, char in enumerate(text) if i > 5 and char not in text[:i])
    stops = {**allowed, "stop_token_ids": [tokens[at]]}
    for includes in (False, True):
        fields = {**stops, "include_stop_str_in_output": includes}
        found, output, last = ask(client, stream=stream, extra_body=fields)
        assert (found, output) == (text[: at + includes], tokens[: at + 1])
        assert (last.finish_reason, last.stop_reason) == ("stop", tokens[at])


@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.extended)], ids=["whole", "stream"])
def test_no_stop_string_ends_a_text_before_min_tokens(client, letters, stream):
    """One that ends with the first token after them does."""
    allowed = {"allowed_token_ids": letters}
    text, _, _ = ask(client, extra_body=allowed)
    for size, least in ((1, 20), (2, 20), (3, 9)):
        for at in range(3, 40, 9):
            stop = text[at : at + size]
            found, _, last = ask(
                client, stream=stream, stop=["0" * 5, stop], extra_body={**allowed, "min_tokens": least}
            )
            end = text.find(stop, least + 1 - size)
            assert found == (text if end < 0 else text[:end]), (stop, least)
            assert last.finish_reason == ("length" if end < 0 else "stop")


@pytest.mark.parametrize(
    ("kind", "side"),
    [
        ("text", "left"),
        ("chat", "right"),
        *[pytest.param(*row, marks=pytest.mark.extended) for row in product(("tokens", "chat"), ("left", "right"))][:3],
    ],
)
def test_one_end_of_a_prompt_is_kept(client, server: RunningServer, kind, side):
    text = "[user]abcdefgh\n[assistant]"
    tokens = server.engine.tokenizer.encode(text).ids

    def said(most, **body):
        extra = {"return_token_ids": True, "truncate_prompt_tokens": most, "truncation_side": side}
        if kind == "chat":
            messages = [{"role": "user", "content": "abcdefgh"}]
            reply = client.chat.completions.create(model="tiny-chat", messages=messages, **body, extra_body=extra)
            return reply.prompt_token_ids, reply.usage.prompt_tokens
        prompt = text if kind == "text" else tokens
        reply = client.completions.create(model="tiny-chat", prompt=prompt, **body, echo=True, extra_body=extra)
        (choice,) = reply.choices
        echo, kept = choice.text, choice.prompt_token_ids
        assert echo.startswith(text[: len(kept)] if side == "right" else text[-len(kept) :])
        return kept, reply.usage.prompt_tokens

    whole = [END, *tokens] if kind == "chat" else tokens
    for most in (1, 9, len(whole), 1000):
        kept = whole[:most] if side == "right" else whole[-most:]
        assert said(most, max_tokens=2) == (kept, min(most, len(whole)))
    assert said(-1, max_tokens=500)[1] == 12 and said(-1, max_tokens=2)[1] == len(whole)


@pytest.mark.parametrize(
    "form",
    [
        f"{NAME} $A {NAME} {NAME}",
        *[pytest.param(form, marks=pytest.mark.extended) for form in (f"{NAME} $A", f"$A {NAME}")],
    ],
)
def test_the_tokens_that_a_tokenizer_adds_are_kept(server: RunningServer, monkeypatch, form):
    """As by transformers, which vLLM calls: the first token stays, and the text loses one more of its own."""
    tokenizer = Tokenizer.from_str(server.engine.tokenizer.to_str())
    tokenizer.post_processor = processors.TemplateProcessing(form, special_tokens=[(NAME, END)])
    monkeypatch.setattr(server.service._model, "_tokenizer", tokenizer)
    wanted = Tokenizer.from_str(tokenizer.to_str())
    for (most, adds), side in product(
        ((4, True), (5, True), (1, False), (5, False), (99, True), (99, False)), ("left", "right")
    ):
        for text in ("abcdefgh", NAME + "ab" + NAME, "abcdefgh" * 300):
            wanted.enable_truncation(most, direction=side)
            body = {
                "prompt": text,
                "truncate_prompt_tokens": most,
                "truncation_side": side,
                "add_special_tokens": adds,
                "return_token_ids": True,
            }
            status, _, reply = server.ask("/v1/completions", {**body, "max_tokens": 1})
            assert status == 200
            tokens = reply["choices"][0]["prompt_token_ids"]
            assert tokens == wanted.encode(text, add_special_tokens=adds).ids


@STREAM
@ENABLED
def test_a_prompt_is_scored_alone(client, server: RunningServer, enabled, stream):
    """`max_tokens=0` and `echo`: the text, tokens and log-probabilities of the prompt, and no token more."""
    body = {"model": "tiny-chat", "prompt": [PROMPT, "xyz"], "echo": True, "logprobs": 2, "max_tokens": 0, "n": 2}
    extra = {"speculative": {"enabled": enabled}, "return_token_ids": True}
    reply = client.completions.create(**body, stream=stream, extra_body=extra)
    chunks = [*reply] if stream else [reply]
    for index, text in enumerate((PROMPT, PROMPT, "xyz", "xyz")):
        parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        tokens = server.engine.tokenizer.encode(text).ids
        assert "".join(part.text for part in parts) == text and parts[-1].finish_reason == "length"
        assert parts[-1].stop_reason is None and [t for p in parts for t in getattr(p, "token_ids", ())] == []
        assert [ids for part in parts if (ids := getattr(part, "prompt_token_ids", None))] == [tokens]
        (listed,) = [part.logprobs for part in parts if part.logprobs is not None]
        (wanted,) = server.engine.generate([text], SamplingParams(max_tokens=1), drafter="none", prompt_logprobs=2)
        pairs = zip(tokens[1:], wanted.prompt_logprobs[1:], strict=True)
        assert listed.token_logprobs[0] is None
        assert listed.token_logprobs[1:] == same(entry[token].logprob for token, entry in pairs)
        assert {len(getattr(listed, name)) for name in LISTS} == {len(tokens)}
    if not stream:
        assert (reply.usage.completion_tokens, reply.usage.prompt_tokens) == (0, len(PROMPT) + 3)


def test_a_prompt_is_scored_alone_whatever_would_follow(client, server: RunningServer):
    """Were it the end of the text, too."""
    body = {**SAMPLED, "echo": True, "max_tokens": 0, "logit_bias": {str(END): 100}}
    (choice,) = client.completions.create(**body).choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (PROMPT, "length", None)
    scored = server.engine.submit(PROMPT, only_prompt=True, prompt_logprobs=0).result(60)
    assert (scored.token_ids, scored.text) == ([], "") and len(scored.prompt_logprobs) == len(PROMPT)
    assert server.num_running() == 0


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [257]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1] * 1025}, "allowed_token_ids"),
        ({"allowed_token_ids": ["1"]}, "allowed_token_ids.0"),
        ({"allowed_token_ids": 1}, "allowed_token_ids"),
        ({"skip_special_tokens": 0}, "skip_special_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 2**64}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 1.5}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 512}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "prompt": "a" * 512}, "prompt"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_value_out_of_range_is_named(server: RunningServer, field, param):
    status, _, reply = server.ask("/v1/completions", {"prompt": "a", **field})
    assert (status, reply["error"]["param"]) == (400, param), reply
    assert server.num_running() == 0
