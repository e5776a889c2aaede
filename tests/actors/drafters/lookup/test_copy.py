"""`drafter=copy`: where copying starts, goes on and starts again, and what a proposal reads."""

from __future__ import annotations

import random

import pytest

from actors.drafters.interface import Context
from actors.drafters.lookup.copy import CopyDrafter, num_followed
from actors.protocol.messages import Admit, SamplingParams


class CountedTokens(list):
    """Token ids that count how many were read."""

    num_read = 0

    def __getitem__(self, place):
        found = super().__getitem__(place)
        self.num_read += len(found) if isinstance(place, slice) else 1
        return found


def opened(drafter, prompt, output=()):
    context = Context(0, 0, [*prompt, *output], len(prompt), SamplingParams(max_tokens=100))
    drafter.open(context)
    drafter.prefill([context])
    return context


def proposed(drafter, context, budget=10):
    (draft,) = drafter.propose([context], [budget])
    assert draft.tree.token_ids[0] == context.token_ids[-1]
    return list(draft.tree.token_ids[1:])


def test_copying_starts_behind_the_trigger_and_ends_with_budget_or_prompt():
    drafter = CopyDrafter(trigger_len=2)
    context = opened(drafter, [1, 2, 3, 4, 5, 6])
    assert proposed(drafter, context) == []
    context.extend([2])
    assert proposed(drafter, context) == [], "one token of output is no trigger of two"
    context.extend([3])
    assert proposed(drafter, context, budget=2) == [4, 5]
    assert proposed(drafter, context) == [4, 5, 6]


def test_a_source_is_copied_from_its_beginning_and_the_prompt_is_not():
    """This is aggressive decoding of an encoder-decoder. After a disagreement copying goes on where the output is
    again."""
    drafter = CopyDrafter(trigger_len=2)
    context = Context(0, 0, [50], 1, SamplingParams(max_tokens=100), source=(1, 2, 3, 4, 5, 6))
    drafter.open(context)
    assert proposed(drafter, context, budget=3) == [1, 2, 3]
    context.extend([1, 2, 9])
    assert proposed(drafter, context) == []
    context.extend([4, 5])
    assert proposed(drafter, context) == [6], "nothing of the prompt follows"
    both = Context(1, 0, [50], 1, SamplingParams(max_tokens=100), source=(1, 2, 3), reference=(7, 8))
    drafter.open(both)
    assert proposed(drafter, both) == [7, 8], "a reference comes first"


def test_tokens_of_the_prompt_are_no_trigger_and_output_is_not_copied():
    drafter = CopyDrafter(trigger_len=1)
    context = opened(drafter, [1, 2, 1])
    assert proposed(drafter, context) == []
    context.extend([8, 9, 8])
    assert proposed(drafter, context) == []


def test_the_first_place_is_the_latest():
    drafter = CopyDrafter(trigger_len=1)
    assert proposed(drafter, opened(drafter, [1, 7, 0, 1, 8, 0, 1], [1]), budget=1) == [8], "nothing follows the last 1"


def test_copying_goes_on_where_it_was_although_the_trigger_occurs_later_too():
    drafter = CopyDrafter(trigger_len=1)
    context = opened(drafter, [1, 2, 3, 4, 5, 9, 3, 8], [1])
    assert proposed(drafter, context, budget=2) == [2, 3]
    context.extend([2, 3])
    assert proposed(drafter, context, budget=2) == [4, 5]


@pytest.mark.parametrize(("edit", "expected"), [([50], [5, 6]), ([50, 51], [5, 6]), ([], [5, 6])])
def test_after_an_edit_the_nearest_place_ahead_is_taken(edit, expected):
    """The prompt has `3 4` three times: before the edit, next after it, and at the end."""
    drafter = CopyDrafter(trigger_len=2)
    context = opened(drafter, [3, 4, 0, 1, 2, 40, 3, 4, 5, 6, 3, 4, 7, 8], [0, 1])
    assert proposed(drafter, context, budget=2) == [2, 40]
    context.extend([2, *edit, 3, 4])
    assert proposed(drafter, context, budget=2) == expected


def test_behind_the_last_place_the_latest_is_taken():
    drafter = CopyDrafter(trigger_len=1)
    context = opened(drafter, [1, 2, 1, 3, 5, 6], [5, 1])
    assert proposed(drafter, context, budget=1) == [3]


def test_a_copied_end_of_the_prompt_is_a_trigger_again():
    drafter = CopyDrafter(trigger_len=1)
    context = opened(drafter, [1, 2, 3, 1], [3, 1])
    assert proposed(drafter, context) == [2, 3, 1]


def test_requests_do_not_see_each_other():
    drafter = CopyDrafter(trigger_len=1)
    contexts = [
        Context(name, 0, [*prompt, 1], len(prompt), SamplingParams(max_tokens=100))
        for name, prompt in enumerate(([1, 2], [1, 3]))
    ]
    for context in contexts:
        drafter.open(context)
    assert [draft.tree.token_ids for draft in drafter.propose(contexts, [1, 1])] == [(1, 2), (1, 3)]
    drafter.release(0)
    assert proposed(drafter, contexts[1]) == [3]


@pytest.mark.extended
@pytest.mark.parametrize("trigger_len", [1, 2, 3])
def test_the_draft_depends_on_the_text_alone(trigger_len):
    """Rounds of any length, cuts and another admission lead to the draft of a drafter that reads the text at once."""
    choose = random.Random(trigger_len)
    drafter = CopyDrafter(trigger_len)
    num_drafted = 0
    for _ in range(50):
        prompt = [choose.randrange(5) for _ in range(choose.randrange(1, 40))]
        context = opened(drafter, prompt)
        for _ in range(30):
            kind = choose.randrange(8)
            if kind == 0:
                context.cut(choose.randrange(len(prompt), len(context.token_ids) + 1))
                drafter.truncate(context)
            elif kind == 1:
                drafter.release(0)
                context = opened(drafter, prompt, context.token_ids[context.prompt_len :])
            else:
                draft = proposed(drafter, context)
                context.extend([*draft[: choose.randrange(11)], choose.randrange(5)])
            draft = proposed(drafter, context)
            fresh = CopyDrafter(trigger_len)
            assert draft == proposed(fresh, opened(fresh, prompt, context.token_ids[context.prompt_len :]))
            num_drafted += len(draft)
    assert num_drafted > 1000


def test_a_prompt_that_comes_in_chunks_is_copied_from_as_a_whole_one():
    drafter, prompt = CopyDrafter(trigger_len=2), list(range(20))
    context = Context(0, 0, prompt[:8], len(prompt), SamplingParams(max_tokens=100))
    drafter.open(context)
    for chunk in (prompt[8:16], prompt[16:]):
        drafter.prefill([context])
        context.extend(chunk)
    context.extend([12, 13])
    assert proposed(drafter, context, budget=4) == [14, 15, 16, 17]


def test_a_long_prompt_is_read_once():
    """A proposal reads as many tokens behind a prompt of 30 as behind one of 30,000."""
    num_read = {}
    for repeats in (1, 1000):
        drafter = CopyDrafter(trigger_len=2)
        context = opened(drafter, list(range(30)) * repeats)
        context.token_ids = CountedTokens(context.token_ids)
        for tokens in ([3, 4], [5, 6, 99], [7, 8], [9]):
            context.extend(tokens)
            assert len(proposed(drafter, context, budget=8)) == (0 if tokens[-1] == 99 else 8)
        num_read[repeats] = context.token_ids.num_read
    assert num_read[1] == num_read[1000]


# --- references -------------------------------------------------------------------------------------------------------


def referring(drafter, prompt, reference, output=()):
    params = SamplingParams(max_tokens=100)
    context = Context.admitted(Admit(0, 0, (*prompt, *output), len(prompt), params, reference=tuple(reference)), None)
    drafter.open(context)
    return context


def test_copying_starts_with_the_reference_and_comes_back_to_it():
    drafter = CopyDrafter(trigger_len=2)
    context = referring(drafter, [1, 2, 3], [7, 8, 9, 10, 11])
    assert proposed(drafter, context, budget=3) == [7, 8, 9]
    context.extend([7, 50])
    assert proposed(drafter, context) == []
    context.extend([9, 10])
    assert proposed(drafter, context) == [11]


def test_prompt_and_reference_are_one_text_to_copy_from():
    drafter = CopyDrafter(trigger_len=2)
    context = referring(drafter, [1, 2, 3], [7, 8])
    context.extend([1, 2])
    assert proposed(drafter, context) == [3, 7, 8]
    assert proposed(drafter, referring(drafter, [1, 2, 3], [7, 8], output=[1, 2])) == [3, 7, 8], "after a preemption"
    context.cut(3)
    drafter.truncate(context)
    assert proposed(drafter, context) == [7, 8]


def test_a_reference_knows_the_tokens_of_the_drafter_only():
    context = Context.admitted(Admit(0, 0, (1, 9), 2, SamplingParams(), reference=(2, 9)), 5)
    assert (context.token_ids, context.reference) == ([1, 4], (2, 4))


@pytest.mark.parametrize(
    ("reference", "output", "num"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 4),
        ([1, 2, 3, 4], [1, 2, 3, 4, 1, 2, 3, 4], 4),  # each token counts once
        ([1, 2, 3, 4, 5, 6], [1, 9, 3, 4, 5, 6], 3),  # two tokens find the place again
        ([1, 2], [5, 6, 7], 0),
        ([1, 2], [], 0),
    ],
)
def test_what_an_output_followed_is_counted(reference, output, num):
    assert num_followed(reference, output) == num
