"""Prompts of the three tasks on which Speculative Streaming reports (arXiv 2402.11131), made for here.

`summarisation`: a held-out function without its docstring, to be said in a line. `structured_query`: tables and a
question, to be put into SQL. `meaning`: a meaning representation, attributes and values, to be put into a sentence. The
bundled target has seen code alone, so on the last one its text means little, and what is measured is its speed.
`python -m docs.measurements.pocket.tasks DIR` writes the files.
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

from cluster.tools.training.corpus import Source, load_corpus
from docs.measurements import lines

NUM_PROMPTS = 24
LONGEST = 700
"""Characters of a function to be summarised."""
_TABLES = {
    "orders": ("id", "customer", "total", "placed_on", "city"),
    "employees": ("id", "name", "salary", "department", "hired_on"),
    "books": ("id", "title", "author", "pages", "published"),
    "flights": ("id", "origin", "destination", "seats", "departure"),
}
_QUESTIONS = (
    "How many {table} are there for each {one}?",
    "Which {table} have the largest {one}?",
    "List the {one} of all {table} by {other}.",
    "Which {one} has the most {table} with a known {other}?",
)
_NAMES = ("The Mill", "Blue Spice", "The Punter", "Cotto", "Green Man", "Zizzi", "The Phoenix", "Wildwood")
_VALUES = {
    "kind": ("pub", "coffee shop", "restaurant"),
    "food": ("French", "Indian", "Japanese", "English", "Italian"),
    "price": ("cheap", "moderate", "high"),
    "area": ("riverside", "city centre"),
    "family friendly": ("yes", "no"),
}


def summarisation(sources: list[Source], choose: random.Random) -> list[str]:
    """Functions that have a docstring, without it."""
    found = []
    for source in sources:
        for node in ast.walk(ast.parse(source.text)):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
                node.body = node.body[1:]  # the tree is read here alone
                body = ast.unparse(node)
                if len(body) < LONGEST:
                    found.append(f"{body}\n\n# What {node.name} does, in one line:\n#")
    return choose.sample(sorted(set(found)), NUM_PROMPTS)


def structured_query(choose: random.Random) -> list[str]:
    schema = "\n".join(f"-- {name}({', '.join(columns)})" for name, columns in sorted(_TABLES.items()))
    asked = [
        question.format(table=table, one=one, other=other)
        for question in _QUESTIONS
        for table, columns in _TABLES.items()
        for one, other in permutations(columns[1:], 2)
    ]
    return [f"{schema}\n-- {question}\nSELECT" for question in choose.sample(sorted(set(asked)), NUM_PROMPTS)]


def meaning(choose: random.Random) -> list[str]:
    def line() -> str:
        chosen = choose.sample([*_VALUES], choose.randint(2, len(_VALUES)))
        pairs = [f"name[{choose.choice(_NAMES)}]", *(f"{key}[{choose.choice(_VALUES[key])}]" for key in chosen)]
        return ", ".join(pairs)

    example = "name[The Vaults], kind[pub], area[riverside]\nThe Vaults is a pub by the river."
    return [f"{example}\n\n{line()}\n" for _ in range(NUM_PROMPTS)]


def prompts_of_tasks() -> dict[str, list[str]]:
    """The prompts of each task; always the same on one version of Python."""
    makers: dict[str, Callable[[random.Random], list[str]]] = {
        "summarisation": lambda choose: summarisation(list(load_corpus(0).held_out), choose),
        "structured_query": structured_query,
        "meaning": meaning,
    }
    return {name: make(random.Random(0)) for name, make in makers.items()}


def main(directory: Path) -> None:
    for name, prompts in prompts_of_tasks().items():
        lines.write(directory / f"{name}.jsonl", ({"prompt": prompt, "category": name} for prompt in prompts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
