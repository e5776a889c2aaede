"""Two rounds of drafting and verifying, enumerated with *keyed* random numbers: a key that is met again gives the same
number again, as a counter-based generator does. So a wrong key shows as an exact bias, not as a chance of one.

Numbers are uniform on [0, 1); every use of one cuts the interval it is known to lie in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from actors.protocol.messages import SamplingKind, SparseDistribution, TokenTree
from actors.verification.coupled import verify_coupled
from actors.verification.distributions import DrawnTree
from actors.verification.rules import RULES
from tests.actors.verification.rule_enumeration import ConditionalDistribution, Emission, Tape, all_runs

Keys = Callable[[str, int, int, int], Hashable]
"""(stream, position, round, node) -> the key of a number; the production's are the default of `emit`.

The node of a draw has three digits: its position, which child of its parent it is, its place among those of its depth.
"""


def production(stream: str, position: int, round: int, node: int) -> Hashable:
    """Keys of `actors.sampling.noise`: a position that is drafted again has new numbers; the target's keep theirs."""
    return (stream, position) if stream == "target" else (stream, round, node)


class Round:
    """One round after `context`: its draft and its verification."""

    def __init__(self, tape: Tape, keys: Keys, number: int, context: tuple[int, ...]) -> None:
        self._tape, self._keys, self._number, self._context = tape, keys, number, context
        self._node = 0
        self._positions: list[int] = []

    def _key(self, stream: str, position: int, node: int) -> Hashable:
        return self._keys(stream, position, self._number, node)

    def propose(self, q: ConditionalDistribution, levels: Sequence[Sequence[SamplingKind]]):
        """A tree like those of `enumerate_drafts`: every node of a level gets children of the level's kinds."""
        tokens, parents, kinds = [0], [-1], [SamplingKind.ROOT]
        laws: list[SparseDistribution | None] = [None]
        contexts, frontier = [self._context], [0]
        for level in levels:
            below = []
            for number, node in enumerate(frontier):
                row = q(contexts[node])
                left = row.copy()
                for sibling, kind in enumerate(level):
                    law = left if kind == SamplingKind.WITHOUT_REPLACEMENT else row
                    if not law.sum():
                        continue
                    position = len(contexts[node])
                    place = 100 * position + 10 * sibling + number * len(level) + sibling
                    if kind == SamplingKind.DETERMINISTIC:
                        token = int(np.argsort(-row, kind="stable")[sibling])
                    elif kind == SamplingKind.COUPLED:
                        token = self._tape.draw(row, self._key("target", position, 0))
                    else:
                        token = self._tape.draw(law, self._key("draft", position, place))
                        laws[node] = SparseDistribution(tuple(range(len(row))), tuple(row))
                    if kind == SamplingKind.WITHOUT_REPLACEMENT:
                        left[token] = 0.0
                    below.append(len(tokens))
                    tokens.append(token)
                    parents.append(node)
                    kinds.append(kind)
                    laws.append(None)
                    contexts.append((*contexts[node], token))
            frontier = below
        self._positions = [len(context) for context in contexts]
        self.contexts = contexts
        return TokenTree(tuple(tokens), tuple(parents)), tuple(kinds), tuple(laws)

    def accept(self, probability: float, node: int) -> bool:
        if not 0.0 < probability < 1.0:
            return probability >= 1.0
        key = self._key("coin", self._positions[node], node)
        return self._tape.draw([probability, 1 - probability], key) == 0

    def sample(self, weights: np.ndarray, node: int) -> int:
        return self._tape.draw(weights, self._key("residual", self._positions[node], node))


def emit(
    rule: str,
    p: ConditionalDistribution,
    q: ConditionalDistribution,
    levels: Sequence[Sequence[SamplingKind]],
    length: int = 2,
    keys: Keys = production,
) -> Emission:
    """The joint distribution of the first `length` tokens. The last round drafts no more than is still counted."""
    joint: dict[tuple[int, ...], float] = defaultdict(float)

    def run(tape: Tape) -> tuple[int, ...]:
        text, number = (), 0
        while len(text) < length:
            room = length - len(text) - (1 if number else 0)
            this = Round(tape, keys, number, text)
            tree, kinds, laws = this.propose(q, levels[: max(room, 1)])
            if rule == "coupled":
                choices = [tape.draw(p(one), keys("target", len(one), number, 0)) for one in this.contexts]
                path, token = verify_coupled(tree, choices)
            else:
                draft = DrawnTree(tree, kinds, laws)
                path, token = RULES[rule](draft, lambda node, at=this.contexts: p(at[node]), this)
            text = (*text, *(tree.token_ids[node] for node in path), token)
            number += 1
        return text[:length]

    for weight, text in all_runs(run):
        joint[text] += weight
    return Emission(dict(joint), 0.0)
