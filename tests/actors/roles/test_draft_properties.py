"""The draft role over a drafter that works ahead: the parts of an answer, previews, steps and their times."""

from __future__ import annotations

import itertools
import random

import pytest

from actors.drafters.draft_ahead.width import Step
from actors.drafters.interface import Capabilities, Draft
from actors.protocol.messages import (
    Admit,
    DraftBatch,
    DraftOrder,
    DraftPreview,
    LevelWork,
    SamplingParams,
    TokenTree,
)
from actors.roles.draft import CHILD_WAIT_S, DraftRole

PREVIEW = DraftPreview(1, 0, 2, 0, TokenTree.chain(4, [5]), ())
LEVELS = (LevelWork("draft2", 1, 0.5, 1, 3, 2, ()),)


class AheadOfTime:
    """Has drafts prepared for the requests in `ready`; a step takes two ticks of the clock."""

    wants_work = True
    waits_for_child = False

    def __init__(self, **without) -> None:
        every = dict(works_ahead=self, sends_previews=self, has_levels=self, prefills=self)
        self.capabilities = Capabilities(**every | without)
        self.ready: set[int] = set()
        self.unseen: list[DraftPreview] = []
        self.calls: list[tuple] = []
        self.step = Step(3)

    def open(self, context):
        pass

    observe = release = open

    def forget(self):
        pass

    def propose(self, contexts, budgets):
        self.calls.append(("propose", [context.request_id for context in contexts], list(budgets)))
        return [Draft.chosen(TokenTree.chain(context.token_ids[-1], [7])) for context in contexts]

    def prefill(self, contexts):
        self.calls.append(("prefill", [context.request_id for context in contexts]))

    def prepared(self, context):
        return context.request_id in self.ready

    def work(self, width, num_passes):
        self.calls.append(("work", width, num_passes))
        return self.step

    def width(self, chooser, time_s):
        self.calls.append(("width", chooser._passes.weight, time_s))
        return 5

    def previews(self):
        unseen, self.unseen = self.unseen, []
        return unseen

    def prefetched(self, context, budget, tree):
        self.calls.append(("prefetched", context.request_id, budget, tree))

    def level_stats(self):
        return LEVELS


def role_of(drafter, **options):
    return DraftRole(drafter, itertools.count().__next__, **options)


def orders(*request_ids, round_=1, length=2):
    return DraftBatch(round_, orders=tuple(DraftOrder(i, length) for i in request_ids))


def admitted(drafter, **options):
    """A role that knows requests 0 to 5."""
    role = role_of(drafter, **options)
    admits = tuple(Admit(i, 0, (3, 4), 2, SamplingParams()) for i in range(6))
    assert [batch.proposals for batch in role.answer(DraftBatch(0, admits=admits))] == [()]
    drafter.calls.clear()
    return role


@pytest.mark.parametrize("seed", range(20))
def test_prepared_drafts_come_first_and_every_order_is_answered_once(seed):
    draw, drafter = random.Random(seed), AheadOfTime()
    role = admitted(drafter)
    for round_ in range(1, 8):
        drafter.ready = set(draw.sample(range(6), draw.randrange(6)))
        num_steps = draw.randrange(3)
        for _ in range(num_steps):
            role.work(4)
        chosen, idle = draw.sample(range(6), draw.randrange(4)), 6
        drafter.calls.clear()
        began = role.clock()
        answers = list(role.answer(orders(*chosen, round_=round_)))
        hits, misses = ([i for i in chosen if (i in drafter.ready) == ready] for ready in (True, False))
        parts = ([hits] if hits or misses else []) + ([misses] if misses or not hits else [])
        assert [[proposal.request_id for proposal in batch.proposals] for batch in answers] == parts
        assert [call for call in drafter.calls if call[0] == "propose"] == [
            ("propose", part, [2] * len(part)) for part in parts if part
        ]
        assert [batch.num_missing for batch in answers] == [len(misses), 0][-len(answers) :]
        assert [len(batch.ahead) for batch in answers] == [num_steps, 0][: len(answers)]
        assert all(batch.round == round_ and batch.levels == LEVELS for batch in answers)
        assert {p.prepared for batch in answers for p in batch.proposals} == {i in drafter.ready for i in chosen}
        times = [began, *(time for batch in answers for time in (batch.started, batch.finished))]
        assert times == sorted(times), "a part begins where the one before it ended"
        assert idle not in role.contexts


def test_without_draft_ahead_there_is_one_part():
    drafter = AheadOfTime(works_ahead=None, has_levels=None)
    role = admitted(drafter, adapts=True)
    drafter.ready = {1}
    (batch,) = role.answer(orders(1, 2))
    assert [(p.request_id, p.prepared) for p in batch.proposals] == [(1, None), (2, None)] and batch.levels == ()
    assert not role.wants_work and role.width() == 0
    role.work(3)
    assert drafter.calls == [("propose", [1, 2], [2, 2])]


def test_steps_are_reported_once_with_their_times():
    drafter = AheadOfTime()
    role = admitted(drafter)
    role.work(2)
    drafter.step = Step(4, refreshed=True)
    role.work()
    assert drafter.calls == [("work", 2, 1), ("work", 0, 1)] and role.wants_work
    (batch,) = role.answer(DraftBatch(1))
    (first, last, fresh), (begun, ended, refreshed) = batch.ahead
    assert first < last < begun < ended and (fresh, refreshed) == (False, True)
    role.work()
    role.forget()
    assert not role.contexts and next(role.answer(DraftBatch(2))).ahead == ()


def test_the_width_of_a_step_follows_from_the_passes_that_cost_something():
    drafter = AheadOfTime()
    assert admitted(drafter).width() == 0 and drafter.calls == [], "as configured"
    role = admitted(drafter, adapts=True)
    for step in (Step(0), Step(3, refreshed=True), Step(3)):
        drafter.step = step
        role.work()
    list(role.answer(orders(1)))
    asked_at = role.clock()
    list(role.answer(orders(1)))
    drafter.calls.clear()
    assert role.width() == 5
    ((_, weight, time_s),) = drafter.calls
    assert weight == 1.0, "neither a step without rows nor one that fed old text again"
    assert 0 < time_s <= asked_at, "the time from an answer to the next record"


def test_a_preview_leaves_when_it_is_due_or_no_step_follows():
    drafter = AheadOfTime()
    role = admitted(drafter)
    drafter.unseen = [PREVIEW]
    assert role.preview(last=False) is None, "no record is expected"
    assert role.preview(last=True).previews == (PREVIEW,)
    assert role.preview(last=True) is None, "nothing was prepared since"
    list(role.answer(orders(1)))
    list(role.answer(orders(1)))
    drafter.unseen = [PREVIEW]
    for _ in range(20):
        role.clock()
    assert role.preview(last=False).previews == (PREVIEW,), "the record is overdue"
    assert role_of(AheadOfTime(sends_previews=None)).preview(last=True) is None


def test_a_draft_that_was_read_off_a_preview_is_not_made_again():
    drafter = AheadOfTime()
    role = admitted(drafter)
    batch = DraftBatch(1, orders=(DraftOrder(1, 3, PREVIEW.tree), DraftOrder(2, 0), DraftOrder(3, 2)))
    answers = list(role.answer(batch))
    assert [p.request_id for batch in answers for p in batch.proposals] == [3]
    assert drafter.calls == [("prefetched", 1, 3, PREVIEW.tree), ("prefill", [2]), ("propose", [3], [2])]


def test_a_role_that_awaits_its_child_waits_for_a_record():
    drafter = AheadOfTime()
    role = admitted(drafter)
    assert role.pause_s() == 0
    drafter.waits_for_child = True
    assert role.pause_s() == CHILD_WAIT_S
