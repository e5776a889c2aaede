from __future__ import annotations

import json

import pytest
from matplotlib.figure import Figure

from cluster.observability.timeline import busy_of, chrome_trace, draw, lanes_of, middle_rounds, waits_of, write_trace


def span(lane: str, name: str, start: float, end: float, number: int, **arguments: object):
    return lane, name, start, end, {"round": number, **arguments}


SPANS = [
    span("draft", "propose", 10.000, 10.002, 1, tokens=5),
    span("target", "verify", 10.0025, 10.0075, 2, rows=6),
    span("draft", "propose", 10.008, 10.010, 2, tokens=5),
    span("target", "verify", 10.011, 10.016, 3, rows=6),
]


def test_trace_has_one_thread_per_lane_and_microseconds_from_the_first_span():
    events = chrome_trace(SPANS)["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {1: "target", 2: "draft"}
    complete = [event for event in events if event["ph"] == "X" and event["name"] != "wait"]
    assert [names[event["tid"]] for event in complete] == ["draft", "target", "draft", "target"]
    assert [round(event["ts"]) for event in complete] == [0, 2500, 8000, 11000]
    assert [round(event["dur"]) for event in complete] == [2000, 5000, 2000, 5000]
    assert complete[1]["args"] == {"round": 2, "rows": 6} and complete[1]["name"] == "verify"


def test_the_trace_file_is_what_perfetto_reads(tmp_path):
    write_trace(tmp_path / "timeline.json", SPANS)
    trace = json.loads((tmp_path / "timeline.json").read_text())
    assert trace["displayTimeUnit"] == "ms"
    assert all({"ph", "pid", "tid", "name"} <= set(event) for event in trace["traceEvents"])


def test_lanes_stand_in_a_fixed_order_and_unknown_ones_follow():
    others = [span("messages", "order", 0, 1, 1), span("0-model", "draft", 0, 1, 1), span("1-model", "draft", 1, 2, 1)]
    assert lanes_of([*others, *SPANS]) == ["target", "draft", "1-model", "0-model", "messages"]


def test_the_picture_takes_rounds_from_the_middle():
    spans = [span("target", "verify", number, number + 0.5, number) for number in range(20)]
    assert [entry[4]["round"] for entry in middle_rounds(spans, 4)] == [8, 9, 10, 11]
    assert middle_rounds(SPANS, 8) == SPANS
    ahead = span("draft", "ahead", 7.75, 8.25, 9)
    assert middle_rounds([*spans, ahead], 4)[-1] == ("draft", "ahead", 8, 8.25, {"round": 9}), "cut at the window"


def test_messages_come_last_and_what_lies_between_work_is_waiting():
    spans = [span("messages", "verdict", 10.0075, 10.008, 2), span("draft2", "draft", 10.0, 10.001, 1), *SPANS]
    assert lanes_of(spans) == ["target", "draft", "draft2", "messages"]
    assert [(lane, start, end) for lane, _, start, end, _ in waits_of(spans)] == [
        ("target", 10.0075, 10.011),
        ("draft", 10.002, 10.008),
    ]
    assert busy_of(SPANS, "target") == pytest.approx(0.010 / 0.016)


def test_a_trace_is_in_the_order_of_time_and_of_lanes():
    spans = [span("messages", "verdict", 10.0075, 10.008, 2), *reversed(SPANS)]
    events = chrome_trace(spans)["traceEvents"]
    lanes = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    order = [event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"]
    assert lanes == ["target", "draft", "messages"] and order == [1, 2, 3]
    complete = [event for event in events if event["ph"] == "X"]
    assert [event["ts"] for event in complete] == sorted(event["ts"] for event in complete)
    assert {event["cat"]: event["tid"] for event in complete} == {"target": 1, "draft": 2, "messages": 3}
    waits = [(event["cat"], round(event["dur"]), event["args"]) for event in complete if event["name"] == "wait"]
    assert waits == [("draft", 6000, {"round": 2}), ("target", 3500, {"round": 3})]


def test_work_within_other_work_leaves_no_wait():
    spans = [span("draft", "ahead", 0, 10, 1), span("draft", "kv_refresh", 2, 3, 1), span("draft", "hit", 12, 13, 2)]
    assert waits_of(spans) == [("draft", "wait", 10, 12, {"round": 2})]
    assert waits_of([span("draft", "ahead", 0, 10, 1), span("draft", "hit", 10, 13, 2)]) == []


def test_lanes_and_records_and_hits_are_all_in_the_picture(tmp_path, monkeypatch):
    """A lane per role with its busy fraction, a mark per hit and miss, a line per record that set work off."""
    pictures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda *args, **options: pictures.append(args[0]) or save(*args, **options))
    spans = [
        span("target", "verify", 1.000, 1.010, 1, rows=6, tokens=3),
        span("messages", "verdict", 1.010, 1.0105, 1),
        span("messages", "order", 1.0105, 1.011, 2),
        span("draft", "hit", 1.011, 1.0112, 2),
        span("messages", "proposal", 1.0112, 1.0115, 2),
        span("messages", "verify", 1.0115, 1.012, 2),
        span("target", "verify", 1.012, 1.022, 2, rows=6, tokens=1),
        span("draft", "ahead", 1.012, 1.016, 2),
        span("draft", "miss", 1.023, 1.026, 3),
        span("target", "verify", 1.027, 1.037, 3, rows=2, tokens=2),
        span("draft2", "draft", 1.013, 1.014, 2),
    ]
    draw(tmp_path / "timeline.png", spans, {"target": 0.8, "draft": None})
    (axes,) = pictures[0].axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["target\n80% busy", "draft\n19% busy", "draft2\n3% busy"], "measured where it is not given"
    assert axes.get_xlim() == pytest.approx((0, 37)) and axes.get_ylim()[0] > axes.get_ylim()[1], "the target on top"
    assert axes.get_title(loc="left").startswith("Rounds 1 to 3: 1 hits, 1 misses.")
    marks = [line.get_marker() for line in axes.lines if line.get_marker() in ("v", "X")]
    records = [line for line in axes.lines if len(line.get_xdata()) == 2]
    assert sorted(marks) == ["X", "v"] and len(records) == 2
    assert list(records[0].get_xdata()) == pytest.approx([10, 11]), "from the end of a pass to the draft it set off"
    assert list(records[1].get_xdata()) == pytest.approx([11.2, 12]), "from the end of a draft to the pass it set off"
    assert [[round(y) for y in line.get_ydata()] for line in records] == [[0, 1], [1, 0]], "between target and draft"
    bars = {
        (round(bar.get_y() + bar.get_height() / 2), round(bar.get_x(), 3), round(bar.get_width(), 3))
        for bar in axes.patches
    }
    assert {(0, 0, 10), (0, 12, 10), (0, 27, 10), (1, 11, 0.2), (1, 12, 4), (1, 23, 3), (2, 13, 1)} <= bars
    assert [text.get_text() for text in axes.texts] == ["6 → 3", "6 → 1", "2 → 2"]


def test_the_picture_is_drawn(tmp_path):
    path = tmp_path / "timeline.png"
    draw(path, SPANS, {"target": 0.6, "draft": None})
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
