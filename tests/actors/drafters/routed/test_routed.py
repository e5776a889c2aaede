"""`drafter=routed`: a request belongs to one member, which alone reads it and learns from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from actors.drafters.interface import Context
from actors.drafters.model.config import ModelDrafterConfig
from actors.drafters.online import learner as learner_module
from actors.drafters.online import windows as windows_module
from actors.drafters.online.idle_time import IdleTime
from actors.drafters.routed.config import RoutedDrafterConfig
from actors.drafters.routed.drafter import MembersLearning
from actors.drafters.routed.router import PromptRouter
from actors.protocol.messages import Commit, LearningWork
from actors.protocol.sampling_params import SamplingParams
from cluster.config.compose import load_config

ONLINE = ModelDrafterConfig(num_draft_tokens=5, kv_slots=4096, online=True, online_rate=3e-3)
MEMBERS: Any = (ONLINE, ONLINE)
ROUTED = RoutedDrafterConfig(drafters=MEMBERS, num_draft_tokens=5)


@pytest.fixture
def by_first_token(monkeypatch):
    """The kind of a request is its first token: even ones are those of member 0."""
    monkeypatch.setattr(PromptRouter, "route", lambda self, token_ids: token_ids[0] % 2)


@pytest.fixture
def learns_at_once(monkeypatch):
    monkeypatch.setattr("actors.drafters.online.idle_time.MOST_DELAYED", 1e9)
    monkeypatch.setattr(IdleTime, "pause_s", lambda *_: 0.0)
    monkeypatch.setattr(learner_module, "WINDOWS_PER_STEP", 1)
    monkeypatch.setattr(learner_module, "STEPS_PER_VERSION", 1)
    monkeypatch.setattr(windows_module, "POSITIONS", 32)
    monkeypatch.setattr(windows_module, "FEWEST", 1)
    monkeypatch.setattr(windows_module, "READ_BEFORE", 200)
    monkeypatch.setattr(windows_module, "USES", 25)


def kinds_of(requests):
    """The requests of member 0, and those of member 1."""
    return [[one for one in requests if one.prompt[0] % 2 == kind] for kind in (0, 1)]


def accepted_share(room, requests, name):
    """Of the draft tokens of the member with this name, which all of them ask for."""
    room.tokens.clear()
    room.serve([replace(one, drafter=name) for one in requests])
    room.target.forget()
    room.draft.forget()
    return room.stats.num_accepted_tokens / room.stats.num_draft_tokens


@pytest.mark.slow
def test_each_member_ends_better_on_its_own_kind_of_text(
    open_room, make_requests, models, by_first_token, learns_at_once
):
    room = open_room(ROUTED)
    requests = make_requests(8, max_tokens=40)
    kinds = kinds_of(requests)
    assert all(kinds), "both members need requests"
    for _ in range(2):
        room.tokens.clear()
        room.serve(requests)
        while room.draft.wants_work:
            room.draft.work()
        room.target.forget()
        room.draft.forget()
    learned = [one.drafter.learner for one in room.draft.drafter.members]
    assert all(one.version > 3 for one in learned)
    own, others = 0.0, 0.0
    for kind, served in enumerate(kinds):
        own += accepted_share(room, served, f"{kind}-model")
        others += accepted_share(room, served, f"{1 - kind}-model")
    assert own > others + 0.3, (own, others)


def test_a_member_sees_nothing_of_the_requests_of_others(open_room, make_requests, by_first_token):
    room = open_room(ROUTED)
    opened: list[set[int]] = [set(), set()]
    for number, one in enumerate(room.draft.drafter.members):
        open_ = one.drafter.open
        one.drafter.open = lambda context, own=opened[number], open_=open_: (
            own.add(context.token_ids[0]),
            open_(context),
        )
    requests = make_requests(6, max_tokens=12)
    room.serve(requests)
    assert [{token % 2 for token in own} for own in opened] == [{0}, {1}]
    for one in room.draft.drafter.members:
        assert not one.drafter._windows_of_text._verified and not one.drafter._contexts


def test_a_request_gets_the_member_that_it_names(open_room, make_requests, by_first_token):
    requests = make_requests(4, max_tokens=12)
    room = open_room(ROUTED).serve([replace(one, drafter="1-model") for one in requests])
    (level,) = room.stats.levels.items()
    assert level[0] == "1-model"
    assert level[1]["num_draft_tokens"] == room.stats.num_draft_tokens > level[1]["num_accepted_tokens"] > 0


def test_a_long_prompt_that_comes_in_chunks_is_routed_by_all_of_it(open_room, monkeypatch):
    """As a drafter on ranks of its own is sent it; one that names its member is read by that as it comes."""
    asked: list[list[int]] = []
    monkeypatch.setattr(PromptRouter, "route", lambda self, token_ids: asked.append(token_ids) or 1)
    drafter, prompt = open_room(ROUTED).draft.drafter, list(range(2, 42))
    sampling = SamplingParams(max_tokens=9)
    contexts = [
        Context(number, 0, prompt[:16], 40, sampling, drafter=name) for number, name in ((0, None), (1, "0-model"))
    ]
    read = [one.drafter.runner.cached_len for one in drafter.members]
    for context in contexts:
        drafter.open(context)
    for chunk in (prompt[16:32], prompt[32:]):
        drafter.prefill(contexts)
        assert not asked and read[0](1) == len(contexts[1].token_ids) - 1
        assert [draft.tree.num_draft_tokens for draft in drafter.propose(contexts[:1], [3])] == [0]
        for context in contexts:
            drafter.observe(context, Commit(context.request_id, 0, len(context.token_ids), (), tuple(chunk)))
            context.extend(chunk)
    drafter.prefill(contexts)
    assert asked == [prompt] and read[1](0) == read[0](1) == len(prompt) - 1
    assert all(draft.tree.num_draft_tokens for draft in drafter.propose(contexts, [3, 3]))
    assert asked == [prompt], "once"
    early = Context(2, 0, prompt[:16], 40, sampling)
    drafter.open(early)
    for number in range(3):
        drafter.release(number)
    assert asked == [prompt], "one that ends while its prompt comes is not routed"


class Learning:
    """A drafter that has so many steps to take."""

    idle_share = 0.5

    def __init__(self, left: int, log: list[int]) -> None:
        self.left, self.log, self.saved = left, log, 0

    @property
    def wants_learning(self) -> bool:
        return self.left > 0

    def learn(self) -> None:
        self.log.append(self.left)
        self.left -= 1

    def save(self) -> None:
        self.saved += 1

    def learning(self) -> LearningWork:
        size = 10 * (1 + self.left)
        return LearningWork(1, self.left > 0, 2, size, 3, 4, 1.0 * self.left, 0.5 * self.left, 0.25 * self.left)


def test_those_that_learn_take_turns_and_are_summed_up():
    log: list[int] = []
    parts = [Learning(1, log), Learning(3, log)]
    both = MembersLearning(parts)
    assert both.learning() == LearningWork(
        2, True, 4, 60, 6, 8, pytest.approx(7 / 3), pytest.approx(7 / 6), pytest.approx(7 / 12)
    )
    while both.wants_learning:
        both.learn()
    assert log == [1, 3, 2, 1]
    both.save()
    assert [one.saved for one in parts] == [1, 1]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("drafter.drafters=[model]", "drafter.drafters=1: must be two or more"),
        ("drafter.drafters=[model,suffix]", "drafter.drafters[1].name=suffix: is not routed to"),
        (
            "drafter.drafters=[model,{name: model, online: true, online_state: x}]",
            "drafter.drafters[1].online_state=x: is of one",
        ),
    ],
)
def test_what_cannot_be_routed_to_is_refused(override, line):
    with pytest.raises(ValueError) as caught:
        load_config(["drafter=routed", override])
    assert str(caught.value).startswith(line)


@pytest.mark.extended
def test_others_that_hold_several_drafters_have_none_that_learns():
    for options in (
        ["drafter=auto", "drafter.drafters=[suffix,{name: model, online: true}]"],
        ["drafter=cascade", "drafter.levels=[ngram,{name: model, online: true}]"],
    ):
        with pytest.raises(
            ValueError, match=r"\[1\]\.online=True: learns as a drafter of its own, or with drafter=routed"
        ):
            load_config(options)
