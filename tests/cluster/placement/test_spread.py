"""Roles that share devices over several nodes because none has room for all: whose cores and GPUs each rank has."""

from __future__ import annotations

import pytest

from cluster.placement.nodes import Node, over_nodes
from tests.cluster.placement.test_nodes import CPUS, GPUS, config_of, table


def test_shared_cores_are_counted_over_all_nodes_and_stay_on_one():
    places = over_nodes(config_of(colocated=True, tp=5), CPUS)
    assert table(config_of(colocated=True, tp=5), CPUS) == [
        "target-0 n1 [0]",
        "target-1 n1 [1]",
        "target-2 n2 [0]",
        "target-3 n2 [1]",
        "target-4 n2 [2, 3]",
        "draft-0 n1 [0, 1]",
    ]
    assert [place.num_threads for place in places] == [1, 1, 1, 1, 2, 2], "of the six cores those of its own node"
    assert {place.share for place in places} == {0.5}


def test_a_lookup_is_on_the_first_node():
    *_, draft = over_nodes(config_of(colocated=True, tp=5, lookup=True), CPUS)
    assert (draft.identity, draft.host, draft.cores, draft.share) == ("draft-0", "10.0.0.1", (), 0.0)


def test_shared_gpus_have_numbers_on_their_node():
    places = over_nodes(config_of(colocated=True, tp=7, ranks=6), GPUS)
    devices = [(place.role, place.host[-1], place.device) for place in places]
    expected = [("1", f"cuda:{index}") for index in range(4)] + [("2", f"cuda:{index}") for index in range(3)]
    assert devices == [("target", *one) for one in expected] + [("draft", *one) for one in expected[:6]]


@pytest.mark.parametrize("first_has_room", [True, False])
def test_the_first_node_with_room_for_all_is_taken(first_has_room):
    nodes = [Node("10.0.0.1", "n1", 4 if first_has_room else 1), Node("10.0.0.2", "n2", 4)]
    hosts = {place.host for place in over_nodes(config_of(colocated=True, tp=3), nodes)}
    assert hosts == {"10.0.0.1" if first_has_room else "10.0.0.2"}
