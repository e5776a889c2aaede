"""Counters and spans of the coordinator: the raw material of reports, metrics and timelines.

Counter names follow vLLM's. Bookkeeping on one clock (CLOCK_MONOTONIC seconds); derives no ratios. Each group of
counters is a class of its own, with the methods that update it; `CoordinatorStats` joins them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from actors.coordinator.sequence import Sequence, SpeculationCounts
from actors.policy.decision import Mode
from actors.protocol.messages import Commit, LevelWork, Proposal, ProposalBatch, Report, VerdictBatch

if TYPE_CHECKING:
    from actors.coordinator.scheduler import Load
    from actors.protocol.membership import Ready

SPAN_LIMIT = 50_000
"""Spans kept; older ones fall out, so that a server's memory stays constant."""

ENDED_LIMIT = 4096
"""Times of ended requests kept for metrics, which read them about once a second."""

MESSAGES = "messages"
"""Timeline lane of the records between the roles."""

SOURCE_COUNTS = ("num_spec_steps", "num_draft_tokens", "num_accepted_tokens")
"""What is counted of each source of drafts, where there are several."""

TimelineSpan = tuple[str, str, float, float, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Times of a request that ended, in seconds from its arrival; None if it ended before."""

    finish_reason: str
    queue_s: float | None
    first_token_s: float | None
    latency_s: float
    num_tokens: int

    @property
    def per_token_s(self) -> float | None:
        """Seconds per token after the first."""
        if self.first_token_s is None or self.num_tokens < 2:
            return None
        return (self.latency_s - self.first_token_s) / (self.num_tokens - 1)


@dataclass
class RequestCounters:
    """Requests and their tokens."""

    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_requests_finished: int = 0
    num_requests_aborted: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    """Tokens of prompts that were looked up in the target's prefix tree."""
    prefix_cache_hits: int = 0
    """Those of them whose KV rows it had."""
    ended: deque[RequestTimes] = field(default_factory=lambda: deque(maxlen=ENDED_LIMIT))

    def add_lookup(self, num_tokens: int, num_hits: int) -> None:
        """The target had rows of so many of the tokens of a prompt."""
        self.prefix_cache_queries += num_tokens
        self.prefix_cache_hits += num_hits

    def add_request(self, sequence: Sequence, now: float) -> None:
        """A request ended."""
        assert sequence.finish_reason is not None
        if sequence.finish_reason == "abort":
            self.num_requests_aborted += 1
        else:
            self.num_requests_finished += 1
        arrived = sequence.arrived_at
        queue_s = None if sequence.admitted_at is None else sequence.admitted_at - arrived
        first_token_s = None if sequence.first_token_at is None else sequence.first_token_at - arrived
        self.ended.append(
            RequestTimes(sequence.finish_reason, queue_s, first_token_s, now - arrived, sequence.num_generated)
        )


@dataclass
class DraftCounters(SpeculationCounts):
    """Draft tokens by position after the root, and drafts that were ready before their verdict."""

    num_drafted_per_pos: list[int] = field(default_factory=list)
    num_accepted_per_pos: list[int] = field(default_factory=list)
    num_branch_hits: int = 0
    num_branch_lookups: int = 0
    num_prefetched: int = 0
    drafts_by_source: dict[str, dict[str, int]] = field(default_factory=dict)
    """Verified drafts, their tokens and accepted ones, of a far drafter and of the lookup beside the coordinator."""

    def add_source(self, source: str, num_draft_tokens: int, num_accepted: int) -> None:
        """A draft of this source, which is not empty, got its verdict."""
        counts = self.drafts_by_source.setdefault(source, dict.fromkeys(SOURCE_COUNTS, 0))
        for name, count in zip(SOURCE_COUNTS, (1, num_draft_tokens, num_accepted), strict=True):
            counts[name] += count


@dataclass
class TimeCounters:
    """Where the time went: passes of the roles, rounds with speculation, links."""

    num_rounds: int = 0
    draft_busy_s: float = 0.0
    target_busy_s: float = 0.0
    num_passes_ahead: int = 0
    """Passes of the target that were made before their batch came."""
    dropped_pass_s: float = 0.0
    """Seconds of passes that were made for other batches than came; not of `target_busy_s`."""
    active_s: float = 0.0
    num_spec_rounds: int = 0
    spec_round_s: float = 0.0
    spec_round_overhead_s: float = 0.0
    wait_for_draft_s: float = 0.0
    wait_for_messages_s: float = 0.0
    num_link_trips: dict[str, int] = field(default_factory=dict)
    link_s: dict[str, float] = field(default_factory=dict)

    def add_spec_round(self, seconds: float, verify_s: float, draft_s: float) -> None:
        """A round with speculation: the target worked for `verify_s`, and idled for `draft_s` while the drafter worked.

        The rest of its idle time was records on their way, and the coordinator.
        """
        idle_s = max(0.0, seconds - verify_s)
        self.num_spec_rounds += 1
        self.spec_round_s += seconds
        self.wait_for_draft_s += min(idle_s, draft_s)
        self.wait_for_messages_s += max(0.0, idle_s - draft_s)
        self.spec_round_overhead_s += max(0.0, seconds - verify_s - draft_s)

    def add_link_trips(self, role: str, seconds: list[float]) -> None:
        """Batches to `role` and their answers were on their way for so long."""
        if seconds:
            self.num_link_trips[role] = self.num_link_trips.get(role, 0) + len(seconds)
            self.link_s[role] = self.link_s.get(role, 0.0) + sum(seconds)


@dataclass
class GuessCounters:
    """States of blocks that a target which fills masks guessed, and those that its decoder came by."""

    num_guessed_states: int = 0
    num_accepted_states: int = 0


@dataclass
class ExportCounters:
    """Hidden states that the target sent to the drafter."""

    num_exports: int = 0
    exported_rows: int = 0
    exported_bytes: int = 0


@dataclass
class LossCounters:
    """Records and roles that were lost, and what it took to recover."""

    num_stale: int = 0
    num_lost_records: int = 0
    num_unreadable: int = 0
    num_role_losses: dict[str, int] = field(default_factory=dict)
    num_refused: dict[str, int] = field(default_factory=dict)
    """Invalid records of ranks, by role; of all senders together they are `num_unreadable`."""
    resume_s: dict[str, list[float]] = field(default_factory=dict)
    no_drafter_s: float = 0.0
    """Seconds in which no role drafted, since each was lost."""

    def add_outage(self, role: str, seconds: float) -> None:
        """A lost role gave its first answer."""
        self.resume_s.setdefault(role, []).append(seconds)


@dataclass
class PolicyCounters:
    """What the policy chose."""

    orders_by_length: list[int] = field(default_factory=list)
    seconds_by_mode: dict[str, float] = field(default_factory=dict)
    num_by_mode: dict[str, int] = field(default_factory=dict)
    rested_s: float = 0.0
    """Seconds in which the decision was for plain decoding, probes left out."""
    mode: str = ""
    guard: dict[str, str | float | None] | None = None
    """What the policy found last of plain decoding against speculation."""

    def add_mode(self, mode: Mode, seconds: float, num_ordered: list[int]) -> None:
        """A round took `seconds` in one mode of the policy, and ordered these numbers of draft tokens."""
        name = mode.value
        self.seconds_by_mode[name] = self.seconds_by_mode.get(name, 0.0) + seconds
        if mode in (Mode.rest, Mode.catch_up):
            self.rested_s += seconds
        if name != self.mode:
            self.mode = name
            self.num_by_mode[name] = self.num_by_mode.get(name, 0) + 1
        counts = self.orders_by_length
        for length in num_ordered:
            if length >= len(counts):
                counts.extend([0] * (length + 1 - len(counts)))
            counts[length] += 1


@dataclass
class CoordinatorStats(
    RequestCounters, DraftCounters, GuessCounters, TimeCounters, ExportCounters, LossCounters, PolicyCounters
):
    """Counters of one measuring window, from `since` on; `phase` is the window's name, empty for none."""

    since: float = 0.0
    phase: str = ""
    levels: dict[str, dict[str, float]] = field(default_factory=dict)
    learning: dict[str, float] = field(default_factory=dict)
    spans: deque[TimelineSpan] = field(default_factory=lambda: deque(maxlen=SPAN_LIMIT))

    def add_commit(self, proposal: Proposal | None, commit: Commit, source: str = "") -> None:
        """One sequence got its verdict on `proposal`, which is of this source if there are several."""
        self.num_tokens += len(commit.token_ids)
        if proposal is None or not proposal.tree.num_draft_tokens:
            return
        tree, num_accepted = proposal.tree, min(len(commit.path), len(commit.token_ids))
        self.add_verdict(tree.num_draft_tokens, num_accepted)
        if source:
            self.add_source(source, tree.num_draft_tokens, num_accepted)
        drafted, accepted, depth = self.num_drafted_per_pos, self.num_accepted_per_pos, max(tree.depths())
        drafted.extend([0] * (depth - len(drafted)))
        accepted.extend([0] * (depth - len(accepted)))
        for position in range(depth):
            drafted[position] += 1
        for position in range(min(depth, num_accepted)):
            accepted[position] += 1

    def add_exchange(self, batch: ProposalBatch, left_at: float, now: float) -> None:
        """An answer of a drafter on ranks of its own arrived. The order left at `left_at`, for the second part of an
        answer the first part. Where two hosts' clocks disagree it is not known how long records were on their way."""
        began = batch.started if batch.imported is None else batch.imported[0]
        if began > left_at:
            self.spans.append((MESSAGES, "order", left_at, began, {"round": batch.round}))
        if now > batch.finished:
            self.spans.append((MESSAGES, "proposal", batch.finished, now, {"round": batch.round}))

    def add_drafts(self, batch: ProposalBatch, num_prefetched: int = 0, num_missed: int = 0) -> None:
        """What the drafter did for an answer, wherever it is; `num_prefetched` proposals of its round had been read off
        previews, and for `num_missed` requests there was nothing."""
        if batch.imported is not None:
            self.spans.append(("draft", "features", *batch.imported, {"round": batch.round}))
        self.draft_busy_s += batch.finished - batch.started
        for started, finished, refreshed in batch.ahead:
            self.draft_busy_s += finished - started
            name = "kv_refresh" if refreshed else "ahead"
            self.spans.append(("draft", name, started, finished, {"round": batch.round}))
        for work in batch.levels:
            self._add_level(work, batch.round)
        if batch.learning is not None:
            self.learning = asdict(batch.learning)
        num_tokens, num_misses, num_hits = 0, num_missed, num_prefetched
        for proposal in batch.proposals:
            num_tokens += proposal.tree.num_draft_tokens
            num_hits += proposal.prepared is True
            num_misses += proposal.prepared is False
        self.num_prefetched += num_prefetched
        self.num_branch_hits += num_hits
        self.num_branch_lookups += num_hits + num_misses
        facts: dict[str, object] = {"round": batch.round}
        if batch.proposals or num_prefetched:
            name = "miss" if num_misses else "hit" if num_hits else "propose"
            facts |= {"requests": num_prefetched + len(batch.proposals), "tokens": num_tokens, "hits": num_hits}
        elif not batch.num_missing:
            name = "prefill"
        else:
            return
        self.spans.append(("draft", name, batch.started, batch.finished, facts))

    def _add_level(self, work: LevelWork, round_: int) -> None:
        counts = self.levels.setdefault(work.level, dict.fromkeys(_LEVEL_COUNTS, 0))
        for name in _LEVEL_COUNTS:
            counts[name] += getattr(work, name)
        for started, finished in work.spans:
            self.spans.append((work.level, "draft", started, finished, {"round": round_}))

    def add_pass(self, batch: VerdictBatch, sent_at: float, now: float, *, speculated: bool) -> None:
        """The verdicts of a target pass arrived, whose batch left at `sent_at`."""
        if batch.started > sent_at:
            self.spans.append((MESSAGES, "verify", sent_at, batch.started, {"round": batch.round}))
        if now > (left_at := batch.left_at):
            self.spans.append((MESSAGES, "verdict", left_at, now, {"round": batch.round}))
        self.target_busy_s += batch.finished - batch.started
        self.num_passes_ahead += batch.ran_ahead
        self.dropped_pass_s += batch.dropped_s
        self.num_guessed_states += batch.guesses[0]
        self.num_accepted_states += batch.guesses[1]
        self.num_rounds += 1
        name = "verify" if speculated else "prefill" if batch.num_tokens > len(batch.verdicts) else "decode"
        num_tokens = sum([len(verdict.path) + len(verdict.token_ids) for verdict in batch.verdicts])
        facts = {"round": batch.round, "rows": batch.num_tokens, "requests": len(batch.verdicts), "tokens": num_tokens}
        committed = max(batch.started, batch.committed)
        if committed > batch.started:
            self.spans.append(("target", "commit", batch.started, committed, {"round": batch.round}))
        self.spans.append(("target", name, committed, batch.finished, facts))
        if batch.exported is not None:
            self.spans.append(("target", "export", *batch.exported, {"round": batch.round}))
        if batch.export is not None:
            self.num_exports += 1
            self.exported_rows += batch.export.num_rows
            self.exported_bytes += batch.export.num_bytes

    def report(self, now: float, *, spans: bool = True) -> Report:
        counters: dict[str, Any] = {name: getattr(self, name) for name in _COUNTERS}
        counters["window_s"] = now - self.since
        return Report(counters, tuple(self.spans) if spans else ())


_LEVEL_COUNTS = ("num_passes", "busy_s", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
_NOT_COUNTERS = ("since", "phase", "mode", "ended", "spans")
_COUNTERS = tuple(one.name for one in fields(CoordinatorStats) if one.name not in _NOT_COUNTERS)


@dataclass(frozen=True, slots=True)
class StatsSnapshot:
    """What watches receive about once a second, before every reset of the counters, and at the end."""

    stats: CoordinatorStats
    load: Load
    ready: list[Ready]


Watch = Callable[[StatsSnapshot], None]
