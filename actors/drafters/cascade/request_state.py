"""One request at one level of a cascade: text, what was drafted behind it, and what is being verified above."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from actors.drafters.interface import Context
from actors.protocol.messages import SparseDistribution, TokenTree


@dataclass(slots=True, eq=False)
class Stream:
    """One request at this level: committed text and, behind it, the tokens this level has drafted with their laws.

    `num_offered` of them and `num_tail` tokens of the level beneath, of `num_ordered` that it was asked for, are in
    the proposal whose verdict is awaited; `parts` says who drafted them, `num_merged` how many stand beside them.
    `share` is how many of its own tokens it was last ordered to have, none if it only passes on what the level beneath
    says; `in_flight` says that draft-ahead has something left to do. `version` counts how often text was taken back.
    """

    context: Context
    text: list[int]
    distributions: list[SparseDistribution] = field(default_factory=list)
    num_offered: int = 0
    num_tail: int = 0
    num_ordered: int = 0
    num_merged: int = 0
    parts: tuple[tuple[str, int], ...] = ()
    share: int = 1
    in_flight: bool = False
    version: int = 0
    num_reviews: int = 0
    first_guess: TokenTree | None = None  # of the level beneath, behind the committed text

    @property
    def request_id(self) -> int:
        return self.context.request_id

    @property
    def num_drafted(self) -> int:
        return len(self.text) - len(self.context.token_ids)

    @property
    def is_full(self) -> bool:
        return self.num_drafted >= self.share

    @property
    def is_prepared(self) -> bool:
        """At least half of a draft is there."""
        return self.num_drafted > 0 and 2 * self.num_drafted >= self.share


def common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> Iterator[int]:
    """The tokens both begin with."""
    for one, other in zip(ours, theirs, strict=False):
        if one != other:
            return
        yield one
