"""What the coordinator counts and, if asked, the spans it saw: the raw material of reports, metrics and timelines.

Counter names follow vLLM's. Pure bookkeeping on one clock (CLOCK_MONOTONIC seconds); derives no ratios.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from actors.coordinator.sequence import Sequence
from actors.protocol.messages import Commit, LevelWork, Proposal, ProposalBatch, Report, VerdictBatch

SPAN_LIMIT = 50_000
"""Spans kept; older ones fall out, so that a server's memory stays constant."""

ENDED_LIMIT = 4096
"""Ended requests whose times wait to be looked at; whoever wants them looks more often than so many end."""

MESSAGES = "messages"
"""Lane of the records between the roles."""

Span = tuple[str, str, float, float, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When things happened to a request that ended, in seconds from its arrival; None: it never came to that."""

    finish_reason: str
    queue_s: float | None
    first_token_s: float | None
    latency_s: float
    num_tokens: int

    @property
    def per_token_s(self) -> float | None:
        """Time per token behind the first."""
        if self.first_token_s is None or self.num_tokens < 2:
            return None
        return (self.latency_s - self.first_token_s) / (self.num_tokens - 1)


@dataclass(slots=True)
class CoordinatorStats:
    """Counters of one measuring window, from `since` on; `phase` is the window's name, empty for none."""

    since: float = 0.0
    phase: str = ""
    mode: str = ""
    num_rounds: int = 0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_requests_finished: int = 0
    num_requests_aborted: int = 0
    num_preemptions: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_drafted_per_pos: list[int] = field(default_factory=list)
    num_accepted_per_pos: list[int] = field(default_factory=list)
    acceptance_histogram: list[int] = field(default_factory=list)
    num_stale: int = 0
    num_branch_hits: int = 0
    num_branch_lookups: int = 0
    num_prefetched: int = 0
    levels: dict[str, dict[str, float]] = field(default_factory=dict)
    draft_busy_s: float = 0.0
    target_busy_s: float = 0.0
    active_s: float = 0.0
    num_spec_rounds: int = 0
    spec_round_s: float = 0.0
    spec_round_overhead_s: float = 0.0
    wait_for_draft_s: float = 0.0
    wait_for_messages_s: float = 0.0
    num_link_trips: dict[str, int] = field(default_factory=dict)
    link_s: dict[str, float] = field(default_factory=dict)
    ended: deque[RequestTimes] = field(default_factory=lambda: deque(maxlen=ENDED_LIMIT))
    num_lost_records: int = 0
    num_unreadable: int = 0
    num_role_losses: dict[str, int] = field(default_factory=dict)
    resume_s: dict[str, list[float]] = field(default_factory=dict)
    fallback_s: float = 0.0
    orders_by_length: list[int] = field(default_factory=list)
    seconds_by_mode: dict[str, float] = field(default_factory=dict)
    num_by_mode: dict[str, int] = field(default_factory=dict)
    guard: dict[str, str | float | None] | None = None
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=SPAN_LIMIT))

    def verified(self, proposal: Proposal | None, commit: Commit) -> None:
        """One sequence left a round with `commit`; `proposal` is what it had been offered."""
        self.num_tokens += len(commit.token_ids)
        if proposal is None or not proposal.tree.num_draft_tokens:
            return
        num_accepted = min(len(commit.path), len(commit.token_ids))
        self.num_spec_steps += 1
        self.num_draft_tokens += proposal.tree.num_draft_tokens
        self.num_accepted_tokens += num_accepted
        depth = max(proposal.tree.depths())
        _grow(self.acceptance_histogram, num_accepted + 1)
        self.acceptance_histogram[num_accepted] += 1
        _grow(self.num_drafted_per_pos, depth)
        _grow(self.num_accepted_per_pos, depth)
        for position in range(depth):
            self.num_drafted_per_pos[position] += 1
            self.num_accepted_per_pos[position] += position < num_accepted

    def drafted(self, batch: ProposalBatch, num_taken: int = 0) -> None:
        """An answer of the drafter; `num_taken` proposals of its round had been read off an outlook before."""
        self.draft_busy_s += batch.finished - batch.started
        for started, finished, glued in batch.ahead:
            self.draft_busy_s += finished - started
            self.spans.append(("draft", "glue" if glued else "ahead", started, finished, {"round": batch.round}))
        hits = num_taken + sum(proposal.prepared is True for proposal in batch.proposals)
        self.num_prefetched += num_taken
        self.num_branch_hits += hits
        self.num_branch_lookups += num_taken + sum(proposal.prepared is not None for proposal in batch.proposals)
        for work in batch.levels:
            self._level_worked(work, batch.round)
        if batch.proposals or num_taken:
            tokens = sum(proposal.tree.num_draft_tokens for proposal in batch.proposals)
            misses = sum(proposal.prepared is False for proposal in batch.proposals)
            name = "miss" if misses else "hit" if hits else "propose"
            requests = num_taken + len(batch.proposals)
            self._span("draft", name, batch, {"requests": requests, "tokens": tokens, "hits": hits})
        elif not batch.num_missing:
            self._span("draft", "prefill", batch, {})

    def _level_worked(self, work: LevelWork, round: int) -> None:
        counts = self.levels.setdefault(work.level, dict.fromkeys(_LEVEL_COUNTS, 0))
        for name in _LEVEL_COUNTS:
            counts[name] += getattr(work, name)
        for started, finished in work.spans:
            self.spans.append((work.level, "draft", started, finished, {"round": round}))

    def judged(self, batch: VerdictBatch, *, speculated: bool) -> None:
        self.target_busy_s += batch.finished - batch.started
        self.num_rounds += 1
        name = "verify" if speculated else "prefill" if batch.num_tokens > len(batch.verdicts) else "decode"
        tokens = sum(len(verdict.path) + 1 for verdict in batch.verdicts)
        asked = {"round": batch.round, "rows": batch.num_tokens, "requests": len(batch.verdicts), "tokens": tokens}
        committed = max(batch.started, batch.committed)
        if committed > batch.started:
            self.spans.append(("target", "commit", batch.started, committed, {"round": batch.round}))
        self.spans.append(("target", name, committed, batch.finished, asked))

    def sent(self, name: str, round: int, left: float, arrived: float) -> None:
        """A record was on its way, or waited to be read. Clocks of two hosts may differ: then nothing is known."""
        if arrived > left:
            self.spans.append((MESSAGES, name, left, arrived, {"round": round}))

    def round_ended(self, seconds: float, verify_s: float, draft_s: float) -> None:
        """A round with speculation: the target worked for `verify_s`, and idled for `draft_s` while the drafter worked.

        The rest was nobody's work: records on their way and the coordinator.
        """
        idle_s = max(0.0, seconds - verify_s)
        self.num_spec_rounds += 1
        self.spec_round_s += seconds
        self.wait_for_draft_s += min(idle_s, draft_s)
        self.wait_for_messages_s += max(0.0, idle_s - draft_s)
        self.spec_round_overhead_s += max(0.0, seconds - verify_s - draft_s)

    def round_seen(self, mode: StrEnum, seconds: float, ordered: list[int]) -> None:
        """A round took `seconds` in one mode of the control; `ordered` are the draft tokens it asked for."""
        self.seconds_by_mode[mode.value] = self.seconds_by_mode.get(mode.value, 0.0) + seconds
        if mode.value != self.mode:
            self.mode = mode.value
            self.num_by_mode[mode.value] = self.num_by_mode.get(mode.value, 0) + 1
        for length in ordered:
            _grow(self.orders_by_length, length + 1)
            self.orders_by_length[length] += 1

    def crossed(self, role: str, away_s: float, busy_s: float) -> None:
        """An order to `role` was answered within `away_s`; what was not work was spent on the way."""
        self.num_link_trips[role] = self.num_link_trips.get(role, 0) + 1
        self.link_s[role] = self.link_s.get(role, 0.0) + max(0.0, away_s - busy_s)

    def request_ended(self, sequence: Sequence, now: float) -> None:
        assert sequence.finish_reason is not None
        if sequence.finish_reason == "abort":
            self.num_requests_aborted += 1
        else:
            self.num_requests_finished += 1
        arrived, admitted, first = sequence.arrived_at, sequence.admitted_at, sequence.first_token_at
        times = (None if at is None else at - arrived for at in (admitted, first))
        self.ended.append(RequestTimes(sequence.finish_reason, *times, now - arrived, sequence.num_generated))

    def resumed(self, role: str, seconds: float) -> None:
        """A role that was lost has given its first answer; until then there was no draft, or no token at all."""
        self.resume_s.setdefault(role, []).append(seconds)
        if role == "draft":
            self.fallback_s += seconds

    def report(self, now: float) -> Report:
        counters: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__ if name not in _NOT_COUNTERS}
        counters["window_s"] = now - self.since
        return Report(counters, tuple(self.spans))

    def _span(self, lane: str, name: str, batch: ProposalBatch, arguments: dict[str, object]) -> None:
        self.spans.append((lane, name, batch.started, batch.finished, {"round": batch.round, **arguments}))


_LEVEL_COUNTS = ("num_passes", "busy_s", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
_NOT_COUNTERS = ("since", "phase", "mode", "ended", "spans")


def _grow(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))
