"""The configuration record of `drafter=rest` and its checks. Torch-free, and without numpy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from actors.drafters.config import DrafterConfig, DraftSetup, PathResolver, PlacedDrafterConfig
from parallel.model.families.registry import read_config
from parallel.ranges import Range, require

if TYPE_CHECKING:
    from actors.drafters.retrieval.rest import RestDrafter

DEPTH = 32
"""Tokens by which the suffixes in a datastore are sorted: a match and its continuation are at most so long."""


@dataclass(frozen=True, slots=True)
class RestDrafterConfig(PlacedDrafterConfig):
    """Retrieval from a datastore file, made by `job=datastore`."""

    name: str = "rest"
    num_draft_tokens: Annotated[int, Range(1, cap=1024, remedy="for none write drafter=none")] = 16
    """Nodes of the tree, at most; 64 as published."""
    datastore: str = ""
    """File made by `job=datastore` with the target's tokenizer."""
    longest_match: Annotated[int, Range(1, DEPTH - 1)] = 16
    """Longest suffix of the text that is looked up, in tokens; the longest that occurs wins."""
    shortest_match: Annotated[int, Range(1, DEPTH - 1)] = 2
    """Shortest suffix whose continuations are drafted, in tokens."""
    depth: Annotated[int, Range(1, DEPTH - 1)] = 10
    """Tokens of a continuation, at most; together with `longest_match` at most 32."""
    max_matches: Annotated[int, Range(1)] = 1000
    """Occurrences whose continuations are counted; of more, as many spread evenly. 5000 as published."""

    def check_fields(self, where: str) -> None:
        longest = self.longest_match
        require(bool(self.datastore), f"{where}.datastore", self.datastore, "name a file made by job=datastore")
        require(longest >= self.shortest_match, f"{where}.longest_match", longest, "must not be below shortest_match")
        remedy = (
            f"is more than {DEPTH} tokens together with longest_match={longest}; the datastore is sorted by {DEPTH}"
        )
        require(longest + self.depth <= DEPTH, f"{where}.depth", self.depth, remedy)

    def with_paths(self, resolve: PathResolver, where: str = "drafter") -> DrafterConfig:
        from actors.drafters.retrieval.datastore import Datastore  # loads numpy
        from actors.tokenizer_file import tokenizer_digest

        key, target = f"{where}.datastore", Path(resolve.target)
        path = resolve.file(key, self.datastore, "one made by job=datastore")
        try:
            store = Datastore(Path(path))
            is_of_target = store.about["tokenizer"] == tokenizer_digest(target)
            store.check_tokens(read_config(target).vocab_size)
        except ValueError as error:
            raise ValueError(f"{key}={error}") from error
        remedy = "was made with another tokenizer than the target's; make one with job=datastore and this target"
        require(is_of_target, key, self.datastore, remedy)
        return replace(self, datastore=path)

    def build(self, setup: DraftSetup) -> tuple[RestDrafter, dict[str, object]]:
        from actors.drafters.retrieval.datastore import Datastore
        from actors.drafters.retrieval.rest import RestDrafter

        store = Datastore(Path(self.datastore))
        return RestDrafter(self, store), {"datastore_tokens": store.about["num_tokens"]}
