"""Merged trees: every path of both, each once; the first keeps its numbers; room is kept to."""

from __future__ import annotations

import random

import pytest

from actors.drafters.path_tree import merge_trees
from actors.protocol.messages import TokenTree


def random_tree(choose, size):
    """Siblings differ."""
    token_ids, parents, taken = [0], [-1], set()
    while len(token_ids) <= size:
        key = (choose.randrange(len(token_ids)), choose.randrange(4))
        if key not in taken:
            taken.add(key)
            parents.append(key[0])
            token_ids.append(key[1])
    return TokenTree(tuple(token_ids), tuple(parents))


def paths(tree):
    return [tuple(tree.token_ids[i] for i in tree.path_to(node)) for node in range(len(tree.parents))]


@pytest.mark.parametrize("seed", range(20))
def test_every_path_of_both_is_there_once(seed):
    choose = random.Random(seed)
    first, second = random_tree(choose, choose.randrange(8)), random_tree(choose, choose.randrange(8))
    merged = merge_trees(first, second, 99)
    merged.check()
    assert paths(merged)[: len(first.parents)] == paths(first)
    assert sorted(paths(merged)) == sorted({*paths(first), *paths(second)})


@pytest.mark.parametrize("room", range(4))
def test_no_more_than_there_is_room_for(room):
    merged = merge_trees(TokenTree.chain(0, [1, 2]), TokenTree.chain(0, [3, 4, 5]), room)
    merged.check()
    assert merged.token_ids == (0, 1, 2, 3, 4, 5)[: 3 + room]


def test_a_child_of_a_node_that_found_no_room_is_left_out():
    second = TokenTree((0, 3, 1, 4), (-1, 0, 0, 1))
    assert merge_trees(TokenTree.chain(0, [1]), second, 0) == TokenTree.chain(0, [1])
