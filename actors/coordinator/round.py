"""The round under way: since when, how long the target idled for the drafter in it, and what is told of it at its end.

A round lasts from one verdict to the next. Pure bookkeeping of times that others read; decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from actors.coordinator.sequence import Sequence
from actors.policy.draft_length import DraftOutcome, RoundObservation
from actors.protocol.messages import Commit, Proposal, ProposalBatch, VerdictBatch


@dataclass(slots=True)
class Round:
    """`went_on`: its pass left without drafts that had been asked for, since they were late or worth no wait."""

    started: float
    waited_s: float = 0.0
    went_on: bool = False
    offers: list[DraftOutcome] = field(default_factory=list)
    num_tokens: int = 0
    _num_rows: int = 0  # of decoding

    def waited(self, batch: ProposalBatch) -> None:
        """The target idles and the drafter has answered: what it worked for that, a pass under way before included."""
        straddling = sum(max(0.0, finished - max(started, self.started)) for started, finished, _ in batch.ahead)
        self.waited_s += batch.finished - batch.started + straddling

    def committed(self, commit: Commit, num_ordered: int, proposal: Proposal | None) -> None:
        """One sequence left the round, for which `num_ordered` draft tokens had been asked."""
        self.offers.append(DraftOutcome(commit.request_id, num_ordered, commit.path))
        self.num_tokens += len(commit.token_ids)
        self._num_rows += 1 + (proposal.tree.num_draft_tokens if proposal is not None else 0)

    def reads_prompt(self, batch: VerdictBatch) -> bool:
        return batch.num_tokens > self._num_rows

    def seen(
        self, batch: VerdictBatch, now: float, running: Collection[Sequence], num_willing: int
    ) -> RoundObservation:
        """The round as the control is told of it, which ends with this verdict."""
        num_running, mean_len = extent(running)
        return RoundObservation(
            now - self.started,
            batch.finished - batch.started,
            self.waited_s,
            self.num_tokens,
            len(self.offers),
            num_running,
            num_willing,
            mean_len,
            batch.num_tokens - self._num_rows,
            self.offers,
            self.went_on,
        )


def extent(running: Collection[Sequence]) -> tuple[int, float]:
    """Sequences that run, at least one, and their mean length."""
    num_running = max(1, len(running))
    return num_running, sum(sequence.prefix_len for sequence in running) / num_running
