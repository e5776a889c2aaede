"""The lanes of a run on one time axis: `timeline.json` for Perfetto, `timeline.png` as a picture.

Reads spans (lane, name, start, end, arguments) on one clock. Each role has a lane. The records between roles have a
lane in the trace and are lines in the picture. `docs/timeline.md` explains both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from actors.coordinator.stats import MESSAGES, TimelineSpan
from parallel.whole_files import write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LANES = ("target", "draft")
"""Drawn from top to bottom; other lanes follow, messages last."""

ROUNDS_SHOWN = 8
"""Rounds in the picture; the trace holds all."""

WORK = {
    "verify": ("#2f6fb0", "target pass with drafts"),
    "decode": ("#7fb2e5", "target pass without"),
    "propose": ("#e08a2e", "drafting while the target waits"),
    "hit": ("#2e9e5b", "hit: the draft was prepared"),
    "miss": ("#c8443c", "miss: drafted after the verdict"),
    "ahead": ("#f0c27f", "draft-ahead, one pass each"),
    "prefill": ("#b9b4a9", "reading text"),
    "draft": ("#e08a2e", "drafting"),
    "export": ("#7b4fa3", "hidden states leave for the drafter"),
    "features": ("#b08fce", "hidden states arrive"),
    "kv_refresh": ("#c98a1b", "draft-ahead, exact pass"),
    "commit": ("#1f4468", "commit of the last verdict's KV rows"),
}
"""Name of a span -> its colour and its meaning."""
_MARKS = {"hit": "v", "miss": "X"}
"""Drawn below the bar, which is often too short to see."""
_OTHER_COLOUR = "#8a8a8a"
_IDLE_COLOUR = "#f1f0ee"
_ANSWERS = {"order": "verdict", "verify": "proposal"}
"""A record to a role -> the record that caused it."""


def chrome_trace(spans: Sequence[TimelineSpan]) -> dict[str, object]:
    """The Trace Event Format that Perfetto and chrome://tracing open; times in microseconds from the first span."""
    origin = min((start for _, _, start, _, _ in spans), default=0.0)
    lanes = lanes_of(spans)
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "engine"}}
    ]
    for tid, lane in enumerate(lanes, start=1):
        events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": lane}})
        events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
    for lane, name, start, end, arguments in sorted([*spans, *waits_of(spans)], key=lambda span: span[2]):
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


def lanes_of(spans: Sequence[TimelineSpan]) -> list[str]:
    """The lanes of the spans in drawing order; of the numbered levels of a cascade the cheapest comes last."""
    present = {lane for lane, *_ in spans}
    others = sorted(present.difference(LANES), key=lambda lane: (lane != MESSAGES, lane), reverse=True)
    return [lane for lane in LANES if lane in present] + others


def waits_of(spans: Sequence[TimelineSpan]) -> list[TimelineSpan]:
    """The gaps between the work of each role, as spans named `wait` with the round of the work that follows."""
    found = []
    for lane in lanes_of(spans):
        if lane == MESSAGES:
            continue
        work = sorted((span for span in spans if span[0] == lane), key=lambda span: span[2])
        idle_since = work[0][3]
        for _, _, start, end, arguments in work[1:]:
            if start > idle_since:
                found.append((lane, "wait", idle_since, start, {"round": arguments["round"]}))
            idle_since = max(idle_since, end)
    return found


def last_rounds(spans: Sequence[TimelineSpan], count: int) -> list[TimelineSpan]:
    """The roles' work in the latest `count` rounds, from their beginning on, in the order of time."""
    work = [span for span in spans if span[0] != MESSAGES]
    first = max((span[4]["round"] for span in work), default=0) - count
    return sorted([span for span in work if span[4]["round"] > first], key=lambda span: span[2])


def middle_rounds(spans: Sequence[TimelineSpan], count: int = ROUNDS_SHOWN) -> list[TimelineSpan]:
    """Spans of `count` consecutive rounds around the middle, away from the start and the end of a run.

    The rounds are those of the first lane; spans that reach beyond their time are cut.
    """
    lane = lanes_of(spans)[0]
    numbered = sorted({span[4]["round"] for span in spans if span[0] == lane})
    first = max(0, (len(numbered) - count) // 2)
    chosen = set(numbered[first : first + count])
    times = [(start, end) for name, _, start, end, arguments in spans if name == lane and arguments["round"] in chosen]
    opens, closes = min(start for start, _ in times), max(end for _, end in times)
    if first == 0:
        opens = min(start for _, _, start, _, _ in spans)
    return [
        (at, name, max(start, opens), min(end, closes), arguments)
        for at, name, start, end, arguments in spans
        if start < closes and end > opens
    ]


def busy_of(spans: Sequence[TimelineSpan], lane: str) -> float:
    """Fraction of the time covered by all `spans` in which a lane worked."""
    whole = max(end for _, _, _, end, _ in spans) - min(start for _, _, start, _, _ in spans)
    return sum(end - start for at, _, start, end, _ in spans if at == lane) / whole if whole else 0.0


def write_trace(path: Path, spans: Sequence[TimelineSpan]) -> None:
    write_text(path, json.dumps(chrome_trace(spans)))


def draw(path: Path, spans: Sequence[TimelineSpan], busy: Mapping[str, float | None]) -> None:
    """Draw the lanes of some rounds. `busy` is the fraction of time each lane worked over the whole run; fractions of
    lanes it does not name are measured on the spans.
    """
    from cluster.io.pictures import picture

    shown = middle_rounds(spans)
    work = [span for span in shown if span[0] != MESSAGES]
    lanes = [lane for lane in lanes_of(shown) if lane != MESSAGES]
    origin = min(start for _, _, start, _, _ in work)
    width_ms = (max(end for _, _, _, end, _ in work) - origin) * 1e3
    fractions = {lane: busy.get(lane) for lane in lanes}
    fractions |= {lane: busy_of(spans, lane) for lane, known in fractions.items() if known is None}
    with picture(path, 13, 1.9 + 0.95 * len(lanes)) as ((axes,),):
        _draw_work(axes, work, lanes, origin, width_ms)
        _draw_messages(axes, shown, lanes, origin)
        axes.set_yticks(range(len(lanes)), [f"{lane}\n{fractions[lane]:.0%} busy" for lane in lanes])
        axes.set_ylim(len(lanes) - 0.45, -0.55)
        axes.set_xlim(0, width_ms)
        axes.set_xlabel("ms; busy fractions are of the whole run")
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        _draw_legend(axes, work)


def _draw_work(axes: Axes, work: Sequence[TimelineSpan], lanes: Sequence[str], origin: float, width_ms: float) -> None:
    for row in range(len(lanes)):
        axes.barh(row, width_ms, height=0.56, color=_IDLE_COLOUR, zorder=0)
    for lane, name, start, end, arguments in work:
        row, left, length = lanes.index(lane), (start - origin) * 1e3, (end - start) * 1e3
        colour, _ = WORK.get(name, (_OTHER_COLOUR, name))
        axes.barh(row, length, left=left, height=0.56, color=colour, edgecolor="white", linewidth=0.6, zorder=2)
        if name in _MARKS:
            axes.plot(left, row + 0.37, marker=_MARKS[name], color=colour, markersize=7, clip_on=False, zorder=4)
        if "rows" in arguments and length > 0.03 * width_ms:
            label = f"{arguments['rows']} → {arguments['tokens']}" if "tokens" in arguments else str(arguments["rows"])
            axes.text(left + length / 2, row, label, ha="center", va="center", color="white", fontsize=9, zorder=3)


def _draw_messages(axes: Axes, shown: Sequence[TimelineSpan], lanes: Sequence[str], origin: float) -> None:
    """A line from the end of the work that sent a verdict or a proposal to the start of the work it caused."""
    target, draft = (lanes.index(lane) if lane in lanes else None for lane in LANES)
    if target is None or draft is None:
        return
    messages = [span for span in shown if span[0] == MESSAGES]
    caused = {(name, end): start for _, name, start, end, _ in messages}
    for _, name, start, end, _ in messages:
        left = caused.get((_ANSWERS.get(name, ""), start))
        if left is not None:
            rows = (target + 0.28, draft - 0.28) if name == "order" else (draft - 0.28, target + 0.28)
            axes.plot([(left - origin) * 1e3, (end - origin) * 1e3], rows, color="#555555", linewidth=0.9, zorder=1)


def _draw_legend(axes: Axes, work: Sequence[TimelineSpan]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    drawn = {name for _, name, *_ in work}
    handles: list[Line2D | Patch] = []
    for name in [*(name for name in WORK if name in drawn), *sorted(drawn - set(WORK))]:
        colour, meaning = WORK.get(name, (_OTHER_COLOUR, name))
        if name in _MARKS:
            handles.append(Line2D([], [], color=colour, marker=_MARKS[name], linestyle="none", label=meaning))
        else:
            handles.append(Patch(color=colour, label=meaning))
    handles += [Patch(color=_IDLE_COLOUR, label="waiting"), Line2D([], [], color="#555555", label="records")]
    numbered = [arguments["round"] for lane, *_, arguments in work if lane == lanes_of(work)[0]]
    hits, misses = (sum(name == sought for _, name, *_ in work) for sought in ("hit", "miss"))
    counted = f": {hits} hits, {misses} misses" if hits or misses else ""
    axes.set_title(
        f"Rounds {min(numbered)} to {max(numbered)}{counted}. In a target pass: rows → tokens emitted.",
    )
    axes.legend(handles=handles, ncols=4, loc="upper left", bbox_to_anchor=(0.0, -0.24))
