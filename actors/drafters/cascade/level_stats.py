"""Counts what one level of a cascade did and how many tokens of the levels below it were accepted.

A token counts for the level that drafted it, through however many others it passed; the level or target that verifies
it does the counting. Knows no model and no rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from actors.drafters.cascade.draft_lengths import TARGET, LengthControl
from actors.drafters.cascade.request_state import RequestState
from actors.protocol.messages import LevelWork, Proposal
from actors.verification.verifier import VerifyInput

Parts = tuple[tuple[str, int], ...]
"""Names of levels and how many nodes of a proposal, in order, each has drafted."""


@dataclass(slots=True)
class LevelStatsRecorder:
    """Counts the work of level number `level`; `control` learns acceptance from the same counts."""

    name: str
    level: int
    child_name: str
    control: LengthControl | None
    _work: list[LevelWork] = field(default_factory=list)

    def record_pass(self, seconds: float) -> None:
        """One pass of this level's model."""
        self._work.append(LevelWork(self.name, 1, seconds))

    def parts_of(self, proposal: Proposal) -> Parts:
        """The levels that drafted a proposal of the child."""
        return proposal.parts or ((self.child_name, proposal.tree.num_draft_tokens),)

    def record_review(self, verified: VerifyInput, source: int | None, num_ordered: int, path: Sequence[int]) -> None:
        """This level accepted `path` of what it ordered from level `source`."""
        if verified.proposal is not None and verified.tree.num_draft_tokens:
            self._work += _accepted_parts(self.parts_of(verified.proposal), path)
        if self.control is not None and source is not None and num_ordered:
            self.control.record_acceptance(source, self.level, num_ordered, len(path))
            self.control.record_draft(verified.seq_id, len(verified.token_ids), source, num_ordered, verified.tree)

    def record_verdict(
        self, state: RequestState, source: int | None, path: Sequence[int], token_ids: Sequence[int]
    ) -> None:
        """The target accepted `path` of this, the last, level's proposal.

        `token_ids` are the target's own choices whatever was drafted; empty under a rule where they depend on the
        draft.
        """
        own, beside = state.num_offered, state.num_offered + state.num_tail
        self._work += _accepted_parts(state.parts, path)
        if state.num_merged:
            kept = sum(node > beside for node in path)
            self._work.append(LevelWork(self.child_name, 0, 0.0, 1, state.num_merged, kept))
        if self.control is not None:
            level, num_tokens = (self.level, own) if own else (source, state.num_ordered)
            if level is not None and num_tokens:
                num_accepted = sum(node <= (own or beside) for node in path)
                self.control.record_acceptance(level, TARGET, num_tokens, num_accepted)
                self.control.record_commit(state.request_id, token_ids)
        state.parts, state.num_merged, state.num_ordered = (), 0, 0

    def flush(self, child_work: Iterable[LevelWork]) -> tuple[LevelWork, ...]:
        """Everything since the last call, with the work of the levels below."""
        work, self._work = (*self._work, *child_work), []
        return work


def _accepted_parts(parts: Parts, path: Sequence[int]) -> Iterator[LevelWork]:
    """Drafted and accepted tokens of each part; parts after a rejected token were not verified and do not count."""
    start = 1
    for name, num_tokens in parts:
        kept = sum(start <= node < start + num_tokens for node in path)
        yield LevelWork(name, 0, 0.0, 1, num_tokens, kept)
        if kept < num_tokens:
            return
        start += num_tokens
