"""What takes long leaves the event loop: while one body is worked on, the streams of the others go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer

from cluster.serving import app, bodies
from cluster.serving.errors import invalid_fields
from cluster.serving.logprobs import TokenNames
from tests.cluster.serving.conftest import RunningServer

CHAT, NAMES = "/v1/chat/completions", "chat_template_kwargs"
MESSAGES = [{"role": "user", "content": "a"}]


class Watched:
    """The tokenizer, and the threads that it was used on."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.used: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._tokenizer, name)
        if name in ("encode", "decode", "id_to_token"):
            self.used.append((name, threading.current_thread().name))
        return found


@pytest.fixture
def tokenizer(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Watched:
    watched = Watched(server.service._model._tokenizer)
    monkeypatch.setattr(server.service._model, "_tokenizer", watched)
    return watched


@pytest.mark.parametrize(
    ("path", "body", "uses"),
    [
        ("/tokenize", {"prompt": "a b c", "return_token_strs": True}, {"encode", "id_to_token"}),
        ("/detokenize", {"tokens": [65] * 100}, {"decode"}),
        ("/v1/completions", {"prompt": [65] * 100, "max_tokens": 1, "echo": True}, {"decode"}),
        ("/v1/completions", {"prompt": "a" * 100, "max_tokens": 1}, {"encode"}),
        ("/v1/completions", {"prompt": ["a" * 60, "b" * 60], "max_tokens": 1}, {"encode"}),
        ("/v1/completions", {"prompt": [65], "max_tokens": 1, "bad_words": ["a", "b"]}, {"encode"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}, {"encode"}),
    ],
)
def test_text_and_tokens_change_into_each_other_elsewhere(
    server: RunningServer, tokenizer, monkeypatch, path, body, uses
):
    monkeypatch.setattr(app, "LONG", 100)
    assert server.ask(path, body)[0] == 200
    assert {name for name, _ in tokenizer.used} == uses
    assert "http-server" not in {thread for _, thread in tokenizer.used}


@pytest.mark.parametrize(
    "fields",
    [{"prompt_logprobs": 2}, {"echo": True, "logprobs": 2}, {"echo": True, "logprobs": 2, "stream": True}],
    ids=str,
)
def test_log_probabilities_of_long_texts_are_written_elsewhere(server: RunningServer, monkeypatch, fields):
    """20 of them take 0.15 ms a token."""
    used = set[str]()
    name_of = TokenNames.name_of
    monkeypatch.setattr(
        TokenNames, "name_of", lambda own, token: used.add(threading.current_thread().name) or name_of(own, token)
    )
    for length, is_there in ((100, False), (10, True)):
        used.clear()
        assert server.ask("/v1/completions", {"prompt": [65] * length, "max_tokens": 1, **fields})[0] == 200
        assert used and ("http-server" in used) == is_there


def test_short_prompts_are_read_at_once(server: RunningServer, tokenizer):
    """A thread would begin later than they are read, and let nothing else run meanwhile."""
    assert server.ask("/v1/completions", {"prompt": ["a b", "c"], "max_tokens": 1})[0] == 200
    assert tokenizer.used == [("encode", "http-server")] * 2


def test_words_are_read_once_for_all_prompts(server: RunningServer, tokenizer):
    body = {"prompt": [[65], [66], [67]], "n": 2, "max_tokens": 1, "bad_words": ["a"]}
    assert server.ask("/v1/completions", body)[0] == 200
    assert len(tokenizer.used) == 2, "with and without a space"


def test_more_words_than_the_engine_takes_are_not_read(server: RunningServer, tokenizer):
    status, _, reply = server.ask("/v1/completions", {"prompt": [65], "bad_words": ["a"] * 301})
    assert (status, reply["error"]["param"], tokenizer.used) == (400, "bad_words", [])


@pytest.mark.parametrize("word", ["\ud800", ""])
def test_a_word_that_is_none_is_named(server: RunningServer, word):
    status, _, reply = server.ask("/v1/completions", {"prompt": "a", "bad_words": [word]})
    assert (status, reply["error"]["param"]) == (400, "bad_words"), reply


def longest_pause_s(work: Callable[[], object]) -> float:
    """For how much of the work another thread did not run: seconds of this process, not of others on its cores."""
    pauses, ended = [0.0], threading.Event()

    def tick() -> None:
        last = time.process_time()
        while not ended.wait(0.001):
            pauses.append(time.process_time() - last)
            last = time.process_time()

    ticking = threading.Thread(target=tick)
    ticking.start()
    try:
        work()
    finally:
        ended.set()
        ticking.join()
    return max(pauses)


def test_a_long_text_lets_others_run(server: RunningServer):
    """The tokenizer keeps other threads, those of rounds in the same process among them, from running while it reads
    one text, but not while it reads a batch."""
    model, text = server.service._model, "ab é\n" * 20_000
    tokenizer: Tokenizer = server.engine.tokenizer
    model._most_characters = len(text)
    started = time.thread_time()
    alone = tokenizer.encode(text).ids
    took = time.thread_time() - started
    found = model.encode(text)
    # a busy machine keeps the other thread waiting now and then, and a call that keeps it from running every time
    assert any(longest_pause_s(lambda: model.encode(text)) < took / 4 for _ in range(50))
    assert found == alone and model.decode(found) == tokenizer.decode(alone) == text


@pytest.mark.parametrize("entry", ["1", "[1]", '"a"', "{}", "[[]]"])
def test_a_body_of_too_many_values_is_not_read(server: RunningServer, monkeypatch, entry):
    """Each value costs up to a hundred times its bytes, and each wrong one an error of its own besides."""
    monkeypatch.setattr(bodies, "_read", lambda _: pytest.fail("was read"))
    body = f'{{"prompt": [{",".join([entry] * (bodies.LEAST_VALUES + 2))}]}}'
    status, _, reply = server.ask("/v1/completions", body.encode())
    assert (status, reply["error"]["code"]) == (413, "body_too_large"), reply


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [1.5] * 100_000}, "prompt.0"),
        ("/v1/completions", {"prompt": [[1.5]] * 100_000}, "prompt.0.0"),
        ("/v1/completions", {"prompt": [65] * 100_000}, "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 100_000}, "n"),
        ("/v1/completions", {"prompt": "a", "stop": [1] * 100_000}, "stop"),
        ("/v1/completions", {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(100_000)), "")}, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [""] * 100_000}, "stop_token_ids"),
        ("/v1/completions", {"prompt": "a", **dict.fromkeys(map(str, range(100_000)), 1)}, None),
        (CHAT, {"messages": [{"role": "x"}] * 100_000}, "messages.0.role"),
        (CHAT, {"messages": [{"role": "user", "content": [{}] * 99_999}]}, "messages.0.content.0.type"),
        (CHAT, {"messages": MESSAGES, "tools": [{}] * 1024}, "tools.0.type"),
        (CHAT, {"messages": MESSAGES, "tools": [{}] * 1025}, "tools"),
        (CHAT, {"messages": MESSAGES, NAMES: dict.fromkeys(map(str, range(999)), 1)}, NAMES),
        ("/v1/completions", {"prompt": "a", "bad_words": ["abc" * 13_000] * 300}, "bad_words"),
        ("/detokenize", {"tokens": [1.5] * 100_000}, "tokens.0"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_wrong_entries_without_end_are_one_error(server: RunningServer, monkeypatch, path, body, param):
    counts = []
    monkeypatch.setattr(bodies, "invalid_fields", lambda errors: counts.append(len(errors)) or invalid_fields(errors))
    status, _, reply = server.ask(path, body)
    assert (status, reply["error"]["param"]) == (400, param), reply
    assert max(counts, default=0) < 10 and len(reply["error"]["message"]) < 200
