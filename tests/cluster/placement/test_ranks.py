"""Which rank runs where: a table of choices and machines, and the refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.drafters.config import NoDrafterConfig, Placement
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.options import PipelineConfig, PipelineName, TargetConfig
from cluster.config.schema import ClusterConfig, ClusterName, PlacementConfig, PlacementName
from cluster.placement.ranks import Devices, lay_out
from tests.cluster.placement.default_launch import CONFIG

FOUR, TWO, ONE = Devices((0, 1, 2, 3)), Devices((4, 6)), Devices((0,))
GPUS = Devices((0, 1, 2, 3), num_gpus=4)


def config_of(*, tp=1, ranks=1, drafter="model", colocated=False, device="auto", plain=False, oversubscribe=False):
    drafters = {
        "model": ModelDrafterConfig(ranks=ranks, device=device, placement=Placement.separate),
        "ngram": NgramDrafterConfig(placement=Placement.separate),
        "none": NoDrafterConfig(),
    }
    return replace(
        CONFIG,
        target=TargetConfig(tp=tp, device=device),
        drafter=drafters[drafter],
        pipeline=PipelineConfig(PipelineName.plain if plain else PipelineName.sync),
        placement=PlacementConfig(PlacementName.colocated if colocated else PlacementName.separate),
        cluster=ClusterConfig(oversubscribe=oversubscribe),
    )


def table(config, devices):
    return [(place.identity, place.device, place.cores, place.share) for place in lay_out(config, devices)]


@pytest.mark.parametrize(
    ("choices", "devices", "expected"),
    [
        ({}, TWO, [("target-0", "cpu", (4,), 1.0), ("draft-0", "cpu", (6,), 1.0)]),
        ({}, FOUR, [("target-0", "cpu", (0, 1), 1.0), ("draft-0", "cpu", (2, 3), 1.0)]),
        (
            dict(tp=2, ranks=1),
            FOUR,
            [("target-0", "cpu", (0,), 1.0), ("target-1", "cpu", (1,), 1.0), ("draft-0", "cpu", (2, 3), 1.0)],
        ),
        (dict(colocated=True), TWO, [("target-0", "cpu", (4, 6), 0.5), ("draft-0", "cpu", (4, 6), 0.5)]),
        (
            dict(colocated=True, tp=2),
            TWO,
            [("target-0", "cpu", (4,), 0.5), ("target-1", "cpu", (6,), 0.5), ("draft-0", "cpu", (4, 6), 0.5)],
        ),
        (dict(drafter="ngram"), TWO, [("target-0", "cpu", (4, 6), 1.0), ("draft-0", "cpu", (), 0.0)]),
        (dict(drafter="ngram", colocated=True), ONE, [("target-0", "cpu", (0,), 1.0), ("draft-0", "cpu", (), 0.0)]),
        (dict(drafter="none", tp=2), TWO, [("target-0", "cpu", (4,), 1.0), ("target-1", "cpu", (6,), 1.0)]),
        (dict(plain=True), ONE, [("target-0", "cpu", (0,), 1.0)]),
        (
            dict(oversubscribe=True, tp=2),
            TWO,
            [("target-0", "cpu", (4,), 0.5), ("target-1", "cpu", (6,), 0.5), ("draft-0", "cpu", (4,), 0.5)],
        ),
        (
            dict(tp=2, ranks=2),
            GPUS,
            [
                ("target-0", "cuda:0", (), 1.0),
                ("target-1", "cuda:1", (), 1.0),
                ("draft-0", "cuda:2", (), 1.0),
                ("draft-1", "cuda:3", (), 1.0),
            ],
        ),
        (
            dict(tp=2, colocated=True),
            GPUS,
            [("target-0", "cuda:0", (), 0.5), ("target-1", "cuda:1", (), 0.5), ("draft-0", "cuda:0", (), 0.5)],
        ),
        (
            dict(drafter="ngram", tp=4),
            GPUS,
            [(f"target-{i}", f"cuda:{i}", (), 1.0) for i in range(4)] + [("draft-0", "cpu", (), 0.0)],
        ),
        (dict(device="cpu"), GPUS, [("target-0", "cpu", (0, 1), 1.0), ("draft-0", "cpu", (2, 3), 1.0)]),
    ],
    ids=str,
)
def test_layout(choices, devices, expected):
    assert table(config_of(**choices), devices) == expected


def test_roles_on_different_kinds_of_devices_do_not_share():
    config = config_of()
    config = replace(config, drafter=replace(config.drafter, device="cpu"))
    assert table(config, GPUS) == [("target-0", "cuda:0", (), 1.0), ("draft-0", "cpu", (0, 1, 2, 3), 1.0)]
    config = replace(config, placement=PlacementConfig(PlacementName.colocated))
    with pytest.raises(ValueError, match="placement=colocated: the target on cuda and the drafter on cpu"):
        lay_out(config, GPUS)


def test_threads_of_two_tensor_parallel_roles_do_not_share_gpus():
    """They share a stream, in which collectives of the two may stand in another order on each GPU."""
    config = config_of(tp=2, ranks=2, colocated=True)
    threads = replace(config, cluster=ClusterConfig(name=ClusterName.inprocess))
    with pytest.raises(ValueError, match="target with 2 ranks and draft with 2 ranks would share GPUs as threads"):
        lay_out(threads, GPUS)
    assert len(lay_out(config, GPUS)) == len(lay_out(threads, FOUR)) == 4
    assert len(lay_out(replace(threads, drafter=ModelDrafterConfig(ranks=1, placement=Placement.separate)), GPUS)) == 3


def test_easyspecs_own_setting_is_every_rank_of_the_target_drafting():
    places = lay_out(config_of(tp=2, ranks=2, colocated=True), TWO)
    assert [(place.identity, place.cores, place.share) for place in places] == [
        ("target-0", (4,), 0.5),
        ("target-1", (6,), 0.5),
        ("draft-0", (4,), 0.5),
        ("draft-1", (6,), 0.5),
    ]
    assert places[3].describe() == "draft-1: cpu cores 6, 1 thread, shared"


def test_threads_are_the_cores_of_a_rank_and_ranks_know_their_size():
    places = lay_out(config_of(tp=2), FOUR)
    assert [(place.rank, place.size, place.num_threads) for place in places] == [(0, 2, 1), (1, 2, 1), (0, 1, 2)]
    assert places[2].describe() == "draft-0: cpu cores 2,3, 2 threads"
    assert lay_out(config_of(), GPUS)[0].describe() == "target-0: cuda:0, 1 thread"
    narrow = replace(config_of(colocated=True), drafter=ModelDrafterConfig(num_threads=3))
    assert [place.num_threads for place in lay_out(narrow, FOUR)] == [4, 3], "it leaves one of its cores"
    assert [place.num_threads for place in lay_out(narrow, ONE)] == [1, 1]


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [4, 5, 7])
def test_cores_are_divided_without_rest_or_overlap(tp, count):
    config = config_of(tp=tp, drafter="none")
    cores = [core for place in lay_out(config, Devices(tuple(range(count)))) for core in place.cores]
    assert cores == list(range(count))


@pytest.mark.parametrize(
    ("choices", "devices", "line"),
    [
        (
            dict(tp=2),
            TWO,
            "target.tp: 3 ranks need 3 cores, 2 here; "
            "lower it or use placement=colocated or set cluster.oversubscribe=true",
        ),
        ({}, ONE, "target.tp: 2 ranks need 2 cores, 1 here; use placement=colocated or set cluster.oversubscribe=true"),
        (
            dict(tp=3, colocated=True),
            TWO,
            "target.tp: 3 ranks need 3 cores, 2 here; lower it or set cluster.oversubscribe=true",
        ),
        (
            dict(ranks=3, colocated=True),
            TWO,
            "drafter.ranks: 3 ranks need 3 cores, 2 here; lower it or set cluster.oversubscribe=true",
        ),
        (
            dict(tp=4, oversubscribe=True),
            GPUS,
            "target.tp: 5 ranks need 5 GPUs, 4 here; lower it or use placement=colocated",
        ),
        (
            dict(tp=1024, drafter="ngram", oversubscribe=True),
            TWO,
            "target.tp: 1024 ranks need 64 cores, 2 here; lower it",
        ),
        (dict(tp=5, drafter="ngram"), GPUS, "target.tp: 5 ranks need 5 GPUs, 4 here; lower it"),
        (dict(device="cuda"), TWO, "target.device=cuda: this machine offers no GPU; use target.device=cpu or auto"),
        (dict(device="tpu"), TWO, "target.device=tpu: unknown device; use auto, cpu or cuda"),
    ],
    ids=str,
)
def test_more_ranks_than_devices_are_refused_with_a_remedy(choices, devices, line):
    with pytest.raises(ValueError) as refusal:
        lay_out(config_of(**choices), devices)
    assert str(refusal.value) == line
