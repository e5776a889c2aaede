"""What stands around a drafter that learns: its report, when it saves, and when new weights are put in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.drafters.interface import Capabilities
from actors.drafters.online.drafter import STEPS_PER_SAVE, OnlineDrafter
from actors.protocol.messages import LearningWork


class Learner:
    """Each number is its own; a call of `learn` makes as many steps as it is given."""

    def __init__(self) -> None:
        self.version, self.serves, self.num_steps, self.num_positions, self.num_rollbacks = 2, True, 3, 5, 7
        self.loss, self.adapted_share, self.shipped_share = (SimpleNamespace(mean=mean) for mean in (1.1, 1.3, 1.7))
        self.memory = SimpleNamespace(num_positions=11, add=self.add)
        self.wants_step, self.saved, self.windows, self.staged = True, [], [], None
        self.steps = 1

    def add(self, window: object) -> None:
        self.windows.append(window)

    def learn(self) -> None:
        self.num_steps += self.steps

    def save(self, path: object) -> None:
        self.saved.append((path, self.num_steps))

    def take_weights(self) -> Any:
        staged, self.staged = self.staged, None
        return staged


class Drafter:
    def __init__(self, log: list[str]) -> None:
        self.capabilities, self.log = Capabilities(), log

    def propose(self, contexts: Any, budgets: Any) -> list[Any]:
        self.log.append("drafts")
        return []


@pytest.fixture
def parts():
    """The learner, what happens in order, and what makes the drafter of both."""
    log: list[str] = []
    learner: Any = Learner()
    served: Any = [SimpleNamespace(assign=lambda matrix, i=i: log.append(f"{i}: {matrix}")) for i in range(2)]
    inside: Any = Drafter(log)
    runner: Any = None
    return learner, log, lambda state: OnlineDrafter(inside, runner, served, learner, 0.25, state)


def test_every_field_of_the_report_is_the_learner_s(parts):
    learner, _, make = parts
    drafter = make(None)
    assert drafter.learning() == LearningWork(
        version=2,
        is_served=True,
        num_steps=3,
        num_positions=5,
        num_held=11,
        num_rollbacks=7,
        loss=1.1,
        adapted_share=1.3,
        shipped_share=1.7,
    )
    learner.serves = False
    assert not drafter.learning().is_served and drafter.idle_share == 0.25
    assert drafter.wants_learning
    learner.wants_step = False
    assert not drafter.wants_learning


def test_it_saves_after_so_many_steps_and_at_the_end_what_is_new(parts):
    learner, _, make = parts
    drafter = make("file")
    for _ in range(2 * STEPS_PER_SAVE):
        drafter.learn()
    assert learner.saved == [("file", 3 + STEPS_PER_SAVE), ("file", 3 + 2 * STEPS_PER_SAVE)]
    drafter.save()
    assert len(learner.saved) == 2, "there is nothing new"
    drafter.learn()
    drafter.save()
    assert learner.saved[2:] == [("file", 4 + 2 * STEPS_PER_SAVE)]
    nowhere = make(None)
    for _ in range(STEPS_PER_SAVE):
        nowhere.learn()
    assert len(learner.saved) == 3


def test_new_weights_are_put_in_before_a_draft_begins_once(parts):
    learner, log, make = parts
    drafter = make(None)
    drafter.propose([], [])
    learner.staged = ["a", "b"]
    drafter.learn()
    assert log == ["drafts"], "not while it learns"
    for _ in range(2):
        drafter.propose([], [])
    assert log == ["drafts", "0: a", "1: b", "drafts", "drafts"]


@pytest.mark.parametrize("size", [0, 40])
def test_features_are_as_wide_as_its_drafter_reads_them(parts, size):
    learner, log, _ = parts
    inside: Any = Drafter(log)
    if size:
        inside.capabilities = Capabilities(reads_features=SimpleNamespace(feature_size=size))  # pyright: ignore
    served: Any = []
    runner: Any = None
    assert OnlineDrafter(inside, runner, served, learner, 0.25, None).feature_size == size
