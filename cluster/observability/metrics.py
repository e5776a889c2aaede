"""Metrics in Ray's registry, for the dashboard, Prometheus and Grafana.

Names are vLLM's where vLLM has one, with the prefix `specdec_` (Ray adds `ray_`). The coordinator updates them about
once a second from its counters, never inside a round. Counters carry the label `phase`, the name of the measuring
window, so that each agrees with the report of that window. Ratios are left to the queries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from actors.protocol.membership import Ready
from cluster.config.schema import LaunchConfig
from cluster.pocket import is_bundled
from parallel.model.checkpoint import checkpoint_name

if TYPE_CHECKING:
    from actors.coordinator.stats import CoordinatorStats, RequestTimes, StatsSnapshot

PREFIX = "specdec_"
ENGINE_LABELS = ("engine", "model_name", "drafter", "pipeline")
"""Labels of every series: the engine's namespace, the target's name, drafter and pipeline."""

MOST_PHASES = 100
"""Values of the label `phase`: each is a set of series that is kept for good."""
FURTHER_PHASES = "further"
"""The label of windows whose names are too many."""

Update = Callable[[float, dict[str, str]], None]
"""Adds to, sets or observes the series with these labels."""


class Registry(Protocol):
    """Makes metrics, in Ray's registry or a test's. A counter is only incremented by positive amounts."""

    def counter(self, name: str, text: str, labels: tuple[str, ...]) -> Update: ...

    def gauge(self, name: str, text: str, labels: tuple[str, ...]) -> Update: ...

    def histogram(self, name: str, text: str, labels: tuple[str, ...], boundaries: Sequence[float]) -> Update: ...


@dataclass(frozen=True, slots=True)
class Counted:
    """A counter: `read` gives its totals by value of `label`; without a label the only key is empty."""

    name: str
    text: str
    read: Callable[[CoordinatorStats], Mapping[str, float]]
    label: str = ""


def _total(name: str, text: str, field: str) -> Counted:
    """A counter without a label of its own, read from one field of the coordinator's counters."""
    read = attrgetter(field)
    return Counted(name, text, lambda stats: {"": read(stats)})


def _by_role(name: str, text: str, read: Callable[[CoordinatorStats], Mapping[str, float]]) -> Counted:
    return Counted(name, text, read, "role")


def _by_level(name: str, text: str, key: str) -> Counted:
    """A counter of every level of a cascade."""
    return Counted(name, text, lambda stats: {level: counts[key] for level, counts in stats.levels.items()}, "level")


def _by_source(name: str, text: str, key: str) -> Counted:
    """A counter of the far drafter and of the lookup beside the coordinator."""
    return Counted(name, text, lambda stats: {one: of[key] for one, of in stats.drafts_by_source.items()}, "source")


def _busy(stats: CoordinatorStats) -> dict[str, float]:
    return {"draft": stats.draft_busy_s, "target": stats.target_busy_s}


def _fallback(stats: CoordinatorStats) -> dict[str, float]:
    """Seconds the guard chose plain decoding, and seconds without a drafter, as in the report."""
    return {"guard": stats.rested_s, "no_drafter": stats.no_drafter_s}


COUNTERS = (
    _total("prompt_tokens_total", "Prompt tokens of admitted requests", "num_prompt_tokens"),
    _total(
        "prefix_cache_queries_total", "Prompt tokens that were looked up in the prefix tree", "prefix_cache_queries"
    ),
    _total("prefix_cache_hits_total", "Of them those whose KV rows the target had", "prefix_cache_hits"),
    _total("generation_tokens_total", "Tokens committed", "num_tokens"),
    _total("rounds_total", "Target passes", "num_rounds"),
    _total("num_preemptions_total", "Sequences preempted for want of KV slots", "num_preemptions"),
    _total("spec_decode_num_drafts_total", "Proposals verified", "num_spec_steps"),
    _total("spec_decode_num_draft_tokens_total", "Draft tokens verified", "num_draft_tokens"),
    _total("spec_decode_num_accepted_tokens_total", "Draft tokens accepted", "num_accepted_tokens"),
    Counted(
        "spec_decode_num_accepted_tokens_per_pos_total",
        "Draft tokens accepted, by position after the root, from 0",
        lambda stats: {str(position): count for position, count in enumerate(stats.num_accepted_per_pos)},
        "position",
    ),
    Counted(
        "spec_decode_num_wasted_tokens_total",
        "Draft tokens verified and not accepted",
        lambda stats: {"": stats.num_draft_tokens - stats.num_accepted_tokens},
    ),
    _by_source("source_drafts_total", "Proposals verified, of the far drafter or the local one", "num_spec_steps"),
    _by_source(
        "source_draft_tokens_total", "Draft tokens verified, of the far drafter or the local one", "num_draft_tokens"
    ),
    _by_source(
        "source_accepted_tokens_total",
        "Draft tokens accepted, of the far drafter or the local one",
        "num_accepted_tokens",
    ),
    _total(
        "branch_hits_total", "Proposals of a drafter that works ahead, ready before their verdict", "num_branch_hits"
    ),
    Counted(
        "branch_misses_total",
        "Proposals of a drafter that works ahead, made after their verdict",
        lambda stats: {"": stats.num_branch_lookups - stats.num_branch_hits},
    ),
    _total("active_seconds_total", "Seconds in which there were requests", "active_s"),
    _by_role("busy_seconds_total", "Seconds the lead rank of a role computed", _busy),
    _by_role(
        "idle_seconds_total",
        "Seconds the lead rank of a role waited while there were requests",
        lambda stats: {role: max(0.0, stats.active_s - busy_s) for role, busy_s in _busy(stats).items()},
    ),
    _total("spec_rounds_total", "Rounds with a draft", "num_spec_rounds"),
    _total("spec_round_seconds_total", "Seconds of rounds with a draft", "spec_round_s"),
    _total(
        "spec_round_overhead_seconds_total",
        "Seconds of rounds with a draft in which neither target nor drafter computed",
        "spec_round_overhead_s",
    ),
    _by_role("link_trips_total", "Orders answered by the lead rank of a role", lambda stats: stats.num_link_trips),
    _by_role("link_seconds_total", "Seconds those orders and answers were in transit", lambda stats: stats.link_s),
    _by_level("level_busy_seconds_total", "Seconds a level of a cascade computed", "busy_s"),
    _by_level("level_draft_tokens_total", "Draft tokens a level of a cascade verified", "num_draft_tokens"),
    _by_level("level_accepted_tokens_total", "Draft tokens a level of a cascade accepted", "num_accepted_tokens"),
    _total("stale_messages_total", "Records discarded as stale", "num_stale"),
    _by_role("role_losses_total", "Times a role died or stopped answering", lambda stats: stats.num_role_losses),
    _by_role("refused_records_total", "Invalid records of ranks, which were replaced", lambda stats: stats.num_refused),
    _by_role(
        "role_restarts_total",
        "Times a lost role answered again",
        lambda stats: {role: len(outages) for role, outages in stats.resume_s.items()},
    ),
    _by_role(
        "role_outage_seconds_total",
        "Seconds until a lost role answered again",
        lambda stats: {role: sum(outages) for role, outages in stats.resume_s.items()},
    ),
    Counted(
        "fallback_seconds_total",
        "Seconds of plain decoding, by why there was no speculation: the guard's choice or a lost drafter",
        _fallback,
        "cause",
    ),
    Counted(
        "guard_turns_total", "Times the never-slower guard entered a mode", lambda stats: stats.num_by_mode, "mode"
    ),
    Counted(
        "guard_seconds_total",
        "Seconds of rounds in each mode of the never-slower guard",
        lambda stats: stats.seconds_by_mode,
        "mode",
    ),
)

_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)

HISTOGRAMS: tuple[tuple[str, str, Callable[[RequestTimes], float | None], tuple[float, ...]], ...] = (
    ("time_to_first_token_seconds", "Seconds from arrival to the first token", lambda r: r.first_token_s, _SECONDS),
    (
        "request_time_per_output_token_seconds",
        "Seconds per token after the first",
        lambda r: r.per_token_s,
        _TOKEN_SECONDS,
    ),
    ("request_queue_time_seconds", "Seconds from arrival to admission into a batch", lambda r: r.queue_s, _SECONDS),
    ("e2e_request_latency_seconds", "Seconds from arrival to the last token", lambda r: r.latency_s, _SECONDS),
)

GAUGES = {
    "num_requests_running": ("Requests in the batch", lambda load: load.num_running),
    "num_requests_waiting": ("Requests waiting for a place in the batch", lambda load: load.num_waiting),
    "kv_slots_used": ("Token slots of the target's KV pool in use", lambda load: load.kv_slots_used),
    "kv_cache_usage_perc": ("Fraction of the target's KV pool in use", lambda load: load.kv_slots_used / load.kv_slots),
}

RANK_GAUGES = {"weight_bytes": "Bytes of weights a rank holds", "kv_bytes": "Bytes of KV cache a rank holds"}


class MetricsWatch:
    """Writes the coordinator's counters to a registry. Counters of a new measuring window start again from zero."""

    def __init__(self, registry: Registry, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        known = (*ENGINE_LABELS, "phase")
        self._counters = [
            registry.counter(PREFIX + counted.name, counted.text, (*known, counted.label) if counted.label else known)
            for counted in COUNTERS
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
        self._phases: set[str] = set()
        self._stats: CoordinatorStats | None = None
        self._totals: dict[tuple[str, str], float] = {}

    def __call__(self, snapshot: StatsSnapshot) -> None:
        if snapshot.stats is not self._stats:
            self._stats, self._totals = snapshot.stats, {}
        self._update_counters(snapshot.stats)
        self._observe_requests(snapshot.stats)
        for name, (_, read) in GAUGES.items():
            self._gauges[name](read(snapshot.load), self._labels)
        for ready in snapshot.ready:
            self._update_rank(ready)

    def _update_counters(self, stats: CoordinatorStats) -> None:
        for counted, increment in zip(COUNTERS, self._counters, strict=True):
            for value, total in counted.read(stats).items():
                growth = total - self._totals.get((counted.name, value), 0.0)
                if growth > 0:
                    increment(growth, self._labels_of(stats, **({counted.label: value} if counted.label else {})))
                    self._totals[counted.name, value] = total

    def _observe_requests(self, stats: CoordinatorStats) -> None:
        while stats.ended:
            times = stats.ended.popleft()
            self._ended(1, self._labels_of(stats, finished_reason=times.finish_reason))
            for (_, _, read, _), observe in zip(HISTOGRAMS, self._histograms, strict=True):
                seconds = read(times)
                if seconds is not None:
                    observe(seconds, self._labels_of(stats))

    def _update_rank(self, ready: Ready) -> None:
        for name, update in self._rank_gauges.items():
            rank = {"role": ready.role, "rank": str(ready.rank)}
            update(float(ready.facts.get(name, 0)), {**self._labels, **rank})

    def _labels_of(self, stats: CoordinatorStats, **labels: str) -> dict[str, str]:
        if len(self._phases) < MOST_PHASES:
            self._phases.add(stats.phase)
        phase = stats.phase if stats.phase in self._phases else FURTHER_PHASES
        return {**self._labels, "phase": phase, **labels}


class RayRegistry:
    """`ray.util.metrics`. Must be used inside an actor: Ray exports the metrics of its process."""

    def __init__(self) -> None:
        from ray.util import metrics

        self._metrics = metrics

    def counter(self, name: str, text: str, labels: tuple[str, ...]) -> Update:
        return self._metrics.Counter(name, description=text, tag_keys=labels).inc

    def gauge(self, name: str, text: str, labels: tuple[str, ...]) -> Update:
        return self._metrics.Gauge(name, description=text, tag_keys=labels).set

    def histogram(self, name: str, text: str, labels: tuple[str, ...], boundaries: Sequence[float]) -> Update:
        return self._metrics.Histogram(name, description=text, boundaries=list(boundaries), tag_keys=labels).observe


def make_ray_watch(labels: Mapping[str, str]) -> MetricsWatch:
    """Must be called in the coordinator's process, which exports the metrics."""
    return MetricsWatch(RayRegistry(), labels)


def model_name(config: LaunchConfig) -> str:
    """The target's name in requests and replies of the server, and in the metrics."""
    path = Path(config.target.path)
    return config.server.model_name or ("pocket" if is_bundled(path) else checkpoint_name(path))


def metric_labels(config: LaunchConfig) -> dict[str, str]:
    values = (config.cluster.namespace, model_name(config), config.drafter.name, str(config.pipeline.name))
    return dict(zip(ENGINE_LABELS, values, strict=True))
