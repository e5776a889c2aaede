from __future__ import annotations

import json

from cluster.timeline import chrome_trace, draw, lanes_of, middle_rounds, write_trace


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
    complete = [event for event in events if event["ph"] == "X"]
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
    assert lanes_of([span("link", "send", 0, 1, 1), *SPANS]) == ["target", "draft", "link"]


def test_the_picture_takes_rounds_from_the_middle():
    spans = [span("target", "verify", number, number + 0.5, number) for number in range(20)]
    assert [entry[4]["round"] for entry in middle_rounds(spans, 4)] == [8, 9, 10, 11]
    assert middle_rounds(SPANS, 8) == SPANS


def test_the_picture_is_drawn(tmp_path):
    path = tmp_path / "timeline.png"
    draw(path, SPANS, {"target": 0.6, "draft": None})
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
