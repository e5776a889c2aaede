"""Both lanes of a run on one time axis: `timeline.json` for Perfetto, `timeline.png` for a glance.

Reads spans (lane, name, start, end, arguments) on one clock; it does not know what the names stand for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from actors.tally import Span

LANES = ("target", "draft")
"""From top to bottom; lanes that occur beside them follow."""

ROUNDS_SHOWN = 8
"""In the picture; the trace holds all."""

_COLOURS = {
    "verify": "#2f6fb0",
    "decode": "#7fb2e5",
    "propose": "#e08a2e",
    "draft": "#5aa469",
    "prefill": "#b9b4a9",
}
_OTHER_COLOUR = "#8a8a8a"


def chrome_trace(spans: Sequence[Span]) -> dict[str, object]:
    """The Trace Event Format that Perfetto and chrome://tracing open; times in microseconds from the first span."""
    origin = min((start for _, _, start, _, _ in spans), default=0.0)
    lanes = lanes_of(spans)
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "engine"}},
    ]
    for tid, lane in enumerate(lanes, start=1):
        events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": lane}})
        events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
    for lane, name, start, end, arguments in sorted(spans, key=lambda span: span[2]):
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": lanes.index(lane) + 1,
                "name": name,
                "cat": lane,
                "ts": (start - origin) * 1e6,
                "dur": (end - start) * 1e6,
                "args": dict(arguments),
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def lanes_of(spans: Sequence[Span]) -> list[str]:
    """The lanes that occur, in the order they are drawn."""
    present = dict.fromkeys(lane for lane, *_ in spans)
    return [lane for lane in LANES if lane in present] + [lane for lane in present if lane not in LANES]


def middle_rounds(spans: Sequence[Span], count: int = ROUNDS_SHOWN) -> list[Span]:
    """The spans of `count` consecutive rounds around the middle, where a run is neither starting nor draining."""
    numbered = sorted({span[4]["round"] for span in spans})
    first = max(0, (len(numbered) - count) // 2)
    shown = set(numbered[first : first + count])
    return [span for span in spans if span[4]["round"] in shown]


def write_trace(path: Path, spans: Sequence[Span]) -> None:
    path.write_text(json.dumps(chrome_trace(spans)), encoding="utf-8")


def draw(path: Path, spans: Sequence[Span], busy: Mapping[str, float | None]) -> None:
    """The lanes of some rounds as a picture; `busy` gives the fraction of time each lane worked over the whole run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = middle_rounds(spans)
    lanes = lanes_of(shown)
    origin = min(start for _, _, start, _, _ in shown)
    width_ms = (max(end for _, _, _, end, _ in shown) - origin) * 1e3
    figure = Figure(figsize=(11, 1.5 + 0.75 * len(lanes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for lane, name, start, end, arguments in shown:
        row, left, length = lanes.index(lane), (start - origin) * 1e3, (end - start) * 1e3
        axes.barh(row, length, left=left, height=0.62, color=_COLOURS.get(name, _OTHER_COLOUR))
        label = arguments.get("rows", arguments.get("tokens"))
        if label is not None and length > 0.015 * width_ms:
            axes.text(left + length / 2, row, str(label), ha="center", va="center", color="white", fontsize=8)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlim(0, width_ms)
    numbered = [arguments["round"] for *_, arguments in shown]
    axes.set_xlabel(
        f"ms, rounds {min(numbered)} to {max(numbered)}; the numbers are rows of a target pass and draft tokens"
    )
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    names = dict.fromkeys(name for _, name, *_ in shown)
    axes.legend(
        handles=[Patch(color=_COLOURS.get(name, _OTHER_COLOUR), label=name) for name in names],
        ncols=len(names),
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
    )
    fractions = " · ".join(f"{lane} {busy[lane]:.0%}" for lane in lanes if busy.get(lane) is not None)
    axes.set_title(f"Busy over the whole run: {fractions}" if fractions else "Lanes", loc="left", fontsize=11)
    figure.savefig(path, dpi=130)
