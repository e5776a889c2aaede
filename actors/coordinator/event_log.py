"""The coordinator's log: ranks that join or are lost, requests and how they end, and the progress of speculation.

Reads records, changes nothing. Batches of a round are not logged.
"""

from __future__ import annotations

import logging
from typing import Any

from actors.coordinator.scheduler import Load
from actors.coordinator.stats import CoordinatorStats
from actors.logs import log_event, logger_of
from actors.protocol.membership import PassFailed, RankLost, Ready, Stop
from actors.protocol.messages import Abort, ReportOrder, Request, Tokens, UpdateWeights, WeightsUpdated

PROGRESS_S = 5.0
"""Seconds of work between two `progress` lines."""

_LEAST_S = 0.5
"""Seconds of work at the end of a window from which on they get a line of their own."""


class EventLog:
    """Writes under `specdec.coordinator`."""

    def __init__(self) -> None:
        self._logger = logger_of("coordinator")
        self._shown: tuple[CoordinatorStats, Load] | None = None
        self._logged: dict[str, float] = {}  # counters at the last `progress` line

    def admitted(self, request: Request, client: str, number: int) -> None:
        """`request` has its number here; its client calls it `number`."""
        log_event(
            self._logger,
            "request",
            request=request.request_id,
            prompt_tokens=len(request.prompt),
            max_tokens=request.sampling.max_tokens,
            temperature=request.sampling.temperature,
            drafter=request.drafter or "any",
            client=client,
            number=number,
        )

    def received(self, record: object) -> None:
        match record:
            case Abort():
                log_event(self._logger, "abort", request=record.request_id)
            case ReportOrder() if record.reset:
                self._log_progress(_LEAST_S)
                if record.phase:
                    log_event(self._logger, "window", phase=record.phase)
            case Ready():
                log_event(self._logger, "joined", role=record.role, rank=record.rank, rank_pid=record.facts.get("pid"))
            case PassFailed():
                facts = {"role": record.role, "rank": record.rank, "round": record.round, "why": record.error}
                log_event(self._logger, "failed", level=logging.ERROR, **facts)
            case RankLost():
                why = f"process {record.incarnation} of this rank has ended"
                log_event(self._logger, "lost", level=logging.ERROR, role=record.role, rank=record.rank, why=why)
            case UpdateWeights():
                facts = {"path": record.weights.path, "version": record.weights.version}
                log_event(self._logger, "weights", **facts)
            case Stop():
                log_event(self._logger, "stop", why=record.reason)

    def refused(self, role: str, rank: int, why: str) -> None:
        """A rank sent a record that was refused."""
        log_event(self._logger, "refused", level=logging.ERROR, role=role, rank=rank, why=why)

    def updated(self, update: WeightsUpdated) -> None:
        log_event(self._logger, "weights-updated", version=update.version, refusal=update.refusal or "-")

    def finished(self, record: Tokens) -> None:
        """A request was sent its last tokens."""
        facts: dict[str, Any] = {"request": record.request_id, "reason": record.finish_reason}
        facts["tokens"] = record.position + len(record.token_ids)
        if record.stats is not None and record.stats.num_spec_steps:
            facts["acceptance_length"] = 1 + record.stats.num_accepted_tokens / record.stats.num_spec_steps
        if record.stats is not None and record.stats.num_preemptions:
            facts["preemptions"] = record.stats.num_preemptions
        if record.error is not None:
            facts["why"] = record.error
        log_event(self._logger, "finished", **facts)

    def progress(self, stats: CoordinatorStats, load: Load) -> None:
        """Log the counters of the last seconds, once there was enough work in them."""
        if self._shown is None or stats is not self._shown[0]:
            self._logged = {}
        self._shown = stats, load
        self._log_progress(PROGRESS_S)

    def _log_progress(self, least_s: float) -> None:
        if self._shown is None:
            return
        stats, load = self._shown
        now: dict[str, float] = {name: count for name, count in vars(stats).items() if isinstance(count, int | float)}
        since = {name: count - self._logged.get(name, 0.0) for name, count in now.items()}
        if since["active_s"] < least_s:
            return
        self._logged = now
        active_s, num_rounds = since["active_s"], since["num_spec_rounds"]
        facts: dict[str, Any] = {
            "phase": stats.phase or "-",
            "running": load.num_running,
            "waiting": load.num_waiting,
            "tokens_per_s": since["num_tokens"] / active_s,
        }
        if num_rounds:
            facts["acceptance_length"] = 1 + since["num_accepted_tokens"] / max(1, since["num_spec_steps"])
            facts["accepted"] = since["num_accepted_tokens"] / max(1, since["num_draft_tokens"])
        if since["num_branch_lookups"]:
            facts["hits"] = since["num_branch_hits"] / since["num_branch_lookups"]
        if num_rounds:
            facts["draft_busy"] = since["draft_busy_s"] / active_s
        facts["target_busy"] = since["target_busy_s"] / active_s
        if num_rounds:
            facts["round_ms"] = 1e3 * since["spec_round_s"] / num_rounds
            facts["overhead_ms"] = 1e3 * since["spec_round_overhead_s"] / num_rounds
        facts["kv_slots"] = f"{load.kv_slots_used}/{load.kv_slots}"
        if since["num_preemptions"]:
            facts["preemptions"] = since["num_preemptions"]
        if since["num_stale"]:
            facts["stale"] = since["num_stale"]
        log_event(self._logger, "progress", **facts)
