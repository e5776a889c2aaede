"""Prompt lookup: which continuation is found, and that its table follows the text."""

from __future__ import annotations

import random

import pytest

from actors.drafters.interface import Context
from actors.drafters.lookup.ngram import NgramDrafter, NgramDrafterConfig
from actors.protocol.messages import SamplingKind, SamplingParams, TokenTree


def context_of(token_ids, request_id=1) -> Context:
    return Context(request_id, 0, list(token_ids), 1, SamplingParams())


def look_up(token_ids, budget=5, **config):
    drafter, context = NgramDrafter(NgramDrafterConfig(**config)), context_of(token_ids)
    drafter.open(context)
    (draft,) = drafter.propose([context], [budget])
    return list(draft.tree.token_ids[1:])


def search(token_ids, budget, max_ngram, min_ngram):
    """The same by brute force: the longest n-gram, its latest earlier end, read on in a circle."""
    for size in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(token_ids) - 1, size - 1, -1):
            if size <= len(token_ids) and token_ids[end - size : end] == token_ids[-size:]:
                return [token_ids[end + i % (len(token_ids) - end)] for i in range(budget)]
    return []


def test_what_followed_the_last_occurrence_is_the_draft():
    assert look_up([1, 2, 3, 4, 9, 8, 1, 2], budget=3) == [3, 4, 9]


def test_the_longest_match_wins_over_a_later_shorter_one():
    assert look_up([5, 1, 2, 3, 7, 1, 2, 4, 5, 1, 2], budget=1) == [3]


def test_of_equal_matches_the_latest_wins():
    assert look_up([1, 2, 3, 1, 2, 4, 1, 2], budget=1) == [4]


def test_a_repetition_is_read_on_through_the_draft():
    assert look_up([6, 7, 6, 7, 6, 7], budget=5) == [6, 7, 6, 7, 6]
    assert look_up([4, 4, 4], budget=4) == [4, 4, 4, 4]


@pytest.mark.parametrize("token_ids", [[1], [1, 2, 3], [1, 2, 1], [3, 1, 2, 9, 1]])
def test_without_a_match_nothing_is_proposed(token_ids):
    assert look_up(token_ids, min_ngram=2) == []


def test_a_short_text_is_no_error_and_one_token_may_be_enough():
    assert look_up([1, 1], min_ngram=1) == [1] * 5
    assert look_up([7], min_ngram=1) == []


@pytest.mark.parametrize("seed", range(15))
def test_the_table_extended_token_by_token_equals_a_search_of_the_whole_text(seed):
    choose = random.Random(seed)
    max_ngram = choose.randint(1, 4)
    min_ngram = choose.randint(1, max_ngram)
    drafter = NgramDrafter(NgramDrafterConfig(max_ngram=max_ngram, min_ngram=min_ngram))
    context = context_of([choose.randrange(3) for _ in range(choose.randint(1, 12))])
    drafter.open(context)
    for _ in range(20):
        if choose.random() < 0.3:
            drafter.prefill([context])
        budget = choose.randint(1, 6)
        (draft,) = drafter.propose([context], [budget])
        assert list(draft.tree.token_ids[1:]) == search(context.token_ids, budget, max_ngram, min_ngram)
        assert draft.tree.token_ids[0] == context.token_ids[-1] and draft.tree.is_chain
        context.token_ids += [choose.randrange(3) for _ in range(choose.randint(1, 4))]


def test_drafts_say_that_their_tokens_were_not_drawn_at_random():
    drafter, context = NgramDrafter(NgramDrafterConfig()), context_of([1, 2, 3, 1, 2])
    drafter.open(context)
    (draft,) = drafter.propose([context], [3])
    assert draft.tree == TokenTree.chain(2, [3, 1, 2])
    assert (
        draft.sampling_kinds == (SamplingKind.ROOT, *[SamplingKind.DETERMINISTIC] * 3)
        and draft.distributions == (None,) * 4
    )


def test_requests_do_not_see_each_others_text():
    drafter = NgramDrafter(NgramDrafterConfig())
    contexts = [context_of([1, 2, 3, 1, 2], 1), context_of([5, 6, 7, 1, 2], 2)]
    for context in contexts:
        drafter.open(context)
    drafts = drafter.propose(contexts, [1, 1])
    assert [draft.tree.num_draft_tokens for draft in drafts] == [1, 0]
    drafter.release(1)
    again = context_of([9, 9, 1, 2], 1)
    drafter.open(again)
    assert drafter.propose([again], [1])[0].tree.num_draft_tokens == 0, "a released text is forgotten"
