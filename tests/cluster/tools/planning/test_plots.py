"""Bars and lines carry the names and the figures of their entries."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from cluster.tools.planning.plots import draw_fidelity, draw_plan
from tests.cluster.tools.planning.test_tables import FIDELITY, MEASURED, entry


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """The panels of the figures that are saved."""
    panels, save = [], Figure.savefig
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        Figure, "savefig", lambda one, *args, **given: panels.extend(one.axes) or save(one, *args, **given)
    )
    return panels


def test_a_bar_has_the_name_and_the_speed_of_its_layout(drawn):
    draw_plan(Path("plan.png"), [entry(0), entry(1, length=0), entry(2, measured=MEASURED)])
    (axes,) = drawn
    assert [label.get_text() for label in axes.get_yticklabels()] == ["layout 0, k=3", "layout 1", "layout 2, k=3"]
    assert [bar.get_width() for bar in axes.patches] == [100.0, 99.0, 98.0]
    colours = [bar.get_facecolor() for bar in axes.patches]
    assert colours[0] == colours[2] != colours[1], "plain decoding is another colour"
    (diamonds,) = axes.collections
    assert diamonds.get_offsets().tolist() == [[50.0, 2.0]] and axes.yaxis_inverted()


@pytest.mark.extended
def test_a_line_is_a_calibration_that_begins_at_the_exact_pass(drawn):
    draw_fidelity(Path("fidelity.png"), FIDELITY)
    for axes, name in zip(drawn, ("acceptance_length", "top1_agreement"), strict=True):
        lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
        exact, every, never = (one[name] for one in FIDELITY)
        assert lines == {"every": ([1, 2], [exact, every]), "never": ([1, 2], [exact, never])}
        assert list(axes.get_xticks()) == [1, 2]
