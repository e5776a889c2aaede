"""The page that pictures are drawn on: its size, its look, and that it is written whole or not at all."""

from __future__ import annotations

from typing import Any

import matplotlib
import pytest
from matplotlib.image import imread

from cluster.io.pictures import picture


def test_a_page_has_its_size_and_its_panels_and_no_frames(tmp_path):
    before = dict(matplotlib.rcParams)
    with picture(tmp_path / "page.png", 6, 2, rows=1, columns=2, sharey="row") as panels:
        assert panels.shape == (1, 2)
        left, right = panels[0]
        left.set_ylim(0, 7)
        assert right.get_ylim() == (0, 7)
        left.set_title("what it shows")
        assert left.get_title(loc="left") == "what it shows"
        left.plot([1, 2], [3, 4], label="a")
        legend: Any = left.legend()
        assert not legend.get_frame_on()
        assert {name: spine.get_visible() for name, spine in left.spines.items()} == {
            "left": True,
            "bottom": True,
            "top": False,
            "right": False,
        }
    assert imread(tmp_path / "page.png").shape[:2] == (260, 780), "130 dots an inch"
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("axis", ["x", "y"])
def test_lines_are_drawn_across_one_axis(tmp_path, axis):
    with picture(tmp_path / "page.png", 2, 2) as ((axes,),):
        axes.grid(axis=axis)
        shown = {name: getattr(axes, f"{name}axis").get_gridlines()[0].get_visible() for name in "xy"}
        assert shown == {"x": axis == "x", "y": axis == "y"} and axes.get_axisbelow() is True
        if axis == "y":
            axes.grid(axis="y")
            assert not axes.xaxis.get_gridlines()[0].get_visible()


def test_an_error_while_drawing_leaves_no_picture(tmp_path):
    with pytest.raises(KeyError), picture(tmp_path / "page.png", 2, 2):
        raise KeyError
    assert not list(tmp_path.iterdir())
