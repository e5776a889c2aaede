"""The target role on a real model, batch by batch: what it answers, feeds and keeps, against `transformers`."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from actors.protocol.messages import (
    HASH_SEED,
    Admit,
    Commit,
    Proposal,
    SamplingParams,
    TokenTree,
    Verdict,
    VerifyBatch,
    VerifyItem,
    extend_hash,
)
from actors.roles.target import TargetRole
from actors.verification.top_tokens import TopTokensReader
from parallel.runtime.runner import open_model

EOS = 1
SHORT, LONG = (3, 4, 5), (9, 8, 7, 6, 5, 4, 3)
ADMITS = tuple(Admit(i, epoch, text, len(text), SamplingParams()) for i, epoch, text in ((1, 4, SHORT), (2, 6, LONG)))


@pytest.fixture
def open_role(models):
    def open_(*, is_lead=True, top_tokens=None):
        runner = open_model(models["target"], num_slots=64)
        return TargetRole(runner, "coupled", [EOS], is_lead=is_lead, top_tokens=top_tokens)

    return open_


@pytest.fixture
def following(models):
    """The likeliest token after a text."""

    def of(*token_ids):
        with torch.no_grad():
            return int(models["reference"](torch.tensor([token_ids])).logits[0, -1].argmax())

    return of


def answered(role, batch):
    (answer,) = role.answer(batch)
    return answer


def cached(role):
    return {request_id: role.runner.cached_len(request_id) for request_id in role.contexts}


def right_and_wrong(request_id, epoch, text, following):
    """A draft after `text`: two right tokens in turn, each behind a wrong sibling, and a wrong one behind them."""
    first = following(*text)
    second = following(*text, first)
    third = following(*text, first, second)
    wrong = [(token + 1) % 97 for token in (first, second, third)]
    tree = TokenTree((text[-1], wrong[0], first, wrong[1], second, wrong[2]), (-1, 0, 0, 2, 2, 4))
    proposal = Proposal(request_id, epoch, len(text), extend_hash(HASH_SEED, text), tree, (0, 1, 1, 1, 1, 1))
    return proposal, (first, second, third)


def test_a_prompt_in_chunks_a_whole_one_and_a_draft(open_role, following):
    """Verdicts for complete texts alone; rows of a verdict's path are kept once its commit comes, those of chunks at
    once."""
    role, began = open_role(), time.monotonic()
    answer = answered(role, VerifyBatch(7, ADMITS, items=(VerifyItem(1, 3), VerifyItem(2, 5))))
    root = following(*SHORT)
    assert answer.verdicts == (Verdict(1, 4, 3, (), (root,)),) and (answer.round, answer.num_tokens) == (7, 8)
    assert began <= answer.started <= answer.committed <= answer.finished <= time.monotonic()
    assert (answer.top_tokens, answer.drafts, answer.export, answer.exported) == (None,) * 4
    assert cached(role) == {1: 0, 2: 5}

    text = (*SHORT, root)
    proposal, (first, second, third) = right_and_wrong(1, 4, text, following)
    commits = (Commit(1, 4, 3, (), (root,)),)
    items = (VerifyItem(1, 1, proposal), VerifyItem(2, 2))
    answer = answered(role, VerifyBatch(8, commits=commits, items=items, after=7))
    assert set(answer.verdicts) == {Verdict(1, 4, 4, (2, 4), (third,)), Verdict(2, 6, 7, (), (following(*LONG),))}
    assert answer.num_tokens == 1 + 5 + 2 and cached(role) == {1: 3, 2: 5}

    commits = (Commit(1, 4, 4, (2, 4), (first, second, third)), Commit(2, 6, 7, (), (following(*LONG),)))
    items = tuple(VerifyItem(i, 1) for i in (1, 2))
    answer = answered(role, VerifyBatch(9, commits=commits, items=items, after=8))
    text, other = (*text, first, second, third), (*LONG, following(*LONG))
    assert cached(role) == {1: 6, 2: 7}, "root and accepted nodes; the newest token has no row yet"
    assert {(one.request_id, one.prefix_len, one.token_ids) for one in answer.verdicts} == {
        (1, 7, (following(*text),)),
        (2, 8, (following(*other),)),
    }
    role.runner.pool.check()


def test_releases_and_the_end_of_an_epoch_give_every_row_back(open_role):
    role = open_role()
    answered(role, VerifyBatch(1, ADMITS, items=(VerifyItem(1, 3), VerifyItem(2, 5))))
    answer = answered(role, VerifyBatch(2, releases=(2,), after=1))
    assert (answer.verdicts, answer.num_tokens, answer.round, *role.contexts) == ((), 0, 2, 1)
    assert answer.started <= answer.committed <= answer.finished
    again = replace(ADMITS[1], epoch=9)
    answered(role, VerifyBatch(3, (again,), releases=(1,), after=2, items=(VerifyItem(2, 7),)))
    assert [*role.contexts] == [2] and role.contexts[2].admit == again
    role.forget()
    assert not role.contexts and role.runner.can_reserve(64)
    answered(role, VerifyBatch(1, ADMITS, items=(VerifyItem(1, 3),)))


def test_a_commit_of_another_text_is_a_broken_invariant(open_role):
    for wrong in (Commit(1, 5, 3, (), (6,)), Commit(1, 4, 2, (), (6,))):
        role = open_role()
        answered(role, VerifyBatch(1, ADMITS, items=(VerifyItem(1, 3),)))
        with pytest.raises(AssertionError):
            answered(role, VerifyBatch(2, commits=(wrong,), after=1))


def test_ranks_that_do_not_lead_keep_the_same_rows_and_say_nothing(open_role, following):
    roles = [open_role(is_lead=is_lead) for is_lead in (True, False)]
    batches = [VerifyBatch(1, ADMITS, items=(VerifyItem(1, 3), VerifyItem(2, 5)))]
    root = following(*SHORT)
    batches += [VerifyBatch(2, commits=(Commit(1, 4, 3, (), (root,)),), items=(VerifyItem(1, 1),), after=1)]
    answers = [[answered(role, batch) for batch in batches] for role in roles]
    assert [len(one.verdicts) for one in answers[0]] == [1, 1] and not any(one.verdicts for one in answers[1])
    assert cached(roles[0]) == cached(roles[1]) == {1: 3, 2: 5}


@pytest.mark.parametrize("is_late", [False, True])
def test_likely_tokens_come_with_their_pass_or_with_the_next_record(open_role, is_late):
    """A late reader's are of the pass before, once, also with a record that has no pass."""
    reader = TopTokensReader(2, reads_prompts=False, is_lead=True, is_late=is_late)
    role = open_role(top_tokens=reader)
    batch = VerifyBatch(1, ADMITS, items=(VerifyItem(1, 3),), may_draft=True)
    answers = [answered(role, batch), answered(role, VerifyBatch(2, after=1)), answered(role, VerifyBatch(3, after=2))]
    assert [one.top_tokens is not None for one in answers] == [not is_late, is_late, False]
    answered(role, VerifyBatch(4, items=(VerifyItem(2, 7),), may_draft=True, after=3))
    role.forget()
    assert answered(role, VerifyBatch(1)).top_tokens is None, "an epoch that is over"


def test_a_request_that_returns_is_known_as_it_was_admitted(open_role, following):
    """Each field its own value; of a text that is fed, no more than is there."""
    role, sampling = open_role(), SamplingParams(max_tokens=11, seed=5)
    admit = Admit(3, 8, LONG, 2, sampling, admission=6, drafter="none", memory_scope=9)
    answer = answered(role, VerifyBatch(1, (admit,), items=(VerifyItem(3, 99),)))
    context = role.contexts[3]
    assert (context.admit, context.token_ids, context.num_fed) == (admit, [*LONG], 7)
    assert answer.verdicts == (Verdict(3, 8, 7, (), (following(*LONG),)),)
