"""Texts whose end needs what stands far before it: modules of Python's library behind the modules that they import.

`FarTexts.row` makes rows to train on: pieces of imported modules, then the module. `FarTexts.held_out` makes texts to
measure with: the tests of modules that no training has seen, and in front of them these modules, or others of the same
length. Knows tokens and sources; knows no model.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path, PurePosixPath

import torch
from tokenizers import Tokenizer
from torch import Tensor

from cluster.tools.training.corpus import Corpus, Source, library_sources
from cluster.tools.training.token_stream import END_OF_TEXT_ID

TESTED = ("bisect", "calendar", "configparser", "csv", "fractions", "heapq", "shlex", "textwrap")
"""Held-out modules whose tests are one file each, held out too."""
PIECE = 384
"""Tokens of each of them in front of a held-out text."""
SHARE = 4
"""A row has at most one in so many of its tokens from one imported module, so that several have a place."""


def module_name(path: str) -> str:
    """`email/message.py` is `email.message`, and `email/__init__.py` is `email`."""
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(source: Source) -> list[str]:
    """The modules that it names in imports anywhere, in order, each once; none if it is no program of this version.
    What it takes `from` a module may be a module too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in its strings
        try:
            nodes = ast.walk(ast.parse(source.text))
        except SyntaxError:
            return []
    package = module_name(source.path).split(".")
    is_package = PurePosixPath(source.path).name == "__init__.py"
    found: dict[str, None] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= dict.fromkeys(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + is_package] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= dict.fromkeys([base, *(f"{base}.{alias.name}" for alias in node.names)])
    return [*found]


class FarTexts:
    """The tokens of a corpus, module by module."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._corpus = tokenizer, corpus
        self._sources = {module_name(source.path): source for source in corpus.training}
        self._imports = {
            name: [one for one in imported_names(source) if one in self._sources and one != name]
            for name, source in self._sources.items()
        }
        self.names = sorted(name for name, imported in self._imports.items() if imported)
        """Modules that import others of the training sources; held-out ones are in neither."""
        self.tokens = cache(self._tokens)

    def _tokens(self, name: str) -> list[int]:
        return [END_OF_TEXT_ID, *self._tokenizer.encode(self._sources[name].text).ids]

    def imports(self, name: str) -> list[str]:
        return self._imports[name]

    def row(self, seed: int, length: int, reach: int) -> tuple[Tensor, Tensor]:
        """Tokens [length + 1] and positions [length] of a row; equal seeds make equal rows.

        Half of it at most is a part of a module, its beginning every other time; before that stand pieces of what it
        imports, of what these import, and then of any modules. Positions from the module on are moved by a distance
        that is drawn up to `reach`: the row learns positions that it has not the length for (PoSE, arXiv 2309.10400).
        """
        choose = random.Random(seed)
        name = choose.choice(self.names)
        own = self.tokens(name)
        if len(own) > length // 2:
            first = choose.choice([0, choose.randrange(len(own) - length // 2)])
            own = own[first : first + length // 2]
        needed, front = length + 1 - len(own), list[int]()
        for other in self._around(name, choose):
            if len(front) >= needed:
                break
            front = self.tokens(other)[: length // SHARE] + front  # the nearest first, so that the row ends with them
        front = front[len(front) - needed :]
        positions = torch.arange(length)
        positions[needed:] += choose.randint(0, max(0, reach - length))
        return torch.tensor(front + own), positions

    def _around(self, name: str, choose: random.Random) -> Iterator[str]:
        """What a module imports, in any order, then what those import, and so on, then any other modules."""
        seen, level = {name}, [name]
        while level:
            further = [one for here in level for one in self._imports[here] if one not in seen]
            level = [*dict.fromkeys(further)]
            choose.shuffle(level)
            seen.update(level)
            yield from level
        others = [one for one in self._sources if one not in seen]
        yield from choose.sample(others, len(others))

    def held_out(self, num_tokens: int, num_between: int) -> tuple[dict[str, list[int]], list[int], list[list[int]]]:
        """Fronts by name, of equal length: the beginnings of the modules `TESTED`, or of as many `other` modules; then
        what stands between, other modules again; and the first tokens of each module's tests."""
        sources = {module_name(source.path): source for source in self._corpus.held_out}
        library = [module_name(source.path) for source in library_sources(self._corpus)]
        long_ones = [name for name in library if len(self.tokens(name)) > PIECE]
        others = random.Random(0).sample(sorted(long_ones), len(long_ones))
        fronts, between = {"tested": list[int](), "other": list[int]()}, list[int]()
        for name in TESTED:
            fronts["tested"] += [END_OF_TEXT_ID, *self._tokenizer.encode(sources[name].text).ids][:PIECE]
        used = iter(others)
        while len(fronts["other"]) < len(fronts["tested"]):
            fronts["other"] += self.tokens(next(used))[:PIECE]
        while len(between) < num_between:
            between += self.tokens(next(used))
        folder = Path(sysconfig.get_paths()["stdlib"]) / "test"
        tests = [(folder / f"test_{name}.py").read_text(encoding="utf-8") for name in TESTED]
        texts = [[END_OF_TEXT_ID, *self._tokenizer.encode(text).ids][: num_tokens + 1] for text in tests]
        return fronts, between[:num_between], texts


def batch_of(rows: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    tokens, positions = zip(*rows, strict=True)
    return torch.stack(tokens), torch.stack(positions)
