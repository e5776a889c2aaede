"""What one pool gives its targets: alone what the simulator of one engine says, merged hardly less, in turn less."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from cluster.tools.fleet.cell import drafter_config
from cluster.tools.fleet.description import Merging, PoolDrafter
from cluster.tools.fleet.layouts import Drafting, FleetLayout
from cluster.tools.fleet.simulation import simulate_fleet
from cluster.tools.simulation import PassCost, Scenario, simulate
from tests.cluster.tools.fleet.fleets import STEADY, pooled, small_fleet

LONG = structs.replace(STEADY, requests_per_s=30, seconds=7.3)
"""Speeds to three per cent."""
BRIEF = structs.replace(STEADY, seconds=0.6)


def per_target(fleet, layout):
    result = simulate_fleet(fleet, layout)
    assert result.num_different == 0 and result.num_tokens
    return result.tokens_per_s / sum(layout.num_targets)


@pytest.mark.extended
@pytest.mark.parametrize(
    "pipeline", ["sync", *(pytest.param(name, marks=pytest.mark.slow) for name in ("branches", "tree"))]
)
def test_a_pool_of_one_target_is_the_drafter_of_the_other_simulator(pipeline):
    fleet = small_fleet(pipeline=pipeline, load=LONG)
    scenario = Scenario(
        pipeline,
        PassCost.flat(15e-3),
        PassCost.flat(1.5e-3),
        drafter_config(fleet),
        fleet.language,
        max_tokens=1000,
        target_link_s=50e-6,
        draft_link_s=50e-6,
    )
    assert per_target(fleet, pooled(1)) == pytest.approx(simulate(scenario).tokens_per_s, rel=0.04)


@pytest.mark.extended
def test_merged_passes_feed_three_targets_as_one_and_turns_do_not():
    fleet = small_fleet(3, load=BRIEF)
    alone = per_target(fleet, pooled(3, pools=(3,), share=1))
    speeds = {merging: per_target(fleet, replace(pooled(3), merging=merging)) for merging in Merging}
    assert speeds[Merging.passes] > 0.95 * alone and speeds[Merging.calls] > 0.93 * alone
    assert speeds[Merging.none] < 0.85 * alone


def test_plain_and_attached_targets_are_those_of_closed_forms():
    fleet = small_fleet(load=LONG)
    plain = FleetLayout("plain", Drafting.plain, (1,), (0,))
    assert per_target(fleet, plain) == pytest.approx(1 / 15.1e-3, rel=0.02), "a pass and two records"
    attached = FleetLayout("attached", Drafting.attached, (1,), (0,))
    tokens = (1 - 0.8**6) / (1 - 0.8)
    assert per_target(fleet, attached) == pytest.approx(tokens / (5 * 1.5e-3 + 15.2e-3), rel=0.04)


@pytest.mark.slow
def test_rows_that_cost_and_hosts_that_are_slow_are_felt():
    fleet = small_fleet(3)
    flat, layout = per_target(fleet, pooled(3)), pooled(3)
    drafter = fleet.drafter
    by_rows = structs.replace(drafter, pass_ms={1: 1.5, 8: 1.5, 32: 6.0})
    assert per_target(structs.replace(fleet, drafter=by_rows), layout) < 0.9 * flat
    slow_host = structs.replace(drafter, host_ms=1.0)
    assert per_target(structs.replace(fleet, drafter=slow_host), layout) < 0.9 * flat


@pytest.mark.extended
def test_a_pass_has_the_rows_of_all_its_targets():
    one, three = (simulate_fleet(small_fleet(count, load=BRIEF), pooled(count)) for count in (1, 3))
    assert three.rows_per_draft_pass > 2 * one.rows_per_draft_pass
    assert 0.5 < one.pool_busy < three.pool_busy <= 1.0


def test_a_pool_without_rows_left_drafts_less():
    drafter = PoolDrafter(pass_ms=1.5, longest_draft=5, fan_out=4, ahead_width=8, kv_slots=60)
    full = simulate_fleet(small_fleet(drafter=drafter), pooled(1))
    assert full.num_different == 0 and full.drafted_share < 0.9


def test_leases_divide_the_rows_of_their_pool():
    """Among those that there are, as in the engine, not among the most that there may be."""
    drafter = PoolDrafter(pass_ms=1.5, longest_draft=5, fan_out=4, ahead_width=8, kv_slots=800)
    fleet = small_fleet(2, drafter=drafter, load=BRIEF)
    assert drafter.most_targets == 16
    assert simulate_fleet(fleet, pooled(2)).drafted_share > 0.95
