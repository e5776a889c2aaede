"""What a rank's successor is given: all of the rank, and what the ranks had measured together."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from actors.drafters.auto.config import AutoDrafterConfig
from actors.drafters.cascade.config import CascadeDrafterConfig
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.options import SchedulerConfig, TargetConfig, VerifyConfig
from actors.transport.keys import LinkKey
from actors.worker.spec import RankSpec

KEY = LinkKey("target-1", b"h" * 32, b"p" * 32)
MEASURED = {"kv_slots": 4321, "mlp_parallel": 3}
FACTS = {**MEASURED, "pid": 7, "dtype": "bfloat16", "path": "elsewhere", "load_s": 1.5, "num_draft_tokens": 99}
"""The facts of a rank's `Ready`: only the first two are options that a successor takes over."""


def spec_of(role: str, drafter) -> RankSpec:
    target = TargetConfig(path="target", device="cpu", kv_slots=10)
    parts = dict(target=target, drafter=drafter, verify=VerifyConfig(), pipeline="sync", scheduler=SchedulerConfig())
    place = dict(device="cpu", num_threads=2, cores=(1, 3), hub_address="tcp://hub:1", host="here", eos_token_ids=(2,))
    return RankSpec(role, 1, 2, **place, **parts, adaptive=True, neighbour_bytes=5, memory_part=0.5, key=KEY)


@pytest.mark.parametrize("role", ["target", "draft", "draft2"])
@pytest.mark.parametrize("drafter", [ModelDrafterConfig(path="draft", device="cpu"), NgramDrafterConfig()])
@pytest.mark.parametrize("incarnation", [1, 6])
def test_a_successor_is_the_same_rank_with_what_its_group_measured(role, drafter, incarnation):
    spec = spec_of(role, drafter)
    part = "target" if role == "target" else "drafter"
    before = getattr(spec, part)
    names = {one.name for one in fields(before)}
    taken_over = {name: value for name, value in MEASURED.items() if name in names}
    expected = replace(spec, incarnation=incarnation, **{part: replace(before, **taken_over)})
    assert spec.successor(incarnation, FACTS) == expected
    assert taken_over or isinstance(before, NgramDrafterConfig), "a model has slots"


@pytest.mark.parametrize("record, field", [(AutoDrafterConfig, "drafters"), (CascadeDrafterConfig, "levels")])
def test_each_of_several_drafters_has_what_was_measured_of_it(record, field):
    model = ModelDrafterConfig(path="draft", device="cpu")
    spec = spec_of("draft", record(**{field: (NgramDrafterConfig(), model, model)}))
    facts = {"kv_slots": 9, "parts": {"0": {}, "1": {"kv_slots": 5, "mlp_parallel": "tensor"}, "2": {"kv_slots": 9}}}
    later = spec.successor(1, facts)
    expected = NgramDrafterConfig(), replace(model, kv_slots=5, mlp_parallel="tensor"), replace(model, kv_slots=9)
    assert getattr(later.drafter, field) == expected
    assert spec.successor(1, {}).drafter == spec.drafter


def test_the_slots_of_the_last_process_hold_for_all_that_follow():
    """A target whose slots were measured with its peers: one that measured alone would find another number."""
    spec = spec_of("target", NgramDrafterConfig())
    spec = replace(spec, target=replace(spec.target, kv_slots=0))
    later = spec.successor(1, {"kv_slots": 77}).successor(2, {"kv_slots": 77, "pid": 1}).successor(3, {})
    assert (later.target.kv_slots, later.incarnation) == (77, 3)
    assert spec.successor(1, {}).target.kv_slots == 0, "nothing was measured before it ended"
