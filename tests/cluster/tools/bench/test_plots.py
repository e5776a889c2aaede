"""What the pictures of a bench show: every bar, whisker, mark and label, read off the figures before they are saved."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from cluster.tools.bench.plots import draw_acceptance, draw_drafters, draw_speed

TRANSFORMERS, ASSISTED = "transformers", "transformers draft model"


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws into a file that must be there afterwards; returns the figure."""
    figures: list[Any] = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, path, **options: path.touch() or figures.append((figure, options))
    )

    def draw(function: Any, *arguments: Any) -> Any:
        path = tmp_path / "picture.png"
        function(*[path if one is None else one for one in arguments])
        assert path.exists()
        figure, options = figures[-1]
        assert options["format"] == "png" and figure.get_layout_engine() is not None
        return figure

    return draw


def ratio(median, least, most):
    return {"median": median, "min": least, "max": most}


def entry(name, **fields) -> Any:
    setting = {"pipeline": "sync", "temperature": 0.0, "batch": 1, "context": None, "workload": fields.get("workload")}
    figures = {"mean_acceptance_length": 2.5, "ms_per_draft": 4.0, "decode_tokens_per_s": 50.0}
    defaults = {"predicted_tokens_per_s": None, "per_position_acceptance": None}
    return {"name": name, "setting": setting, "sides": {}, "ratios": {}, **figures, **defaults, **fields}


def bars(axes):
    return [(round(patch.get_width(), 6), round(patch.get_y() + patch.get_height() / 2, 6)) for patch in axes.patches]


def marks(axes):
    found: list[Any] = [one for one in axes.collections if isinstance(one, PathCollection)]
    return {one.get_label(): one.get_offsets().tolist() for one in found}


def test_speed_has_a_bar_for_each_setting_and_a_mark_for_each_peer(drawn):
    sides = dict.fromkeys(("speculative", "plain", TRANSFORMERS, ASSISTED, "other"))
    peers = {f"plain / {TRANSFORMERS}": ratio(4.0, 1, 9), "plain / other": ratio(0.5, 0, 9)}
    first = entry("a", sides=sides, ratios={"speculative / plain": ratio(2.0, 1.5, 2.25), **peers})
    last = entry("b", ratios={"speculative / plain": ratio(0.5, 0.25, 0.75), f"plain / {ASSISTED}": ratio(2.0, 1, 9)})
    figure = drawn(draw_speed, None, [first, last])
    (axes,) = figure.axes
    assert bars(axes) == [(2.0, 0.0), (0.5, 1.0)]
    (whiskers, *_) = [one for one in axes.collections if not isinstance(one, PathCollection)]
    assert [segment[:, 0].tolist() for segment in whiskers.get_segments()] == [[1.5, 2.25], [0.25, 0.75]]
    assert marks(axes) == {TRANSFORMERS: [[0.25, 0.0]], ASSISTED: [[0.5, 1.0]], "other": [[2.0, 0.0]]}
    texts = [(text.get_text().strip(), *text.get_position()) for text in axes.texts]
    assert texts == [("2.00x", 2.25, 0), ("0.50x", 0.75, 1)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"] and axes.yaxis_inverted()
    assert axes.get_xlim() == pytest.approx((0, 1.15 * 2.25)) and axes.get_legend() is not None
    assert figure.get_size_inches().tolist() == pytest.approx([9, 1.6 + 0.42 * 2])
    alone = drawn(draw_speed, None, [last | {"ratios": {"speculative / plain": ratio(0.5, 0.25, 0.75)}}]).axes[0]
    assert alone.get_legend() is None and alone.get_xlim() == pytest.approx((0, 1.15)), "plain decoding is in sight"


def test_acceptance_has_a_line_for_each_setting_that_speculated(drawn):
    entries = [
        entry("a", per_position_acceptance=[0.9, 0.5], mean_acceptance_length=2.4),
        entry("none"),
        entry("b", per_position_acceptance=[0.8, 0.4, 0.2], mean_acceptance_length=2.25),
    ]
    (axes,) = drawn(draw_acceptance, None, entries).axes
    lines = [(line.get_label(), list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]
    assert lines == [("a  (length 2.40)", [1, 2], [0.9, 0.5]), ("b  (length 2.25)", [1, 2, 3], [0.8, 0.4, 0.2])]
    assert axes.get_xticks().tolist() == [1, 2, 3] and axes.get_ylim() == (0, 1.02)
    assert len({line.get_color() for line in axes.lines}) == 2 and axes.get_legend() is not None
    (empty,) = drawn(draw_acceptance, None, entries[1:2]).axes
    assert not empty.lines and empty.get_legend() is None


def test_drafters_have_a_row_of_panels_for_each_comparison(drawn):
    entries = [
        entry("a", mean_acceptance_length=2.0, ms_per_draft=3.0, decode_tokens_per_s=40.0, predicted_tokens_per_s=44.0),
        entry("b", mean_acceptance_length=None, ms_per_draft=5.0, decode_tokens_per_s=60.0),
        entry("c", workload="x", mean_acceptance_length=7.0, ms_per_draft=8.0, decode_tokens_per_s=90.0),
    ]
    figure = drawn(draw_drafters, None, entries)
    widths = [[width for width, _ in bars(axes)] for axes in figure.axes]
    assert widths == [[2.0, 0.0], [3.0, 5.0], [40.0, 60.0], [7.0], [8.0], [90.0]]
    assert [list(marks(axes).values()) for axes in figure.axes] == [[], [], [[[44.0, 0.0]]], [], [], []]
    titles = ["acceptance length", "ms per draft", "tokens/s decoding (diamond: predicted)"]
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "", "", *titles], "under the last row"
    assert figure.get_size_inches().tolist() == pytest.approx([12, 0.8 + (0.6 + 0.26 * 2) + (0.6 + 0.26)])
    assert all(axes.yaxis_inverted() for axes in figure.axes)
