"""An attached drafter is sent what a drafter of its own ranks would be sent, made from the target's batch and verdict:
hand-worked batches against a drafter that writes down what it hears."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from actors.drafters.interface import FeatureRows
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
from parallel.comm.group import SINGLE
from tests.actors.roles.test_draft import Recorder
from tests.parallel.conftest import on_ranks  # noqa: F401  a fixture

TREE = TokenTree((4, 7, 8, 9), (-1, 0, 0, 2))


def admit(request_id, token_ids=(3, 4), *, max_tokens=20, epoch=5, drafter=None):
    return Admit(request_id, epoch, token_ids, 2, SamplingParams(max_tokens=max_tokens), drafter=drafter)


def proposal(request_id, tree=TREE, prefix_len=2):
    return Proposal(request_id, 5, prefix_len, 0, tree)


@pytest.fixture
def attached():
    return AttachedDrafter(Recorder(), SINGLE, "cpu")


def followed(attached, batch, verdicts=(), features=(), top_tokens=None):
    """The drafts that leave with the verdicts."""
    answer = VerdictBatch(batch.round, verdicts, 0.0, 0.5, top_tokens=top_tokens)
    after = attached.follow(batch, answer, features)
    assert after == replace(answer, drafts=after.drafts, top_tokens=None), "all else is the target's"
    return after.drafts


def drafted(attached, batch, *verdicts, top_tokens=None):
    """(orders, texts) of the drafts that were made, and what the drafter heard."""
    attached.role.drafter.heard.clear()
    attached.begin(batch)
    answer = followed(attached, batch, verdicts, top_tokens=top_tokens)
    drafts = None if answer is None else {p.request_id: p.tree.num_draft_tokens for p in answer.proposals}
    assert answer is None or answer.round == batch.round
    return drafts, attached.role.drafter.heard


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
    drafted(attached, VerifyBatch(1, (admit(1),), items=(VerifyItem(1, 2),)), Verdict(1, 5, 2, (), (6,)))
    for number, token in ((2, 7), (3, 8)):
        quiet = VerifyBatch(number, items=(VerifyItem(1, 1),))
        assert drafted(attached, quiet, Verdict(1, 5, number + 1, (), (token,))) == (None, [])
    assert attached.role.contexts[1].token_ids == [3, 4, 6]
    drafts, heard = drafted(attached, VerifyBatch(4, items=(VerifyItem(1, 1, None, 2),)), Verdict(1, 5, 5, (), (9,)))
    assert drafts == {1: 2} and heard == [("observe", 1, (3, 4, 6), ()), ("propose", (1, 2))]
    assert attached.role.contexts[1].token_ids == [3, 4, 6, 7, 8, 9]


@pytest.mark.parametrize(("max_tokens", "length"), [(9, 4), (6, 4), (5, 3), (4, 2), (3, 1), (2, 0), (1, 0)])
def test_no_more_is_drafted_than_may_be_emitted(attached, max_tokens, length):
    """One token was emitted; the target adds one to the last draft."""
    batch = VerifyBatch(1, (admit(1, max_tokens=max_tokens),), items=(VerifyItem(1, 2, None, 4),))
    drafts, _ = drafted(attached, batch, Verdict(1, 5, 2, (), (6,)))
    assert drafts == ({1: length} if length else {})
    again = AttachedDrafter(Recorder(), SINGLE, "cpu")
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
    drafted(attached, VerifyBatch(1, (admit(1),), items=(VerifyItem(1, 2),)), Verdict(1, 5, 2, (), (6,)))
    drafted(attached, VerifyBatch(2, items=(VerifyItem(1, 1),)), Verdict(1, 5, 3, (), (7,)))
    attached.begin(VerifyBatch(3, (admit(2), admit(3, drafter="none"))))
    drafts, heard = drafted(attached, VerifyBatch(4, releases=(1, 2, 3)))
    assert (drafts, heard) == ({}, [("release", 1)]) and not attached.role.contexts
    assert drafted(attached, VerifyBatch(5)) == (None, [])
    again = VerifyBatch(6, (admit(1, epoch=6),), items=(VerifyItem(1, 2, None, 1),))
    drafts, heard = drafted(attached, again, Verdict(1, 6, 2, (), (9,)))
    assert heard[1] == ("observe", 1, (3, 4), ()) and attached.role.contexts[1].token_ids == [3, 4, 9], (
        "nothing of its former life"
    )


def test_verdicts_of_requests_it_does_not_follow_or_that_end_are_left_out(attached):
    batch = VerifyBatch(
        1, (admit(1), admit(2, drafter="none")), items=(VerifyItem(1, 2, None, 4), VerifyItem(2, 2, None, 4))
    )
    drafts, heard = drafted(attached, batch, Verdict(1, 5, 2, (), (), none_follows=True), Verdict(2, 5, 2, (), (6,)))
    assert (drafts, heard) == ({}, [("open", 1, (3, 4))])


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
