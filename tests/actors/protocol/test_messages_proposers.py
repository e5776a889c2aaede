"""Who proposed the nodes of a path, by the parts of a proposal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.protocol.messages import GRAMMAR, HASH_SEED, Proposal, TokenTree

CHAIN = Proposal(1, 1, 1, HASH_SEED, TokenTree.chain(9, [1, 2, 3, 4]))


def test_runs_of_a_path_have_the_names_of_their_levels():
    parts = replace(CHAIN, parts=(("a", 1), ("b", 2)))
    assert parts.proposers((1, 2, 3, 4)) == (("a", 1), ("b", 2), ("", 1))
    assert parts.proposers((2,)) == (("b", 1),)
    assert parts.proposers(()) == ()
    assert CHAIN.proposers((1, 2)) == (("", 2),)
    assert replace(CHAIN, is_forced=True).proposers((1, 2)) == ((GRAMMAR, 2),)


@pytest.mark.parametrize("parts", [(("a", 5),), (("a", -1),), (("a" * 65, 1),), (("a\n", 1),)])
def test_parts_that_do_not_fit_are_refused(parts):
    replace(CHAIN, parts=(("a", 4),)).check(10)
    with pytest.raises(ValueError, match="parts"):
        replace(CHAIN, parts=parts).check(10)
