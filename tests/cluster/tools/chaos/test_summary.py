"""What `drill.json` says of faults that are made by hand, and when a fault counts as noticed and as recovered from."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from actors.protocol.messages import SamplingParams
from cluster.completion import EngineError
from cluster.io.prompts import Prompt
from cluster.runtime.supervisor import Incident
from cluster.tools.chaos import drill as module
from cluster.tools.chaos.drill import Drill, DrillLoad, Fault, TokenGap, plan_faults
from cluster.tools.chaos.summary import summarise

ONE = (("draft-0", "SIGKILL"),)
BOTH = (("draft2-1", "SIGSTOP"), ("target-0", "SIGKILL"))
FAULTS = [Fault(ONE, 0.5, 3.0, 1.0), Fault(BOTH, 2.0, 5.0, 4.0), Fault(ONE, 1.5, 7.0, 2.0)]


def test_a_summary_has_every_fault_and_the_times_of_each_kind():
    load = DrillLoad(9, 90, [4, 0, 4], ["lost"])
    found = summarise(FAULTS, load, 3)
    assert [(one["kind"], one["signal"], one["noticed_s"]) for one in found.pop("faults")] == [
        ("draft", "SIGKILL", 0.5),
        ("draft2+target", "SIGSTOP+SIGKILL", 2.0),
        ("draft", "SIGKILL", 1.5),
    ]
    assert found.pop("kinds") == [
        {
            "kind": "draft",
            "signal": "SIGKILL",
            "num_faults": 2,
            "noticed_s": {"median": 1.0, "max": 1.5},
            "replaced_s": {"median": 1.5, "max": 2.0},
            "stalled_s": {"median": 5.0, "max": 7.0},
        },
        {
            "kind": "draft2+target",
            "signal": "SIGSTOP+SIGKILL",
            "num_faults": 1,
            "noticed_s": {"median": 2.0, "max": 2.0},
            "replaced_s": {"median": 4.0, "max": 4.0},
            "stalled_s": {"median": 5.0, "max": 5.0},
        },
    ]
    assert found == {
        "job": "drill",
        "passed": False,
        "num_faults": 3,
        "num_requests": 9,
        "tokens": 90,
        "num_failed": 1,
        "failures": ["lost"],
        "num_unequal_requests": 3,
        "unequal_prompts": [1, 5],
    }


@pytest.mark.parametrize(
    ("load", "planned", "passed"),
    [
        (DrillLoad(1), 3, True),
        (DrillLoad(0), 3, False),
        (DrillLoad(1), 4, False),
        (DrillLoad(1, 1, [0]), 3, False),
        (DrillLoad(1, 1, [], ["x"]), 3, False),
    ],
    ids=["right", "no request", "a fault is missing", "other tokens", "a failure"],
)
def test_a_drill_passes_if_all_was_struck_and_nothing_differs(load, planned, passed):
    assert summarise(FAULTS, load, planned)["passed"] is passed


def incident(identity: str, at: float) -> Incident:
    return Incident(identity, 0, "ended", at)


@pytest.mark.parametrize(
    ("incidents", "at"),
    [
        ([], None),
        ([incident("draft-0", 1.0)], None),
        ([incident("target-0", 4.0), incident("draft-0", 1.0)], 4.0),
        ([incident("draft-0", 1.0), incident("target-0", 2.0), incident("target-0", 9.0)], 2.0),
        ([incident("draft2-0", 5.0), incident("draft-0", 1.0), incident("target-0", 0.5)], 1.0),
    ],
    ids=["none", "one of two", "both", "the first of each", "and another"],
)
def test_a_fault_is_noticed_once_all_that_was_struck_is(incidents, at):
    assert module._noticed_at(incidents, ["draft-0", "target-0"]) == at


def drill_of(pids: dict[str, int]) -> Drill:
    engine: Any = SimpleNamespace(pids=lambda: pids, supervisor=SimpleNamespace(incidents=[]))
    return Drill(engine, [Prompt("a")], SamplingParams(), [[1]])


def test_processes_are_replaced_once_each_has_another_number(monkeypatch):
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 7.0))
    before = {"a": 1, "b": 2, "c": 3}
    for now, at in (
        ({"a": 9, "b": 2}, None),
        ({"a": 9}, None),
        ({"a": 9, "b": 8}, 7.0),
        ({"a": 9, "b": 8, "c": 7}, 7.0),
    ):
        assert drill_of(now)._replaced_at(["a", "b"], before) == at


def test_while_it_waits_gaps_grow_and_without_recovery_the_fault_is_named(monkeypatch):
    clock = [100.0]

    def slept(seconds: float) -> None:
        assert seconds == 0.005
        clock[0] += 1.0

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=slept))
    drill, gap = drill_of({}), TokenGap(100.0)
    token_at: dict[float, float | None] = {100.0: None, 101.0: 101.0, 102.0: 101.0, 103.0: 103.5}
    completion: Any = SimpleNamespace()
    drill._live[1] = completion

    def happened() -> float | None:
        completion.last_token_at = token_at.get(clock[0] + 1.0, 104.0)
        return 55.0 if clock[0] >= 104.0 else None

    completion.last_token_at = None
    assert drill._await(ONE, gap, happened) == 55.0
    assert (gap.longest, gap.since) == (2.5, 104.0) and clock[0] == 104.0
    with pytest.raises(
        EngineError, match="^job=drill: SIGSTOP to draft2-1 and SIGKILL to target-0: no recovery after 90 s"
    ):
        drill._await(BOTH, gap, lambda: None)
    assert clock[0] == 194.0
    drill.load.failed.append("prompt: lost")
    with pytest.raises(EngineError, match="^job=drill: SIGKILL to draft-0: prompt: lost$"):
        drill._await(ONE, gap, lambda: None)
    assert clock[0] == 194.0, "at once"


def test_a_share_of_pairs_needs_two_roles():
    planned = plan_faults(["draft-0", "draft-1"], ["SIGKILL"], 4, random.Random(0), pairs=0.5)
    assert sorted(planned) == sorted([(("draft-0", "SIGKILL"),), (("draft-1", "SIGKILL"),)] * 2), "there is one role"
    planned = plan_faults(["draft-0", "target-0"], ["SIGKILL"], 5, random.Random(0), pairs=0.5)
    assert sum(len(strikes) == 2 for strikes in planned) == 2 and len(planned) == 5
