"""What a scrape of a draft pool reads: every count of its snapshot, under its own name and labels."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from actors.pool.merged_passes import MergeCounts
from actors.pool.service import LeaseState, PoolSnapshot
from actors.pool.tenant_drafter import LeaseCounts
from cluster.observability.pool_metrics import PoolMetrics

RUNS = LeaseState(7, "alice", "tcp://h:1", 2.5, 30, LeaseCounts(1, 2, 3, 4, 5, 6, 8, 9))
ENDED = LeaseState(6, "default", "tcp://h:2", 9.0, 0, LeaseCounts(), why="its engine has ended")
SNAPSHOT = PoolSnapshot((RUNS, ENDED), MergeCounts(11, 12, 13, 14, 15, 16, 20, 21), 100, 0.25, 17, 18, 19, 2.5, 0.75)


def page(snapshot: PoolSnapshot | None) -> dict[str, float]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PoolMetrics(lambda: snapshot))
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_every_count_is_under_its_name():
    found = page(SNAPSHOT)
    of_pool = {
        **{"passes": 11, "orders": 12, "left_out_orders": 13, "steps": 14, "wanted_steps": 15, "failed_passes": 16},
        **{"leases": 17, "refused_leases": 18, "refused_records": 19, "calls": 20, "leases_in_calls": 21},
        **{"pass_seconds": 2.5, "host_seconds": 0.75},
    }
    of_lease = {
        **{"drafts": 1, "left_out_drafts": 2, "beyond_share_drafts": 3, "draft_tokens": 4, "accepted_tokens": 5},
        **{"passes": 6, "merged_passes": 8, "refused_records": 9},
    }
    labels = '{client="alice",engine="tcp://h:1",lease="7"}'
    assert {name: value for name, value in found.items() if "default" not in name} == {
        **{f"specdec_pool_{name}_total": value for name, value in of_pool.items()},
        **{f"specdec_lease_{name}_total{labels}": value for name, value in of_lease.items()},
        **{f"specdec_lease_rows{labels}": 30, f"specdec_lease_seconds{labels}": 2.5},
        **{
            "specdec_pool_running_leases": 1,
            "specdec_pool_kv_slots_per_lease": 100,
            "specdec_pool_draft_seconds": 0.25,
        },
    }
    assert sum("default" in name for name in found) == len(of_lease) + 2


def test_before_the_first_snapshot_there_is_nothing():
    assert page(None) == {}
