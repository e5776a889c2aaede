"""What several drafters in one place can do: each call reaches those that it concerns, and no other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from actors.drafters.auto.drafter import AutoDrafter
from actors.drafters.auto.members import Member, MembersAhead, MembersFeatures, MembersRows
from actors.drafters.draft_ahead.width import Step, WidthChooser
from actors.drafters.interface import Capabilities, Context, Draft, FeatureRows
from actors.protocol.messages import Admit, Commit, DraftPreview, SamplingParams, TokenTree

PROMPT = (5, 6, 7)


@dataclass
class Ahead:
    """A drafter whose draft for one text was prepared: `tokens`, if there are any."""

    tokens: tuple[int, ...] = ()
    wants_work: bool = False
    waits_for_child: bool = False
    may_work_ahead: bool = True
    calls: list[Any] = field(default_factory=list)

    @property
    def capabilities(self):
        return Capabilities(works_ahead=self, sends_previews=self)

    def prepared(self, context):
        return bool(self.tokens)

    def width(self, chooser, time_s):
        self.calls.append(("width", time_s))
        return 3

    def work(self, width=0, num_passes=1):
        self.calls.append(("work", width, num_passes))
        return Step(width)

    def previews(self):
        return [DraftPreview(0, 0, len(PROMPT), 0, TokenTree.chain(7, self.tokens))] if self.tokens else []

    def prefetched(self, context, budget, tree):
        self.calls.append(("prefetched", budget, tree.token_ids))

    def open(self, context):
        pass

    def observe(self, context, commit):
        self.calls.append(("observed", commit.path))

    def release(self, request_id):
        pass

    def propose(self, contexts, budgets):
        self.calls.append(("proposed", tuple(budgets)))
        tree = [TokenTree.chain(7, self.tokens[:budget] or (8,) * budget) for budget in budgets]
        return [Draft.chosen(one) for one in tree]


def member(drafter: Any, name: str = "model", longest: int = 4) -> Member:
    return Member(name, drafter, longest, is_shown=False, is_chain=True)


def opened(*drafters: Any) -> tuple[AutoDrafter, Context]:
    auto = AutoDrafter([member(one, f"{i}-model") for i, one in enumerate(drafters)])
    context = Context.admitted(Admit(0, 0, PROMPT, len(PROMPT), SamplingParams()), None)
    auto.open(context)
    return auto, context


def test_one_step_is_that_of_one_that_has_something_to_do():
    idle, busy, waiting = Ahead(), Ahead(wants_work=True), Ahead(wants_work=True, waits_for_child=True)
    ahead = MembersAhead([member(one) for one in (idle, busy, waiting)])
    assert ahead.wants_work and not ahead.waits_for_child
    assert ahead.width(WidthChooser(), 0.5) == 3 and ahead.work(2, 3) == Step(2)
    assert busy.calls == [("width", 0.5), ("work", 2, 3)] and not idle.calls and not waiting.calls
    busy.wants_work = False
    assert ahead.wants_work and ahead.waits_for_child
    waiting.wants_work = False
    assert not ahead.wants_work and not ahead.waits_for_child and ahead.width(WidthChooser(), 0.5) == 0


@pytest.mark.parametrize("may", [True, False])
def test_whether_to_work_ahead_holds_for_all(may):
    both = Ahead(may_work_ahead=not may), Ahead(may_work_ahead=not may)
    ahead = MembersAhead([member(one) for one in both])
    ahead.may_work_ahead = may
    assert [one.may_work_ahead for one in both] == [may, may] and ahead.may_work_ahead is may


def test_a_prepared_draft_is_used_though_another_drafter_might_be_better():
    other, prepared = Ahead(), Ahead(tokens=(1, 2, 3, 4, 5, 6))
    auto, context = opened(other, prepared)
    assert auto.capabilities.works_ahead is not None and auto.capabilities.works_ahead.prepared(context)
    (draft,) = auto.propose([context], [9])
    assert draft.tree.token_ids[1:] == (1, 2, 3, 4), "at most its longest"
    assert not other.calls
    auto.observe(context, Commit(0, 0, len(PROMPT), (1,), (1, 9)))
    assert other.calls == [("observed", ())] and prepared.calls[-1] == ("observed", (1,))


def test_a_draft_that_was_read_off_a_preview_is_its_drafters():
    other, prepared = Ahead(), Ahead(tokens=(1, 2))
    auto, context = opened(other, prepared)
    (preview,) = auto.previews()
    assert preview.tree.token_ids[1:] == (1, 2)
    auto.prefetched(context, 5, preview.tree)
    auto.observe(context, Commit(0, 0, len(PROMPT), (1, 2), (1, 2, 3)))
    assert prepared.calls == [("prefetched", 4, (7, 1, 2)), ("observed", (1, 2))], "ordered at most its longest"
    assert other.calls == [("observed", ())]
    (work,) = auto.level_stats()
    assert (work.level, work.num_drafts, work.num_draft_tokens, work.num_accepted_tokens) == ("1-model", 1, 2, 2)


@dataclass
class Reader:
    feature_size: int
    read: list[FeatureRows] = field(default_factory=list)

    def read_features(self, features):
        self.read.append(features)


def test_each_reader_gets_its_own_features():
    wide, narrow = Reader(3), Reader(2)
    features = MembersFeatures([wide, narrow])
    rows = torch.arange(20.0).view(4, 5)
    features.read_features(FeatureRows(7, 2, rows))
    assert features.feature_size == 5
    for one, columns in ((wide, rows[:, :3]), (narrow, rows[:, 3:])):
        (got,) = one.read
        assert (got.request_id, got.start) == (7, 2) and torch.equal(got.rows, columns)


def test_a_single_reader_gets_what_is_sent():
    """Features from another role may come fused, narrower than the target has them."""
    one, fused = Reader(30), torch.ones(4, 5)
    MembersFeatures([one]).read_features(FeatureRows(7, 0, fused))
    assert one.read[0].rows is fused


def test_rows_are_given_back_by_all_and_passes_go_through_all():
    released: list[str] = []

    class Sharing:
        def __init__(self, name):
            self.name = name

        def verifying(self, target):
            return f"{self.name}({target})"

        def release_rows(self):
            released.append(self.name)

    rows: Any = MembersRows([Sharing("a"), Sharing("b")])
    assert rows.verifying("target") == "b(a(target))"
    rows.release_rows()
    assert released == ["a", "b"]


def test_it_can_do_what_any_of_them_can():
    class Plain:
        capabilities = Capabilities(vocab_size=90)

    class Larger:
        capabilities = Capabilities(vocab_size=97)

    can = AutoDrafter([member(Plain()), member(Larger())]).capabilities
    assert can.vocab_size == 90
    missing = (can.works_ahead, can.sends_previews, can.reads_features, can.shares_rows, can.reads_top_tokens)
    assert missing == (None,) * 5
    assert AutoDrafter([member(Plain()), member(Ahead())]).capabilities.works_ahead is not None
