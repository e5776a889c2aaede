"""The memory that is printed before loading is the memory that the ranks then report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.drafters.config import NoDrafterConfig, Placement
from actors.drafters.speculator.config import SpeculatorDrafterConfig
from actors.options import TargetConfig
from cluster import pocket
from cluster.observability.report import bytes_per_role
from cluster.placement.memory import Footprint, describe_layout, footprints, load_allowance_s, sharing
from cluster.runtime.backend import rank_spec


def test_weights_are_what_the_ranks_find(open_engine):
    engine = open_engine("model", tp=2)
    expected = {role: Footprint(**sizes) for role, sizes in bytes_per_role(engine.ready).items()}
    assert footprints(engine.config, engine.places) == expected
    lookup = open_engine("ngram")
    assert set(footprints(lookup.config, lookup.places)) == {"target"}


def test_ranks_on_one_gpu_divide_what_their_weights_leave(open_engine):
    engine = open_engine("model", tp=2)
    target, draft = (next(one for one in engine.places if one.role == role) for role in ("target", "draft"))
    together = [replace(one, device="cuda:0") for one in (target, draft)]
    sizes = footprints(engine.config, together)
    (beside_target, part), (beside_draft, rest) = (sharing(engine.config, together, one) for one in together)
    assert beside_target == sizes["draft"].weights // draft.size and beside_draft == sizes["target"].weights // 2
    assert part + rest == pytest.approx(1) and part / rest == pytest.approx(sizes["target"].kv / sizes["draft"].kv)
    apart = [together[0], replace(draft, device="cuda:1")]
    assert [sharing(engine.config, apart, one) for one in apart] == [(0, 1.0)] * 2
    spec = rank_spec(engine.config, together[0], "", "", (), sharing=(beside_target, part))
    assert (spec.neighbour_bytes, spec.memory_part) == (beside_target, part)


def test_a_large_model_may_take_longer_to_load(open_engine):
    engine = open_engine("model", tp=2)
    sizes = {"target": Footprint(2 * 35 * 2**30, 0), "draft": Footprint(2**30, 0)}
    assert load_allowance_s(engine.places, sizes) == pytest.approx(70), "two ranks of the target"
    assert load_allowance_s(engine.places, {}) == 0


def test_slots_that_were_asked_for_are_the_pool(open_engine):
    engine = open_engine("none")
    small = replace(engine.config, target=replace(engine.config.target, kv_slots=7))
    of_one = footprints(replace(small, target=replace(small.target, kv_slots=1)), engine.places)["target"].kv
    assert footprints(small, engine.places)["target"].kv == 7 * of_one


def test_the_report_has_a_line_per_rank_and_per_model(open_engine):
    engine = open_engine("model")
    bundled = TargetConfig(path=str(pocket.TARGET))
    sizes = {"target": Footprint(3 * 2**30, 2**20), "draft": Footprint(2**20, 0)}
    lines = describe_layout(replace(engine.config, target=bundled), engine.places, sizes).splitlines()
    assert lines[0] == "layout" and [line.split(":")[0].strip() for line in lines[1:3]] == ["target-0", "draft-0"]
    assert lines[3:] == [
        "memory",
        f"  target: 3.00 GiB of weights, up to 1.0 MiB of KV, {pocket.TARGET} (bundled)",
        f"  draft: 1.0 MiB of weights, up to 0.0 MiB of KV, {engine.config.drafter.path}",
    ]


def test_a_speculator_is_counted_where_it_drafts(open_engine):
    """A speculator is beside a copy of the target's tables, or on the target's ranks."""
    engine = open_engine("model")  # whose roles it would have
    bundled = replace(engine.config, target=TargetConfig(path=str(pocket.TARGET)))
    alone = footprints(replace(bundled, drafter=NoDrafterConfig()), engine.places)["target"]
    for placement, role in ((Placement.separate, "draft"), (Placement.attached, "target")):
        drafter = SpeculatorDrafterConfig(path=str(pocket.SPECULATOR), placement=placement)
        config = replace(bundled, drafter=drafter)
        sizes = footprints(config, engine.places[: 1 if role == "target" else 2])
        grown = sizes[role].weights - (alone.weights if role == "target" else 0)
        assert 6e6 < grown < 20e6 and sizes[role].kv > (alone.kv if role == "target" else 0)
        assert f"{pocket.SPECULATOR} (bundled)" in describe_layout(config, engine.places, sizes)
