"""Prompts of the tasks: made alike, and as they are bundled."""

from __future__ import annotations

import ast
import json
import random

import pytest

from cluster import pocket
from cluster.tools.training.corpus import Source
from docs.measurements.pocket.tasks import NUM_PROMPTS, main, meaning, structured_query, summarisation

TASKS = ("summarisation", "structured_query", "meaning")


@pytest.mark.parametrize("name", TASKS)
def test_bundled_prompts_are_of_their_task(name):
    lines = pocket.PROMPTS.with_name(f"{name}.jsonl").read_text().splitlines()
    prompts = [json.loads(line) for line in lines]
    assert len(prompts) == NUM_PROMPTS == len({prompt["prompt"] for prompt in prompts})
    assert {prompt["category"] for prompt in prompts} == {name}


@pytest.mark.parametrize(("name", "make"), [("structured_query", structured_query), ("meaning", meaning)])
def test_what_depends_on_no_library_is_made_as_it_is_bundled(name, make):
    lines = pocket.PROMPTS.with_name(f"{name}.jsonl").read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == make(random.Random(0))


def test_functions_lose_their_docstring_alone():
    functions = [f'def f{i}(x):\n    """Return x plus {i}."""\n    return x + {i}\n' for i in range(NUM_PROMPTS)]
    without = "def g(x):\n    return x\n"
    prompts = summarisation([Source("a.py", "\n".join([*functions, without]))], random.Random(0))
    assert len(prompts) == NUM_PROMPTS and not any('"""' in prompt or "def g" in prompt for prompt in prompts)
    for prompt in prompts:
        (function,) = ast.parse(prompt).body
        assert isinstance(function, ast.FunctionDef) and len(function.body) == 1
        assert prompt.endswith(f"# What {function.name} does, in one line:\n#")


@pytest.mark.slow  # it reads the whole library
def test_all_files_are_written(tmp_path):
    main(tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == set(TASKS)
