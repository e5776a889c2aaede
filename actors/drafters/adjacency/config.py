"""The configuration records of `drafter=recycling` and `drafter=aded`. Without PyTorch and numpy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from actors.drafters.config import DraftSetup, PlacedDrafterConfig
from actors.drafters.corpus import CorpusDrafterConfig
from actors.drafters.scoped import Share
from parallel.ranges import Range

if TYPE_CHECKING:
    from actors.drafters.adjacency.aded import AdedDrafter
    from actors.drafters.adjacency.recycling import RecyclingDrafter


@dataclass(frozen=True, slots=True)
class RecyclingDrafterConfig(PlacedDrafterConfig):
    """Token recycling: the target's own candidates at each token's last verified row, along a fixed tree."""

    name: str = "recycling"
    num_draft_tokens: Annotated[int, Range(1, cap=1024, remedy="for none write drafter=none")] = 24
    """Nodes of the tree, at most; 80 as published."""
    width: Annotated[int, Range(1, cap=64)] = 8
    """Candidates kept for every token of the vocabulary and client; 4 bytes each."""
    reads_prompts: bool = True
    """Also take candidates from the rows of prompts. The target then computes logits at every token it reads; without
    it the matrix fills from drafts alone, and slowly."""
    share: Share = Share.client
    """client: what the passes of the same client's requests taught; all: of any client, whose texts then show in
    acceptance."""

    @property
    def target_top_k(self) -> int:
        return self.width

    def build(self, setup: DraftSetup) -> tuple[RecyclingDrafter, dict[str, object]]:
        from actors.drafters.adjacency.recycling import RecyclingDrafter

        return RecyclingDrafter(self), {}


class TreeConstruction(StrEnum):
    """How the tree is found in the table."""

    best_first = "best_first"
    search = "search"


@dataclass(frozen=True, slots=True)
class AdedDrafterConfig(CorpusDrafterConfig):
    """Tri-grams with the target's probabilities, nudged by what it emits."""

    name: str = "aded"
    num_draft_tokens: Annotated[int, Range(1, cap=1024, remedy="for none write drafter=none")] = 16
    """Nodes of the tree, at most; 64 as published."""
    construction: TreeConstruction = TreeConstruction.best_first
    """best_first: the likeliest paths; search: the paper's Monte Carlo tree search, a hundred times as slow."""
    min_probability: Annotated[float, Range(0, 1)] = 0.01
    """best_first leaves out paths less likely than this."""
    iterations: Annotated[int, Range(1)] = 150
    """Iterations of a search, each four tokens deep at most; 150 as published."""
    width: Annotated[int, Range(1, cap=64)] = 12
    """Followers kept for each pair of tokens; 12 as published."""
    max_pairs: Annotated[int, Range(1)] = 100_000
    """Pairs of tokens in the table, the one unchanged for longest dropped first; about 1.5 kB each."""
    learns: bool = True
    """Take the target's distribution at every verified row into the table; false: only the tokens it emits, and the
    corpus, as published."""
    reads_prompts: bool = True
    """Also at the rows of prompts. The target then computes logits at every token it reads."""
    share: Share = Share.client
    """client: what the passes of the same client's requests taught; all: of any client, whose texts then show in
    acceptance."""

    @property
    def target_top_k(self) -> int:
        return self.width if self.learns else 0

    def build(self, setup: DraftSetup) -> tuple[AdedDrafter, dict[str, object]]:
        from actors.drafters.adjacency.aded import AdedDrafter

        corpus = self.documents()
        return AdedDrafter(self, corpus), {"corpus_tokens": sum(map(len, corpus))}
