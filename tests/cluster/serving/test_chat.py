"""Chats over HTTP: the checkpoint's template, the rest of the context, streams that join to the whole reply."""

from __future__ import annotations

import json
import shutil

import pytest

from actors.protocol.messages import SamplingParams
from cluster import pocket
from cluster.serving.chat_template import ChatTemplate
from tests.cluster.serving.conftest import TEMPLATE, RunningServer

MESSAGES = [
    {"role": "system", "content": "be é"},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
]
WRITTEN = "<|endoftext|>[system]be é\n[user]ab\n[assistant]"
BODY = {"model": "tiny-chat", "messages": MESSAGES, "temperature": 0.9, "seed": 3}


def streamed(client, **body):
    chunks = list(client.chat.completions.create(stream=True, **body))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    indices = {choice.index for choice in choices}
    return {
        index: (
            [choice.delta.role for choice in choices if choice.index == index and choice.delta.role],
            "".join(choice.delta.content or "" for choice in choices if choice.index == index),
            [choice.finish_reason for choice in choices if choice.index == index and choice.finish_reason],
        )
        for index in indices
    }, chunks


def test_a_chat_is_what_the_template_writes(client, server: RunningServer):
    reply = client.chat.completions.create(**BODY, max_tokens=30)
    ids = server.engine.tokenizer.encode(WRITTEN, add_special_tokens=False).ids
    (wanted,) = server.engine.generate([ids], SamplingParams(temperature=0.9, seed=3, max_tokens=30), drafter="none")
    (choice,) = reply.choices
    assert (choice.message.content, choice.finish_reason) == (wanted.text, wanted.finish_reason)
    assert choice.message.role == "assistant" and reply.id.startswith("chatcmpl-")
    assert reply.object == "chat.completion" and reply.usage.prompt_tokens == len(ids)


def test_streams_join_to_the_whole_reply(client):
    for n, seed in ((1, 3), (3, 5)):
        body = {**BODY, "seed": seed, "n": n, "max_completion_tokens": 25}
        whole = client.chat.completions.create(**body)
        found, chunks = streamed(client, **body, stream_options={"include_usage": True})
        assert found == {c.index: (["assistant"], c.message.content, [c.finish_reason]) for c in whole.choices}
        assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_a_chat_runs_to_the_end_of_the_context(client):
    long = [{"role": "user", "content": "a" * 400}]
    options = {"temperature": 0, "messages": long, "extra_body": {"ignore_eos": True}}
    reply = client.chat.completions.create(**{**BODY, **options})
    assert reply.choices[0].finish_reason == "length" and reply.usage.total_tokens == 512


def test_the_answer_of_the_assistant_can_be_left_to_the_chat(client, server: RunningServer):
    body = {"messages": MESSAGES, "add_generation_prompt": False}
    _, _, reply = server.ask("/tokenize", body)
    wanted = server.engine.tokenizer.encode(WRITTEN.removesuffix("[assistant]"), add_special_tokens=False).ids
    assert (reply["tokens"], reply["count"], reply["max_model_len"]) == (wanted, len(wanted), 512)


CONTINUED = [
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>\n{% endfor %}",
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}</s>\n{% endfor %}",
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% set said = m.content.split('</think>')[-1].lstrip() %}<{{ said }}>{% endfor %}",
]


@pytest.mark.parametrize("source", CONTINUED)
def test_a_message_that_goes_on_ends_where_that_of_transformers_does(source):
    from transformers.utils.chat_template_utils import render_jinja_template

    for content in ("a", "a ", " a b\n", "<think>x</think> a", "a <|end|> a", "é {{ x }}", "x</think>"):
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
        try:
            theirs = render_jinja_template([messages], chat_template=source, continue_final_message=True)[0][0]
        except ValueError:
            theirs = None
        try:
            ours = ChatTemplate(source, {}).render_open(messages)
        except ValueError:
            ours = None
        assert ours == theirs and (ours is not None or "</think>" in content)


def test_a_message_that_its_template_does_not_write_cannot_go_on():
    template = ChatTemplate("{% for m in messages[:-1] %}{{ m.content }}{% endfor %}", {})
    with pytest.raises(
        ValueError, match="^messages: the checkpoint's chat template does not write the last one as it is"
    ):
        template.render_open([{"role": "user", "content": "a"}] * 2)


def test_the_last_message_goes_on(client, server: RunningServer):
    """Of either role; the reply is what it gains, streamed or not, with drafts or without."""
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    for role in ("assistant", "user"):
        messages = [*MESSAGES, {"role": role, "content": [{"type": "text", "text": "é is "}]}]
        written = f"<|endoftext|>[system]be é\n[user]ab\n[{role}]é is "
        ids = server.engine.tokenizer.encode(written, add_special_tokens=False).ids
        params = SamplingParams(temperature=0.9, seed=3, max_tokens=30)
        (wanted,) = server.engine.generate([ids], params, drafter="none")
        for enabled in (True, False):
            extra = {**fields, "speculative": {"enabled": enabled}}
            body = {**BODY, "messages": messages, "max_tokens": 30, "extra_body": extra}
            reply = client.chat.completions.create(**body)
            assert reply.choices[0].message.content == wanted.text and reply.usage.prompt_tokens == len(ids)
            assert streamed(client, **body)[0] == {0: (["assistant"], wanted.text, [wanted.finish_reason])}
        assert server.ask("/tokenize", {"messages": messages, **fields})[2]["tokens"] == ids


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_what_cannot_go_on_is_refused(server: RunningServer, path):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
    for body in ({"messages": MESSAGES}, {"messages": called, "add_generation_prompt": False}):
        status, _, reply = server.ask(path, {**body, "continue_final_message": True})
        assert (status, reply["error"]["param"]) == (400, "continue_final_message"), reply


def test_texts_become_tokens_and_tokens_texts(server: RunningServer):
    _, _, reply = server.ask("/tokenize", {"prompt": "é<|endoftext|>", "return_token_strs": True})
    assert reply["tokens"] == server.engine.tokenizer.encode("é<|endoftext|>").ids
    assert len(reply["token_strs"]) == 3 and reply["token_strs"][-1] == "<|endoftext|>"
    _, _, back = server.ask("/detokenize", {"tokens": reply["tokens"]})
    assert back == {"prompt": "é<|endoftext|>"}
    assert server.ask("/detokenize", {"tokens": [9999]})[0] == 400
    assert server.ask("/tokenize", {})[0] == 400


def test_a_checkpoint_without_a_template_says_so(tiny_checkpoint, server: RunningServer, monkeypatch):
    assert ChatTemplate.read(tiny_checkpoint("Llama")) is None
    monkeypatch.setattr(server.service._model, "_template", None)
    status, _, content = server.ask("/v1/chat/completions", {"messages": MESSAGES})
    assert (status, content["error"]["code"]) == (400, "no_chat_template")
    assert "tokenizer_config.json" in content["error"]["message"]


def test_the_bundled_target_goes_on_with_the_text():
    template = ChatTemplate.read(pocket.TARGET)
    assert template is not None
    messages = [{"role": "user", "content": "def f():"}, {"role": "user", "content": "    return"}]
    assert template.render(messages, add_generation_prompt=True) == "def f():\n    return"


@pytest.mark.parametrize("place", ["file", "settings", "several"])
def test_a_template_is_found_where_checkpoints_have_it(tmp_path, place):
    settings: dict = {"eos_token": "<e>", "bos_token": {"content": "<b>"}, "pad_token": None}
    source = "{{ bos_token }}{{ eos_token }}{{ messages[0].content }}{{ thinking }}"
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(source)
        settings["chat_template"] = "other"
    else:
        named = [{"name": "tool_use", "template": "other"}, {"name": "default", "template": source}]
        settings["chat_template"] = source if place == "settings" else named
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    template = ChatTemplate.read(tmp_path)
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}], add_generation_prompt=True, thinking=7) == "<b><e>x7"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.x }}",
    ],
)
def test_a_template_that_refuses_a_chat_is_one_line(source):
    with pytest.raises(ValueError, match="^messages: the checkpoint's chat template refuses them"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}], add_generation_prompt=True)


def test_a_broken_template_is_noticed_at_the_start():
    with pytest.raises(ValueError, match=r"^target.path: its chat template cannot be read"):
        ChatTemplate("{% if %}", {})


def test_templates_are_those_of_transformers(tmp_path, tiny_checkpoint):
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(tiny_checkpoint("Llama"), tmp_path, dirs_exist_ok=True)
    source = (
        "{%- for m in messages %}\n    {%- if loop.index0 > 3 %}{% break %}{% endif %}\n"
        "    {%- generation %}\n    {%- set said = m.content | tojson %}\n    {{- m.role + ': ' + said + '\\n' }}\n"
        "    {%- endgeneration %}{{ said }}\n{%- endfor %}\n"
        "{% if add_generation_prompt %}\n>{% endif %}"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|endoftext|>", "chat_template": source}))
    messages = [{"role": "user", "content": f"é <{i}> \"'&"} for i in range(6)]
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = ChatTemplate.read(tmp_path)
    assert ours is not None
    for opens in (True, False):
        wanted = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens)
        assert ours.render(messages, add_generation_prompt=opens) == wanted
    assert ChatTemplate(TEMPLATE, {"bos_token": "B"}).render([], add_generation_prompt=True) == "B[assistant]"
