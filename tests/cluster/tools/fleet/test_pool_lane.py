"""When the draft roles of two targets get their passes: at once, in the next pass, or after the other's call."""

from __future__ import annotations

import pytest

from actors.drafters.model.config import ModelDrafterConfig
from actors.protocol.messages import Admit, DraftBatch, DraftOrder, SamplingParams
from cluster.tools.fleet.description import Merging
from cluster.tools.fleet.pool_lane import Leased, PassLog, PoolLane
from cluster.tools.simulation.clock import ARRIVAL, LaneClock, VirtualClock
from cluster.tools.simulation.language import Language
from cluster.tools.simulation.roles import ScriptedRunner, draft_role
from parallel.pass_cost import PassCost

PASS = PassCost.flat(1.0)
LONG = tuple(range(2 * 512 + 100))
"""A text that is read in three passes."""


class Lane:
    """A pool with two leases, and when what they ask for comes."""

    def __init__(self, merging, cost=PASS, pipeline="sync", **options):
        self.clock, self.answers = VirtualClock(), []
        self.lane = PoolLane(self.clock, cost, merging, **options)
        self.leases = [self.lease(number, cost, pipeline) for number in range(2)]

    def lease(self, number, cost, pipeline):
        text, time, log = Language().text(number), LaneClock(), PassLog(cost)
        runner = ScriptedRunner(lambda _: text, time, log, 1 << 20)
        role = draft_role(pipeline, ModelDrafterConfig(num_draft_tokens=4), runner, time, adapts=False)
        lease = Leased(role, time, log, lambda record, now: self.answers.append((number, now, record)))
        self.lane.open(lease)
        return lease

    def order(self, when, number, num_draft_tokens=4, prompt=(1, 2, 3)):
        orders = DraftOrder(7, num_draft_tokens)
        batch = DraftBatch(1, (Admit(7, 0, prompt, len(prompt), SamplingParams()),), orders=(orders,))
        self.clock.at(when, ARRIVAL, lambda: self.lane.receive(self.leases[number], batch))

    def times(self):
        self.clock.run(until=100.0)
        return [(number, now) for number, now, _ in self.answers]


@pytest.mark.parametrize(
    ("merging", "second"), [(Merging.passes, 2 + 4), (Merging.calls, 4 + 4), (Merging.none, 4 + 4)]
)
def test_an_order_joins_at_the_next_pass_or_waits_for_the_call(merging, second):
    lane = Lane(merging)
    lane.order(0.0, 0)
    lane.order(1.5, 1)
    assert lane.times() == [(0, 4.0), (1, second)], "four tokens are four passes of a second"
    (_, _, first), (_, _, other) = lane.answers
    assert (first.started, first.finished, len(first.proposals)) == (0.0, 4.0, 1)
    assert other.finished == second


def test_orders_that_wait_together_are_one_call():
    lane = Lane(Merging.calls)
    for number in (0, 1):
        lane.order(0.5, number, 4 - 2 * number)
    assert sorted(lane.times()) == [(0, 4.5), (1, 2.5)], "each is answered when its own passes are taken"
    assert lane.lane.num_passes == 4 and lane.lane.num_rows == 4 + 2 + 2 * (3 - 1)


def test_a_text_is_read_in_parts_between_which_others_draft():
    lane = Lane(Merging.calls)
    lane.order(0.0, 0, 0, LONG)
    lane.order(0.5, 1)
    assert lane.times() == [(1, 5.0), (0, 7.0)], "after the first part the draft comes first"


def test_rows_and_hosts_cost_what_they_are_given():
    by_rows = PassCost.table({1: 1.0, 3: 1.0, 6: 4.0})
    lane = Lane(Merging.calls, by_rows, host_s=0.25)
    for number in (0, 1):
        lane.order(0.0, number, 1)
    assert lane.times() == [(0, 4.5), (1, 4.5)], "two texts of three tokens in one pass, and two hosts"
    assert lane.lane.busy_s == 4.5


def test_a_lease_that_ends_gets_nothing_and_delays_none():
    lane = Lane(Merging.calls)
    lane.order(0.0, 0)
    lane.order(0.0, 1)
    lane.clock.at(1.5, ARRIVAL, lambda: lane.lane.close(lane.leases[0]))
    assert lane.times() == [(1, 4.0)]


@pytest.mark.parametrize("merging", Merging)
def test_draft_ahead_goes_on_until_a_verdict(merging):
    lane = Lane(merging, pipeline="branches")
    lane.order(0.0, 0)
    lane.order(0.0, 1)
    lane.times()
    assert {number for number, _, _ in lane.answers} == {0, 1}
    assert lane.lane.num_passes > 8 and 0 < lane.lane.busy_s < 100, "both prepare for a verdict, and then rest"
