"""Plots of a bench: `bench.png`, speeds; `acceptance.png`, acceptance by position; `drafters.png`, costs of drafting.

Reads the entries of `report.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cluster.io.pictures import COLOURS, picture
from cluster.tools.bench.figures import BenchEntry
from cluster.tools.bench.tables import comparisons
from cluster.tools.bench.tasks import peer_sides

_MARKERS = "sDo^vPX*<>"
_NUM_PEER_COLOURS = 10


def draw_speed(path: Path, entries: Sequence[BenchEntry]) -> None:
    """Tokens per second relative to plain decoding: a bar per setting, from least to most over its repeats."""
    with picture(path, 9, 1.6 + 0.42 * len(entries)) as ((axes,),):
        rows = range(len(entries))
        speed = [entry["ratios"]["speculative / plain"] for entry in entries]
        medians = [ratio["median"] for ratio in speed]
        whiskers = [[abs(ratio["median"] - ratio[end]) for ratio in speed] for end in ("min", "max")]
        caps = {"capsize": 3, "ecolor": "#1b3f66"}
        axes.barh(rows, medians, height=0.6, color=COLOURS[0], xerr=whiskers, error_kw=caps)
        for row, ratio in enumerate(speed):
            axes.text(ratio["max"], row, f"  {ratio['median']:.2f}x", va="center")
        peers = peer_sides(side for entry in entries for side in entry["sides"])
        for index, peer in enumerate(peers):
            colour, marker = f"C{(index + 1) % _NUM_PEER_COLOURS}", _MARKERS[index % len(_MARKERS)]
            ratios = ((row, entry["ratios"].get(f"plain / {peer}")) for row, entry in enumerate(entries))
            points = [(1 / ratio["median"], row) for row, ratio in ratios if ratio is not None]
            axes.scatter(*zip(*points, strict=True), color=colour, marker=marker, label=peer, zorder=3)
        axes.axvline(1.0, color="black")
        axes.set_yticks(rows, [entry["name"] for entry in entries])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.15 * max([1.0, *(ratio["max"] for ratio in speed)]))
        axes.set_xlabel("tokens/s relative to plain decoding (median; whiskers: least and most)")
        if peers:
            axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=min(3, len(peers)))
        axes.set_title("Speed by setting")


def draw_acceptance(path: Path, entries: Sequence[BenchEntry]) -> None:
    """How often the draft token at each position was accepted, a line per setting that speculated."""
    with picture(path, 8, 4.2) as ((axes,),):
        drawn = [(entry, rates) for entry in entries if (rates := entry["per_position_acceptance"])]
        for index, (entry, rates) in enumerate(drawn):
            label = f"{entry['name']}  (length {entry['mean_acceptance_length']:.2f})"
            colour = COLOURS[index % len(COLOURS)]
            axes.plot(range(1, len(rates) + 1), rates, marker="o", color=colour, label=label)
        deepest = max((len(rates) for _, rates in drawn), default=1)
        axes.set_xticks(range(1, deepest + 1))
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("position in the draft")
        axes.set_ylabel("accepted")
        axes.grid(axis="y")
        if drawn:
            axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        axes.set_title("Acceptance by position")


def draw_drafters(path: Path, entries: Sequence[BenchEntry]) -> None:
    """Acceptance length, cost of a draft, and decoding speed beside the predicted one; a row per comparison."""
    groups = comparisons(entries)
    panels = (
        ("mean_acceptance_length", "acceptance length"),
        ("ms_per_draft", "ms per draft"),
        ("decode_tokens_per_s", "tokens/s decoding (diamond: predicted)"),
    )
    height = 0.8 + sum(0.6 + 0.26 * len(group) for group in groups)
    with picture(path, 12, height, max(1, len(groups)), 3, sharey="row", sharex="col") as grid:
        for line, group in zip(grid, groups, strict=False):
            names = [entry["name"] for entry in group]
            for axes, (key, title) in zip(line, panels, strict=True):
                axes.barh(names, [entry[key] or 0 for entry in group], height=0.65, color=COLOURS[0])
                axes.grid(axis="x")
                if group is groups[-1]:
                    axes.set_xlabel(title)
            predicted = [(entry["predicted_tokens_per_s"], entry["name"]) for entry in group]
            points = [point for point in predicted if point[0] is not None]
            if points:
                line[2].scatter(*zip(*points, strict=True), color=COLOURS[1], marker="D", s=22, zorder=3)
            line[0].invert_yaxis()
