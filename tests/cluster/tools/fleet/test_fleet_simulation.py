"""Fleets under load and losses: every token is that of plain decoding, and nothing is left of what is gone."""

from __future__ import annotations

import csv

import pytest
from msgspec import structs

from cluster.tools.fleet import simulation
from cluster.tools.fleet.description import FleetLoad, Losses, Outage, TargetReplica
from cluster.tools.fleet.layouts import Drafting, FleetLayout
from cluster.tools.fleet.simulation import simulate_fleet
from cluster.tools.fleet.traffic import Traffic
from cluster.tools.simulation.clock import ARRIVAL, VirtualClock
from tests.cluster.tools.fleet.fleets import BAD_LUCK, LOCAL, pooled, two_regions

BRIEF = FleetLoad(requests_per_s=12, seconds=1.5, warmup_s=0.2, prompt=[20, 40], output=[20, 40])
HARDER = Losses(drafters_per_minute=40, recovery_s=0.3, detect_s=0.05)


@pytest.fixture
def simulations(monkeypatch):
    """Simulations, kept to be looked at."""
    seen = []
    init = simulation._FleetSimulation.__init__

    def kept(self, *arguments):
        init(self, *arguments)
        seen.append(self)

    monkeypatch.setattr(simulation._FleetSimulation, "__init__", kept)
    return seen


@pytest.mark.extended
def test_no_token_differs_and_no_lease_is_left_when_drafters_and_targets_vanish(simulations):
    losses = structs.replace(BAD_LUCK, outages=[Outage(region="west", at_s=1.5, seconds=0.7)])
    result = simulate_fleet(two_regions(losses=losses), LOCAL)
    assert result.num_tokens > 800 and result.num_different == 0
    assert result.drafters_lost > 5 and result.targets_lost > 5
    assert result.num_moves >= result.num_far_moves > 0
    leasing, cells = simulations[0]._leasing, simulations[0]._cells
    for pool in leasing.pools:
        assert set(pool.leases) <= set(cells), "a lost cell has no lease"
        if pool.lane is not None:
            assert pool.lane._leases == [lease.leased for lease in pool.leases.values()]
    served = [cell for pool in leasing.pools for cell in pool.leases]
    assert len(served) == len(set(served)), "a cell has one pool"


@pytest.mark.extended
def test_no_target_comes_back_during_an_outage(simulations, monkeypatch):
    """One that was lost before it begins would, after its own time."""
    times = ((0.5, 1.0), (0.7, 2.0), (0.9, 0.1))
    outages = [Outage(region="west", at_s=at_s, seconds=seconds) for at_s, seconds in times]
    seen, run = list[int](), VirtualClock.run

    def looked_at(clock, until):
        for second in (1.0, 2.0, 3.0):
            clock.at(second, ARRIVAL, lambda: seen.append(sum(one.region == "west" for one in simulations[0]._cells)))
        run(clock, until)

    monkeypatch.setattr(VirtualClock, "run", looked_at)
    result = simulate_fleet(two_regions(losses=Losses(outages=outages)), LOCAL)
    assert seen == [0, 0, 2]
    assert result.num_different == 0


@pytest.mark.extended
def test_a_token_that_a_client_gets_wrong_is_counted(monkeypatch):
    deliver = Traffic._deliver

    def wrong(self, cell, stream, tokens):
        is_chosen = stream.number == 3 and tokens.position == 0
        deliver(self, cell, stream, tokens)
        if is_chosen:
            stream.tokens[0] += 1

    monkeypatch.setattr(Traffic, "_deliver", wrong)
    assert simulate_fleet(two_regions(load=BRIEF), LOCAL).num_different == 1


@pytest.mark.slow
def test_without_losses_all_is_served_and_every_layout_meets_the_same_requests():
    fleet = two_regions()
    results = [
        simulate_fleet(fleet, layout) for layout in (LOCAL, FleetLayout("attached", Drafting.attached, (2, 2), (0, 0)))
    ]
    for result in results:
        assert result.num_moves == result.drafters_lost == result.num_different == 0
        assert result.tokens_per_s == pytest.approx(result.offered_tokens_per_s, rel=0.15)
        assert 0 < result.slow_stream_tokens_per_s <= result.stream_tokens_per_s
        assert 0 < result.first_token_s <= result.late_first_token_s < 0.5
    assert results[0].offered_tokens_per_s == results[1].offered_tokens_per_s
    assert results[0].num_requests == results[1].num_requests


@pytest.mark.slow
def test_a_lost_drafter_is_replaced_by_the_other_region_and_comes_back():
    fleet = two_regions(losses=HARDER)
    far = simulate_fleet(fleet, pooled(2, 2, pools=(0, 1), share=4))
    near = simulate_fleet(two_regions(), LOCAL)
    assert far.stream_tokens_per_s < near.stream_tokens_per_s, "a pool that is far gives less"
    assert far.drafted_share > 0.3 and far.num_different == 0


@pytest.mark.slow
def test_text_that_does_not_fit_is_put_off_not_changed():
    target = TargetReplica(pass_ms=15.0, ranks=4, max_num_seqs=8, kv_slots=150)
    load = FleetLoad(requests_per_s=60, seconds=1, warmup_s=0.2, prompt=[20], output=[40])
    result = simulate_fleet(two_regions(target=target, load=load), LOCAL)
    assert result.num_preemptions > 0 and result.num_different == 0
    assert result.num_waiting > 0


def test_lengths_come_from_a_file(tmp_path):
    path = tmp_path / "lengths.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("prompt_tokens", "output_tokens"), (12, 7), (30, 7)])
    fleet = two_regions(load=FleetLoad(requests_per_s=20, seconds=2, warmup_s=0.1, lengths=str(path)))
    result = simulate_fleet(fleet, LOCAL)
    assert fleet.lengths == [(12, 7), (30, 7)]
    assert 7 * (result.num_requests - 6) <= result.num_tokens <= 7 * result.num_requests


@pytest.mark.extended
def test_money():
    fleet = two_regions(load=BRIEF)
    result = simulate_fleet(fleet, LOCAL)
    assert result.dollars_per_hour == pytest.approx(2 * 4 * 2.0 + 2.0 + 2 * 4 * 1.0 + 0.5)
    assert result.num_devices == 18
    assert result.dollars_per_million is not None and result.tokens_per_dollar is not None
    assert result.dollars_per_million * result.tokens_per_dollar == pytest.approx(1e6)
    assert result.tokens_per_dollar == pytest.approx(result.tokens_per_s * 3600 / 26.5)
