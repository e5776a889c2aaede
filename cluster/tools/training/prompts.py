"""Prompts cut from sources: the heads of module-level functions and classes. Knows no model.

A prompt is a definition's first line up to the end of its docstring, and up to ten lines of body, so that a model
continues code whose purpose the text has stated.
"""

from __future__ import annotations

import ast
import random
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers import Tokenizer

from cluster.tools.training.corpus import Source

FEWEST_TOKENS, MOST_TOKENS = 40, 250
"""Bounds on a prompt's length in tokens."""
MOST_BODY_LINES = 10
"""Lines of body a prompt may show after the docstring."""


@dataclass(frozen=True)
class SourcePrompt:
    """One prompt; the fields are those of a line of `prompts.jsonl`."""

    prompt: str
    """The text to continue; it ends inside the definition, without a line break."""
    source: str
    """Library-relative path of the file it was cut from."""
    category: str
    """`function` or `class` when body is shown, `docstring` when the prompt ends with the docstring."""


def parse(source: Source) -> ast.Module:
    """Return the syntax tree, without its syntax warnings; an empty one for a source that does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return ast.parse(source.text)
    except SyntaxError:
        return ast.Module([], [])


def last_line(node: ast.stmt) -> int:
    """Return the number, from 1, of a statement's last line."""
    return node.end_lineno or node.lineno


def cut_prompts(source: Source, tokenizer: Tokenizer, seed: int) -> list[SourcePrompt]:
    """Return one prompt per suitable definition of a source, in file order.

    A definition is suitable when it has a docstring, body after it, and a cut within the length bounds. Sources that
    do not parse give no prompts. The seed decides how much body is shown.
    """
    choice = random.Random(f"{seed} {source.path}")
    lines = source.text.split("\n")
    prompts = []
    for node in parse(source).body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if ast.get_docstring(node) is None or len(node.body) < 2:
            continue
        body_lines = choice.choice((0, choice.randint(1, MOST_BODY_LINES)))
        docstring_end = last_line(node.body[0])
        stop = min(docstring_end + body_lines, last_line(node) - 1)
        text = "\n".join(lines[node.lineno - 1 : stop]).rstrip()
        if FEWEST_TOKENS <= len(tokenizer.encode(text).ids) <= MOST_TOKENS:
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            prompts.append(SourcePrompt(text, source.path, kind if stop > docstring_end else "docstring"))
    return prompts


def choose_prompts(sources: Iterable[Source], tokenizer: Tokenizer, seed: int, count: int) -> list[SourcePrompt]:
    """Return `count` prompts, or all there are, taken from the sources in turn so that none dominates."""
    cuts = [cut_prompts(source, tokenizer, seed) for source in sources]
    choice = random.Random(seed)
    for prompts in cuts:
        choice.shuffle(prompts)
    chosen: list[SourcePrompt] = []
    while len(chosen) < count and any(cuts):
        for prompts in cuts:
            if prompts and len(chosen) < count:
                chosen.append(prompts.pop())
    return sorted(chosen, key=lambda prompt: (prompt.source, prompt.category, prompt.prompt))
