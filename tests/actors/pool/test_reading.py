"""Parts of texts: in order, of so many tokens in all, until nothing is left."""

from __future__ import annotations

from actors.pool.reading import next_part


def test_parts_are_of_so_many_tokens_in_all():
    assert next_part([(1, 0, 5), (2, 0, 5), (3, 0, 5)], 8) == [(1, 5), (2, 3)]
    assert next_part([(1, 5, 5), (2, 3, 5), (3, 0, 5)], 8) == [(2, 5), (3, 5)]
    assert next_part([(1, 4, 20)], 8) == [(1, 12)]
    assert next_part([(1, 5, 5), (2, 0, 0)], 8) == []


def test_parts_end_with_the_texts():
    lengths, read = {1: 30, 2: 3, 3: 17}, {1: 0, 2: 0, 3: 0}
    sizes = []
    while part := next_part([(number, read[number], length) for number, length in lengths.items()], 7):
        sizes.append(sum(end - read[number] for number, end in part))
        read |= dict(part)
    assert read == lengths
    assert sizes == [7] * 7 + [1]
