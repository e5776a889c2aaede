"""A drafter on the target's ranks: what goes with a pass, by what the decision is in the middle of."""

from __future__ import annotations

from typing import Any

import pytest

from actors.coordinator.attached_port import AttachedPort
from actors.coordinator.sequence import Sequence
from actors.policy.decision import Mode
from actors.protocol.messages import UNKNOWN_COSTS, Request, SamplingParams


class Decided:
    """A policy that is in one mode, and follows some of the requests."""

    may_end = may_score = False
    costs = UNKNOWN_COSTS

    def __init__(self, mode: Mode, num_followed: int = 2, length: int = 3) -> None:
        self.mode, self.length, self._num_followed = mode, length, num_followed
        self.num_caught_up = 0

    def caught_up(self):
        self.num_caught_up += 1

    def num_followed(self, num_requests):
        return min(num_requests, self._num_followed)

    def draft_length(self, request_id, most):
        return self.length if self.mode in (Mode.speculate, Mode.trial) else 0


def rows(*requests: Request) -> list[Any]:
    """Their prompts whole, in one pass."""
    found = [Sequence.start(request, 64) for request in requests]
    return [(one, one.uncached_len, None) for one in found]


def opened(mode: Mode, **options: Any) -> tuple[AttachedPort, Any]:
    policy: Any = Decided(mode, **options)
    return AttachedPort(policy, 0), policy


TWO = [Request(i, (3, 4, 5), SamplingParams(max_tokens=9)) for i in range(2)]


def test_drafts_begin_with_the_pass_after_the_one_that_read_the_texts():
    port, policy = opened(Mode.catch_up)
    first = port.begin_pass(rows(*TWO), ())
    assert list(first.reading) == [0, 1] and not any(first.lengths.values()) and not policy.num_caught_up
    port.begin_pass(rows(*TWO), ())
    assert policy.num_caught_up == 1


@pytest.mark.parametrize("mode", [Mode.speculate, Mode.rest, Mode.probe, Mode.trial])
def test_no_other_pass_counts_as_having_read_the_texts(mode):
    """What a round of drafts read is not what the requests of a later trial have to have read."""
    port, policy = opened(mode)
    port.begin_pass(rows(*TWO), ())
    policy.mode = Mode.catch_up
    port.begin_pass(rows(*TWO), ())
    assert not policy.num_caught_up
    port.begin_pass(rows(*TWO), ())
    assert policy.num_caught_up == 1


def test_a_pass_without_requests_that_may_draft_has_read_nothing():
    port, policy = opened(Mode.catch_up)
    plain = [Request(one.request_id, one.prompt, one.sampling, drafter="none") for one in TWO]
    for _ in range(3):
        orders = port.begin_pass(rows(*plain), ())
        assert not orders.lengths
    assert not policy.num_caught_up


@pytest.mark.parametrize("mode", [Mode.speculate, Mode.trial])
def test_drafts_are_ordered_for_those_that_are_followed(mode):
    port, _ = opened(mode, num_followed=1, length=2)
    orders = port.begin_pass(rows(*TWO), ())
    assert dict(orders.lengths) == {0: 2}
