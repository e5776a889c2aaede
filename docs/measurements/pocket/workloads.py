"""Prompts of kinds that suit lookup drafters: editing, which copies text with a change, and an agent that rereads it.

Cut from the held-out modules and their tests. A small target copies some functions and not others, so its answers
decide: the candidates whose answers copy the prompt most, without repeating themselves, are kept. The caller passes the
function that completes prompts. `python -m docs.measurements.pocket.workloads DIR` writes both files with the bundled
target.
"""

from __future__ import annotations

import ast
import random
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

from cluster.tools.training.corpus import HELD_OUT, Source
from cluster.tools.training.prompts import SourcePrompt, last_line, parse
from docs.measurements import lines

NUM_PROMPTS = 24
FEWEST_TOKENS, MOST_TOKENS = 60, 170
"""Bounds on a function's length in tokens."""
FEWEST_LINES = 5
ANSWER_TOKENS = 64
"""Length of the answers that are judged."""
LEAST_VARIETY = 0.4
"""Different trigrams per trigram of an answer; an answer with fewer repeats itself rather than the prompt."""
NUM_SESSIONS = 3
"""Sessions of the agent that write the same function."""
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
    lines = source.text.split("\n")
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.FunctionDef) and last_line(node) - node.lineno + 1 >= FEWEST_LINES:
            text = "\n".join(lines[node.lineno - 1 : last_line(node)])
            if FEWEST_TOKENS <= len(tokenizer.encode(text).ids) <= MOST_TOKENS:
                yield Function(node.name, text, source.path)


def edit_prompt(function: Function) -> SourcePrompt:
    """The function, then the beginning of it under another name."""
    renamed = re.sub(rf"\b{function.name}\b", f"{function.name}_again", function.beginning)
    return SourcePrompt(f"{function.text}\n\n{renamed}", function.source, "editing")


def agent_prompt(function: Function, other: Function) -> SourcePrompt:
    """A session that has read `other` and the function, and begins to write the latter."""
    steps = [
        f'>>> read("{other.name}")\n{other.beginning}',
        f'>>> read("{function.name}")\n{function.text}',
        f'>>> write("{function.name}")\n{function.beginning}',
    ]
    return SourcePrompt("\n".join([SYSTEM, "\n\n".join(steps)]), function.source, "agent")


def copied_share(prompt_ids: Sequence[int], answer: Sequence[int]) -> float:
    """Fraction of the answer's four-grams that the prompt holds; 0 for an answer that repeats itself."""
    trigrams = [tuple(answer[i : i + 3]) for i in range(len(answer) - 2)]
    grams = [tuple(answer[i : i + _GRAM]) for i in range(len(answer) - _GRAM + 1)]
    if not grams or len(set(trigrams)) < LEAST_VARIETY * len(trigrams):
        return 0.0
    known = {tuple(prompt_ids[i : i + _GRAM]) for i in range(len(prompt_ids) - _GRAM + 1)}
    return sum(gram in known for gram in grams) / len(grams)


def most_copied(
    functions: Iterable[Function],
    prompt_of: Callable[[Function], SourcePrompt],
    count: int,
    tokenizer: Tokenizer,
    complete: Complete,
) -> list[Function]:
    """The `count` functions whose prompts have the answers that copy most, the most copied first."""
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
) -> dict[str, list[SourcePrompt]]:
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
    from cluster.config.compose import load_config
    from cluster.engine import Engine

    overrides = ["cluster=inprocess", "drafter=ngram", f"sampling.max_tokens={ANSWER_TOKENS}"]
    with Engine(load_config(overrides)) as engine:

        def complete(prompts: Sequence[str]) -> list[list[int]]:
            return [completion.token_ids for completion in engine.generate(prompts)]

        for name, prompts in choose_workloads(held_out_sources(), engine.tokenizer, complete).items():
            lines.write(folder / f"{name}.jsonl", map(asdict, prompts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
