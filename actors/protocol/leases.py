"""Records between an engine and a draft pool: the order of a lease, about once a second, a query, and the answers.

A lease gives the engine's coordinator the drafter of the pool as if it were the engine's own draft rank: the pool
connects to the coordinator's hub under that rank's name and with its key. Standard library only, every record frozen.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import isfinite

_ADDRESS = re.compile(r"tcp://([\w.-]{1,255}|\[[0-9a-fA-F:]{2,45}\]):\d{1,5}", re.ASCII)
KEY_BYTES = 32
"""Bytes of either half of a key."""
_LARGEST = 2**31 - 1
MOST_DRAFT_TOKENS = 256
"""Draft tokens of one order, at most."""
MOST_SEATS = 64
"""Leases that an engine holds at a time, at most."""
_LONGEST_LINE = 4096


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """What both sides must agree on, since drafts are made for it: the verification rule, the pipeline and the
    vocabulary, by its `tokenizer_digest` (empty: not known). `streams`: whether the engine waits for no draft and wants
    previews all the time (`DraftBatch.streams`), or whether the pool's drafter can send them."""

    rule: str
    pipeline: str
    vocabulary: str = ""
    streams: bool = False

    def misfit(self, wanted: LeaseTerms) -> str | None:
        """One line why a pool of these terms cannot draft for those that are wanted, or None."""
        for name, mine, theirs in (
            ("verify", self.rule, wanted.rule),
            ("pipeline", self.pipeline, wanted.pipeline),
        ):
            if mine != theirs:
                return f"the pool drafts for {name}={mine}, not {theirs}; start the engine or the pool with the other's"
        if self.vocabulary and wanted.vocabulary and self.vocabulary != wanted.vocabulary:
            return "the pool's vocabulary is not the target's; start the pool with target.path=DIR of the same model"
        if wanted.streams and not self.streams:
            return "the pool shows no drafts ahead; drop pipeline.local_drafter or use a pool of drafter=model"
        return None


@dataclass(frozen=True, slots=True)
class LeaseOrder:
    """Engine to pool: begin lease `number`, or renew it; a higher number ends the engine's earlier ones. One that was
    granted before, `is_renewal`, is refused by a pool that was started since: its rank would pass for the earlier one.

    The pool connects to `hub_address`, whose public key is `hub`, with the key `private` of the engine's draft rank at
    this `seat`, as its process `number`. Texts have at most `max_model_len` tokens below `vocab_size`, orders at most
    `num_draft_tokens`.
    """

    number: int
    hub_address: str
    hub: bytes
    terms: LeaseTerms
    vocab_size: int
    max_model_len: int
    num_draft_tokens: int
    private: bytes = field(repr=False, default=b"")
    seat: int = 0
    is_renewal: bool = False

    def check(self) -> None:
        """Raise ValueError, one line, for a field that is out of range."""
        if not _ADDRESS.fullmatch(self.hub_address):
            raise ValueError("hub_address: must be tcp://HOST:PORT")
        if len(self.hub) != KEY_BYTES or len(self.private) != KEY_BYTES:
            raise ValueError(f"hub, private: must have {KEY_BYTES} bytes each")
        for name, most in (
            ("number", _LARGEST),
            ("vocab_size", _LARGEST),
            ("max_model_len", _LARGEST),
            ("num_draft_tokens", MOST_DRAFT_TOKENS),
        ):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name}: must be between 1 and {most}")
        if not 0 <= self.seat < MOST_SEATS:
            raise ValueError(f"seat: must be between 0 and {MOST_SEATS - 1}")


@dataclass(frozen=True, slots=True)
class LeaseQuery:
    """Engine to pool: what would a lease of these terms be answered? An engine with several pools asks each."""

    terms: LeaseTerms
    num_draft_tokens: int


@dataclass(frozen=True, slots=True)
class LeaseAnswer:
    """Pool to engine: lease `number` lasts `lease_s` seconds from now, or is refused, or has ended (`why`, one line).

    A refusal that `is_final` stays one however often it is asked again, unless pool or engine are started otherwise.
    `drafter` and `num_leases` say what the pool drafts with, and for how many engines, `draft_s` how many seconds its
    answers to orders of drafts have taken lately. The answer to a `LeaseQuery` has number 0.
    """

    number: int
    lease_s: float = 0.0
    why: str = ""
    is_final: bool = False
    drafter: str = ""
    num_leases: int = 0
    draft_s: float = 0.0

    def check(self) -> None:
        """Raise ValueError, one line, for a field that is out of range."""
        for name, seconds in (("lease_s", self.lease_s), ("draft_s", self.draft_s)):
            if not (isfinite(seconds) and seconds >= 0):
                raise ValueError(f"{name}: must be 0 or more")
        for name, line in (("why", self.why), ("drafter", self.drafter)):
            if len(line) > _LONGEST_LINE or not line.isprintable():
                raise ValueError(f"{name}: must be one line of at most {_LONGEST_LINE} printable characters")
