"""Texts whose end repeats what stands far before it, and nothing else of which can be foreseen.

A text is noise, tokens drawn at random, with blocks between it. A `span` is a list of tokens; its question is the same
list, of which the first token tells the others. `records` are pairs of a key and what follows it, in any order, each
behind a separator; their question walks along them, so that each answer is the next key. Blocks of one text share no
tokens, and the noise has none of theirs: an answer stands in one place. Knows no model and no drafter.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

VOCABULARY = 1024
SEPARATOR = 1
NOISE = 256
"""Tokens of the noise of one text; any other one but the first two may stand in a block."""


@dataclass(frozen=True)
class Block:
    """What stands in the text, and the question at its end."""

    kind: str
    tokens: list[int]
    question: list[int]


def block_of(kind: str, tokens: Sequence[int], choose: random.Random) -> Block:
    """A block of these tokens, each of them once in the question."""
    if kind == "span":
        return Block(kind, list(tokens), list(tokens))
    pairs = list(pairwise(tokens))
    choose.shuffle(pairs)
    return Block(kind, [one for pair in pairs for one in (SEPARATOR, *pair)], list(tokens))


class Words:
    """The tokens of one text: some are noise, and of the others each is used once."""

    def __init__(self, choose: random.Random) -> None:
        self._choose = choose
        ids = choose.sample(range(SEPARATOR + 1, VOCABULARY), VOCABULARY - SEPARATOR - 1)
        self._noise, self._unused = ids[:NOISE], ids[NOISE:]

    def noise(self, count: int) -> list[int]:
        return self._choose.choices(self._noise, k=count)

    def block(self, kind: str, count: int) -> Block:
        tokens, self._unused = self._unused[:count], self._unused[count:]
        if len(tokens) < count:
            raise ValueError(f"{VOCABULARY} words are too few for these blocks")
        return block_of(kind, tokens, self._choose)
