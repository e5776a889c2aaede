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

import torch
from torch import Tensor

VOCABULARY = 1024
END, SEPARATOR = 0, 1
NOISE = 256
"""Tokens of the noise of one text; any other one, but the two above, may stand in a block."""


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


def training_row(seed: int, length: int, reach: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [length + 1], positions [length] and whether an answer comes next [length]; equal seeds make equal rows.

    Blocks and noise between them in the first part, all their questions in the second. Positions jump at some places,
    by distances of all magnitudes, up to `reach` (PoSE, arXiv 2309.10400).
    """
    choose = random.Random(seed)
    words, blocks, front, questions = Words(choose), list[Block](), 0, 0
    share = choose.uniform(0.7, 1.0)
    while True:
        kind, count = choose.choice(["span", "records"]), choose.randint(4, 40)
        longer = front + (count if kind == "span" else 3 * (count - 1)), questions + count
        if sum(longer) > share * length:
            break
        blocks.append(words.block(kind, count))
        front, questions = longer
    pieces: list[tuple[list[int], int]] = [(one.tokens, 0) for one in blocks]
    asked = [(one.question, 1) for one in blocks]
    choose.shuffle(asked)
    pieces += asked
    spare = length + 1 - sum(len(tokens) for tokens, _ in pieces)
    cuts = sorted(choose.randint(0, spare) for _ in pieces)
    row, wanted = list[int](), list[int]()
    for (tokens, is_asked), low, high in zip(pieces, [0, *cuts], cuts, strict=False):
        row += [*words.noise(high - low), *tokens]
        wanted += [0] * (high - low) + [0] + [is_asked] * (len(tokens) - 1)
    rest = length + 1 - len(row)
    row += words.noise(rest)
    wanted += [0] * rest
    positions = torch.arange(length)
    left = reach - length
    for _ in range(choose.randint(0, 4)):
        if left > 1:
            jump = int(left ** choose.random())
            positions[choose.randrange(length) :] += jump
            left -= jump
    return torch.tensor(row), positions, torch.tensor(wanted[1:], dtype=torch.bool)
