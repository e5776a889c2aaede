"""Prompts for editing and for an agent: how they are cut and chosen, and that the bundled ones are copied from."""

from __future__ import annotations

import json
import sysconfig
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from cluster import pocket
from cluster.io.prompts import read_prompts
from cluster.tools.training.corpus import HELD_OUT, Source
from docs.measurements.pocket.workloads import (
    NUM_PROMPTS,
    NUM_SESSIONS,
    SYSTEM,
    agent_prompt,
    choose_workloads,
    copied_share,
    cut_functions,
    edit_prompt,
    held_out_sources,
)
from tests.cluster.conftest import one_free_thread as one_free_thread  # noqa: PLC0414 (a fixture)

BODY = "\n".join(f"        self.assertEqual(add({i}, {i + 1}), {2 * i + 1})" for i in range(8))
SOURCE = Source(
    "test/test_add.py",
    "class T:\n" + "\n".join(f"    def test_add_{i}(self):\n        # add to {i}\n{BODY}\n" for i in range(10)),
)
SHORT = Source("short.py", "def f():\n    return 1\n")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(pocket.TARGET / "tokenizer.json"))


def test_whole_functions_of_a_suitable_length_are_cut(tokenizer):
    functions = list(cut_functions(SOURCE, tokenizer))
    assert [function.name for function in functions] == [f"test_add_{i}" for i in range(10)]
    assert functions[0].text.startswith("    def test_add_0(self):") and functions[0].text.endswith("15)")
    assert list(cut_functions(SHORT, tokenizer)) == list(cut_functions(Source("x.py", "def f(:"), tokenizer)) == []


def test_an_edit_begins_the_function_again_under_another_name(tokenizer):
    function = next(cut_functions(SOURCE, tokenizer))
    prompt = edit_prompt(function)
    again = prompt.prompt.removeprefix(function.text + "\n\n")
    assert again == function.beginning.replace("test_add_0", "test_add_0_again") and not again.endswith("\n")


def test_a_session_shows_the_function_before_it_is_written(tokenizer):
    function, other, *_ = cut_functions(SOURCE, tokenizer)
    text = agent_prompt(function, other).prompt
    assert text.startswith(SYSTEM) and text.endswith(function.beginning)
    assert text.index(other.beginning) < text.index(function.text)


def test_copies_count_and_circles_do_not():
    prompt = list(range(100))
    assert copied_share(prompt, prompt[20:60]) == 1.0
    assert copied_share(prompt, [*prompt[20:40], *range(200, 220)]) == pytest.approx(17 / 37)
    assert copied_share(prompt, [20, 21, 22, 23] * 10) == 0.0, "it repeats itself, not the prompt"


def test_the_functions_that_are_copied_most_are_chosen(tokenizer):
    """Answers that copy more of the prompt, the later the function stands in the file."""

    def complete(prompts):
        ids = [tokenizer.encode(prompt).ids for prompt in prompts]
        return [[*text[: 6 + 5 * i], *range(4000, 4064 - 5 * i)] for i, text in enumerate(ids)]

    chosen = choose_workloads([SOURCE], tokenizer, complete)
    assert "test_add_9_again" in chosen["editing"][0].prompt and len(chosen["editing"]) == 10
    written = [prompt.prompt.rpartition(">>> write(")[2].partition(")")[0] for prompt in chosen["agent"]]
    assert written[0] == '"test_add_9"' and set(Counter(written).values()) == {NUM_SESSIONS}


@pytest.mark.parametrize("name", ["editing", "agent"])
def test_the_bundled_workloads_are_whole(tokenizer, name):
    file = pocket.PROMPTS.with_name(f"{name}.jsonl")
    prompts = read_prompts(file)
    assert len({prompt.text for prompt in prompts}) == NUM_PROMPTS
    assert {json.loads(line)["category"] for line in Path(file).read_text().splitlines()} == {name}
    assert max(len(tokenizer.encode(prompt.text).ids) for prompt in prompts) + 64 <= 512, (
        "the pair knows no longer texts"
    )


@pytest.mark.extended
def test_the_bundled_workloads_are_answered_by_copying(one_free_thread):
    """More than a third of the agent's answers are looked up, and a session like an earlier one is looked up better."""
    from cluster.config.compose import load_config
    from cluster.engine import Engine

    prompts = read_prompts(pocket.PROMPTS.with_name("agent.jsonl"))
    overrides = ["cluster=inprocess", "cluster.oversubscribe=true", "drafter=suffix", "sampling.max_tokens=48"]
    overrides.append("pipeline.adaptive=false")  # on a busy machine the policy may rest
    with Engine(load_config(overrides)) as engine:
        sessions = [engine.generate([prompts[i].text for i in range(start, start + 3)]) for start in (0, 8)]
    shares = [
        sum(one.stats.num_accepted_tokens for one in session) / sum(len(one.token_ids) for one in session)
        for session in sessions
    ]
    assert 1 / 3 < shares[0] < shares[1]


def test_held_out_text_is_that_of_pythons_own_library():
    library = Path(sysconfig.get_paths()["stdlib"])
    found = held_out_sources()
    assert {source.path for source in found} >= set(HELD_OUT)
    assert all(source.text == (library / source.path).read_text(encoding="utf-8") for source in found)
