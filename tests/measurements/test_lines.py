"""`docs/measurements/lines.py`: a file of lines grows, and tables of it."""

from __future__ import annotations

from docs.measurements import lines


def test_lines_are_read_as_they_were_appended(tmp_path, capsys):
    file, added = tmp_path / "out.jsonl", [{"setting": "ä", "start": 0}, {"setting": "b", "start": 0, "ms": 1.5}]
    for line in added:
        lines.append(file, line)
    assert lines.read(file) == added and capsys.readouterr().err.count("\n") == 2
    lines.write(file, added[1:])
    assert lines.read(file) == added[1:]


def test_groups_come_in_the_order_of_their_first_lines():
    found = [{"at": at, "of": of, "number": number} for number, (at, of) in enumerate([(2, "x"), (1, "x"), (2, "x")])]
    groups = lines.grouped(found, "at", "of")
    assert [(key, [line["number"] for line in own]) for key, own in groups.items()] == [
        ((2, "x"), [0, 2]),
        ((1, "x"), [1]),
    ]


def test_a_table_is_markdown():
    assert lines.head("setting", 16) == "| setting | 16 |\n|---|---|"
    assert lines.row("`a`", 1, "") == "| `a` | 1 |  |"
    assert lines.spread([3.0, 1.0, 2.0], ".1f") == "2.0 (1.0 to 3.0)" and lines.spread([0.25], ".0%") == "25%"
