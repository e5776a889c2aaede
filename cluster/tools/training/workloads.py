"""Prompts of kinds that lookups live on: editing, where text is copied with a change, and an agent that sees it again.

Cut from the held-out modules and their tests. A small target copies some functions and not others, so that what it
answers decides: of all candidates those are kept whose answers copy most without going round in a circle. Knows no
model; whoever asks hands in what completes a prompt. `python -m cluster.tools.training.workloads DIR` writes both files with
the bundled target.
"""

from __future__ import annotations

import ast
import random
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from cluster.tools.training.corpus import HELD_OUT, Source
from cluster.tools.training.prompts import Prompt, write_prompts

NUM_PROMPTS = 24
FEWEST_TOKENS, MOST_TOKENS = 60, 170
"""Bounds on a function's length in tokens."""
FEWEST_LINES = 5
ANSWER_TOKENS = 64
"""Length of the answers that are judged."""
LEAST_VARIETY = 0.4
"""Different trigrams per trigram of an answer; below, it repeats itself rather than the prompt."""
NUM_SESSIONS = 3
"""Sessions of the agent that come to the same function."""
SYSTEM = '''"""Session of a coding agent.

Tools: read(name) shows a function, run(name) runs its test, write(name) stores a new version of it.
Answers of the tools are shown as they came.
"""
'''
_GRAM = 4

Complete = Callable[[Sequence[str]], list[list[int]]]
"""Prompts to the token ids of their greedy answers."""


@dataclass(frozen=True)
class Function:
    """A function's whole text, without the indentation of its class."""

    name: str
    text: str
    source: str

    @property
    def beginning(self) -> str:
        """A third of its lines, at least two, up to the end of a line."""
        lines = self.text.split("\n")
        return "\n".join(lines[: max(2, len(lines) // 3)]).rstrip()


def held_out_sources(root: Path | None = None) -> list[Source]:
    """The held-out modules and, where the library has them, their tests."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    paths = [path for name in HELD_OUT for path in (name, f"test/test_{name}")]
    return [Source(path, (root / path).read_text(encoding="utf-8")) for path in paths if (root / path).is_file()]


def cut_functions(source: Source, tokenizer: Tokenizer) -> Iterator[Function]:
    """Functions and methods of a suitable length, in file order; none from a source that does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            module = ast.parse(source.text)
    except SyntaxError:
        return
    lines = source.text.split("\n")
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno + 1 >= FEWEST_LINES:
            text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if FEWEST_TOKENS <= len(tokenizer.encode(text).ids) <= MOST_TOKENS:
                yield Function(node.name, text, source.path)


def edit_prompt(function: Function) -> Prompt:
    """The function, then the beginning of it under another name."""
    renamed = re.sub(rf"\b{function.name}\b", f"{function.name}_again", function.beginning)
    return Prompt(f"{function.text}\n\n{renamed}", function.source, "editing")


def agent_prompt(function: Function, other: Function) -> Prompt:
    """A session that has seen `other` and the function, and begins to write the latter."""
    steps = [
        f'>>> read("{other.name}")\n{other.beginning}',
        f'>>> read("{function.name}")\n{function.text}',
        f'>>> write("{function.name}")\n{function.beginning}',
    ]
    return Prompt("\n".join([SYSTEM, "\n\n".join(steps)]), function.source, "agent")


def copied_share(prompt_ids: Sequence[int], answer: Sequence[int]) -> float:
    """Four-grams of the answer that the prompt holds; 0 for an answer that goes round in a circle."""
    trigrams = [tuple(answer[i : i + 3]) for i in range(len(answer) - 2)]
    grams = [tuple(answer[i : i + _GRAM]) for i in range(len(answer) - _GRAM + 1)]
    if not grams or len(set(trigrams)) < LEAST_VARIETY * len(trigrams):
        return 0.0
    known = {tuple(prompt_ids[i : i + _GRAM]) for i in range(len(prompt_ids) - _GRAM + 1)}
    return sum(gram in known for gram in grams) / len(grams)


def most_copied(
    functions: Iterable[Function],
    prompt_of: Callable[[Function], Prompt],
    count: int,
    tokenizer: Tokenizer,
    complete: Complete,
) -> list[Function]:
    """The `count` functions whose prompts are answered with most of themselves, the most copied first."""
    functions = list(functions)
    prompts = [prompt_of(function).prompt for function in functions]
    shares = [
        copied_share(tokenizer.encode(prompt).ids, answer)
        for prompt, answer in zip(prompts, complete(prompts), strict=True)
    ]
    ranked = sorted(range(len(functions)), key=lambda i: -shares[i])
    return [functions[i] for i in ranked[:count]]


def choose_workloads(
    sources: Iterable[Source], tokenizer: Tokenizer, complete: Complete, seed: int = 0
) -> dict[str, list[Prompt]]:
    """`editing` and `agent`, of `NUM_PROMPTS` prompts each; the agent's sessions take turns."""
    functions = [function for source in sources for function in cut_functions(source, tokenizer)]
    choice = random.Random(seed)
    others = choice.sample(functions, NUM_SESSIONS)
    edited = most_copied(functions, edit_prompt, NUM_PROMPTS, tokenizer, complete)
    seen = most_copied(
        functions, lambda function: agent_prompt(function, others[0]), NUM_PROMPTS // NUM_SESSIONS, tokenizer, complete
    )
    return {
        "editing": [edit_prompt(function) for function in edited],
        "agent": [agent_prompt(function, other) for other in others for function in seen],
    }


def main(folder: Path) -> None:
    """Write `editing.jsonl` and `agent.jsonl` with the bundled target's answers."""
    from cluster.config.schema import load_config
    from cluster.engine import Engine

    overrides = ["cluster=inprocess", "drafter=ngram", f"sampling.max_tokens={ANSWER_TOKENS}"]
    with Engine(load_config(overrides)) as engine:

        def complete(prompts: Sequence[str]) -> list[list[int]]:
            return [completion.token_ids for completion in engine.generate(prompts)]

        for name, prompts in choose_workloads(held_out_sources(), engine.tokenizer, complete).items():
            write_prompts(prompts, folder / f"{name}.jsonl")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
