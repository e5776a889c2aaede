"""One request at one level of a cascade: its text, the drafted tokens, and the proposal whose verdict is awaited."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.drafters.interface import Context
from actors.protocol.messages import SparseDistribution, TokenTree


@dataclass(slots=True, eq=False)
class RequestState:
    """`text` is the context's text followed by this level's drafted tokens; `distributions` are theirs, in order."""

    context: Context
    text: list[int]
    distributions: list[SparseDistribution] = field(default_factory=list)
    siblings: list[tuple[int, ...]] = field(default_factory=list)  # runners-up of these tokens, where a level has any
    first_draft: TokenTree | None = None  # of the child, at the context's text
    share: int = 1  # own tokens wanted in the next proposal; 0: the level forwards the child's drafts
    version: int = 0  # how often text was taken back
    num_reviews: int = 0
    in_flight: bool = False  # draft-ahead has something left to do
    # The proposal whose verdict is awaited: own tokens, then the tail from the child, then merged nodes.
    num_offered: int = 0
    num_tail: int = 0
    num_merged: int = 0
    num_ordered: int = 0  # tokens ordered from the child for the tail
    parts: tuple[tuple[str, int], ...] = ()  # levels, and how many of its nodes, in order, each drafted

    @property
    def request_id(self) -> int:
        return self.context.request_id

    @property
    def num_drafted(self) -> int:
        """Drafted tokens after the context's text."""
        return len(self.text) - len(self.context.token_ids)

    @property
    def is_full(self) -> bool:
        """Whether the wanted tokens are drafted."""
        return self.num_drafted >= self.share

    @property
    def is_prepared(self) -> bool:
        """Whether at least half of the wanted tokens are drafted."""
        return self.num_drafted > 0 and 2 * self.num_drafted >= self.share
