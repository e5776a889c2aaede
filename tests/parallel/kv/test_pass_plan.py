from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.kv.pass_plan import BlockCopies, PendingRows, Span, logit_rows


@st.composite
def forests(draw, max_rows=24):
    num_rows = draw(st.integers(1, max_rows))
    return [draw(st.integers(-1, i - 1)) for i in range(num_rows)]


def ancestors(parents, row):
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path


@given(forests(), st.data())
def test_a_row_sees_its_ancestors_and_itself(parents, data):
    pending, first = PendingRows(), 0
    while first < len(parents):  # in passes of any size; asking in between must not disturb
        stop = data.draw(st.integers(first + 1, len(parents)))
        pending.append(stop - first, parents[first:stop])
        visible = pending.visible(first)
        assert visible.shape == (stop - first, stop) and visible.dtype == bool
        for row in range(first, stop):
            assert np.flatnonzero(visible[row - first]).tolist() == sorted(ancestors(parents, row))
            assert pending.depths[row] == len(ancestors(parents, row)) - 1
        first = stop
    assert pending.is_chain == (parents == list(range(-1, len(parents) - 1)))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_no_parents_is_a_chain(sizes):
    pending = PendingRows()
    for size in sizes:
        pending.append(size, None)
    assert pending.is_chain and [*pending.depths] == list(range(sum(sizes)))
    assert pending.visible(0).tolist() == np.tri(sum(sizes), dtype=bool).tolist()


def test_a_chain_may_continue_a_tree():
    pending = PendingRows()
    pending.append(3, [-1, -1, 0])
    pending.append(2, None)
    assert pending.depths == [0, 0, 1, 2, 3] and not pending.is_chain
    assert pending.visible(4).tolist() == [[True, False, True, True, True]]


def test_what_remains_after_a_commit():
    pending = PendingRows()
    pending.append(7, [-1, 0, 0, 2, 3, 3, 1])
    rest = pending.after_commit([0, 2], [3, 4, 5])
    assert rest.parents == [-1, 0, 0] and rest.depths == [0, 1, 1]
    assert not pending.after_commit([0], []).parents
    first_two = pending.after_commit([], [0, 2])
    assert [*first_two.parents] == [-1, 0] and [*first_two.depths] == [0, 1], "none is committed"


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-2], [-1, 2, 0]])
def test_parents_come_first(parents):
    with pytest.raises(AssertionError):
        PendingRows().append(len(parents), parents)


def test_rows_that_want_logits():
    spans = [Span(0, 3, num_logits=2), Span(1, 4, num_logits=0), Span(2, 1)]
    assert logit_rows(spans) == [1, 2, 7]
    assert logit_rows([Span(0, 3), Span(1, 4, wanted=[0, 2]), Span(2, 2, wanted=[])]) == [2, 3, 5]


@pytest.mark.extended
@given(st.integers(0, 3), st.lists(st.integers(1, 2), min_size=1, max_size=3), st.integers(1, 40), st.integers(0, 9))
def test_a_copy_sees_the_text_and_its_own_block(num_blocks, copies, block, before):
    num_text, sizes = num_blocks * block, [block * count for count in copies]
    pending = BlockCopies(num_text, sizes, block, before)
    pending.append(num_text + sum(sizes), None)  # as it is laid out
    visible = pending.visible(0)
    words = pending.visible_words(0).view(np.uint8)
    unpacked = np.unpackbits(words, axis=1, count=len(visible), bitorder="little")
    assert (unpacked.view(bool) == visible).all()
    places = [(0, row) for row in range(num_text)]
    for copy, size in enumerate(sizes):
        places += [(num_text + sum(sizes[:copy]), offset) for offset in range(size)]
    for row, (first, offset) in enumerate(places):
        end = offset // block * block + block
        own = range(first, first + end)
        expected = [*own] if row < num_text else [*range(num_text), *own]
        assert np.flatnonzero(visible[row]).tolist() == expected
        assert pending.depths[row] == (row if row < num_text else num_text - before + offset)
