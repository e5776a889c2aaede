"""`plan.png`, predicted speed of the best layouts and what was measured of it, and `fidelity.png`, what layers side by
side cost. Reads the entries of `plan.json`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from cluster.tools.planning.tables import SHOWN

_BAR, _PLAIN, _MEASURED = "#2f6fb0", "#b8b8b8", "#e08a2e"
_LINES = ("#2f6fb0", "#5aa469", "#e08a2e", "#a3487f", "#8a8a8a")


def draw_plan(path: Path, entries: Sequence[Mapping[str, object]]) -> None:
    """A bar per layout; a diamond where it was run."""
    shown = [entry for i, entry in enumerate(entries) if i < SHOWN or not entry["num_draft_tokens"]]
    figure, (axes,) = _canvas(9.5, 1.4 + 0.36 * len(shown), 1)
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


def draw_fidelity(path: Path, found: Sequence[Mapping[str, object]]) -> None:
    """Acceptance length and top-1 agreement by layers side by side, a line per policy."""
    figure, panels = _canvas(10, 3.8, 2)
    exact = next(one for one in found if one["layer_group"] == 1)
    policies = dict.fromkeys(one["calibration"] for one in found if one is not exact)
    for axes, name, title in (
        (panels[0], "acceptance_length", "Acceptance length"),
        (panels[1], "top1_agreement", "Likeliest token equals that of an exact pass"),
    ):
        for colour, policy in zip(_LINES, policies, strict=False):
            widest = {max(one["partition"]): one for one in found if one["calibration"] == policy}
            line = [exact, *(widest[width] for width in sorted(widest))]
            widths, heights = [max(one["partition"]) for one in line], [one[name] for one in line]
            axes.plot(widths, heights, marker="o", markersize=4, color=colour, label=policy)
        axes.set_xticks(sorted({max(one["partition"]) for one in found}))
        axes.set_xlabel("layers side by side")
        axes.margins(y=0.15)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_title(title, loc="left", fontsize=11)
    panels[0].legend(loc="lower left", frameon=False, fontsize=8, title="calibrated", title_fontsize=8)
    figure.savefig(path, dpi=130)


def _canvas(width: float, height: float, num_panels: int) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, num_panels, squeeze=False)[0]
    for axes in panels:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return figure, panels


def _label(entry: Mapping[str, object]) -> str:
    return f"{entry['layout']}" + f", k={entry['num_draft_tokens']}" * bool(entry["num_draft_tokens"])
