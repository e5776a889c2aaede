"""The layouts that are enumerated, and the overrides that select each."""

from __future__ import annotations

import pytest

from cluster.tools.planning.layouts import (
    Layout,
    Shape,
    described_layouts,
    draft_model,
    enumerate_layouts,
    local_layouts,
    simplest,
)
from tests.cluster.config.quick_loading import load_quickly

TENSOR = Shape("tensor", 2)


def test_every_layout_that_fits_and_no_other():
    found = list(enumerate_layouts([1, 2, 8], [Shape(), TENSOR], 3, ["sync", "branches", "pingpong"], batch=1))
    assert len(found) == len(set(found))
    assert {layout.target_ranks for layout in found} == {1, 2}
    assert Layout(1, "branches", "separate", TENSOR) in found and Layout(2, "branches", "separate", Shape()) in found
    assert Layout(2, "sync", "attached", TENSOR) in found and Layout(1, "sync", "attached", Shape()) in found
    assert Layout(2, "sync", "colocated", Shape()) in found, "one rank does what two could"
    assert Layout(2, "sync", "colocated", TENSOR) not in found, "on the target's ranks it takes fewer records"
    assert Layout(2, "sync", "separate", TENSOR) not in found, "four ranks on three devices"
    assert not [layout for layout in found if layout.pipeline == "pingpong"], "one request cannot alternate"
    assert not [layout for layout in found if layout.placement == "colocated" and layout.overlaps]
    assert Layout(1, "plain", "separate") in found
    batched = enumerate_layouts([1], [Shape()], 2, ["pingpong"], batch=2)
    assert Layout(1, "pingpong", "separate", Shape()) in list(batched)


def test_layouts_of_described_passes_are_those_within_the_axes_of_the_job():
    axes = ["job.pipelines=[sync]", "job.parallels=[tensor]", "job.draft_ranks=[2]", "job.target_ranks=[1,2]"]
    shapes = [Shape(), TENSOR, TENSOR, Shape("tensor", 4)]
    assert described_layouts([1, 1, 4, 2], shapes, 3, load_quickly(["job=plan", *axes]).job) == [
        Layout(1, "plain", "separate"),
        Layout(1, "sync", "colocated", TENSOR),
        Layout(1, "sync", "separate", TENSOR),
        Layout(2, "plain", "separate"),
        Layout(2, "sync", "attached", TENSOR),
    ]


def test_the_axes_of_the_job_bound_what_is_planned(tiny_checkpoint):
    pair = [f"target.path={tiny_checkpoint('Llama')}", f"drafter.path={tiny_checkpoint('Llama', num_hidden_layers=5)}"]
    axes = ["job.target_ranks=[2]", "job.draft_ranks=[2]", "job.pipelines=[pingpong]"]
    for batch, pipelines in ((1, {"plain"}), (2, {"plain", "pingpong"})):
        config = load_quickly(["job=plan", *pair, *axes, f"job.batch={batch}"])
        local = local_layouts(config, 4)
        described = described_layouts([1, 2, 4], [Shape(), TENSOR], 4, config.job)
        for layouts, ranks in ((local, {1, 2}), (described, {2})):
            assert {layout.target_ranks for layout in layouts} == {2}
            assert {layout.pipeline for layout in layouts} == pipelines
            assert {layout.shape.ranks for layout in layouts if layout.shape} == (ranks if batch > 1 else set())
    assert all(layout.overlaps for layout in local if layout.shape)


def test_a_layout_replaces_how_the_configured_drafter_is_shared(tiny_checkpoint):
    pair = [f"target.path={tiny_checkpoint('Llama')}", f"drafter.path={tiny_checkpoint('Llama', num_hidden_layers=5)}"]
    shared = ["drafter=model", "drafter.parallel=layer", "drafter.ranks=2", "drafter.layer_partition=[1,2,1,1]"]
    config = load_quickly(["job=plan", *pair, *shared])
    for layout in (Layout(1, "sync", "separate", Shape()), Layout(1, "sync", "colocated", TENSOR)):
        assert layout.configure(config, 4) == layout.configure(load_quickly(["job=plan", *pair]), 4)
    by_width = Layout(1, "sync", "colocated", Shape("layer", 2, 2)).configure(config, 4)
    assert (draft_model(by_width).layer_group, draft_model(by_width).layer_partition) == (2, [])


def test_threads_of_a_rank_are_an_option_where_a_layout_bounds_them(tiny_checkpoint):
    path = tiny_checkpoint("Llama")
    config = load_quickly(
        ["drafter=model", "job=plan", f"target.path={path}", f"drafter.path={path}", "drafter.num_threads=2"]
    )
    for shape, threads in ((Shape(threads=1), 1), (Shape(), 2)):
        layout = Layout(2, "sync", "colocated", shape)
        assert draft_model(layout.configure(config, 4)).num_threads == threads
        assert ("drafter.num_threads=1" in layout.overrides(4)) == (threads == 1)


def layer_shapes(overrides: list[str], num_devices: int) -> set[Shape]:
    layouts = local_layouts(
        load_quickly(["drafter=model", "job=plan", "job.parallels=[layer]", *overrides]), num_devices
    )
    return {layout.shape for layout in layouts if layout.shape}


def test_layers_are_shared_as_the_drafter_allows_and_in_each_way_once(tiny_checkpoint):
    def pair(num_layers: int) -> list[str]:
        path = tiny_checkpoint("Llama", num_hidden_layers=num_layers)
        return [f"target.path={path}", f"drafter.path={path}"]

    whole = {shape.mlp for shape in layer_shapes([*pair(6), "drafter.calibration=broadcast"], 2)}
    assert whole == {"replicated"}, "one rank makes the exact rows and needs whole MLPs"
    three = layer_shapes([*pair(5), "job.draft_ranks=[3]"], 4)
    assert {shape.mlp for shape in three} == {"replicated"}, "four heads are no multiple of three"
    four = {(shape.layer_group, shape.partition) for shape in layer_shapes(pair(5), 4)}
    assert four == {(2, (1, 1, 2, 1)), (3, (1, 3, 1))}, "a width of 4 is limited to the 3 inner layers"
    six = layer_shapes([*pair(8), "job.layer_groups=[3,4,6]"], 8)
    assert {(shape.layer_group, shape.partition) for shape in six} == {(3, (1, 3, 3, 1)), (6, (1, 6, 1))}
    own = layer_shapes([*pair(6), "drafter.parallel=layer", "drafter.layer_partition=[[0,1],[2,3],[4],[5]]"], 2)
    assert {(shape.layer_group, shape.partition) for shape in own} == {(2, (2, 2, 1, 1))}
    assert "layer 2 2+2+1+1 mlp tensor" in {shape.describe() for shape in own}


def test_a_drafter_on_several_cores_may_leave_them_to_others(tiny_checkpoint):
    path = tiny_checkpoint("Llama")
    axes = ["job.parallels=[single,tensor]", "job.pipelines=[sync]", "job.target_ranks=[1]"]
    config = load_quickly(["job=plan", f"target.path={path}", f"drafter.path={path}", *axes])
    one = Shape(threads=1)

    def one_threaded(num_cores: int) -> set[tuple[str, Shape]]:
        layouts = local_layouts(config, num_cores, threads=True)
        assert simplest(layouts).shape == Shape()
        return {(layout.placement, layout.shape) for layout in layouts if layout.shape and layout.shape.threads}

    assert one_threaded(1) == set() and one_threaded(2) == {("colocated", one)}
    assert one_threaded(4) == {("colocated", one), ("separate", one)}
    assert not [layout for layout in local_layouts(config, 2) if layout.shape and layout.shape.threads]


@pytest.mark.extended
@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, "plain", "separate"),
        Layout(1, "sync", "colocated", TENSOR),
        Layout(1, "branches", "separate", Shape()),
        Layout(1, "sync", "attached", Shape()),
        Layout(2, "sync", "attached", TENSOR),
        Layout(2, "sync", "colocated", Shape(threads=1)),
        Layout(2, "sync", "colocated", Shape("layer", 2, 2, "tensor")),
        Layout(2, "sync", "colocated", Shape("layer", 2, 2, "replicated", (1, 2, 1, 1))),
    ],
    ids=Layout.describe,
)
def test_the_line_to_paste_is_the_layout_that_was_planned(layout: Layout, tiny_checkpoint):
    pair = [f"target.path={tiny_checkpoint('Llama')}", f"drafter.path={tiny_checkpoint('Llama', num_hidden_layers=5)}"]
    pasted = load_quickly([*layout.overrides(4), *pair[: 2 if layout.shape else 1]])
    planned = layout.configure(load_quickly(["job=plan", *pair]), 4)
    assert pasted.target == planned.target and pasted.pipeline == planned.pipeline
    assert pasted.drafter == planned.drafter
    if layout.shape:
        assert pasted.placement == planned.placement


def test_a_model_is_only_split_where_it_can_be(tiny_checkpoint):
    pair = [f"target.path={tiny_checkpoint('Llama')}", f"drafter.path={tiny_checkpoint('Llama')}"]
    layouts = local_layouts(load_quickly(["job=plan", "job.target_ranks=[1,2,3]", *pair]), 4)
    assert {layout.target_ranks for layout in layouts} == {1, 2}, "four heads are no multiple of three"
    assert {layout.shape.parallel for layout in layouts if layout.shape} >= {"single", "tensor"}
    drafted = local_layouts(load_quickly(["job=plan", "job.draft_ranks=[1,2,3]", *pair]), 4)
    assert {layout.shape for layout in drafted if layout.shape} == {Shape(), TENSOR}
    assert simplest(layouts) == Layout(1, "sync", "separate", Shape())
    split, wide = Layout(1, "sync", "separate", TENSOR), Layout(2, "sync", "separate", Shape())
    assert simplest([wide, split]) == split, "ranks of the target count first"
    assert not [one for one in layouts if one.shape and one.shape.parallel == "layer"], "two layers are too few"
    deep = [pair[0], f"drafter.path={tiny_checkpoint('Llama', num_hidden_layers=6)}"]
    assert layer_shapes(deep, 2) == {
        Shape("layer", 2, 2, "replicated", (1, 2, 2, 1)),
        Shape("layer", 2, 2, "tensor", (1, 2, 2, 1)),
    }
    narrow = local_layouts(load_quickly(["job=plan", "job.parallels=[single]", "job.pipelines=[sync]", *pair]), 1)
    assert simplest(narrow) == Layout(1, "sync", "colocated", Shape()) and len(narrow) == 2
