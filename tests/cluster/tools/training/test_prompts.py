"""Prompts: cut where a model can go on, and only from held-out modules where that matters."""

from __future__ import annotations

import ast
import json

import pytest
from tokenizers import Tokenizer

from cluster import pocket
from cluster.io.text import load_tokenizer
from cluster.tools.training.corpus import HELD_OUT, Source
from cluster.tools.training.prompts import FEWEST_TOKENS, MOST_TOKENS, choose_prompts, cut_prompts

DOCSTRING = '''"""Return something long enough for a prompt, with a few more words than necessary.

    The arguments are numbers, the result is one too, and nothing else is read, changed or remembered by this.
    """'''
BODY = "".join(f"    value_{number} = first + {number} * second\n" for number in range(30))
SUITABLE = f"def suitable(first, second):\n    {DOCSTRING}\n{BODY}"
UNSUITABLE = f"""
def without_docstring(first, second):
{BODY}
def only_docstring(first, second):
    {DOCSTRING}

def short(x):
    "Short."
    return x
"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(pocket.TARGET)


def test_a_prompt_is_the_beginning_of_a_definition(tokenizer: Tokenizer):
    for seed in range(10):
        (prompt,) = cut_prompts(Source("a.py", SUITABLE + UNSUITABLE), tokenizer, seed)
        assert SUITABLE.startswith(prompt.prompt)
        assert DOCSTRING in prompt.prompt
        assert prompt.prompt.count("value_") <= 10
        assert prompt.category == ("function" if "value_" in prompt.prompt else "docstring")


def test_sources_that_do_not_parse_give_none(tokenizer: Tokenizer):
    assert cut_prompts(Source("a.py", SUITABLE + "def ("), tokenizer, 0) == []


def test_choice_takes_turns_and_repeats_with_the_seed(tokenizer: Tokenizer):
    many = "".join(SUITABLE.replace("suitable", f"suitable_{number}") for number in range(10))
    sources = [Source("many.py", many), Source("one.py", SUITABLE)]
    chosen = choose_prompts(sources, tokenizer, seed=0, count=4)
    assert [prompt.source for prompt in chosen].count("one.py") == 1
    assert len(chosen) == 4
    assert chosen == choose_prompts(sources, tokenizer, seed=0, count=4)
    assert len(choose_prompts(sources, tokenizer, seed=0, count=100)) == 11


def test_bundled_prompts_are_held_out_and_within_bounds(tokenizer: Tokenizer):
    prompts = [json.loads(line) for line in pocket.PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert len(prompts) == 48
    assert len({prompt["prompt"] for prompt in prompts}) == 48
    assert {prompt["category"] for prompt in prompts} == {"function", "class", "docstring"}
    for prompt in prompts:
        assert prompt["source"] in HELD_OUT
        assert FEWEST_TOKENS <= len(tokenizer.encode(prompt["prompt"]).ids) <= MOST_TOKENS
        assert prompt["prompt"] == prompt["prompt"].rstrip()
        kind = ast.parse(prompt["prompt"].split("\n")[0].split("(")[0].split(":")[0] + "():\n    pass").body[0]
        assert isinstance(kind, ast.FunctionDef | ast.ClassDef)
