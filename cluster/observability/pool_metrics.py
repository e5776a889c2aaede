"""Metrics of a draft pool in the text format of Prometheus: the pool's latest snapshot, and the counts of each lease.

Names have the prefix of `metrics.py`. A lease has the labels of its engine's key, its engine's address and its number;
its series end some seconds after the lease. A scrape only reads a record that was made already, so it delays no pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from actors.pool.service import LeaseState, PoolSnapshot
from cluster.observability.metrics import PREFIX

_LEASE_LABELS = ("client", "engine", "lease")

POOL_COUNTERS: tuple[tuple[str, str, Callable[[PoolSnapshot], float]], ...] = (
    ("leases", "Leases that began", lambda pool: pool.num_begun),
    ("refused_leases", "Orders of leases that were refused", lambda pool: pool.num_refused_leases),
    ("refused_records", "Records of engines that were refused", lambda pool: pool.num_refused),
    ("passes", "Passes for drafts, or calls of a drafter without them", lambda pool: pool.merged.num_proposals),
    ("orders", "Orders of drafts that those passes were for", lambda pool: pool.merged.num_orders),
    ("left_out_orders", "Orders left out for the sake of other engines", lambda pool: pool.merged.num_left_out),
    ("steps", "Passes with a step of draft-ahead", lambda pool: pool.merged.num_steps),
    (
        "wanted_steps",
        "Steps that engines waited for, which those passes merged",
        lambda pool: pool.merged.num_wanted_steps,
    ),
    ("calls", "Calls of the drafter of any kind: passes, and parts of texts", lambda pool: pool.merged.num_calls),
    ("leases_in_calls", "Leases that those calls had work of, in all", lambda pool: pool.merged.num_in_calls),
    ("pass_seconds", "Seconds in those calls", lambda pool: pool.pass_s),
    ("host_seconds", "Seconds outside them in which a lease had something to do", lambda pool: pool.host_s),
    ("failed_passes", "Passes that failed, and were repeated order by order", lambda pool: pool.merged.num_failed),
)
POOL_GAUGES: tuple[tuple[str, str, Callable[[PoolSnapshot], float]], ...] = (
    ("running_leases", "Leases that run", lambda pool: sum(not lease.why for lease in pool.leases)),
    ("kv_slots_per_lease", "KV slots of each lease; 0: the drafter has none", lambda pool: pool.share or 0),
    ("draft_seconds", "Seconds from an order to its drafts, lately", lambda pool: pool.draft_s),
)
LEASE_COUNTERS: tuple[tuple[str, str, Callable[[LeaseState], int]], ...] = (
    ("drafts", "Drafts", lambda lease: lease.counts.num_drafts),
    ("draft_tokens", "Draft tokens", lambda lease: lease.counts.num_draft_tokens),
    ("accepted_tokens", "Draft tokens accepted", lambda lease: lease.counts.num_accepted_tokens),
    ("passes", "Passes for its drafts", lambda lease: lease.counts.num_passes),
    (
        "merged_passes",
        "Of them those that other leases had drafts in too",
        lambda lease: lease.counts.num_merged_passes,
    ),
    ("left_out_drafts", "Drafts left out for the sake of other engines", lambda lease: lease.counts.num_left_out),
    (
        "beyond_share_drafts",
        "Drafts its share of KV slots had no room for",
        lambda lease: lease.counts.num_beyond_share,
    ),
    ("refused_records", "Records of its coordinator that were refused", lambda lease: lease.counts.num_refused_records),
)
LEASE_GAUGES: tuple[tuple[str, str, Callable[[LeaseState], float]], ...] = (
    ("rows", "KV rows of its texts", lambda lease: lease.num_rows),
    ("seconds", "Seconds since it began", lambda lease: lease.seconds),
)


class PoolMetrics:
    """A collector of `prometheus_client`. `snapshot` returns the latest one, None before the first."""

    def __init__(self, snapshot: Callable[[], PoolSnapshot | None]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        if (pool := self._snapshot()) is None:
            return
        for kind, families in ((CounterMetricFamily, POOL_COUNTERS), (GaugeMetricFamily, POOL_GAUGES)):
            for name, text, read in families:
                yield kind(f"{PREFIX}pool_{name}", text, value=read(pool))
        for kind, families in ((CounterMetricFamily, LEASE_COUNTERS), (GaugeMetricFamily, LEASE_GAUGES)):
            for name, text, read in families:
                family: Any = kind(f"{PREFIX}lease_{name}", text, labels=_LEASE_LABELS)
                for lease in pool.leases:
                    family.add_metric((lease.client, lease.engine, str(lease.number)), read(lease))
                yield family


class MetricsListener:
    """Answers `GET /metrics` from construction to `close`. Raises ValueError for an address that is taken."""

    def __init__(self, host: str, port: int, snapshot: Callable[[], PoolSnapshot | None]) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(PoolMetrics(snapshot))  # pyright: ignore[reportArgumentType]  (only `collect` is called)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ValueError(f"job.metrics_port={port}: cannot listen on {host} ({error.strerror})") from error

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
