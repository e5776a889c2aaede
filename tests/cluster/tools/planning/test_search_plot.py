"""`search.png`: a line of steps for each search, over seconds, beside plain decoding."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from cluster.tools.planning.plots import draw_fidelity, draw_plan, draw_searches
from tests.cluster.tools.planning.test_tables import FIDELITY, MEASURED, entry


def drawn(monkeypatch, draw, *arguments) -> list[Any]:
    pages: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda page, path, **options: path.touch() or pages.append((page, options)))
        draw(*arguments)
    ((page, options),) = pages
    assert options["format"] == "png"
    return page.axes


def test_searches_are_steps_beside_plain_decoding(monkeypatch, tmp_path):
    curves = {"bayesian": [(0.5, 0.75), (2.0, 1.5)], "random": [(1.0, 1.25)], "swift": []}
    (axes,) = drawn(monkeypatch, draw_searches, tmp_path / "search.png", curves)
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines)[:2] == ["bayesian", "random"] and "swift" not in lines
    found = lines["bayesian"]
    assert (list(found.get_xdata()), list(found.get_ydata())) == ([0.5, 2.0], [0.75, 1.5])
    assert found.get_drawstyle() == "steps-post", "what was best until then"
    assert list(axes.lines[-1].get_ydata()) == [1.0, 1.0] and len(axes.lines) == 3
    assert axes.get_xlabel() == "seconds of search"
    assert axes.get_ylabel() == "tokens/s over plain decoding, expected"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["bayesian", "random"]
    assert axes.get_title("left").startswith("Layers to draft with") and axes.yaxis.get_gridlines()[0].get_visible()


def test_a_plan_names_its_axis_and_its_marks(monkeypatch, tmp_path):
    (axes,) = drawn(monkeypatch, draw_plan, tmp_path / "plan.png", [entry(0), entry(2, measured=MEASURED)])
    assert axes.get_xlabel() == "tokens/s, predicted" and axes.get_title("left") == "Predicted speed by layout"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["measured"]
    assert [text.get_text().strip() for text in axes.texts] == ["100", "98"]
    (axes,) = drawn(monkeypatch, draw_plan, tmp_path / "plan.png", [entry(0)])
    assert axes.get_legend() is None and not axes.collections


def test_fidelity_names_both_panels(monkeypatch, tmp_path):
    panels = drawn(monkeypatch, draw_fidelity, tmp_path / "fidelity.png", FIDELITY)
    assert [axes.get_title("left") for axes in panels] == [
        "Acceptance length",
        "Likeliest token equals that of an exact pass",
    ]
    assert {axes.get_xlabel() for axes in panels} == {"layers side by side"}
    assert panels[0].get_legend().get_title().get_text() == "calibrated" and panels[1].get_legend() is None
    assert all(axes.yaxis.get_gridlines()[0].get_visible() for axes in panels)
