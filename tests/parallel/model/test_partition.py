from __future__ import annotations

import pytest

from parallel.model.partition import LayerLayout, default_partition, partition_of

PUBLISHED = {  # layers, layers side by side -> sizes (EasySpec's shipped partitions)
    (32, 4): [1, 3, 4, 4, 4, 4, 4, 4, 3, 1],  # Llama-3-8B, Llama-2-7B
    (40, 4): [1, 3, 4, 4, 4, 4, 4, 4, 4, 4, 3, 1],  # Llama-2-13B
    (28, 2): [1, *[2] * 13, 1],  # Llama-3.2-3B
    (16, 2): [1, *[2] * 7, 1],  # Llama-3.2-1B
    (22, 2): [1, *[2] * 10, 1],  # TinyLlama
    (28, 4): [1, 3, 4, 4, 4, 4, 4, 3, 1],  # Qwen2-7B
    (28, 3): [1, 2, *[3] * 8, 1],  # Qwen2-1.5B
    (24, 4): [1, 3, 4, 4, 4, 4, 3, 1],  # Qwen2-0.5B
}


@pytest.mark.parametrize("case", PUBLISHED, ids=str)
def test_the_default_is_the_published_partition(case):
    partition = default_partition(*case)
    assert [len(members) for members in partition] == PUBLISHED[case]


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 9])
def test_any_depth_is_covered_in_order_by_groups_that_fit(group):
    for num_layers in range(1, 30):
        partition = default_partition(num_layers, group)
        assert [layer for members in partition for layer in members] == list(range(num_layers))
        assert max(map(len, partition)) <= group and all(partition)
        assert len(partition[0]) == len(partition[-1]) == 1


def test_a_partition_may_be_written_as_sizes_or_as_layers():
    assert partition_of([1, 2, 1], 4) == partition_of([[0], [1, 2], [3]], 4) == ((0,), (1, 2), (3,))


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ([1, 2], "must name the layers 0 to 3 once each and in order"),
        ([1, 4], "must name the layers 0 to 3"),
        ([[0], [2, 1], [3]], "must name the layers 0 to 3"),
        ([[0, 1], [1, 2], [3]], "must name the layers 0 to 3"),
        ([1, [1, 2], 1], "mixes sizes and layers"),
        ([1, 0, 3], "has an empty group"),
        ([], "must name the layers 0 to 3"),
    ],
)
def test_what_is_no_partition_is_refused(given, line):
    with pytest.raises(ValueError, match=line):
        partition_of(given, 4)


def test_who_holds_what():
    partition = partition_of([1, 2, 2, 1], 6)
    held = lambda calibration, ranks=2: [  # noqa: E731
        LayerLayout(partition, ranks, calibration=calibration).held(rank) for rank in range(ranks)
    ]
    assert held("recompute") == [(0, 1, 2, 3, 4, 5)] * 2
    assert held("owner") == [(0, 2, 4), (1, 3, 5)]
    assert held("owner", 3) == [(0, 3), (1, 4), (2, 5)]
    assert held("broadcast") == [(0, 1, 2, 3, 4, 5), (0, 1, 3, 5)]
    assert held("owner", 1) == held("broadcast", 1) == [(0, 1, 2, 3, 4, 5)]


def test_layers_of_a_group_are_on_different_ranks():
    for ranks in (2, 3, 4, 8):
        layout = LayerLayout(default_partition(32, min(4, ranks)), ranks)
        assert all(len({layout.owner(layer) for layer in members}) == len(members) for members in layout.partition)
