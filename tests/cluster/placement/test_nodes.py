"""Layouts over several nodes: roles stay whole, are separate or together as configured; errors name what is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.drafters.cascade.config import CascadeDrafterConfig, LevelsPlacement
from actors.drafters.config import Placement
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.options import TargetConfig
from cluster.config.schema import ClusterConfig, PlacementConfig, PlacementName
from cluster.placement.nodes import Node, over_nodes
from cluster.runtime.ray_reservation import device_bundles
from tests.cluster.placement.default_launch import CONFIG

LOOKUP = NgramDrafterConfig(placement=Placement.separate)
CPUS = [Node("10.0.0.1", "n1", 2), Node("10.0.0.2", "n2", 4)]
GPUS = [Node("10.0.0.1", "n1", 32, 4), Node("10.0.0.2", "n2", 32, 4)]
MIXED = [Node("10.0.0.1", "big", 32, 4), Node("10.0.0.2", "cheap", 16, 2)]


def config_of(*, tp=1, ranks=1, lookup=False, colocated=False, nodes=None, oversubscribe=False):
    return replace(
        CONFIG,
        target=TargetConfig(tp=tp),
        drafter=LOOKUP if lookup else ModelDrafterConfig(ranks=ranks, placement=Placement.separate),
        placement=PlacementConfig(PlacementName.colocated if colocated else PlacementName.separate, nodes or {}),
        cluster=ClusterConfig(oversubscribe=oversubscribe),
    )


def table(config, nodes):
    names = {node.host: node.name for node in nodes}
    return [
        f"{place.identity} {names[place.host]} {place.device if place.device != 'cpu' else list(place.cores)}"
        for place in over_nodes(config, nodes)
    ]


def ranks_on(role, node, *devices, first=0):
    """`devices` of the node, taken by consecutive ranks."""
    return [f"{role}-{rank} {node} {device}" for rank, device in enumerate(devices, start=first)]


CUDA = [f"cuda:{index}" for index in range(4)]
FOUR_ON_FIRST = ranks_on("target", "n1", *CUDA)


@pytest.mark.parametrize(
    ("choices", "nodes", "expected"),
    [
        ({}, CPUS, ["target-0 n2 [0, 1, 2, 3]", "draft-0 n1 [0, 1]"]),
        ({}, CPUS[:1], ["target-0 n1 [0]", "draft-0 n1 [1]"]),
        (dict(nodes={"draft": ["n2"], "target": ["n1"]}), CPUS, ["target-0 n1 [0, 1]", "draft-0 n2 [0, 1, 2, 3]"]),
        (
            dict(tp=4, ranks=2),
            CPUS,
            ranks_on("target", "n2", [0], [1], [2], [3]) + ranks_on("draft", "n1", [0], [1]),
        ),
        (dict(lookup=True), CPUS, ["target-0 n2 [0, 1, 2, 3]", "draft-0 n1 []"]),
        (dict(tp=2, ranks=2), GPUS, ranks_on("target", "n1", *CUDA[:2]) + ranks_on("draft", "n1", *CUDA[2:])),
        (dict(tp=4, ranks=2), GPUS, FOUR_ON_FIRST + ranks_on("draft", "n2", *CUDA[:2])),
        (dict(tp=2, ranks=4), GPUS, ranks_on("target", "n2", *CUDA[:2]) + ranks_on("draft", "n1", *CUDA)),
        (
            dict(tp=6, ranks=2),
            GPUS,
            FOUR_ON_FIRST + ranks_on("target", "n2", *CUDA[:2], first=4) + ranks_on("draft", "n2", *CUDA[2:]),
        ),
        (dict(nodes={"draft": ["cheap"]}), MIXED, ["target-0 big cuda:0", "draft-0 cheap cuda:0"]),
        (dict(nodes={"draft": ["10.0.0.2"]}), MIXED, ["target-0 big cuda:0", "draft-0 cheap cuda:0"]),
        (dict(colocated=True, tp=4, ranks=2), GPUS, FOUR_ON_FIRST + ranks_on("draft", "n1", *CUDA[:2])),
        (
            dict(colocated=True, tp=6),
            GPUS,
            FOUR_ON_FIRST + ranks_on("target", "n2", *CUDA[:2], first=4) + ["draft-0 n1 cuda:0"],
        ),
        (
            dict(colocated=True, nodes={"target": ["n2"]}),
            CPUS,
            ["target-0 n2 [0, 1, 2, 3]", "draft-0 n2 [0, 1, 2, 3]"],
        ),
        (dict(tp=7, oversubscribe=True), CPUS, ranks_on("target", "n1", [0], [1], [0])),
    ],
    ids=str,
)
def test_layout(choices, nodes, expected):
    assert table(config_of(**choices), nodes)[: len(expected)] == expected


def test_a_role_is_split_only_where_no_node_has_room():
    for tp in range(1, 5):
        for ranks in range(1, 5):
            places = over_nodes(config_of(tp=tp, ranks=ranks), GPUS)
            for role in ("target", "draft"):
                assert len({place.host for place in places if place.role == role}) == 1
            assert len({(place.host, place.device) for place in places}) == tp + ranks, "a device each"


@pytest.mark.parametrize(
    ("choices", "nodes", "line"),
    [
        (dict(tp=8), GPUS, "target.tp: 9 ranks need 9 GPUs, 8 here; lower it or use placement=colocated"),
        (
            dict(tp=4, ranks=3, nodes={"draft": ["cheap"]}),
            [MIXED[0], replace(MIXED[1], num_gpus=2), Node("10.0.0.3", "spare", 1, 4)],
            "placement: draft needs 3 GPUs; free on the nodes it may use: cheap 2",
        ),
        (
            dict(nodes={"draft": ["gone"]}),
            CPUS,
            "placement.nodes: draft wants node gone, which is not there; there are n1, n2",
        ),
        (
            dict(colocated=True, tp=3, nodes={"target": ["n1"]}),
            CPUS,
            "placement.nodes: no named node has room for every role; name fewer, or none",
        ),
    ],
    ids=str,
)
def test_what_is_missing_is_named(choices, nodes, line):
    with pytest.raises(ValueError) as refused:
        over_nodes(config_of(**choices), nodes)
    assert str(refused.value).startswith(line)


def test_ranks_take_turns_only_where_there_are_cores():
    nodes = [Node("10.0.0.1", "full", 0), Node("10.0.0.2", "one", 1), Node("10.0.0.3", "two", 1)]
    config = config_of(tp=4, lookup=True, oversubscribe=True)
    assert table(config, nodes)[:4] == [f"target-{i} {name} [0]" for i, name in enumerate(["one", "one", "two", "two"])]
    with pytest.raises(ValueError, match=r"^placement: target needs 2 cores; free on the nodes it may use: full 0$"):
        over_nodes(config_of(tp=2, lookup=True, oversubscribe=True, nodes={"target": ["full"]}), nodes)


def test_a_lower_level_goes_where_its_drafter_may_go():
    levels = (ModelDrafterConfig(), ModelDrafterConfig())
    drafter = CascadeDrafterConfig(levels=levels, placement=LevelsPlacement.separate)
    cheap = replace(MIXED[1], num_gpus=3)
    for allowed, expected in (({"draft": ["cheap"]}, "cheap"), ({"draft": ["cheap"], "draft2": ["big"]}, "big")):
        config = replace(config_of(nodes=allowed), drafter=drafter)
        hosts = {place.role: place.host for place in over_nodes(config, [MIXED[0], cheap])}
        assert hosts["draft"] == cheap.host
        assert hosts["draft2"] == {"cheap": cheap.host, "big": MIXED[0].host}[expected]


def test_bundles_are_tied_to_the_node_of_the_layout():
    places = over_nodes(config_of(tp=4, ranks=2), GPUS)
    bundles = device_bundles(places)
    assert bundles["10.0.0.1", "cuda:3"] == {"GPU": 1.0, "CPU": 0.01, "node:10.0.0.1": 0.001}
    assert [host for host, device in bundles if device == "cuda:0"] == ["10.0.0.1", "10.0.0.2"]
    assert places[0].describe() == "target-0: 10.0.0.1 cuda:0, 1 thread"
