"""Max-gram: the longest match wherever it is, the leftmost of equals, bigrams after it; text may be taken back."""

from __future__ import annotations

import random

import pytest

from actors.drafters.interface import Context
from actors.drafters.lookup.maxgram import MaxgramDrafter, MaxgramDrafterConfig
from actors.protocol.messages import SamplingParams


def open_text(drafter, token_ids, request_id=1):
    context = Context(request_id, 0, list(token_ids), len(token_ids), SamplingParams())
    drafter.open(context)
    return context


def draft(drafter, context, budget=4):
    return list(drafter.propose([context], [budget])[0].tree.token_ids[1:])


def longest_match(tokens):
    """(length, place) by trying everything: the longest agreement with the end, the leftmost of equals."""
    last = len(tokens) - 1
    best = (0, None)
    for place in range(last):
        length = 0
        while length <= place and tokens[place - length] == tokens[last - length]:
            length += 1
        if length > best[0]:
            best = (length, place)
    return best


@pytest.mark.parametrize("seed", range(30))
def test_the_place_is_the_one_found_by_trying_all(seed):
    choose = random.Random(seed)
    tokens = [choose.randrange(3) for _ in range(choose.randrange(2, 40))]
    drafter = MaxgramDrafter(MaxgramDrafterConfig())
    _, place = longest_match(tokens)
    expected = tokens[place + 1 :][:4] if place is not None else []
    assert draft(drafter, open_text(drafter, tokens))[: len(expected)] == expected


def test_bigrams_of_any_text_go_on_where_the_copy_ends():
    drafter = MaxgramDrafter(MaxgramDrafterConfig())
    draft(drafter, open_text(drafter, [5, 6, 7, 8], request_id=1))
    assert draft(drafter, open_text(drafter, [1, 5], request_id=2)) == [], "a running request shares nothing"
    drafter.release(1)
    assert draft(drafter, open_text(drafter, [1, 5], request_id=2)) == [6, 7, 8]
    assert draft(drafter, open_text(drafter, [1, 9], request_id=3)) == []
    assert draft(drafter, open_text(drafter, [7, 9, 5, 7, 2, 7, 2], request_id=4))[:3] == [7, 2, 7], "its own win"


def test_text_that_was_taken_back_is_not_copied_from():
    drafter = MaxgramDrafter(MaxgramDrafterConfig())
    context = open_text(drafter, [1, 2, 3, 4])
    context.extend([2, 9])
    drafter.prefill([context])
    context.cut(4)
    drafter.truncate(context)
    context.extend([2])
    assert draft(drafter, context, 2) == [3, 4]
    context.extend([3, 9, 1, 2])
    assert draft(drafter, context, 2) == [3, 4]
