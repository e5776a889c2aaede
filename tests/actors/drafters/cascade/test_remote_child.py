"""Levels on ranks of their own: where each level runs, what waits for what, and what happens when a level is lost."""

from __future__ import annotations

import random
from collections import deque

import pytest

from actors.drafters.cascade.build import build_levels
from actors.drafters.cascade.config import CascadeDrafterConfig, LevelsPlacement
from actors.drafters.cascade.remote_child import RemoteChild
from actors.drafters.config import DraftSetup
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.options import SchedulerConfig, VerifyConfig
from actors.protocol.membership import RoleBack, RoleLost, Stop
from actors.protocol.messages import DraftBatch, ProposalBatch
from actors.roles.draft import DraftRole
from actors.topology import child_role, parent_role
from actors.transport.channel import CODEC
from actors.transport.mailbox import Mailbox
from parallel.comm.group import SINGLE, Group
from tests import matrices


def cascade(*levels):
    return CascadeDrafterConfig(
        levels=levels,
        tails=(0,) * len(levels),
        num_draft_tokens=levels[-1].num_draft_tokens,
        placement=LevelsPlacement.separate,
    )


def model(path, length=3):
    return ModelDrafterConfig(path=path, num_draft_tokens=length)


def setup_of(pipeline):
    return DraftSetup(VerifyConfig(), pipeline, SchedulerConfig(), SINGLE, "cpu", (1,))


def test_every_model_has_a_role_and_a_lookup_lives_with_the_one_it_drafts_for():
    lookup = NgramDrafterConfig()
    assert cascade(lookup, model("a"), model("b"), model("c")).roles() == {
        "draft": range(3, 4),
        "draft2": range(2, 3),
        "draft3": range(0, 2),
    }
    assert cascade(model("a"), model("b")).roles() == {"draft": range(1, 2), "draft2": range(0, 1)}
    assert lookup.roles() == {"draft": range(1)}


def test_who_speaks_to_whom():
    assert (child_role("draft"), child_role("draft2")) == ("draft2", "draft3")
    assert (parent_role("draft3"), parent_role("draft2"), parent_role("draft")) == ("draft2", "draft", None)


class Loop:
    """The control line to a level in this process: records are encoded, and answers may take their time."""

    gives_up = False

    def __init__(self, role=None, seed=0, dies_after=None):
        self.role, self.arrived, self.sent = role, deque(), []
        self._chance = random.Random(seed)
        self._dies_after = dies_after

    def send(self, record):
        self.sent.append(record)
        if self._dies_after is not None and len(self.sent) == self._dies_after:
            self.arrived.append(RoleLost("draft2"))
        elif self.role is not None:
            record = CODEC.decode(CODEC.encode(record))
            self.arrived += [CODEC.decode(CODEC.encode(answer)) for answer in self.role.answer(record)]
            while self.role.wants_work and self._chance.random() < 0.7:
                self.role.work()

    def receive(self, timeout_s=None):
        if timeout_s == 0 and self._chance.random() < 0.5:
            return None
        if not self.arrived:
            assert timeout_s == 0 or (timeout_s and self.gives_up), "no answer would ever come"
            return None
        return self.arrived.popleft()


def proposals(round, num_missing=0):
    return ProposalBatch(round, (), 0.0, 0.0, num_missing)


def test_an_answer_in_parts_is_awaited_and_an_old_one_is_dropped():
    line = Loop()
    line.arrived += [proposals(1), proposals(2, 1), Stop("later"), proposals(2)]
    mailbox = Mailbox(line)
    port = RemoteChild(mailbox, SINGLE)
    port.post(DraftBatch(2))
    assert port.collect(2, wait=True) is None, "a record for the rank ends the wait"
    assert mailbox.receive() == Stop("later")
    assert [batch.num_missing for batch in port.collect(2, wait=True)] == [1, 0]


class ScriptedGroup(Group):
    """Rank 1 of 2; rank 0 broadcasts these numbers."""

    rank, size = 1, 2

    def __init__(self, *codes):
        self._codes = deque(codes)

    def broadcast(self, tensor, src=0):
        return tensor.fill_(self._codes.popleft())


def test_only_rank_0_sends():
    line = Loop()
    RemoteChild(Mailbox(line), ScriptedGroup()).post(DraftBatch(1))
    assert not line.sent


def test_the_ranks_of_a_level_act_on_what_rank_0_received():
    """A rank has the answer already, or not yet, or a loss that rank 0 has not received: it acts as rank 0."""
    line = Loop()
    port = RemoteChild(Mailbox(line), ScriptedGroup(-1, 2, 0, 1))
    port.post(DraftBatch(1))
    line.arrived += [proposals(1, 1), proposals(1)]
    assert port.collect(1, wait=False) is None, "rank 0 has received nothing yet"
    assert [batch.num_missing for batch in port.collect(1, wait=False)] == [1, 0]
    port.post(DraftBatch(2))
    assert port.collect(2, wait=True) == [], "rank 0 has received a loss"
    line.arrived += [RoleLost("draft2"), RoleBack("draft2", 9), proposals(3)]
    port.poll()  # rank 0 has posted long ago, and the answer is here
    port.post(DraftBatch(3))
    assert port.collect(3, wait=False) == [proposals(3)]


def test_a_batch_names_its_predecessor_and_a_lost_answer_is_no_answer():
    line = Loop()
    port = RemoteChild(Mailbox(line), SINGLE)
    line.gives_up = True
    port.post(DraftBatch(1))
    assert not port.collect(1, wait=True)
    port.post(DraftBatch(2))
    line.arrived.append(RoleBack("draft2", 5))
    port.poll()
    port.post(DraftBatch(3))
    port.post(DraftBatch(4))
    assert [(batch.round, batch.after, batch.epoch) for batch in line.sent] == [
        (1, 0, 0),
        (2, 1, 0),
        (3, 0, 5),
        (4, 3, 5),
    ]


def test_a_record_of_the_child_ends_the_wait_for_the_next_record():
    line = Loop()
    line.arrived += [proposals(1), Stop("later")]
    mailbox = Mailbox(line)
    assert not mailbox.has_child_records
    assert mailbox.receive(timeout_s=9) is None and mailbox.has_child_records
    assert mailbox.receive(timeout_s=9) == Stop("later"), "a record of the child ends one wait"


def test_a_lost_level_sends_nothing_until_it_is_back_without_state():
    line = Loop()
    port = RemoteChild(Mailbox(line), SINGLE)
    line.arrived.append(RoleLost("draft2"))
    assert port.collect(1, wait=True) == []
    port.post(DraftBatch(2))
    assert port.collect(2, wait=True) == [] and not line.sent
    line.arrived.append(RoleBack("draft2", 7))
    while port.epoch == 0:
        port.poll()
    port.post(DraftBatch(3))
    assert line.sent == [DraftBatch(3, epoch=7)]
    line.arrived.append(RoleBack("draft2", 8))
    assert port.collect(3, wait=True) == [], "an order to the lost child is never answered"


@pytest.fixture
def open_pair(open_room, models):
    """A room whose drafter's child level is behind a connection."""

    def open_(pipeline, **line_options):
        lower = model(str(models["small"]), 3)
        config = cascade(lower, model(str(models["drafter"]), 5))
        room = open_room(pipeline=pipeline)
        setup = setup_of(pipeline)
        line = Loop(DraftRole(lower.build(setup)[0]), **line_options)
        port = RemoteChild(Mailbox(line), SINGLE)
        room.draft = DraftRole(build_levels(config, range(1, 2), setup, port)[0])
        room.num_draft_tokens = 5
        return room, line

    return open_


@pytest.mark.extended
@pytest.mark.parametrize(
    "pipeline, temperature",
    [
        ("sync", 0.0),
        ("branches", 1.0),
        pytest.param("branches", 0.0, marks=pytest.mark.slow),
        pytest.param("tree", 1.0, marks=pytest.mark.slow),
        pytest.param("sync", 1.0, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_plain_decoding(open_room, open_pair, make_requests, pipeline, temperature):
    requests = make_requests(3, max_tokens=30 if matrices.is_whole else 16, temperature=temperature)
    plain = open_room(pipeline="plain").serve(requests)
    room, _ = open_pair(pipeline, seed=3)
    room.serve(requests)
    assert (room.tokens, room.ends) == (plain.tokens, plain.ends)
    assert room.stats.levels["0-model"]["num_accepted_tokens"] > 0
    assert any(lane == "0-model" for lane, *_ in room.stats.spans), "a level elsewhere has a lane of its own"


@pytest.mark.extended
@pytest.mark.parametrize(
    ("pipeline", "returns"),
    [
        ("sync", False),
        ("branches", True),
        pytest.param("sync", True, marks=pytest.mark.slow),
        pytest.param("branches", False, marks=pytest.mark.slow),
    ],
)
def test_a_level_that_dies_is_skipped_and_one_that_comes_back_is_used_again(
    open_room, open_pair, make_requests, models, pipeline, returns
):
    requests = make_requests(2, max_tokens=30 if matrices.is_whole else 16)
    plain = open_room(pipeline="plain").serve(requests)
    room, line = open_pair(pipeline, dies_after=5)

    def come_back(room):
        nonlocal returns
        if returns and len(line.sent) == 5:
            line.role = DraftRole(model(str(models["small"])).build(setup_of(pipeline))[0])
            line.arrived.append(RoleBack("draft2", 2))
            returns = False

    came_back = returns
    room.serve(requests, come_back)
    assert (room.tokens, room.ends) == (plain.tokens, plain.ends) and room.stats.num_accepted_tokens > 0
    assert (len(line.sent) > 5) == came_back
