"""Ranks whose node is gone: they go where there is room, together, and what is missing is one line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.drafters.model.config import ModelDrafterConfig
from cluster.placement.nodes import Node, over_nodes
from cluster.placement.ranks import NoRoom
from cluster.placement.relocation import relocate
from cluster.runtime.ray_reservation import device_bundles
from tests.cluster.placement.test_nodes import config_of

N1, N2, N3, N4 = (Node(f"10.0.0.{i}", f"n{i}", 4, 4) for i in range(1, 5))
CPUS = [replace(node, num_gpus=0) for node in (N1, N2, N3, N4)]


def left(*nodes, cores=4, gpus=0):
    """These nodes, with so much free on each."""
    return [replace(node, num_cores=cores, num_gpus=gpus) for node in nodes]


def layout(config, nodes):
    return {place.identity: place for place in over_nodes(config, nodes)}


def moved(config, places, nodes, role, homes=None):
    return {
        identity: (place.host, place.device if place.device != "cpu" else place.cores)
        for identity, place in relocate(config, places, homes or places, nodes, role).items()
    }


def test_a_role_moves_whole_to_a_node_with_room_and_no_other_role_does():
    config = config_of(tp=3, ranks=2)
    places = layout(config, [N1, N2, N3])
    assert {place.host for place in places.values() if place.role == "target"} == {N1.host}
    nodes = [*left(N2, gpus=2), *left(N3, gpus=4)]
    found = moved(config, places, nodes, "target")
    assert found == {f"target-{rank}": (N3.host, f"cuda:{rank}") for rank in range(3)}
    assert relocate(config, places, places, nodes, "draft") == {}, "nothing of it was lost"


def test_devices_of_ours_are_not_given_twice():
    config = config_of(tp=3, ranks=2)
    places = layout(config, [N1, N2])
    found = moved(config, places, left(N1, gpus=1) + left(N3, gpus=1), "draft")
    assert found == {"draft-0": (N1.host, "cuda:3"), "draft-1": (N3.host, "cuda:0")}, "spread where no node has room"


def test_what_is_left_of_a_role_is_joined():
    config = config_of(tp=6, ranks=1)
    places = layout(config, [N1, N2])
    assert places["target-5"].host == N2.host and places["draft-0"].host == N2.host
    nodes = left(N3, gpus=4) + left(N1, gpus=2)
    found = moved(config, places, nodes, "target")
    assert [found[f"target-{rank}"] for rank in (4, 5)] == [(N1.host, "cuda:4"), (N1.host, "cuda:5")]
    assert moved(config, places, nodes, "draft") == {"draft-0": (N3.host, "cuda:0")}


def test_ranks_that_share_a_device_share_the_next_one():
    config = config_of(colocated=True, tp=2, ranks=1)
    places = layout(config, [N1])
    assert places["draft-0"].share == 0.5
    for role in ("target", "draft"):
        found = relocate(config, places, places, left(N2, gpus=2), role)
        assert {identity: (place.host, place.device, place.share) for identity, place in found.items()} == {
            "target-0": (N2.host, "cuda:0", 0.5),
            "draft-0": (N2.host, "cuda:0", 0.5),
            "target-1": (N2.host, "cuda:1", 0.5),
        }
    assert len(device_bundles(list(found.values()))) == 2


def test_cores_are_as_many_as_there_were_or_fit():
    config = config_of()
    places = layout(config, CPUS[:2])
    for free, cores in ((8, (0, 1, 2, 3)), (2, (0, 1))):
        found = relocate(config, places, places, left(N3, cores=free), "target")
        assert (found["target-0"].cores, found["target-0"].num_threads) == (cores, len(cores))
    shared = replace(config_of(colocated=True), drafter=ModelDrafterConfig(num_threads=1))
    places = layout(shared, CPUS[:1])
    found = relocate(shared, places, places, left(N2, cores=8), "target")
    assert [found[identity].num_threads for identity in ("target-0", "draft-0")] == [len(CPUS[0].devices.cores), 1]


def test_who_takes_turns_finds_room_anywhere():
    config = config_of(oversubscribe=True)
    places = layout(config, CPUS[:2])
    (place,) = relocate(config, places, places, left(N2, cores=0), "target").values()
    assert (place.host, place.share, place.num_threads) == (N2.host, 0.0, 1)
    assert not device_bundles([place])


def test_who_takes_turns_moves_again_with_the_rest_of_its_role():
    config = config_of(tp=6, lookup=True, oversubscribe=True)
    homes = layout(config, CPUS[:2])
    places = homes | relocate(config, homes, homes, left(N2, cores=0), "target")
    assert {place.share for place in places.values() if place.role == "target"} == {0.0, 1.0}
    found = relocate(config, places, homes, left(N3, cores=4) + left(N4, cores=4), "target")
    assert {identity for identity, place in found.items() if place.host in (N3.host, N4.host)} == {
        f"target-{rank}" for rank in range(6)
    }


def test_a_lookup_needs_no_room():
    config = config_of(lookup=True)
    places = layout(config, CPUS[:2])
    nodes = left(N3, cores=0)
    assert moved(config, places, nodes, "draft") == {"draft-0": (N3.host, ())}


def test_who_finds_the_first_node_back_returns_to_it():
    config = config_of()
    homes = layout(config, CPUS[:2])
    places = homes | relocate(config, homes, homes, left(N3), "draft")
    assert places["draft-0"].host == N3.host
    returned = relocate(config, places, homes, left(N1, N2, cores=0), "draft")
    assert returned == {"draft-0": homes["draft-0"]}, "although nothing is free there: it is reserved"


@pytest.mark.parametrize(
    ("choices", "nodes", "line"),
    [
        (
            dict(tp=3),
            left(N2, gpus=1) + left(N3, gpus=1),
            "target-0, target-1, target-2: node 10.0.0.1 is gone; needed elsewhere: 3 GPUs, free on the nodes it "
            "may use: n2 1, n3 1; start Ray there again or on another node",
        ),
        (
            dict(nodes={"target": ["n1"], "draft": ["n2"]}),
            left(N2, gpus=4),
            "target-0: node 10.0.0.1 is gone; needed elsewhere: 1 GPU, there is no other node it may use; start "
            "Ray there again or on another node or allow more nodes with placement.nodes",
        ),
    ],
    ids=str,
)
def test_what_is_missing_is_one_line(choices, nodes, line):
    config = config_of(**choices)
    places = layout(config, [N1, N2])
    with pytest.raises(NoRoom) as refused:
        relocate(config, places, places, nodes, "target")
    assert str(refused.value) == line
