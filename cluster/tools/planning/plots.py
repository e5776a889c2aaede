"""`plan.png`, predicted speed of the best layouts with the measured ones, `fidelity.png`, acceptance and agreement
of layer-parallel drafting, and `search.png`, searches for layers to draft with over time. Reads the entries of
`plan.json` and the curves of `job=search`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster.io.pictures import COLOURS, picture
from cluster.tools.planning.tables import Entry, shown

_PLAIN = "#b8b8b8"


def draw_plan(path: Path, entries: Sequence[Entry]) -> None:
    """A bar per layout; a diamond where it was run."""
    bars = shown(entries)
    with picture(path, 9.5, 1.4 + 0.36 * len(bars)) as ((axes,),):
        speeds = [entry["tokens_per_s"] for entry in bars]
        colours = [COLOURS[0] if entry["num_draft_tokens"] else _PLAIN for entry in bars]
        drawn = axes.barh(range(len(bars)), speeds, height=0.62, color=colours)
        axes.bar_label(drawn, fmt="  %.0f")
        measured = [(entry["measured"]["tokens_per_s"], row) for row, entry in enumerate(bars) if entry["measured"]]
        if measured:
            axes.scatter(*zip(*measured, strict=True), color=COLOURS[1], marker="D", s=28, zorder=3, label="measured")
            axes.legend(loc="lower right")
        lengths = [f", k={entry['num_draft_tokens']}" * bool(entry["num_draft_tokens"]) for entry in bars]
        names = [entry["layout"] + length for entry, length in zip(bars, lengths, strict=True)]
        axes.set_yticks(range(len(bars)), names)
        axes.invert_yaxis()
        axes.set_xlabel("tokens/s, predicted")
        axes.set_title("Predicted speed by layout")


def draw_fidelity(path: Path, found: Sequence[Entry]) -> None:
    """Acceptance length and top-1 agreement by layers side by side, a line per calibration interval."""
    with picture(path, 10, 3.8, columns=2) as (panels,):
        exact = next(one for one in found if one["layer_group"] == 1)
        policies = dict.fromkeys(one["calibration"] for one in found if one is not exact)
        for axes, name, title in (
            (panels[0], "acceptance_length", "Acceptance length"),
            (panels[1], "top1_agreement", "Likeliest token equals that of an exact pass"),
        ):
            for colour, policy in zip(COLOURS, policies, strict=False):
                by_width = {max(one["partition"]): one for one in found if one["calibration"] == policy}
                line = {1: exact, **{width: by_width[width] for width in sorted(by_width)}}
                heights = [one[name] for one in line.values()]
                axes.plot(list(line), heights, marker="o", color=colour, label=policy)
            axes.set_xticks(sorted({max(one["partition"]) for one in found}))
            axes.set_xlabel("layers side by side")
            axes.margins(y=0.15)
            axes.grid(axis="y")
            axes.set_title(title)
        panels[0].legend(loc="lower left", title="calibrated")


def draw_searches(path: Path, curves: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Points (seconds, speed over plain decoding) of each search as steps."""
    with picture(path, 7, 3.8) as ((axes,),):
        for colour, (name, points) in zip(COLOURS, curves.items(), strict=False):
            if points:
                axes.step(*zip(*points, strict=True), where="post", color=colour, label=name)
        axes.axhline(1.0, color=_PLAIN)
        axes.set_xlabel("seconds of search")
        axes.set_ylabel("tokens/s over plain decoding, expected")
        axes.grid(axis="y")
        axes.legend(loc="lower right")
        axes.set_title("Layers to draft with: the choice over time")
