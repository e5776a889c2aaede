"""A target that runs ahead: which batch it predicts, and that a pass made for another than came leaves no trace."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from actors.drafters.interface import Draft
from actors.protocol.membership import Weights
from actors.protocol.messages import (
    Admit,
    Commit,
    MeasuredCosts,
    Proposal,
    ProposalBatch,
    SamplingParams,
    TokenTree,
    Verdict,
    VerdictBatch,
    VerifyBatch,
    VerifyItem,
)
from actors.roles.attached import AttachedDrafter
from actors.roles.run_ahead import MOST_CREDIT, PRICE, RunAhead
from actors.roles.target import TargetRole
from actors.transport.codec import CODEC
from parallel.comm.group import SINGLE
from parallel.runtime.runner import open_model
from tests.actors.roles.test_draft import Recorder

EOS, STOP, LONGEST = 1, 5, 64
TREE = TokenTree((4, 7, 8), (-1, 0, 1))
PROPOSAL = Proposal(1, 6, 2, 11, TREE)
NEXT = Proposal(1, 6, 4, 12, TokenTree((9, 3), (-1, 0)))
BATCH = VerifyBatch(3, items=(VerifyItem(1, 1, PROPOSAL, 4, reads_text=True),), after=2)
VERDICT = Verdict(1, 6, 2, (1,), (9,))
PREDICTED = VerifyBatch(
    4, commits=(Commit(1, 6, 2, (1,), (7, 9)),), items=(VerifyItem(1, 1, NEXT, 4, reads_text=True),), after=3
)


def answer_of(*verdicts, proposals=(NEXT,)):
    return VerdictBatch(3, verdicts, 0.0, 1.0, drafts=ProposalBatch(3, proposals, 1.0, 2.0))


def predicted(verdict=VERDICT, batch=BATCH, *, proposals=(NEXT,), longest=LONGEST, **sampling):
    asked = SamplingParams(**{"max_tokens": 20, "stop_token_ids": (STOP,)} | sampling)
    ahead = RunAhead([EOS], longest)
    return ahead.predict(batch, answer_of(verdict, proposals=proposals), lambda _: Admit(1, 6, (3, 4), 2, asked))


def test_the_next_batch_of_a_request_that_goes_on():
    assert predicted() == PREDICTED
    assert predicted(proposals=()) == replace(PREDICTED, items=(VerifyItem(1, 1, None, 4, reads_text=True),))


def test_a_draft_that_no_pass_verifies_is_not_in_it():
    assert predicted(batch=replace(BATCH, unverified=True)).items[0].proposal is None


def test_plain_decoding_goes_on_plainly():
    plain = replace(BATCH, items=(VerifyItem(1, 1),), may_draft=False)
    expected = VerifyBatch(4, commits=(Commit(1, 6, 2, (), (9,)),), items=(VerifyItem(1, 1),), after=3, may_draft=False)
    assert predicted(Verdict(1, 6, 2, (), (9,)), plain, proposals=()) == expected


@pytest.mark.parametrize(
    ("verdict", "options"),
    [
        (replace(VERDICT, token_ids=(EOS,)), {}),
        (replace(VERDICT, token_ids=(STOP,)), {}),
        (VERDICT, dict(stop_token_ids=(7,))),  # on the path
        (VERDICT, dict(max_tokens=2)),
        (VERDICT, dict(longest=4)),
        (replace(VERDICT, token_ids=(), none_follows=True), {}),
        (replace(VERDICT, token_ids=()), {}),  # the root is fed again
        (replace(VERDICT, forced=(6,)), {}),  # which is the draft then
    ],
)
def test_nothing_is_predicted_where_a_request_ends_or_changes(verdict, options):
    assert predicted(verdict, **options) is None


@pytest.mark.parametrize("options", [dict(max_tokens=3), dict(longest=5)])
def test_a_request_that_may_get_one_token_more_goes_on(options):
    assert predicted(**options) == PREDICTED


def test_an_end_token_that_is_ignored_ends_nothing():
    assert predicted(replace(VERDICT, token_ids=(EOS,)), ignore_eos=True).commits[0].token_ids == (7, EOS)


def test_nothing_is_predicted_while_a_text_is_read():
    reading = replace(BATCH, items=(*BATCH.items, VerifyItem(2, 8)))
    assert predicted(batch=reading) is None
    ahead = RunAhead([EOS], LONGEST)
    assert (
        ahead.predict(replace(BATCH, items=()), answer_of(), lambda _: Admit(1, 6, (3, 4), 2, SamplingParams())) is None
    )


def compared(batch, *, times=1, then=None, **options):
    """Whether a batch is the predicted one, and whether it pays to run ahead, after so many of them and another."""
    ahead = RunAhead([EOS], LONGEST, **options)
    found = None
    for one in [batch] * times + ([] if then is None else [then]):
        ahead.predict(BATCH, answer_of(VERDICT), lambda _: Admit(1, 6, (3, 4), 2, SamplingParams()))
        found = ahead.matches(one)
    return found, ahead.pays


def item(**changes):
    return replace(PREDICTED, items=(replace(PREDICTED.items[0], **changes),))


def test_the_predicted_batch_matches_by_whatever_way_it_came():
    assert compared(PREDICTED) == (True, True)
    assert compared(CODEC.decode(CODEC.encode(PREDICTED))) == (True, True)


@pytest.mark.parametrize(
    "batch",
    [
        replace(PREDICTED, round=9, after=7),
        replace(PREDICTED, costs=MeasuredCosts(least_chance=0.25), unverified=True),
        item(num_draft_tokens=1, reads_text=False),
        item(num_draft_tokens=0),
    ],
)
def test_what_is_drafted_behind_the_verdicts_may_differ(batch):
    assert compared(batch)[0]


@pytest.mark.parametrize(("num_draft_tokens", "is_it"), [(1, True), (0, False)])
def test_streams_of_drafts_begin_in_the_pass_before_them(num_draft_tokens, is_it):
    assert compared(item(num_draft_tokens=num_draft_tokens), has_streams=True) == (is_it, is_it)


@pytest.mark.parametrize(
    "batch",
    [
        replace(PREDICTED, admits=(Admit(2, 0, (3,), 1, SamplingParams()),)),
        replace(PREDICTED, releases=(1,)),
        replace(PREDICTED, commits=()),
        replace(PREDICTED, commits=(replace(PREDICTED.commits[0], token_ids=(7,)),)),
        replace(PREDICTED, commits=(replace(PREDICTED.commits[0], epoch=7),)),
        replace(PREDICTED, may_draft=False),
        replace(PREDICTED, bridge=1),
        replace(PREDICTED, items=()),
        replace(PREDICTED, items=(*PREDICTED.items, VerifyItem(2, 8))),
        VerifyBatch(4, weights=Weights("elsewhere", 2)),
        item(proposal=None),
        item(proposal=replace(NEXT, tree=TokenTree((9, 2), (-1, 0)))),
        item(num_tokens=2),
        item(request_id=2),
    ],
)
def test_a_batch_of_other_rows_is_not_the_predicted_one(batch):
    assert compared(batch) == (False, False)


def test_a_batch_that_came_otherwise_is_made_up_for_by_many():
    assert compared(PREDICTED, times=PRICE, then=BATCH) == (False, True)
    assert compared(PREDICTED, times=PRICE - 1, then=BATCH) == (False, False)
    assert compared(PREDICTED, times=100, then=BATCH)[1], "what is saved up is bounded"
    ahead = RunAhead([EOS], LONGEST)
    for is_last, batch in [(False, BATCH)] * 50 + [(False, PREDICTED)] * (MOST_CREDIT - 1) + [(True, PREDICTED)]:
        ahead.predict(BATCH, answer_of(VERDICT), lambda _: Admit(1, 6, (3, 4), 2, SamplingParams()))
        ahead.matches(batch)
        assert ahead.pays is is_last, "and so is what is owed"


def test_nothing_matches_that_was_not_predicted():
    ahead = RunAhead([EOS], LONGEST)
    assert not ahead.matches(PREDICTED) and ahead.pays
    ahead.predict(BATCH, answer_of(VERDICT), lambda _: Admit(1, 6, (3, 4), 2, SamplingParams()))
    ahead.forget()
    assert not ahead.matches(PREDICTED) and ahead.pays


# --- the target -------------------------------------------------------------------------------------------------------

PROMPT, OTHER = (9, 8, 7, 6, 5, 4, 3), (3, 4, 5, 6)
WAITED_S = 0.05


class Knowing(Recorder):
    """A drafter that drafts what the target writes, but for the last token of a draft."""

    def __init__(self, reference):
        super().__init__()
        self.reference = reference

    def propose(self, contexts, budgets):
        drafts = []
        for context, budget in zip(contexts, budgets, strict=True):
            text = [*context.token_ids]
            for _ in range(budget):
                with torch.no_grad():
                    text.append(int(self.reference(torch.tensor([text])).logits[0, -1].argmax()))
            drafted = text[len(context.token_ids) :]
            drafted[-1] = (drafted[-1] + 1) % 97
            drafts.append(Draft.chosen(TokenTree.chain(context.token_ids[-1], drafted)))
        return drafts


@pytest.fixture
def open_role(models):
    def open_(*, ahead=True, slots=64, price=0):
        runner = open_model(models["target"], num_slots=slots)
        drafter = AttachedDrafter(Knowing(models["reference"]), SINGLE, "cpu")
        foresight = RunAhead([EOS], LONGEST, price) if ahead else None
        return TargetRole(runner, "coupled", [EOS], is_lead=True, drafter=drafter, ahead=foresight)

    return open_


def admission(request_id, text, epoch=6, **sampling):
    asked = SamplingParams(**dict(max_tokens=40, ignore_eos=True) | sampling)
    return Admit(request_id, epoch, tuple(text), len(text), asked, cache_salt="")


def opening(**sampling):
    return VerifyBatch(1, (admission(1, PROMPT, **sampling),), items=(VerifyItem(1, len(PROMPT), None, 3),))


def text_of(batches):
    """Of request 1, by the commits of these batches."""
    return [*PROMPT, *(token for batch in batches for one in batch.commits for token in one.token_ids)]


def as_predicted(batch, _):
    return batch


def without_its_draft(batch, _):
    return replace(batch, items=(replace(batch.items[0], proposal=None),))


def with_a_shorter_draft(batch, _):
    (one,) = batch.items
    shorter = TokenTree.chain(one.proposal.tree.token_ids[0], one.proposal.tree.token_ids[1:2])
    return replace(batch, items=(replace(one, proposal=Proposal.deterministic(*_prefix(one.proposal), shorter)),))


def beside_another_request(batch, _):
    return replace(batch, admits=(admission(2, OTHER),), items=(*batch.items, VerifyItem(2, len(OTHER), None, 2)))


def with_its_text_read_again(batch, text):
    """It was preempted: what the verdict committed is in the text that is admitted."""
    return replace(
        batch,
        commits=(),
        releases=(1,),
        admits=(admission(1, text, epoch=7),),
        items=(VerifyItem(1, len(text), None, 3),),
    )


def once_another_took_its_place(batch, _):
    """It was ended by a stop string, or aborted; its last commit is sent, and its rows may serve another."""
    return replace(batch, releases=(1,), admits=(admission(2, PROMPT),), items=(VerifyItem(2, len(PROMPT), None, 3),))


CHANGES = [
    as_predicted,
    without_its_draft,
    with_a_shorter_draft,
    beside_another_request,
    with_its_text_read_again,
    once_another_took_its_place,
]


def _prefix(proposal):
    return proposal.request_id, proposal.epoch, proposal.prefix_len, proposal.prefix_hash


def served(role, change, *, rounds=3, **sampling):
    """Answers without their times, and the state after each: the third batch is another one than is predicted."""
    batch, found, sent, answers = opening(**sampling), [], [], []
    predictor = RunAhead([EOS], LONGEST)
    for number in range(1, rounds + 1):
        sent.append(batch)
        (answer,) = role.answer(batch)
        answers.append(answer)
        rows = {request_id: role.runner.cached_len(request_id) for request_id in role.contexts}
        drafts = answer.drafts.proposals if answer.drafts is not None else ()
        found.append((answer.verdicts, drafts, answer.hits, answer.num_tokens, rows))
        role.runner.pool.check()
        batch = predictor.predict(batch, answer, lambda request_id: role.contexts[request_id].admit)
        if number == 2:
            batch = change(batch, [*text_of(sent), *batch.commits[0].token_ids])
    return found, answers


@pytest.mark.parametrize("change", CHANGES)
def test_what_follows_is_what_a_target_answers_that_waits(open_role, change):
    expected, _ = served(open_role(ahead=False), change, rounds=6)
    found, answers = served(open_role(), change, rounds=6)
    assert found == expected
    assert sum(len(verdict.path) for answer in answers for verdict in answer.verdicts) > 3, "drafts are accepted"
    ahead = [answer.ran_ahead for answer in answers]
    assert ahead == [False, True, change is as_predicted, True, True, True]
    assert [answer.dropped_s > 0 for answer in answers] == [False, False, change is not as_predicted] + [False] * 3


def test_nothing_is_computed_ahead_while_it_does_not_pay(open_role):
    """One batch that came otherwise is made up for by so many that came as predicted."""
    _, answers = served(open_role(price=3), without_its_draft, rounds=8)
    assert [answer.ran_ahead for answer in answers] == [False, True, False, False, False, True, True, True]
    assert [answer.dropped_s > 0 for answer in answers] == [False, False, True] + [False] * 5


def test_a_pass_made_ahead_takes_the_time_that_it_took(open_role, monkeypatch):
    """Not that of the wait for its batch, and not before it."""
    role, took_s = open_role(), []
    forward = role.runner.forward

    def timed(*arguments, **options):
        began = time.monotonic()
        found = forward(*arguments, **options)
        took_s.append(time.monotonic() - began)
        return found

    monkeypatch.setattr(role.runner, "forward", timed)
    batch, predictor = opening(), RunAhead([EOS], LONGEST)
    (answer,) = role.answer(batch)
    made = time.monotonic()
    time.sleep(WAITED_S)
    batch = predictor.predict(batch, answer, lambda request_id: role.contexts[request_id].admit)
    came = time.monotonic()
    (after,) = role.answer(batch)
    assert after.ran_ahead and answer.left_at < after.started < after.finished
    assert after.finished - after.started > took_s[1], "which the pass took that was made before the batch came"
    assert after.finished - after.started < came - made + (after.finished - came), "the wait is no work"
    assert after.committed == after.started and after.started > answer.left_at + WAITED_S - (made - answer.left_at)


def test_what_a_pass_made_ahead_raises_is_raised_once_its_batch_is_here(open_role, monkeypatch):
    """The coordinator puts it down to the requests of that batch."""
    role = open_role()
    forward, passes = role.runner.forward, iter((True, False))

    def failing(*arguments, **options):
        if next(passes):
            return forward(*arguments, **options)
        raise RuntimeError("no memory")

    monkeypatch.setattr(role.runner, "forward", failing)
    (answer,) = role.answer(opening())
    assert answer.verdicts, "the answer had left"
    batch = RunAhead([EOS], LONGEST).predict(opening(), answer, lambda _: admission(1, PROMPT))
    with pytest.raises(RuntimeError, match="no memory"):
        next(role.answer(batch))


@pytest.mark.parametrize(("room", "num_pending"), [(3, 0), (4, 4)])
def test_no_pass_is_made_ahead_without_room_for_it(open_role, room, num_pending):
    """The rows are a root and its draft of 3; the coordinator preempts a request where they do not fit."""
    role = open_role(slots=len(PROMPT) + room)
    (answer,) = role.answer(opening())
    assert answer.drafts.proposals[0].tree.num_draft_tokens == 3 and role.runner.cached_len(1) == len(PROMPT)
    assert role.runner.pool.pending_len(1) == num_pending
    role.runner.pool.check()
    batch = RunAhead([EOS], LONGEST).predict(opening(), answer, lambda _: admission(1, PROMPT))
    (answer,) = role.answer(without_its_draft(batch, ()))
    assert len(answer.verdicts) == 1, "with fewer rows it goes on"


@pytest.mark.parametrize("how", ["forget", "weights"])
def test_a_pass_made_ahead_is_not_of_use_after_the_end_of_all_requests(open_role, models, how):
    role = open_role()
    assert len(list(role.answer(opening()))) == 1
    if how == "forget":
        role.forget()
    else:
        (answer,) = role.answer(VerifyBatch(2, weights=Weights(str(models["target"]), 2)))
        assert not answer.refusal and answer.dropped_s > 0
    role.runner.pool.check()
    assert role.contexts == {} and role.runner.pool.num_free == 64
    (answer,) = role.answer(replace(opening(), round=3))
    assert not answer.ran_ahead and answer.dropped_s == 0 and answer.num_tokens == len(PROMPT)
