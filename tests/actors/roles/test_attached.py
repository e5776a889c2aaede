"""An attached drafter is sent what a drafter of its own ranks would be sent, made from the target's batch and verdict:
hand-worked batches against a drafter that writes down what it hears."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from actors.drafters.interface import FeatureRows
from actors.drafters.lookup.suffix import SuffixDrafter, SuffixDrafterConfig
from actors.drafters.scoped import Share
from actors.protocol.messages import (
    Admit,
    Proposal,
    SamplingParams,
    TokenTree,
    TopTokens,
    Verdict,
    VerdictBatch,
    VerifyBatch,
    VerifyItem,
)
from actors.roles.attached import AttachedDrafter
from actors.roles.draft import DraftRole
from actors.roles.target import TargetContext
from parallel.comm.group import SINGLE
from tests.actors.roles.test_draft import Recorder
from tests.parallel.conftest import on_ranks  # noqa: F401  a fixture

TREE = TokenTree((4, 7, 8, 9), (-1, 0, 0, 2))


def admit(request_id, token_ids=(3, 4), *, max_tokens=20, epoch=5, drafter=None):
    return Admit(request_id, epoch, token_ids, 2, SamplingParams(max_tokens=max_tokens), drafter=drafter)


def proposal(request_id, tree=TREE, prefix_len=2):
    return Proposal(request_id, 5, prefix_len, 0, tree)


class Attached(AttachedDrafter):
    """With the texts of the target that it follows: a batch changes them before its pass, what a verdict commits comes
    with the batch after it."""

    def __init__(self):
        super().__init__(Recorder(), SINGLE, "cpu")
        self.contexts: dict[int, TargetContext] = {}
        self.committed: dict[int, list[int]] = {}

    def begin(self, batch):
        super().begin(batch)
        for request_id, token_ids in self.committed.items():
            self.contexts[request_id].token_ids += token_ids
        self.committed.clear()
        for request_id in batch.releases:
            if (context := self.contexts.pop(request_id, None)) is not None:
                self.ended(request_id, context.token_ids)
        self.contexts |= {one.request_id: TargetContext(one, [*one.token_ids]) for one in batch.admits}

    def commit(self, items, verdicts):
        proposals = {item.request_id: item.proposal for item in items}
        for one in verdicts:
            accepted = [proposals[one.request_id].tree.token_ids[node] for node in one.path]
            self.committed[one.request_id] = [*accepted, *one.token_ids]


@pytest.fixture
def attached():
    return Attached()


def followed(attached, batch, verdicts=(), features=(), top_tokens=None):
    """The drafts that leave with the verdicts."""
    answer = VerdictBatch(batch.round, verdicts, 0.0, 0.5, top_tokens=top_tokens)
    after = attached.follow(batch, answer, features, attached.contexts)
    assert after == replace(answer, drafts=after.drafts, top_tokens=None), "all else is the target's"
    attached.commit(batch.items, verdicts)
    return after.drafts


def drafted(attached, batch, *verdicts, top_tokens=None):
    """(orders, texts) of the drafts that were made, and what the drafter heard."""
    attached.role.drafter.heard.clear()
    attached.begin(batch)
    answer = followed(attached, batch, verdicts, top_tokens=top_tokens)
    drafts = None if answer is None else {p.request_id: p.tree.num_draft_tokens for p in answer.proposals}
    assert answer is None or answer.round == batch.round
    return drafts, attached.role.drafter.heard


def followed_by(attached, batch, *verdicts):
    """The drafts that leave with the verdicts of this batch."""
    attached.begin(batch)
    return followed(attached, batch, verdicts)


@pytest.mark.parametrize("unverified", [False, True])
def test_the_drafter_knows_of_a_draft_that_no_pass_verifies(attached, unverified):
    batch = VerifyBatch(1, (admit(1),), items=(VerifyItem(1, 2, None, 3),), unverified=unverified)
    assert drafted(attached, batch, Verdict(1, 5, 2, (), (11,)))[0] == {1: 3}
    assert attached.role.contexts[1].is_unverified is unverified


def test_a_draft_follows_the_accepted_path_and_the_target_s_own_token(attached):
    batch = VerifyBatch(1, (admit(1), admit(2, (3, 4, 6))), items=(VerifyItem(1, 2, proposal(1), 3), VerifyItem(2, 3)))
    drafts, heard = drafted(attached, batch, Verdict(1, 5, 2, (2, 3), (11,)), Verdict(2, 5, 3, (), (12,)))
    assert drafts == {1: 3}, "request 2 had no order"
    assert heard == [
        ("open", 1, (3, 4)),
        ("open", 2, (3, 4, 6)),
        ("observe", 1, (3, 4), (2, 3)),
        ("observe", 2, (3, 4, 6), ()),
        ("propose", (1, 3)),
    ]
    assert attached.role.contexts[1].token_ids == [3, 4, 8, 9, 11]
    assert attached.role.contexts[2].token_ids == [3, 4, 6, 12]


def test_text_of_rounds_without_orders_is_sent_with_the_next_one(attached):
    first = VerifyBatch(1, (admit(1),), items=(VerifyItem(1, 2, None, 3),))
    assert drafted(attached, first, Verdict(1, 5, 2, (), (4,)))[0] == {1: 3}
    verified = VerifyBatch(2, items=(VerifyItem(1, 1, proposal(1, prefix_len=3)),))
    assert drafted(attached, verified, Verdict(1, 5, 3, (2, 3), (6,))) == (None, [])
    quiet = VerifyBatch(3, items=(VerifyItem(1, 1),))
    assert drafted(attached, quiet, Verdict(1, 5, 6, (), (7,))) == (None, [])
    assert attached.role.contexts[1].token_ids == [3, 4, 4]
    drafts, heard = drafted(attached, VerifyBatch(4, items=(VerifyItem(1, 1, None, 2),)), Verdict(1, 5, 7, (), (5,)))
    assert drafts == {1: 2} and heard == [("observe", 1, (3, 4, 4), (2, 3)), ("propose", (1, 2))]
    assert attached.role.contexts[1].token_ids == [3, 4, 4, 8, 9, 6, 7, 5]
    drafts, heard = drafted(attached, VerifyBatch(5, items=(VerifyItem(1, 1, None, 1),)), Verdict(1, 5, 8, (), (6,)))
    assert heard[0] == ("observe", 1, (3, 4, 4, 8, 9, 6, 7, 5), ()), "of each draft it hears once"


def test_nothing_is_done_for_the_drafter_until_something_is_ordered(attached):
    """Requests that come and go while decoding is plain: none of their texts is followed token by token."""
    drafted(attached, VerifyBatch(1, (admit(1), admit(2)), items=(VerifyItem(1, 2), VerifyItem(2, 2))))
    attached.role.answer = attached._note_texts = None  # called by nothing
    for number in range(2, 40):
        items = (VerifyItem(1, 1),) if number > 20 else (VerifyItem(1, 1), VerifyItem(2, 1))
        batch = VerifyBatch(number, releases=(2,) if number == 21 else (), items=items)
        verdicts = [Verdict(item.request_id, 5, number, (), (number,)) for item in items]
        assert drafted(attached, batch, *verdicts) == (None, [])


def test_a_request_that_ends_while_nothing_is_ordered_is_released_with_its_whole_text(attached):
    """Tokens of plain rounds and those of the last verdict, so that lookups draft from the end of an answer, too."""
    suffix = SuffixDrafter(SuffixDrafterConfig(share=Share.all))
    attached.role = DraftRole(suffix)
    ordered = VerifyBatch(1, (admit(1),), items=(VerifyItem(1, 2, None, 3),))
    followed_by(attached, ordered, Verdict(1, 5, 2, (), (11,)))
    for number, token in enumerate((12, 13, 14), 2):
        followed_by(attached, VerifyBatch(number, items=(VerifyItem(1, 1),)), Verdict(1, 5, number + 1, (), (token,)))
    followed_by(attached, VerifyBatch(5, releases=(1,)))
    other = VerifyBatch(6, (admit(2, (12, 13)),), items=(VerifyItem(2, 2, None, 3),))
    assert followed_by(attached, other, Verdict(2, 5, 2, (), (14,))).proposals[0].tree.num_draft_tokens == 0
    again = VerifyBatch(7, (admit(3, (11, 12)),), items=(VerifyItem(3, 2, None, 3),))
    assert followed_by(attached, again, Verdict(3, 5, 2, (), (13,))).proposals[0].tree.token_ids == (13, 14)


@pytest.mark.parametrize(("max_tokens", "length"), [(9, 4), (6, 4), (5, 3), (4, 2), (3, 1), (2, 0), (1, 0)])
def test_no_more_is_drafted_than_may_be_emitted(attached, max_tokens, length):
    """One token was emitted; the target adds one to the last draft."""
    batch = VerifyBatch(1, (admit(1, max_tokens=max_tokens),), items=(VerifyItem(1, 2, None, 4),))
    drafts, _ = drafted(attached, batch, Verdict(1, 5, 2, (), (6,)))
    assert drafts == ({1: length} if length else None)
    again = Attached()
    known = VerifyBatch(1, (admit(1, max_tokens=max_tokens),))
    drafted(again, known)
    drafts, _ = drafted(again, VerifyBatch(2, items=(VerifyItem(1, 2, None, 4),)), Verdict(1, 5, 2, (), (6,)))
    assert drafts == ({1: length} if length else None), "of a request that the drafter knew before"


def test_texts_are_read_where_the_batch_says_so(attached):
    batch = VerifyBatch(
        1, (admit(1), admit(2)), items=(VerifyItem(1, 2, reads_text=True), VerifyItem(2, 1, reads_text=True))
    )
    drafts, heard = drafted(attached, batch, Verdict(1, 5, 2, (), (6,)))
    assert drafts == {} and sorted(heard[-1][1:]) == [1, 2], "with a verdict or in the middle of its prompt"
    quiet = VerifyBatch(2, items=(VerifyItem(1, 1), VerifyItem(2, 1)))
    assert drafted(attached, quiet, Verdict(1, 5, 3, (), (6,))) == (None, [])


def test_requests_that_end_are_released_once_and_unheard_ones_never(attached):
    drafted(attached, VerifyBatch(1, (admit(1),), items=(VerifyItem(1, 2, None, 1),)), Verdict(1, 5, 2, (), (6,)))
    drafted(attached, VerifyBatch(2, items=(VerifyItem(1, 1),)), Verdict(1, 5, 3, (), (7,)))
    attached.begin(VerifyBatch(3, (admit(2), admit(3, drafter="none"))))
    assert drafted(attached, VerifyBatch(4, releases=(1, 2, 3))) == (None, [])
    again = VerifyBatch(6, (admit(1, epoch=6),), items=(VerifyItem(1, 2, None, 1),))
    drafts, heard = drafted(attached, again, Verdict(1, 6, 2, (), (9,)))
    assert drafts == {1: 1} and heard[:3] == [("release", 1), ("open", 1, (3, 4)), ("observe", 1, (3, 4), ())]
    assert attached.role.contexts[1].token_ids == [3, 4, 9], "nothing of its former life"
    following = VerifyBatch(7, items=(VerifyItem(1, 1, None, 1),))
    assert [one[0] for one in drafted(attached, following, Verdict(1, 6, 3, (), (5,)))[1]] == ["observe", "propose"]


def test_verdicts_of_requests_it_does_not_follow_or_that_end_are_left_out(attached):
    numbers = 1, 2, 3
    items = tuple([VerifyItem(number, 2, None, 4) for number in numbers])
    batch = VerifyBatch(1, (admit(1), admit(2, drafter="none"), admit(3)), items=items)
    ends, *go_on = Verdict(1, 5, 2, (), (), none_follows=True), Verdict(2, 5, 2, (), (6,)), Verdict(3, 5, 2, (), (6,))
    drafts, heard = drafted(attached, batch, ends, *go_on)
    assert drafts == {3: 4}
    assert heard[:3] == [("open", 1, (3, 4)), ("open", 3, (3, 4)), ("observe", 3, (3, 4), ())]


def test_top_tokens_and_features_reach_the_drafter(attached):
    read = []
    reader = type("Reader", (), {"read_top_tokens": read.append, "read_features": read.append})
    capabilities = attached.role._capabilities
    attached.role._capabilities = type(capabilities)(reads_top_tokens=reader, reads_features=reader)
    attached.begin(VerifyBatch(1, (admit(1),)))
    top, rows = TopTokens(1, b"", b"", b"", ()), FeatureRows(1, 0, torch.zeros(2, 3))
    assert followed(attached, VerifyBatch(1), (), (rows,), top).proposals == () and read == [top, rows]
    read.clear()
    assert followed(attached, VerifyBatch(2), (), (rows,)) is None and read == [rows], "features come by themselves"


def test_all_of_it_is_forgotten_with_the_epoch(attached):
    drafted(attached, VerifyBatch(1, (admit(1),), items=(VerifyItem(1, 2),)), Verdict(1, 5, 2, (), (6,)))
    drafted(attached, VerifyBatch(2, items=(VerifyItem(1, 1),)), Verdict(1, 5, 3, (), (7,)))
    attached.begin(VerifyBatch(3, (admit(2),)))
    attached.forget()
    assert not attached.role.contexts and drafted(attached, VerifyBatch(1)) == (None, [])


def test_every_rank_gets_the_lead_s_verdicts(on_ranks):  # noqa: F811
    """Verdicts of any number, with paths of any length, each number its own."""
    items = (
        VerifyItem(7, 1, proposal(7)),
        VerifyItem(8, 1),
        VerifyItem(9, 4, proposal(9, TokenTree.chain(4, (1, 2, 3)))),
    )
    full = (
        Verdict(7, 21, 31, (2, 3), (11,)),
        Verdict(8, 22, 32, (), (), none_follows=True),
        Verdict(9, 23, 33, (1, 2, 3), (13,)),
    )

    def shared(group, verdicts):
        own = verdicts if group.rank == 0 else ()
        return AttachedDrafter(Recorder(), group, "cpu").agree(own, items, is_lead=group.rank == 0)

    for verdicts in (full, full[1:2], ()):
        assert on_ranks(2, lambda group, verdicts=verdicts: shared(group, verdicts)) == [verdicts, verdicts]
    assert AttachedDrafter(Recorder(), SINGLE, "cpu").agree([*full], items, is_lead=True) == full


PROMPT = tuple(range(100, 133))


@pytest.mark.parametrize(
    ("prompt", "item", "verdicts", "reads_much"),
    [
        (PROMPT, VerifyItem(1, 33, None, 3), [Verdict(1, 5, 33, (), (4,))], True),
        (PROMPT[1:], VerifyItem(1, 32, None, 3), [Verdict(1, 5, 32, (), (4,))], False),
        (PROMPT, VerifyItem(1, 33, reads_text=True), [Verdict(1, 5, 33, (), (4,))], True),
        (PROMPT, VerifyItem(1, 33), [Verdict(1, 5, 33, (), (4,))], False),
        (PROMPT, VerifyItem(1, 20, reads_text=True), [], False),
        (PROMPT, VerifyItem(1, 33, None, 3), [Verdict(1, 5, 33, (), (), none_follows=True)], False),
    ],
)
def test_verdicts_wait_for_no_drafter_that_has_a_prompt_to_read(attached, prompt, item, verdicts, reads_much):
    """Unless it is short, nothing is ordered behind it, or no verdict could leave."""
    batch = VerifyBatch(1, (admit(1, prompt, max_tokens=99),), items=(item,))
    attached.begin(batch)
    assert attached.reads_much(batch, verdicts, attached.contexts) is reads_much
    assert not attached.role.drafter.heard


def test_a_text_that_was_read_delays_no_later_verdict_but_one_that_was_not_does(attached):
    batch = VerifyBatch(1, (admit(1, PROMPT, max_tokens=99),), items=(VerifyItem(1, 33, None, 3),))
    drafted(attached, batch, Verdict(1, 5, 33, (), (4,)))
    for length in range(34, 68):  # at rest the drafter hears of nothing
        batch = VerifyBatch(length, items=(VerifyItem(1, 1),))
        assert drafted(attached, batch, Verdict(1, 5, length, (), (4,))) == (None, [])
        ordered = VerifyBatch(length, items=(VerifyItem(1, 1, None, 3),))
        late = attached.reads_much(ordered, [Verdict(1, 5, length, (), (4,))], attached.contexts)
        assert late is (length > 34 + 32)
