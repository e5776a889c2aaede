"""`plan.png`: predicted speed of the best layouts, and what was measured of it. Reads the entries of `plan.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from cluster.planning.tables import SHOWN

_BAR, _PLAIN, _MEASURED = "#2f6fb0", "#b8b8b8", "#e08a2e"


def draw_plan(path: Path, entries: Sequence[Mapping[str, object]]) -> None:
    """A bar per layout; a diamond where it was run."""
    shown = [entry for i, entry in enumerate(entries) if i < SHOWN or not entry["num_draft_tokens"]]
    figure = Figure(figsize=(9.5, 1.4 + 0.36 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    rows = range(len(shown))
    colours = [_BAR if entry["num_draft_tokens"] else _PLAIN for entry in shown]
    axes.barh(rows, [entry["tokens_per_s"] for entry in shown], height=0.62, color=colours)
    for row, entry in enumerate(shown):
        axes.text(entry["tokens_per_s"], row, f"  {entry['tokens_per_s']:.0f}", va="center", fontsize=8)
    tried = [(entry["measured"]["tokens_per_s"], row) for row, entry in enumerate(shown) if entry["measured"]]
    if tried:
        axes.scatter(*zip(*tried, strict=True), color=_MEASURED, marker="D", s=28, zorder=3, label="measured")
        axes.legend(loc="lower right", frameon=False)
    axes.set_yticks(rows, [_label(entry) for entry in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("tokens/s, predicted")
    axes.set_title("Predicted speed by layout", loc="left", fontsize=11)
    figure.savefig(path, dpi=130)


def _label(entry: Mapping[str, object]) -> str:
    return f"{entry['layout']}" + f", k={entry['num_draft_tokens']}" * bool(entry["num_draft_tokens"])
