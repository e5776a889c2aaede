"""The memory that is printed before loading is the memory that the ranks then report."""

from __future__ import annotations

from dataclasses import replace

from actors.options import TargetConfig
from cluster import pocket
from cluster.observability.report import bytes_per_role
from cluster.placement.memory import Footprint, describe_layout, footprints


def test_weights_are_what_the_ranks_find(open_engine):
    engine = open_engine("model", tp=2)
    expected = {role: Footprint(**sizes) for role, sizes in bytes_per_role(engine.ready).items()}
    assert footprints(engine.config, engine.places) == expected
    lookup = open_engine("ngram")
    assert set(footprints(lookup.config, lookup.places)) == {"target"}


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
