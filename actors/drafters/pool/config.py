"""`drafter=pool`: drafts come from a pool that the targets of several engines share. Torch-free.

The pool is started by itself (`job=pool`); this record says where it is. The engine starts no draft rank of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated

from actors.drafters.config import DrafterConfig, PathResolver
from actors.options import PipelineName, VerifyRule
from actors.protocol.leases import MOST_DRAFT_TOKENS, MOST_SEATS
from parallel.ranges import Range, require


@dataclass(frozen=True, slots=True)
class PoolDrafterConfig(DrafterConfig):
    """A draft pool that other engines use too (`job=pool`), or several, of which one or some at a time draft."""

    name: str = "pool"
    pools: list[str] = field(default_factory=list)
    """Addresses of pools, tcp://HOST:PORT each: the one whose drafts come soonest lends its drafter, and another takes
    over when it is lost."""
    key_files: list[str] = field(default_factory=list)
    """Files with the pools' keys, in the same order, or one file for all; a pool prints where it has written its
    own."""
    num_draft_tokens: Annotated[int, Range(1, MOST_DRAFT_TOKENS, remedy="for none write drafter=none")] = 5
    """Draft tokens a round, at most."""
    at_once: Annotated[int, Range(1, MOST_SEATS)] = 1
    """Pools that draft at a time, each for a part of the requests: those go to the pools whose drafts bring most. Each
    has the pools of its own that come `at_once` places later in the list to take over."""
    is_elsewhere = True

    def check_fields(self, where: str) -> None:
        require(bool(self.pools), f"{where}.pools", "[]", "give the address of a pool, as [tcp://HOST:PORT]")
        for address in self.pools:
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            good = address.startswith("tcp://") and host and port.isdecimal() and 0 < int(port) < 1 << 16
            require(bool(good), f"{where}.pools", address, "is no address; give tcp://HOST:PORT")
        remedy = "give at most the number of pools"
        require(self.at_once <= len(self.pools), f"{where}.at_once", self.at_once, remedy)
        remedy = "give the file with the key of each pool, or one for all"
        require(len(self.key_files) in (1, len(self.pools)), f"{where}.key_files", self.key_files, remedy)

    def check_with(self, rule: VerifyRule, pipeline: PipelineName, where: str = "drafter") -> None:
        remedy = "a pool's drafts are verified by verify=coupled; use that"
        require(rule in (VerifyRule.coupled, VerifyRule.auto), "verify", str(rule), remedy)

    def with_paths(self, resolve: PathResolver, where: str = "drafter") -> PoolDrafterConfig:
        key, wanted = f"{where}.key_files", "the key that the pool has written"
        return replace(self, key_files=[resolve.file(key, file, wanted) for file in self.key_files])

    @property
    def scores_drafts(self) -> bool:
        return False

    @property
    def num_seats(self) -> int:
        return self.at_once

    @property
    def lenders(self) -> list[tuple[str, str]]:
        files = self.key_files * len(self.pools) if len(self.key_files) == 1 else self.key_files
        return list(zip(self.pools, files, strict=True))
