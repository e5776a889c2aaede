"""Metrics in Ray's registry: what the dashboard, Prometheus and Grafana see of an engine.

Names are vLLM's where vLLM has one, with the prefix `specdec_` (Ray adds `ray_`). Fed by the coordinator about once a
second from its tally, never inside a round. Counters carry the label `phase`, the name of the measuring window, so
that each agrees with the report of that window; ratios are left to whoever reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Protocol

from actors.coordinator.service import StatsSnapshot
from actors.coordinator.stats import CoordinatorStats, RequestTimes
from actors.policy.speculation_switch import Mode
from actors.protocol.membership import Ready
from cluster.config.schema import LaunchConfig

PREFIX = "specdec_"
ENGINE_LABELS = ("engine", "model_name", "drafter", "pipeline")
"""On every series: the engine's namespace, the target's name, and how it is drafted for."""

Update = Callable[[float, dict[str, str]], None]
"""Adds to, sets or observes one series, which the labels name."""


class Registry(Protocol):
    """Makes metrics; in Ray's own, or a test's. A counter is never grown by nothing."""

    def counter(self, name: str, text: str, labels: tuple[str, ...]) -> Update: ...

    def gauge(self, name: str, text: str, labels: tuple[str, ...]) -> Update: ...

    def histogram(self, name: str, text: str, labels: tuple[str, ...], boundaries: Sequence[float]) -> Update: ...


@dataclass(frozen=True, slots=True)
class Counted:
    """One counter and where it is read: a total, or, with a `label`, a total for each of its values."""

    name: str
    text: str
    read: Callable[[CoordinatorStats], float | Mapping[str, float]]
    label: str = ""


def _per_position(stats: CoordinatorStats) -> dict[str, float]:
    return {str(position): count for position, count in enumerate(stats.num_accepted_per_pos)}


def _idle(stats: CoordinatorStats) -> dict[str, float]:
    """An engine without requests is not idle, it is off duty."""
    busy = {"draft": stats.draft_busy_s, "target": stats.target_busy_s}
    return {role: max(0.0, stats.active_s - busy_s) for role, busy_s in busy.items()}


def _per_role(stats: CoordinatorStats, of: Callable[[list[float]], float]) -> dict[str, float]:
    return {role: of(outages) for role, outages in stats.resume_s.items()}


def _per_level(stats: CoordinatorStats, name: str) -> dict[str, float]:
    return {level: counts[name] for level, counts in stats.levels.items()}


def _fallback(stats: CoordinatorStats) -> dict[str, float]:
    """As in the report: what the guard decided, and what there was no drafter for."""
    rested_s = sum(stats.seconds_by_mode.get(mode.value, 0.0) for mode in (Mode.rest, Mode.catch_up))
    return {"guard": rested_s, "no_drafter": stats.fallback_s}


COUNTERS = (
    Counted("prompt_tokens_total", "Prompt tokens of admitted requests", lambda t: t.num_prompt_tokens),
    Counted("generation_tokens_total", "Tokens committed", lambda t: t.num_tokens),
    Counted("rounds_total", "Target passes", lambda t: t.num_rounds),
    Counted("num_preemptions_total", "Sequences put back for want of KV slots", lambda t: t.num_preemptions),
    Counted("spec_decode_num_drafts_total", "Proposals verified", lambda t: t.num_spec_steps),
    Counted("spec_decode_num_draft_tokens_total", "Draft tokens verified", lambda t: t.num_draft_tokens),
    Counted("spec_decode_num_accepted_tokens_total", "Draft tokens accepted", lambda t: t.num_accepted_tokens),
    Counted(
        "spec_decode_num_accepted_tokens_per_pos_total",
        "Draft tokens accepted, by their place behind the root",
        _per_position,
        "position",
    ),
    Counted(
        "spec_decode_num_wasted_tokens_total",
        "Draft tokens verified in vain",
        lambda t: t.num_draft_tokens - t.num_accepted_tokens,
    ),
    Counted("branch_hits_total", "Proposals that were there before their verdict", lambda t: t.num_branch_hits),
    Counted(
        "branch_misses_total",
        "Proposals made only after their verdict, by a drafter that works ahead",
        lambda t: t.num_branch_lookups - t.num_branch_hits,
    ),
    Counted("active_seconds_total", "Seconds in which there were requests", lambda t: t.active_s),
    Counted(
        "busy_seconds_total",
        "Seconds a role's lead computed",
        lambda t: {"draft": t.draft_busy_s, "target": t.target_busy_s},
        "role",
    ),
    Counted("idle_seconds_total", "Seconds a role's lead waited while there were requests", _idle, "role"),
    Counted("spec_rounds_total", "Rounds with speculation", lambda t: t.num_spec_rounds),
    Counted("spec_round_seconds_total", "Seconds in rounds with speculation", lambda t: t.spec_round_s),
    Counted(
        "spec_round_overhead_seconds_total",
        "Seconds of such rounds in which neither role on their critical path computed",
        lambda t: t.spec_round_overhead_s,
    ),
    Counted("link_trips_total", "Orders answered by a role's lead", lambda t: t.num_link_trips, "role"),
    Counted("link_seconds_total", "Seconds those orders and answers were on their way", lambda t: t.link_s, "role"),
    Counted(
        "level_busy_seconds_total", "Seconds a level of a cascade computed", lambda t: _per_level(t, "busy_s"), "level"
    ),
    Counted(
        "level_draft_tokens_total",
        "Draft tokens a level of a cascade verified",
        lambda t: _per_level(t, "num_draft_tokens"),
        "level",
    ),
    Counted(
        "level_accepted_tokens_total",
        "Draft tokens a level of a cascade accepted",
        lambda t: _per_level(t, "num_accepted_tokens"),
        "level",
    ),
    Counted("stale_messages_total", "Records recognised as stale", lambda t: t.num_stale),
    Counted("role_losses_total", "Times a role died or fell silent", lambda t: t.num_role_losses, "role"),
    Counted("role_restarts_total", "Times a lost role answered again", lambda t: _per_role(t, len), "role"),
    Counted("role_outage_seconds_total", "Seconds until it did", lambda t: _per_role(t, sum), "role"),
    Counted(
        "fallback_seconds_total", "Seconds of plain decoding where speculation might have been", _fallback, "cause"
    ),
    Counted("guard_turns_total", "Times the never-slower guard entered a mode", lambda t: t.num_by_mode, "mode"),
    Counted("guard_seconds_total", "Seconds of rounds in each of its modes", lambda t: t.seconds_by_mode, "mode"),
)

_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)

HISTOGRAMS: tuple[tuple[str, str, Callable[[RequestTimes], float | None], tuple[float, ...]], ...] = (
    ("time_to_first_token_seconds", "From arrival to the first token", lambda r: r.first_token_s, _SECONDS),
    ("request_time_per_output_token_seconds", "Per token behind the first", lambda r: r.per_token_s, _TOKEN_SECONDS),
    ("request_queue_time_seconds", "From arrival to the first place in a batch", lambda r: r.queue_s, _SECONDS),
    ("e2e_request_latency_seconds", "From arrival to the last token", lambda r: r.latency_s, _SECONDS),
)

GAUGES = {
    "num_requests_running": ("Requests in the batch", lambda load: load.num_running),
    "num_requests_waiting": ("Requests waiting for a place in the batch", lambda load: load.num_waiting),
    "kv_slots_used": ("Token slots of the target's KV pool in use", lambda load: load.kv_slots_used),
    "kv_cache_usage_perc": ("The same as a fraction of the pool", lambda load: load.kv_slots_used / load.kv_slots),
}

RANK_GAUGES = {"weight_bytes": "Bytes of weights a rank holds", "kv_bytes": "Bytes of KV a rank has room for"}


class MetricsWatch:
    """Feeds what the coordinator shows to a registry; a tally that was reset starts again from zero."""

    def __init__(self, registry: Registry, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        known = (*ENGINE_LABELS, "phase")
        self._counters = [
            registry.counter(PREFIX + one.name, one.text, (*known, one.label) if one.label else known)
            for one in COUNTERS
        ]
        self._ended = registry.counter(
            f"{PREFIX}request_success_total", "Requests that ended, by reason", (*known, "finished_reason")
        )
        self._histograms = [
            registry.histogram(PREFIX + name, text, known, boundaries) for name, text, _, boundaries in HISTOGRAMS
        ]
        self._gauges = {name: registry.gauge(PREFIX + name, text, ENGINE_LABELS) for name, (text, _) in GAUGES.items()}
        self._rank_gauges = {
            name: registry.gauge(PREFIX + name, text, (*ENGINE_LABELS, "role", "rank"))
            for name, text in RANK_GAUGES.items()
        }
        self._tally: CoordinatorStats | None = None
        self._seen: dict[tuple[int, str], float] = {}

    def __call__(self, snapshot: StatsSnapshot) -> None:
        if snapshot.stats is not self._tally:
            self._tally, self._seen = snapshot.stats, {}
        self._feed_counters(snapshot.stats)
        self._feed_requests(snapshot.stats)
        for name, (_, read) in GAUGES.items():
            self._gauges[name](read(snapshot.load), self._labels)
        for ready in snapshot.ready.values():
            self._feed_rank(ready)

    def _feed_counters(self, stats: CoordinatorStats) -> None:
        for index, (counted, increment) in enumerate(zip(COUNTERS, self._counters, strict=True)):
            read = counted.read(stats)
            for value, total in read.items() if counted.label else (("", read),):
                grown = total - self._seen.get((index, value), 0.0)
                if grown > 0:
                    increment(grown, self._of(stats, **({counted.label: value} if counted.label else {})))
                    self._seen[index, value] = total

    def _feed_requests(self, stats: CoordinatorStats) -> None:
        while stats.ended:
            times = stats.ended.popleft()
            self._ended(1, self._of(stats, finished_reason=times.finish_reason))
            for (_, _, read, _), observe in zip(HISTOGRAMS, self._histograms, strict=True):
                seconds = read(times)
                if seconds is not None:
                    observe(seconds, self._of(stats))

    def _feed_rank(self, ready: Ready) -> None:
        for name, update in self._rank_gauges.items():
            rank = {"role": ready.role, "rank": str(ready.rank)}
            update(float(ready.facts.get(name, 0)), {**self._labels, **rank})

    def _of(self, stats: CoordinatorStats, **labels: str) -> dict[str, str]:
        return {**self._labels, "phase": stats.phase, **labels}


class RayRegistry:
    """`ray.util.metrics`; to be used inside an actor, whose process exports them."""

    def counter(self, name: str, text: str, labels: tuple[str, ...]) -> Update:
        from ray.util.metrics import Counter

        return Counter(name, description=text, tag_keys=labels).inc

    def gauge(self, name: str, text: str, labels: tuple[str, ...]) -> Update:
        from ray.util.metrics import Gauge

        return Gauge(name, description=text, tag_keys=labels).set

    def histogram(self, name: str, text: str, labels: tuple[str, ...], boundaries: Sequence[float]) -> Update:
        from ray.util.metrics import Histogram

        return Histogram(name, description=text, boundaries=list(boundaries), tag_keys=labels).observe


def make_ray_watch(labels: Mapping[str, str]) -> MetricsWatch:
    """Built inside the coordinator's process, where the metrics live."""
    return MetricsWatch(RayRegistry(), labels)


def metric_labels(config: LaunchConfig) -> dict[str, str]:
    values = (
        config.cluster.namespace,
        PurePath(config.target.path).name,
        config.drafter.name,
        str(config.pipeline.name),
    )
    return dict(zip(ENGINE_LABELS, values, strict=True))
