"""What the simulator makes of published systems, within the deviations that `docs/simulator.md` states."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.tools.simulation import simulate
from docs.measurements import published
from docs.measurements.published import (
    SSD_SYNC,
    SWIFT_ASYNC,
    SWIFT_SYNC_TREE,
    Comparison,
    fit_acceptance,
    ssd,
    swiftspec,
    with_acceptance,
)


@pytest.mark.slow
def test_ssd():
    plain, sync, ahead, over_plain = ssd()
    assert abs(plain.deviation) < 0.001 and abs(sync.deviation) < 0.01, "what was fitted"
    assert abs(ahead.deviation) < 0.05 and abs(over_plain.deviation) < 0.05, "what was predicted"
    assert [one.fitted for one in (plain, sync, ahead, over_plain)] == [True, True, False, False]
    assert ahead.result.branch_hit_rate == pytest.approx(0.82, abs=0.03)


@pytest.mark.slow
def test_swiftspec():
    ahead, wide, over_chains, over_trees = swiftspec()
    assert abs(ahead.deviation) < 0.02, "what was fitted"
    assert [one.fitted for one in (ahead, wide, over_chains, over_trees)] == [True, False, False, False]
    assert -0.09 < wide.deviation < -0.04
    # Not met: the published ratio is to other engines, ours to the same engine tuned on all eight GPUs.
    assert -0.2 < over_chains.deviation < -0.1 and -0.2 < over_trees.deviation < -0.05


@pytest.mark.slow
def test_swiftspec_at_a_usual_acceptance_falls_short():
    cases = (replace(case, max_tokens=1000) for case in (SWIFT_ASYNC, SWIFT_SYNC_TREE))
    ahead, tree = (simulate(with_acceptance(case, 0.8)) for case in cases)
    assert ahead.tokens_per_s == pytest.approx(251, rel=0.03)
    assert 1.4 < ahead.tokens_per_s / tree.tokens_per_s < 1.6


@pytest.mark.extended
def test_fit_finds_the_acceptance_behind_a_speed():
    case = replace(SSD_SYNC, max_tokens=600)
    speed = simulate(with_acceptance(case, 0.7)).tokens_per_s
    assert fit_acceptance(case, speed, 0.6, 0.8) == pytest.approx(0.7, abs=0.003)


def test_a_figure_is_a_line(monkeypatch, capsys):
    monkeypatch.setattr(published, "ssd", lambda: [Comparison("SSD", "tokens/s", 100, 97, fitted=True)])
    monkeypatch.setattr(published, "swiftspec", lambda: [Comparison("SwiftSpec", "ratio", 2, 2.5)])
    published.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["SSD", "tokens/s", "100.00", "97.00", "-3.0%", "fitted"]
    assert lines[1] == ["SwiftSpec", "ratio", "2.00", "2.50", "+25.0%"]
