"""What rows cost a mixture of experts: they use as many experts as independent rows would, and lengths follow."""

from __future__ import annotations

import pytest

from docs.measurements import mixtures


@pytest.mark.extended
def test_rows_of_a_mixture_use_the_expected_number_of_experts(monkeypatch):
    """So the cost of a pass by its rows grows with the experts that are read, whatever it is measured with."""
    monkeypatch.setattr(mixtures, "ROWS", (1, 4, 16))
    experts, times = mixtures.measured(16, 2, 1)
    assert experts[0] == 2 and len(times) == 3
    assert experts == pytest.approx([mixtures.distinct(16, 2, rows) for rows in (1, 4, 16)], rel=0.1)


@pytest.mark.parametrize(
    ("num_experts", "batch", "acceptance"), [(8, 4, 0.8), pytest.param(128, 4, 0.6, marks=pytest.mark.extended)]
)
def test_lengths_follow_a_staircase_of_distinct_experts(num_experts, batch, acceptance):
    """Long drafts where few experts are left to read; plain decoding where each row reads eight others of 128."""
    case = mixtures.scenario(mixtures.cost(num_experts, 2 if num_experts == 8 else 8), batch, acceptance, 0, 200)
    fixed, _, warm = mixtures.speedups(case)
    best = max(1.0, *fixed.values())
    assert warm > 0.95 * best
    assert best > 2 if num_experts == 8 else best < 1.05
