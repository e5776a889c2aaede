from __future__ import annotations

from pathlib import Path

import pytest

from cluster.io.prompts import Prompt
from cluster.io.text import load_tokenizer
from cluster.tools.bench import tasks
from cluster.tools.bench.tasks import fitting, of_length
from cluster.tools.training.corpus import Corpus, Source

PROMPTS = [Prompt("abc", category="x"), Prompt("defghi", category="y")]


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return load_tokenizer(Path(tiny_checkpoint("Llama")))


def test_prompts_become_tokens_and_keep_their_labels(tokenizer):
    made = fitting(PROMPTS, tokenizer, max_tokens=4, max_model_len=64)
    assert [tokenizer.decode(list(prompt.content)) for prompt in made] == ["abc", "defghi"]
    assert [prompt.category for prompt in made] == ["x", "y"]


def test_prompts_without_room_for_the_answer_are_left_out(tokenizer):
    made = fitting(PROMPTS, tokenizer, max_tokens=4, max_model_len=10)
    assert len(made) == 2
    assert fitting(PROMPTS, tokenizer, max_tokens=4, max_model_len=9) == made[:1]
    with pytest.raises(ValueError, match="the shortest has 3 tokens and leaves no room"):
        fitting(PROMPTS, tokenizer, max_tokens=4, max_model_len=6)


@pytest.mark.extended
def test_contexts_have_exactly_their_length_and_begin_with_their_prompt(tokenizer):
    made = of_length(PROMPTS, 40, tokenizer, max_tokens=4, max_model_len=64)
    assert [len(prompt.token_ids) for prompt in made] == [40, 40]
    assert made[0].text.startswith("abc\n\ndefghi") and made[1].text.startswith("defghi\n\nabc")
    assert tokenizer.decode(list(made[0].token_ids)) == made[0].text
    assert [prompt.category for prompt in made] == ["x", "y"]
    (short,) = of_length(PROMPTS[:1], 2, tokenizer, max_tokens=4, max_model_len=64)
    assert short.text == "ab"
    with pytest.raises(ValueError, match="job.contexts=61: with sampling.max_tokens=4 it exceeds the context of 64"):
        of_length(PROMPTS, 61, tokenizer, max_tokens=4, max_model_len=64)


def library(*texts):
    return Corpus(tuple(Source(f"{i}.py", text) for i, text in enumerate(texts)), (Source("bisect.py", "held out"),))


def test_a_context_beyond_the_prompt_file_repeats_no_text(tokenizer, monkeypatch):
    """Prompts that are equal count once, and behind the file's texts each prompt has modules of its own."""
    monkeypatch.setattr(tasks, "load_corpus", lambda seed: library("module zero", "module one", "module 2", "module 3"))
    prompts = [*PROMPTS, Prompt("abc")]
    made = of_length(prompts[:2], 31, tokenizer, max_tokens=4, max_model_len=64)
    assert [one.text for one in made] == [
        "abc\n\ndefghi\n\nmodule zero\n\nmodul",
        "defghi\n\nabc\n\nmodule one\n\nmodule",
    ]
    (alike, *_) = of_length(prompts, 15, tokenizer, max_tokens=4, max_model_len=64)
    assert alike.text == "abc\n\ndefghi\n\nmo"
    with pytest.raises(
        ValueError, match="job.contexts=60: a prompt with all texts that follow it has 34 tokens, and no"
    ):
        of_length(PROMPTS, 60, tokenizer, max_tokens=4, max_model_len=64)


@pytest.mark.extended
def test_a_long_context_does_not_begin_again(tokenizer):
    """Of the real library: what a lookup finds there is what modules themselves repeat."""
    made = of_length(PROMPTS, 20_000, tokenizer, max_tokens=4, max_model_len=32_768)
    for one in made:
        body = one.text[100:]
        assert body.find(body[:200], 1) == -1
    assert made[0].text[20:] != made[1].text[20:]
