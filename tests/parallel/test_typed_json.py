"""What is wrong with a JSON file is a ValueError of one line."""

from __future__ import annotations

from typing import Annotated, TypedDict

import pytest
from msgspec import Meta

from parallel.typed_json import as_type, parse_json, read_json
from tests.first_use import use_together


class Inner(TypedDict, total=False):
    size: Annotated[int, Meta(ge=1)]


class Outer(TypedDict):
    names: list[str]
    inner: Inner


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[" * 100_000, "is nested too deeply"),
        ('{"a": {"b":' * 100_000, "is nested too deeply"),
        ("", r"is not JSON \(Expecting value at column 1\)"),
        ("{\n]", r"is not JSON \(.* at line 2, column 1\)"),
        (r'{"a": "\uD83D"}', r"is not Unicode text \(\\ud83d is half of a character\)"),
        (rb'["\udc00\ud83d"]', r"is not Unicode text \(\\udc00 is half"),
        (b"\xff\xff", "is not UTF-8 text"),
        ("9" * 5000, "is not JSON"),
    ],
)
def test_what_is_no_json(text, line):
    with pytest.raises(ValueError, match=rf"^{line}[^\n]*$"):
        parse_json(text)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({"names": ["a", 7], "inner": {}}, r"names\[1\]=7: must be str"),
        ({"names": [], "inner": {"size": 0}}, r"inner\.size=0: must be int >= 1"),
        ({"names": [], "inner": {"size": "long" * 20}}, r"inner\.size: must be int, got str"),
        ({"names": None, "inner": {}}, "names: must be array, got null"),
        ({"names": []}, "Object missing required field inner"),
        ([], "must be object, got array"),
    ],
)
def test_the_wrong_field_is_named(content, line):
    with pytest.raises(ValueError, match=rf"^{line}$"):
        as_type(content, Outer)


def test_any_key_of_a_mapping_is_meant():
    with pytest.raises(ValueError, match=r"^\[\.\.\.\]: must be int, got str$"):
        as_type({"a": 1, "b": "x"}, dict[str, int])


def test_fields_of_no_type_are_left_out():
    assert as_type({"names": ["a"], "inner": {"size": 1, "more": 2}, "x": 0}, Outer) == {
        "names": ["a"],
        "inner": {"size": 1},
    }


def test_a_folder_or_nothing_is_no_file(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        read_json(tmp_path)
    with pytest.raises(ValueError, match="no such file"):
        read_json(tmp_path / "config.json")


@pytest.mark.extended
def test_threads_may_use_a_type_for_the_first_time_together():
    """As the ranks of one process do."""
    before = 'content = {"several": [{"field_1": 2}], "one": {"field_0": 3}}'
    use_together("from parallel.typed_json import as_type", before, "as_type(content, outer)")
