"""Metrics in the text format of Prometheus, for a server without Ray: the coordinator's counters as they are when they
are read, and how long the server's own requests took.

Names, texts and boundaries are those of `metrics.py`. It must not know HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from actors.coordinator.stats import RequestTimes
from actors.protocol.membership import Ready
from actors.protocol.messages import Report
from cluster.completion import Completion
from cluster.observability.metrics import COUNTERS, ENGINE_LABELS, GAUGES, HISTOGRAMS, PREFIX, RANK_GAUGES

_AT_COORDINATOR = ("request_queue_time_seconds",)
"""Times that a client does not see."""
_ALIAS = "vllm:"
_OF_VLLM = frozenset(
    [
        "e2e_request_latency_seconds",
        "generation_tokens",
        "kv_cache_usage_perc",
        "num_preemptions",
        "num_requests_running",
        "num_requests_waiting",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "prompt_tokens",
        "request_success",
        "request_time_per_output_token_seconds",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_drafts",
        "time_to_first_token_seconds",
    ]
)
"""Metrics that vLLM has too, with the same meaning."""
_MADE_AT = "_created"
"""A further series for each one, of the time when it began, which Prometheus reads as a metric."""


class RequestHistograms:
    """How long requests took, as their client saw it, and why they ended."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._ended = Counter(
            f"{PREFIX}request_success",
            "Requests that ended, by reason",
            (*ENGINE_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._labels = dict(labels)
        self._histograms = [
            (read, Histogram(PREFIX + name, text, ENGINE_LABELS, registry=self._registry, buckets=boundaries))
            for name, text, read, boundaries in HISTOGRAMS
            if name not in _AT_COORDINATOR
        ]

    def observe(self, completion: Completion) -> None:
        """A request ended, or is being aborted."""
        times = _times_of(completion)
        self._ended.labels(**self._labels, finished_reason=times.finish_reason).inc()
        for read, histogram in self._histograms:
            if (seconds := read(times)) is not None:
                histogram.labels(**self._labels).observe(seconds)

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith(_MADE_AT)]
            yield metric


def _times_of(completion: Completion) -> RequestTimes:
    submitted, first = completion.submitted_at, completion.first_token_at
    ended = completion.finished_at or completion.updated_at
    reason = completion.finish_reason or "abort"
    first_s = None if first is None else first - submitted
    return RequestTimes(reason, None, first_s, ended - submitted, len(completion.token_ids))


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """What a scrape reads: a report of the coordinator, what the ranks measured at their start, and the histograms."""

    report: Report
    ready: Iterable[Ready]
    labels: Mapping[str, str]
    histograms: RequestHistograms
    has_alias: bool = False

    def text(self) -> bytes:
        return generate_latest(self)  # pyright: ignore[reportArgumentType]  (only `collect` is called)

    def collect(self) -> Iterable[Metric]:
        """All metrics, and with `has_alias` those of vLLM a second time under its names."""
        for metric in self._metrics():
            yield metric
            if self.has_alias and metric.name.removeprefix(PREFIX) in _OF_VLLM:
                yield _aliased(metric)

    def _metrics(self) -> Iterable[Metric]:
        counters: Any = SimpleNamespace(**self.report.counters)
        for counted in COUNTERS:
            labels = [counted.label] if counted.label else []
            family = CounterMetricFamily(PREFIX + counted.name, counted.text, labels=[*ENGINE_LABELS, *labels])
            for value, total in counted.read(counters).items():
                family.add_metric([*self.labels.values(), *([value] if labels else [])], total)
            yield family
        for name, (text, read) in GAUGES.items():
            yield self._gauge(name, text, (), {(): read(counters)})
        for name, text in RANK_GAUGES.items():
            values = {(one.role, str(one.rank)): float(one.facts.get(name, 0)) for one in self.ready}
            yield self._gauge(name, text, ("role", "rank"), values)
        yield from self.histograms.collect()

    def _gauge(
        self, name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
    ) -> GaugeMetricFamily:
        family = GaugeMetricFamily(PREFIX + name, text, labels=[*ENGINE_LABELS, *labels])
        for own, value in values.items():
            family.add_metric([*self.labels.values(), *own], value)
        return family


def _aliased(metric: Metric) -> Metric:
    alias = Metric(metric.name.replace(PREFIX, _ALIAS, 1), metric.documentation, metric.type)
    alias.samples = [sample._replace(name=sample.name.replace(PREFIX, _ALIAS, 1)) for sample in metric.samples]
    return alias
