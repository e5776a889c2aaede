from __future__ import annotations

import os

from actors.protocol.membership import Ready
from cluster.tools.bench.machine import machine, resident_bytes


def ready(**facts_by_rank: dict[str, object]) -> dict[str, Ready]:
    return {name.replace("_", "-"): Ready(name.partition("_")[0], 0, facts) for name, facts in facts_by_rank.items()}


def test_the_machine_is_described():
    found = machine()
    assert found["processor"] and found["num_cores"] == len(os.sched_getaffinity(0))
    assert found["memory_bytes"] > 2**28


def test_memory_by_process_where_ranks_name_theirs():
    own, parent = os.getpid(), os.getppid()
    found = resident_bytes(ready(target_0={"pid": own}, target_1={"pid": own}, draft_0={"pid": parent}))
    assert set(found) == {"target-0+target-1", "draft-0"}
    assert found["target-0+target-1"] > 2**20 and found["target-0+target-1"] != found["draft-0"]


def test_memory_of_all_where_they_do_not():
    (held,) = resident_bytes(ready(target_0={}, draft_0={})).items()
    own = resident_bytes(ready(target_0={"pid": os.getpid()}))["target-0"]
    assert held[0] == "draft-0+target-0" and held[1] > 0.5 * own
