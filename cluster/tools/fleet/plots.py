"""`fleet.png`: tokens per second, and what a million tokens costs, by layout. Reads the entries of `fleet.json`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cluster.io.pictures import COLOURS, picture
from cluster.tools.fleet.tables import FleetEntry, places

_OTHERS = "#b8b8b8"


def draw_fleet(path: Path, entries: Sequence[FleetEntry]) -> None:
    """A bar per layout in each panel; layouts without draft pools are grey."""
    names = [f"{entry['layout']}\n{places(entry)}" for entry in entries]
    colours = [COLOURS[0] if any(entry["pools"].values()) else _OTHERS for entry in entries]
    with picture(path, 11, 1.4 + 0.5 * len(entries), columns=2, sharey=True) as (panels,):
        for axes, name, label, form in (
            (panels[0], "tokens_per_s", "tokens/s, simulated", "  %.0f"),
            (panels[1], "dollars_per_million", "dollars per million tokens", "  %.2f"),
        ):
            drawn = axes.barh(range(len(entries)), [entry[name] or 0.0 for entry in entries], 0.62, color=colours)
            axes.bar_label(drawn, fmt=form)
            axes.margins(x=0.15)
            axes.set_xlabel(label)
        panels[0].set_yticks(range(len(entries)), names)
        panels[0].invert_yaxis()
