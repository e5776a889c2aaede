"""The records that a level sends to the one below: each brings the child's text to the parent's, and no more."""

from __future__ import annotations

import pytest

from actors.drafters.cascade.child import ChildLevel
from actors.drafters.interface import Context
from actors.protocol.messages import (
    Admit,
    Commit,
    DraftBatch,
    DraftOrder,
    LevelWork,
    Proposal,
    ProposalBatch,
    SamplingParams,
    TokenTree,
    TopTokens,
)
from actors.sampling.noise import NoiseStream, noise_key

SAMPLING = SamplingParams(temperature=0.5)
TOP = TopTokens(1, b"", b"", b"", ())


class Port:
    """Notes what is posted; answers what it is given."""

    def __init__(self, *, is_remote=False):
        self.epoch, self.is_remote, self.has_records = 0, is_remote, False
        self.posted: list[DraftBatch] = []
        self.answers: dict[int, list[ProposalBatch] | None] = {}
        self.num_polls = 0

    def post(self, batch):
        self.posted.append(batch)

    def collect(self, round, *, wait):
        return self.answers.get(round, [] if wait else None)

    def poll(self):
        self.num_polls += 1


def opened(port, *request_ids):
    child = ChildLevel(port, "0-low", 4)
    for request_id in request_ids or (7,):
        child.open(Context(request_id, 3, [5, 6], 2, SAMPLING, admission=11, settled_len=2, scope=9))
    return child


def posted(child, port, *orders):
    child.post([(7, text, count) for text, count in orders] if not isinstance(orders[0][0], int) else orders)
    return port.posted[-1]


def admission(number):
    return noise_key(11, NoiseStream.DRAFT, number)


def test_a_text_is_admitted_with_all_that_belongs_to_it():
    port = Port()
    batch = posted(opened(port), port, ([5, 6, 1], 3))
    assert batch.admits == (Admit(7, 3, (5, 6, 1), 2, SAMPLING, admission(0), memory_scope=9),)
    assert (batch.round, batch.commits, batch.releases, batch.orders) == (1, (), (), (DraftOrder(7, 3),))


@pytest.mark.parametrize(
    ("ordered", "change", "text", "commit"),
    [
        (2, None, [5, 6, 1, 2], Commit(7, 3, 3, (), (2,), 2)),
        (2, None, [5, 6, 1], Commit(7, 3, 2, (), (1,), 2)),
        (0, None, [5, 6, 1], None),
        (2, (1, 2), [5, 6, 1, 8, 9, 4], Commit(7, 3, 3, (1, 2), (8, 9, 4), 2)),
        (2, (1, 2), [5, 6, 1, 8, 9], Commit(7, 3, 3, (1,), (8, 9), 2)),
        (2, 2, [5, 6, 4], Commit(7, 3, 2, (), (4,), 2)),
        (2, 2, [5, 6], Commit(7, 3, 2, (), (), 2)),
        (2, 3, [5, 6, 1, 4], Commit(7, 3, 3, (), (4,), 2)),
        (2, 5, [5, 6, 1, 4], Commit(7, 3, 3, (), (4,), 2)),
    ],
    ids=[
        "goes on",
        "the root again",
        "nothing new",
        "a path",
        "its last node is the root",
        "cut",
        "cut alone",
        "all",
        "more",
    ],
)
def test_what_follows_is_said_as_it_happened(ordered, change, text, commit):
    """What follows a draft that was ordered at three tokens: a path that was accepted, or a length that was kept."""
    port = Port()
    child = opened(port)
    posted(child, port, ([5, 6, 1], ordered))
    if isinstance(change, tuple):
        child.accept(7, change)
    elif change is not None:
        child.cut(7, change)
    batch = posted(child, port, (text, 1))
    assert batch.commits == (() if commit is None else (commit,)) and not batch.admits and batch.round == 2
    again = posted(child, port, ([*text, 3], 0))
    assert again.commits == (Commit(7, 3, len(text), (), (3,), 2),), "the child has it now"


def test_a_cut_takes_back_what_it_cuts_of_an_accepted_path():
    port = Port()
    child = opened(port)
    posted(child, port, ([5, 6, 1], 4))
    child.accept(7, (1, 2, 3))
    child.cut(7, 5)
    batch = posted(child, port, ([5, 6, 1, 8, 9, 4, 4], 1))
    assert batch.commits == (Commit(7, 3, 3, (1, 2), (8, 9, 4, 4), 2),)


def test_requests_that_ended_are_released_if_the_child_has_them():
    port = Port()
    child = opened(port, 7, 8)
    posted(child, port, (7, [5, 6], 1))
    child.release(7)
    child.release(8)
    child.release(99)
    child.open(Context(9, 3, [5], 1, SAMPLING))
    assert posted(child, port, (9, [5], 1)).releases == (7,)
    assert posted(child, port, (9, [5, 6], 1)).releases == ()


def test_a_request_that_opens_again_is_admitted_anew():
    port = Port()
    child = opened(port)
    posted(child, port, ([5, 6], 1))
    child.open(Context(7, 4, [5], 1, SAMPLING))
    batch = posted(child, port, ([5], 1))
    assert batch.releases == (7,) and batch.admits[0].epoch == 4 and batch.admits[0].token_ids == (5,)


def test_a_child_that_came_back_without_state_is_sent_all():
    port = Port()
    child = opened(port, 7, 8)
    posted(child, port, (7, [5, 6], 1), (8, [5, 6], 1))
    child.release(8)
    port.epoch = 1
    batch = posted(child, port, (7, [5, 6, 1], 1))
    assert batch.releases == () and batch.admits == (Admit(7, 3, (5, 6, 1), 2, SAMPLING, admission(1), memory_scope=9),)
    assert port.num_polls == 2
    assert not posted(child, port, (7, [5, 6, 1, 2], 1)).admits


def test_likely_tokens_travel_once():
    port = Port()
    child = opened(port)
    child.add_top_tokens(None)
    child.add_top_tokens(TOP)
    assert posted(child, port, ([5, 6], 1)).top_tokens == (TOP,) and posted(child, port, ([5, 6], 1)).top_tokens == ()


def proposed(request_id):
    return Proposal(request_id, 3, 2, 0, TokenTree.chain(6, (1,)))


def test_one_answer_is_awaited_at_a_time():
    port = Port()
    child = opened(port)
    assert child.collect() == {} and not child.is_awaited and not child.is_silent
    posted(child, port, ([5, 6], 1))
    assert child.is_awaited and child.is_silent
    assert child.collect(wait=False) is None and child.is_awaited
    port.has_records = True
    assert not child.is_silent
    parts = [ProposalBatch(1, (proposed(7),), 1.0, 1.5, 1), ProposalBatch(1, (proposed(8),), 2.0, 2.25)]
    port.answers[1] = parts
    assert child.collect(wait=False) == {7: proposed(7), 8: proposed(8)} and not child.is_awaited
    assert child.level_stats() == (LevelWork("0-low", 1, 0.5), LevelWork("0-low", 1, 0.25))
    assert child.level_stats() == ()
    posted(child, port, ([5, 6], 1))
    assert child.collect() == {} and not child.is_awaited, "it is lost"


@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("levels", [(), (LevelWork("below", 2),)])
def test_the_work_of_a_child_and_of_levels_below_it(is_remote, levels):
    """The times of a child on ranks of its own are shown, work ahead among them."""
    port = Port(is_remote=is_remote)
    child = opened(port)
    posted(child, port, ([5, 6], 1))
    port.answers[1] = [ProposalBatch(1, (proposed(7),), 1.0, 1.5, 0, ((0.25, 0.75, False),), levels)]
    child.collect()
    spans = ((1.0, 1.5), (0.25, 0.75)) if is_remote else ()
    if levels:
        assert child.level_stats() == (*levels, *([LevelWork("0-low", spans=spans)] if is_remote else []))
    else:
        assert child.level_stats() == (LevelWork("0-low", 2, 1.0, spans=spans),)
    posted(child, port, ([5, 6], 0))
    port.answers[2] = [ProposalBatch(2, (), 1.0, 1.5)]
    child.collect()
    assert child.level_stats() == (), "text alone is no draft"
