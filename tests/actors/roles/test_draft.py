"""The draft role: it keeps the text for its drafter, and names the prefix of every proposal."""

from __future__ import annotations

import pytest

from actors.drafters.interface import Capabilities, Draft
from actors.protocol.messages import (
    HASH_SEED,
    Admit,
    Commit,
    DraftBatch,
    DraftOrder,
    SamplingKind,
    SamplingParams,
    SparseDistribution,
    TokenTree,
    extend_hash,
)
from actors.roles.draft import DraftRole


class Recorder:
    """A drafter that records its calls, and proposes the tokens 7, 8, ..."""

    def __init__(self, vocab_size=None) -> None:
        self.capabilities = Capabilities(vocab_size, prefills=self)
        self.heard: list[tuple] = []

    def open(self, context):
        self.heard.append(("open", context.request_id, tuple(context.token_ids)))

    def prefill(self, contexts):
        self.heard.append(("prefill", *[context.request_id for context in contexts]))

    def propose(self, contexts, budgets):
        self.heard.append(("propose", *zip([context.request_id for context in contexts], budgets, strict=True)))
        return [
            Draft.chosen(TokenTree.chain(context.token_ids[-1], range(7, 7 + budget)))
            for context, budget in zip(contexts, budgets, strict=True)
        ]

    def observe(self, context, commit):
        self.heard.append(("observe", context.request_id, tuple(context.token_ids), commit.path))

    def release(self, request_id):
        self.heard.append(("release", request_id))


def last_answer(role, batch):
    return list(role.answer(batch))[-1]


def admit(request_id, token_ids=(3, 4), epoch=0):
    return Admit(request_id, epoch, token_ids, len(token_ids), SamplingParams())


@pytest.fixture
def role():
    return DraftRole(Recorder())


def test_a_text_of_which_much_is_unread_is_read_before_its_draft_and_timed_apart():
    now = iter(range(1000))
    role = DraftRole(Recorder(), clock=lambda: float(next(now)))
    assert last_answer(role, DraftBatch(1, admits=(admit(1),), orders=(DraftOrder(1, 2),))).read_s == 0
    text = tuple(range(40))
    answer = last_answer(
        role,
        DraftBatch(
            2, commits=(Commit(1, 0, 2, (), text),), admits=(admit(2),), orders=(DraftOrder(1, 2), DraftOrder(2, 1))
        ),
    )
    assert answer.read_s == 1 and role.drafter.heard[-2:] == [("prefill", 1), ("propose", (1, 2), (2, 1))]
    assert last_answer(role, DraftBatch(3, orders=(DraftOrder(1, 2),))).read_s == 0, "it has been read"
    last_answer(role, DraftBatch(4, commits=(Commit(1, 0, 42, (), text),), orders=(DraftOrder(1, 0),)))
    assert last_answer(role, DraftBatch(5, orders=(DraftOrder(1, 2),))).read_s == 0, "while there was time"


def test_news_come_before_orders_and_leavers_before_comers(role):
    last_answer(role, DraftBatch(1, admits=(admit(1),)))
    role.drafter.heard.clear()
    batch = DraftBatch(
        2,
        admits=(admit(2), admit(1, (3, 4, 5), epoch=1)),
        commits=(Commit(1, 1, 3, (), (6,)),),
        releases=(1,),
        orders=(DraftOrder(1, 2), DraftOrder(2, 0)),
    )
    last_answer(role, batch)
    assert role.drafter.heard == [
        ("release", 1),
        ("open", 2, (3, 4)),
        ("open", 1, (3, 4, 5)),
        ("observe", 1, (3, 4, 5), ()),
        ("prefill", 2),
        ("propose", (1, 2)),
    ]


def test_a_proposal_names_the_prefix_it_was_made_for(role):
    answer = last_answer(role, DraftBatch(5, admits=(admit(1, epoch=3),), orders=(DraftOrder(1, 2),)))
    (proposal,) = answer.proposals
    assert answer.round == 5 and answer.started <= answer.finished
    assert (proposal.request_id, proposal.epoch, proposal.prefix_len) == (1, 3, 2)
    assert proposal.prefix_hash == extend_hash(HASH_SEED, [3, 4]) and proposal.tree == TokenTree.chain(4, [7, 8])
    assert proposal.sampling_kinds == (0, 1, 1) and all(type(draw) is int for draw in proposal.sampling_kinds), (
        "as it travels"
    )
    batch = DraftBatch(6, commits=(Commit(1, 3, 2, (1,), (7, 9)),), orders=(DraftOrder(1, 1),))
    (proposal,) = last_answer(role, batch).proposals
    assert proposal.prefix_len == 4 and proposal.prefix_hash == extend_hash(HASH_SEED, [3, 4, 7, 9])
    assert proposal.tree.token_ids[0] == 9


def test_laws_travel_with_their_proposal(role):
    distribution = SparseDistribution((7, 8), (0.5, 0.5))
    drafted = Draft(TokenTree.chain(4, [7]), (SamplingKind.ROOT, SamplingKind.IID), (distribution, None))
    role.drafter.propose = lambda contexts, budgets: [drafted]
    (proposal,) = last_answer(role, DraftBatch(1, admits=(admit(1),), orders=(DraftOrder(1, 1),))).proposals
    assert proposal.distributions == (distribution, None) and proposal.sampling_kinds == (0, 3)


def test_without_orders_the_answer_is_empty(role):
    answer = last_answer(role, DraftBatch(1, admits=(admit(1),)))
    assert answer.proposals == () and role.drafter.heard == [("open", 1, (3, 4))]


def test_a_commit_for_another_prefix_is_a_broken_invariant(role):
    last_answer(role, DraftBatch(1, admits=(admit(1),)))
    with pytest.raises(AssertionError):
        last_answer(role, DraftBatch(2, commits=(Commit(1, 0, 3, (), (6,)),)))


def test_tokens_that_the_drafter_does_not_have_are_read_as_others():
    role = DraftRole(Recorder(vocab_size=10))
    listed = {"stop_token_ids": (9, 10), "allowed_token_ids": (2, 11)}
    sampling = SamplingParams(logit_bias=((3, 1.0), (11, 1.0)), bad_words=((4, 12), (5,)), **listed)
    orders = (DraftOrder(1, 2),)
    last_answer(role, DraftBatch(1, admits=(Admit(1, 0, (3, 12), 2, sampling),), orders=orders))
    context = role.contexts[1]
    assert context.token_ids == [3, 9] and context.prefix_hash == extend_hash(HASH_SEED, (3, 12))
    assert (context.sampling.logit_bias, context.sampling.bad_words) == (((3, 1.0),), ((5,),))
    assert (context.sampling.stop_token_ids, context.sampling.allowed_token_ids) == ((9,), (2,))
    answer = last_answer(role, DraftBatch(2, commits=(Commit(1, 0, 2, (), (10, 4)),), orders=orders, after=1))
    assert context.token_ids == [3, 9, 9, 4]
    assert answer.proposals[0].prefix_hash == extend_hash(HASH_SEED, (3, 12, 10, 4)), "of what was really committed"
