"""An engine of Ray's actors whose drafter is lent by a pool; a file of its own, since daemons start in it."""

from __future__ import annotations

import pytest

from cluster.config.schema import ClusterConfig, ClusterName
from tests.cluster.engine.test_draft_pools import accepted, lent, open_pool, sections, texts

__all__ = ["open_pool"]


@pytest.mark.ray
@pytest.mark.slow
def test_an_engine_on_ray_uses_a_pool(open_engine, open_pool):
    pytest.importorskip("ray")
    plain = texts(open_engine("none", **sections("plain")))
    pool = open_pool()
    cluster = ClusterConfig(ClusterName.local, dashboard=False, num_cpus=4, oversubscribe=True)
    engine = open_engine(lent(pool), cluster=cluster, **sections())
    assert texts(engine) == plain and accepted(engine) > 0
    assert set(engine.pids()) == {"coordinator", "target-0"}
    pool.end()
    assert texts(engine) == plain
