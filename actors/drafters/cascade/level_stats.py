"""What one level of a cascade did, and how those who drafted for it were judged: by this level, or by the target.

Every token is the level's that drafted it, through however many others it came; whoever judges it keeps account of it.
Counts only; knows no model and no rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from actors.drafters.cascade.draft_lengths import TARGET, LengthControl
from actors.drafters.cascade.request_state import Stream
from actors.protocol.messages import LevelWork, Proposal
from actors.verification.verifier import Subject

Parts = tuple[tuple[str, int], ...]
"""Names of levels and how many nodes of a proposal, in order, each has drafted."""


class LevelStatsRecorder:
    """`name` is that of level number `level`, `below` that of the one beneath; `control` hears who was judged how."""

    def __init__(self, name: str, level: int, below: str, control: LengthControl | None) -> None:
        self._name = name
        self._level = level
        self._below = below
        self._control = control
        self._work: list[LevelWork] = []

    def passed(self, seconds: float) -> None:
        """One pass of this level's model."""
        self._work.append(LevelWork(self._name, 1, seconds))

    def parts_from_beneath(self, proposal: Proposal) -> Parts:
        return proposal.parts or ((self._below, proposal.tree.num_draft_tokens),)

    def reviewed(self, subject: Subject, source: int | None, num_ordered: int, path: Sequence[int]) -> None:
        """This level's ruling on what it had ordered of level `source`."""
        if subject.tree.num_draft_tokens:
            self._work += _judged(self.parts_from_beneath(subject.proposal), path)
        if self._control is not None and num_ordered:
            self._control.judged(source, self._level, num_ordered, len(path))
            self._control.guessed(subject.seq_id, len(subject.token_ids), source, num_ordered, subject.tree)

    def verified(self, stream: Stream, source: int | None, path: Sequence[int], token_ids: Sequence[int]) -> None:
        """The target's verdict on what this level, the last, had offered; merged tokens stand beside the others.

        `token_ids` are the target's own, whatever was drafted; none where they depend on that.
        """
        own, beside = stream.num_offered, stream.num_offered + stream.num_tail
        self._work += _judged(stream.parts, path)
        if stream.num_merged:
            kept = sum(node > beside for node in path)
            self._work.append(LevelWork(self._below, 0, 0.0, 1, stream.num_merged, kept))
        if self._control is not None and (own or stream.num_ordered):
            level, num_tokens = (self._level, own) if own else (source, stream.num_ordered)
            self._control.judged(level, TARGET, num_tokens, sum(node <= (own or beside) for node in path))
            self._control.committed(stream.request_id, token_ids)
        stream.parts, stream.num_merged, stream.num_ordered = (), 0, 0

    def close(self, beneath: Iterable[LevelWork]) -> tuple[LevelWork, ...]:
        """Everything since the last time, and what the levels beneath say of themselves."""
        work, self._work = (*self._work, *beneath), []
        return work


def _judged(parts: Parts, path: Sequence[int]) -> Iterator[LevelWork]:
    """How the drafters of the `parts` fared; nobody looked at what hangs behind a rejected token."""
    start = 1
    for name, num_tokens in parts:
        kept = sum(start <= node < start + num_tokens for node in path)
        yield LevelWork(name, 0, 0.0, 1, num_tokens, kept)
        if kept < num_tokens:
            return
        start += num_tokens
