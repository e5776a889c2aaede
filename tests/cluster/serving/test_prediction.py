"""Predictions: what is drafted from them, what is counted of them, and that they change no token."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from actors.drafters.auto.config import AutoDrafterConfig
from actors.drafters.auto.drafter import UNMEASURED, AutoDrafter
from actors.drafters.cascade.config import CascadeDrafterConfig
from actors.drafters.lookup.copy import CopyDrafterConfig
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.protocol.messages import SamplingParams
from tests.cluster.serving.conftest import RunningServer, serving

PROMPT = list(range(40, 60))
NUM = 30


@pytest.fixture(scope="module", autouse=True)
def unmeasured_rounds() -> Iterator[None]:
    """What is chosen follows from acceptance alone: after one long pause of the machine drafts may look too dear."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoDrafter, "_times", lambda *_: UNMEASURED)
        yield


@pytest.fixture(scope="module")
def server(chat_checkpoint) -> Iterator[RunningServer]:
    drafter = AutoDrafterConfig(drafters=[CopyDrafterConfig(), NgramDrafterConfig()], num_draft_tokens=10)
    with serving(chat_checkpoint, drafter) as running:
        yield running


@pytest.fixture(scope="module")
def written(server: RunningServer) -> list[int]:
    """The tokens after `PROMPT`."""
    params = SamplingParams(max_tokens=NUM, ignore_eos=True)
    return server.engine.generate([PROMPT], params, drafter="none")[0].token_ids


@pytest.mark.extended
@pytest.mark.parametrize("drafter", ["copy", "auto", "cascade"])
def test_drafts_follow_a_reference_in_every_drafter_that_copies(drafter, open_engine, half_agreeing_drafter, written):
    model = ModelDrafterConfig(path=str(half_agreeing_drafter), num_draft_tokens=4, device="cpu")
    config = {
        "copy": CopyDrafterConfig(),
        "auto": AutoDrafterConfig(drafters=[CopyDrafterConfig(), NgramDrafterConfig()], num_draft_tokens=10),
        "cascade": CascadeDrafterConfig(levels=[CopyDrafterConfig(num_draft_tokens=4), model], num_draft_tokens=4),
    }[drafter]
    engine, params = open_engine(config), SamplingParams(max_tokens=NUM, ignore_eos=True)
    found = {
        name: engine.submit(PROMPT, params, reference=reference).result()
        for name, reference in {"none": (), "right": tuple(written), "wrong": tuple(reversed(written))}.items()
    }
    assert [one.token_ids for one in found.values()] == [written] * 3
    accepted = {name: one.stats.num_accepted_tokens for name, one in found.items()}
    if drafter == "cascade":  # the model above decides how much of the copy is passed on
        assert accepted["right"] >= accepted["none"]
    else:
        assert accepted["right"] > max(accepted["none"], accepted["wrong"])
    if drafter == "copy":
        steps = found["right"].stats.num_spec_steps  # each draft is followed to its end, with a token of the target's
        assert steps == -(-(NUM - 1) // 11) and accepted["right"] == NUM - 1 - steps


def test_a_reference_is_checked(server: RunningServer):
    for reference, line in (([-1], "reference: names token -1"), ([99999], "reference: names token 99999")):
        with pytest.raises(ValueError, match=line):
            server.engine.submit(PROMPT, reference=reference)
    with pytest.raises(Exception, match="reference: 600 tokens do not fit the context of 512"):
        server.engine.submit(PROMPT, reference=[1] * 600).result()


def ask(client: openai.OpenAI, **body):
    options = {"ignore_eos": True, "speculative": body.pop("speculative", {})}
    call = {"prompt": "def f(", "max_tokens": NUM, "temperature": 0, **body}
    return client.completions.create(model="tiny-chat", extra_body={**options, "prediction": call.pop("p")}, **call)


@pytest.mark.parametrize(
    "speculative", [{}, pytest.param({"drafter": "copy"}, marks=pytest.mark.extended)], ids=["auto", "copy"]
)
def test_a_prediction_changes_no_token_and_is_counted(client, server: RunningServer, speculative):
    plain = ask(client, p=None)
    text = plain.choices[0].text
    assert plain.usage.completion_tokens_details is None
    for content in (text, [{"type": "text", "text": text[:5]}, {"type": "text", "text": text[5:]}], "something else"):
        p = {"type": "content", "content": content}
        reply = ask(client, p=p, speculative=speculative)
        assert reply.choices[0].text == text
        details = reply.usage.completion_tokens_details
        whole = content if isinstance(content, str) else text
        size = len(server.engine.tokenizer.encode(whole, add_special_tokens=False).ids)
        assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == size
        assert (details.accepted_prediction_tokens > 0) == (whole == text)
        chunks = list(ask(client, p=p, speculative=speculative, stream=True, stream_options={"include_usage": True}))
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == text
        assert chunks[-1].usage == reply.usage


@pytest.mark.extended
def test_the_counts_are_of_all_choices(client, server: RunningServer):
    p = {"type": "content", "content": "abc"}
    size = len(server.engine.tokenizer.encode("abc", add_special_tokens=False).ids)
    details = ask(client, p=p, n=3, seed=1, temperature=0.8).usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == 3 * size


def test_chats_take_it_too(client):
    body = {"model": "tiny-chat", "messages": [{"role": "user", "content": "a"}], "max_tokens": 20, "temperature": 0}
    plain = client.chat.completions.create(**body)
    text = plain.choices[0].message.content
    reply = client.chat.completions.create(**body, prediction={"type": "content", "content": text})
    assert reply.choices[0].message.content == text and reply.usage.completion_tokens_details is not None


def refusal(server: RunningServer, **body) -> tuple[int, str]:
    status, _, reply = server.ask("/v1/completions", {"prompt": "a", "max_tokens": 1, **body})
    assert status == 400
    return reply["error"]["param"], reply["error"]["message"]


def test_it_is_refused_where_nothing_would_copy(server: RunningServer, monkeypatch):
    p = {"prediction": {"type": "content", "content": "a"}}
    for how in ({"enabled": False}, {"drafter": "ngram"}):
        param, line = refusal(server, **p, speculative=how)
        assert param == "prediction" and line.endswith("name drafter copy, or leave it out")
    monkeypatch.setattr(server.service._model, "_drafter", NgramDrafterConfig())
    param, line = refusal(server, **p)
    assert param == "prediction" and line.endswith("start the server with drafter=copy, or leave it out")


@pytest.mark.parametrize(
    "value", [{"type": "text", "content": "a"}, {"type": "content"}, "a", {"type": "content", "content": ["a"]}]
)
def test_another_form_is_refused(server: RunningServer, value):
    assert refusal(server, prediction=value)[0].startswith("prediction")


def test_one_longer_than_the_context_is_refused(server: RunningServer):
    param, line = refusal(server, prediction={"type": "content", "content": "é" * 2000})
    assert param == "prediction" and "do not fit the context of 512 tokens" in line
    assert refusal(server, prediction={"type": "content", "content": "\ud800"})[0] == "prediction"
