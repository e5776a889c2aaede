"""Lookup drafters in a cascade: provisional text that was taken back changes no later draft and costs little."""

from __future__ import annotations

import random
import sys

import pytest

from actors.drafters.cascade.config import CascadeDrafterConfig
from actors.drafters.interface import Context
from actors.drafters.lookup.maxgram import MaxgramDrafter, MaxgramDrafterConfig
from actors.drafters.lookup.ngram import NgramDrafter, NgramDrafterConfig
from actors.drafters.lookup.suffix import History, SuffixDrafter, SuffixDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.protocol.messages import Admit, Commit, DraftBatch, SamplingParams
from actors.roles.draft import DraftRole

LOOKUPS = {
    "ngram": lambda: NgramDrafter(NgramDrafterConfig(max_ngram=3, min_ngram=1)),
    "maxgram": lambda: MaxgramDrafter(MaxgramDrafterConfig(max_places=5)),
    "suffix": lambda: SuffixDrafter(SuffixDrafterConfig(min_match=1)),
    "suffix tree": lambda: SuffixDrafter(SuffixDrafterConfig(min_match=1, width=3, min_probability=0.01)),
}


def draft(drafter, token_ids, budget=6):
    """The draft of a drafter that receives the whole text at once."""
    context = Context(9, 0, list(token_ids), len(token_ids), SamplingParams())
    drafter.open(context)
    (proposed,) = drafter.propose([context], [budget])
    return proposed


@pytest.mark.extended
@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize(
    "seed", [0, 5, 8, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2, 3, 4, 6, 7, 9, 10, 11))]
)
def test_any_appends_and_cuts_end_like_a_fresh_start(name, seed):
    choose = random.Random(seed)
    alphabet = choose.choice((2, 3, 5))
    drafter = LOOKUPS[name]()
    context = Context(1, 0, [choose.randrange(alphabet) for _ in range(choose.randint(1, 60))], 1, SamplingParams())
    drafter.open(context)
    for _ in range(40):
        if choose.random() < 0.4:
            reach = choose.choice((3, 20, 70))
            context.cut(choose.randint(max(0, len(context.token_ids) - reach), len(context.token_ids)))
            drafter.truncate(context)
        context.extend([choose.randrange(alphabet) for _ in range(choose.randint(1, 30))])
        if choose.random() < 0.3:
            drafter.prefill([context])
        else:
            assert drafter.propose([context], [6])[0] == draft(LOOKUPS[name](), context.token_ids)


def test_what_was_copied_when_the_level_above_disagreed_is_found_again():
    drafter = NgramDrafter(NgramDrafterConfig())
    context = Context(1, 0, [1, 2, 3, 4, 5, 9, 1, 2], 8, SamplingParams())
    drafter.open(context)
    context.extend([3, 4])
    drafter.prefill([context])
    context.cut(8)
    drafter.truncate(context)
    context.extend([8, 2, 3])
    assert drafter.propose([context], [2])[0].tree.token_ids[1:] == (4, 5)


def num_steps(work):
    """Lines of Python that `work` runs."""
    steps = 0

    def trace(frame, event, argument):
        nonlocal steps
        steps += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return steps


@pytest.mark.extended
@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize("depth", [*(pytest.param(depth, marks=pytest.mark.slow) for depth in (2, 17)), 40])
def test_a_proposal_costs_the_same_behind_a_long_periodic_text(name, depth):
    """Small models go round in circles; a cascade takes `depth` tokens back every round."""

    def steps_behind(length):
        drafter = LOOKUPS[name]()
        context = Context(1, 0, [i % 7 for i in range(length)], length, SamplingParams())
        drafter.open(context)
        drafter.prefill([context])
        steps = []
        for _ in range(3):
            context.extend([(len(context.token_ids) + i) % 7 for i in range(depth)])
            drafter.prefill([context])
            context.cut(len(context.token_ids) - depth)

            def take_back_and_propose():
                drafter.truncate(context)
                drafter.propose([context], [8])

            steps.append(num_steps(take_back_and_propose))
            context.extend([len(context.token_ids) % 7])
        return steps[-1]

    assert steps_behind(600) <= 1.5 * steps_behind(150)


# --- what requests share ----------------------------------------------------------------------------------------------


def answer(role, *commits, admits=(), releases=()):
    list(role.answer(DraftBatch(1, tuple(admits), tuple(commits), tuple(releases))))


def admitted(prompt, output=()):
    return Admit(1, 0, (*prompt, *output), len(prompt), SamplingParams())


@pytest.fixture
def shared(monkeypatch):
    """Texts that entered a history."""
    added = []
    monkeypatch.setattr(History, "add", lambda self, token_ids: added.append(list(token_ids)))
    return added


@pytest.mark.parametrize("name", ["maxgram", "suffix"])
def test_only_text_that_stays_is_shared(name):
    """Provisional text of the level above is not shared: the target may reject it."""
    role = DraftRole(LOOKUPS[name]())
    answer(role, admits=[admitted([1, 2])])
    answer(role, Commit(1, 0, 2, (), (3, 4), settled_len=2))
    answer(role, Commit(1, 0, 2, (), (5, 6, 7, 8), settled_len=4))
    answer(role, releases=[1])
    expected = {(9, 1, 2): (5, 6), (9, 5): (6,), (9, 6): (), (9, 3): ()}
    assert {text: draft(role.drafter, text).tree.token_ids[1:] for text in expected} == expected


def test_a_request_that_comes_back_shares_its_output_once(shared):
    role = DraftRole(LOOKUPS["suffix"]())
    answer(role, admits=[admitted([1, 2])])
    answer(role, Commit(1, 0, 2, (), (3, 4)))
    answer(role, admits=[admitted([1, 2], [3, 4])], releases=[1])
    answer(role, admits=[admitted([1, 2], [3, 4])], releases=[1])
    answer(role, Commit(1, 0, 4, (), (5,)))
    answer(role, releases=[1])
    assert shared == [[1, 2, 3, 4], [1, 2, 3, 4, 5]], "new tokens follow the text before them, where matches begin"


def test_under_a_level_only_tokens_of_the_target_are_shared(open_room, make_requests, shared):
    levels = (SuffixDrafterConfig(num_draft_tokens=1), ModelDrafterConfig(path="small", num_draft_tokens=6))
    requests = make_requests(6, max_tokens=24, temperature=1.0)
    room = open_room(CascadeDrafterConfig(levels=levels, tails=(0, 0), num_draft_tokens=6)).serve(requests)
    answers = [str([*request.prompt, *room.tokens[request.request_id]])[1:-1] for request in requests]
    assert shared and all(any(str(text)[1:-1] in answer for answer in answers) for text in shared)


def test_bigrams_are_not_shared_if_switched_off():
    drafter = MaxgramDrafter(MaxgramDrafterConfig(shared_bigrams=False))
    draft(drafter, [1, 2, 3])
    drafter.release(9)
    assert draft(drafter, [1]).tree.num_draft_tokens == 0
