"""What takes long leaves the event loop: while one body is worked on, the streams of the others go on."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.cluster.serving.conftest import RunningServer


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
        ("/v1/completions", {"prompt": [65], "max_tokens": 1, "bad_words": ["a", "b"]}, {"encode"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}, {"encode"}),
    ],
)
def test_text_and_tokens_change_into_each_other_elsewhere(server: RunningServer, tokenizer, path, body, uses):
    assert server.ask(path, body)[0] == 200
    assert {name for name, _ in tokenizer.used} == uses
    assert "http-server" not in {thread for _, thread in tokenizer.used}


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
