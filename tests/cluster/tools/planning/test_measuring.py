"""Timed passes become costs; predictions are chosen for trials."""

from __future__ import annotations

import pytest

from cluster.tools.planning.layouts import Layout, Shape
from cluster.tools.planning.measuring import ENOUGH, SETTLING, pass_cost
from cluster.tools.planning.prediction import Prediction
from cluster.tools.planning.rounds import TimedPass
from cluster.tools.planning.trials import worth_trying


def passes(seconds: dict[int, list[float]]) -> list[TimedPass]:
    """Preceded by passes of the settling time, which do not count."""
    found = [TimedPass(rows, False, one) for rows, times in seconds.items() for one in times]
    settling: list[TimedPass] = []
    while int(SETTLING * (len(settling) + len(found))) > len(settling):
        settling.append(TimedPass(1, False, 99.0))
    return settling + found


@pytest.mark.parametrize("count", [ENOUGH, 6])
def test_slow_passes_are_in_the_costs(count: int):
    """A tenth of them ten times as long: a round takes as long as its passes, not as their medians."""
    quick, slow = [1.0] * (count - 2), [10.0] * 2
    played = passes({1: quick + slow, 4: [2 * one for one in quick + slow]})
    cost = pass_cost(played)
    assert count * (cost(1) + cost(4)) == pytest.approx(sum(one.seconds for one in played if one.seconds < 99))
    assert cost(4) == pytest.approx(2 * cost(1))


def test_one_slow_pass_does_not_decide_where_passes_are_few():
    cost = pass_cost(passes({1: [1.0] * ENOUGH, 2: [2.0] * 5, 4: [4.0] * 4 + [24.0], 6: [6.0] * 2}))
    assert cost(1) == 1.0 and cost(2) == pytest.approx(2 * 50 / 30) and cost(4) == pytest.approx(4 * 50 / 30)
    assert [rows for rows, _ in cost.points] == [1, 2, 4], "two passes are left out"


def test_every_way_to_share_the_drafter_is_tried():
    def at(pipeline: str, shape: Shape | None, speed: float) -> Prediction:
        return Prediction(Layout(1, pipeline, "colocated", shape), 4, speed, *[1.0] * 2, None, *[1.0] * 2, "drafter")

    tensor, layer, wider = Shape("tensor", 2), Shape("layer", 2, 2), Shape("layer", 4, 2)
    ranked = [
        at("sync", Shape(threads=1), 9.5),
        at("sync", Shape(), 9.0),
        at("sync", layer, 8.0),
        at("sync", wider, 7.0),
        at("sync", tensor, 6.0),
        at("plain", None, 5.0),
    ]
    assert worth_trying(ranked, 9) == [*ranked[:3], *ranked[4:]], "one of the two layer-parallel ones"
    assert worth_trying(ranked, 2) == ranked[:2]
