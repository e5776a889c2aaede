"""Token recycling: what the matrix keeps of verdicts, and the tree that is read off it."""

from __future__ import annotations

import numpy as np
import pytest

from actors.drafters.adjacency.config import AdedDrafterConfig, RecyclingDrafterConfig
from actors.drafters.adjacency.recycling import RecyclingDrafter, tree_template
from actors.drafters.interface import Context
from actors.protocol.messages import SamplingParams, TopTokens


def top_tokens(rows):
    """Rows as (token, its candidates)."""
    contexts = np.array([(-1, token) for token, _ in rows], np.int32)
    token_ids = np.array([candidates for _, candidates in rows], np.int32)
    arrays = contexts.tobytes(), token_ids.tobytes(), bytes(token_ids.nbytes)
    return TopTokens(token_ids.shape[1], *arrays, ((1, 2, len(rows)),))


def draft(drafter, token, budget):
    (proposed,) = drafter.propose([Context(1, 0, [2, token], 2, SamplingParams())], [budget])
    proposed.tree.check()
    return proposed.tree


def paths(tree):
    return {tuple(tree.token_ids[i] for i in tree.path_to(node)) for node in range(1, len(tree.token_ids))}


def test_a_chain_of_bigrams_is_drafted_to_its_depth_after_one_pass():
    drafter = RecyclingDrafter(RecyclingDrafterConfig(width=2))
    drafter.read_top_tokens(top_tokens([(token, ((token + 1) % 7, 9)) for token in range(7)]))
    tree = draft(drafter, 3, 24)
    assert tree.num_draft_tokens < 24, "what follows 9 is not known and not drafted"
    longest = max(paths(tree), key=len)
    assert len(longest) >= 6 and longest == tuple((4 + i) % 7 for i in range(len(longest)))


def test_nothing_is_drafted_of_tokens_that_were_never_verified():
    """The released code starts from a matrix of zeros and drafts token 0 after every such token."""
    drafter = RecyclingDrafter(RecyclingDrafterConfig(width=3))
    assert draft(drafter, 5, 8).num_draft_tokens == 0
    drafter.read_top_tokens(top_tokens([(1, (2, 200, 4))]))
    assert draft(drafter, 5, 8).num_draft_tokens == draft(drafter, 10**6, 8).num_draft_tokens == 0
    assert paths(draft(drafter, 1, 8)) == {(2,), (200,), (4,)}
    released = RecyclingDrafter(RecyclingDrafterConfig(width=3))
    released.matrices.of(0).rows = np.zeros((300, 3), np.int32)
    assert paths(draft(released, 5, 3)) <= {(0,), (0, 0), (0, 0, 0)}


def test_the_last_row_of_a_token_counts_and_others_stay():
    drafter = RecyclingDrafter(RecyclingDrafterConfig(width=2))
    drafter.read_top_tokens(top_tokens([(1, (5, 6)), (2, (7, 8)), (1, (8, 9))]))
    drafter.read_top_tokens(top_tokens([(500, (1, 2))]))
    assert paths(draft(drafter, 500, 6)) >= {(1,), (2,), (1, 8)}
    assert drafter.matrices.of(0).rows[[1, 2]].tolist() == [[8, 9], [7, 8]]


@pytest.mark.parametrize("width", [1, 3, 8, 12])
def test_a_larger_tree_holds_the_smaller_one(width):
    def nodes(size):
        template = tree_template(size, width)
        found = [()]
        for parent, rank in zip(template.parents[1:], template.ranks[1:], strict=True):
            found.append((*found[parent], int(rank)))
        assert len(set(found)) == size + 1 and max(map(max, found[1:])) < width
        assert [len(path) for path in found] == sorted(map(len, found)), "by depth, so that a depth is one gather"
        return set(found)

    for size in range(1, 40):
        assert nodes(size) < nodes(size + 1)


def test_prompts_are_read_unless_it_is_said_otherwise():
    """The pass over a prompt fills the matrix, so that the first draft has something to follow."""
    assert all(
        config().reads_prompts and config().target_top_k for config in (RecyclingDrafterConfig, AdedDrafterConfig)
    )
    assert not RecyclingDrafterConfig(reads_prompts=False).reads_prompts
