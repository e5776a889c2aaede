"""The width of draft-ahead that is chosen comes close to the best fixed one, whatever a row costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.drafters.model.config import ModelDrafterConfig
from cluster.tools.simulation.language import Language, power_law
from cluster.tools.simulation.simulator import Scenario, simulate
from parallel.pass_cost import PassCost


def scenario(pipeline: str, num_requests: int, row_share: float) -> Scenario:
    draft_s = 1.2e-3
    return Scenario(
        pipeline,
        PassCost.flat(10e-3),
        PassCost(((1, draft_s), (101, draft_s * (1 + 100 * row_share)))),
        ModelDrafterConfig(num_draft_tokens=5, fan_out=6, ahead_width=16),
        Language((0.75,), power_law(0.8)),
        num_requests=num_requests,
        max_tokens=800 if num_requests == 1 else 200 if row_share else 80,
        target_link_s=5e-5,
        draft_link_s=5e-5,
    )


@pytest.mark.extended
@pytest.mark.parametrize(
    ("pipeline", "num_requests", "row_share", "candidates"),
    [
        pytest.param("branches", 1, 0.1, (2, 4, 8), marks=pytest.mark.slow),
        pytest.param("branches", 8, 0.0, (16,), marks=pytest.mark.slow),
        ("tree", 8, 0.3, (1, 2)),
    ],
)
def test_the_chosen_width_is_nearly_the_best(pipeline, num_requests, row_share, candidates):
    free = scenario(pipeline, num_requests, row_share)
    fixed = {width: replace(free.drafter, ahead_width=width * num_requests) for width in {*candidates, 16}}
    speeds = {width: simulate(replace(free, drafter=drafter)).tokens_per_s for width, drafter in fixed.items()}
    # drafts no shorter than five tokens, so that only the width is chosen
    chosen = simulate(replace(free, adaptive=True, min_draft_tokens=5)).tokens_per_s
    assert chosen > 0.93 * max(speeds[width] for width in candidates)
    assert chosen > 1.05 * speeds[16] or not row_share, "where rows cost, it is not simply the widest"
