"""Lines of figures that a program appends to a file while it measures, and Markdown tables of them.

A run that is stopped keeps what it measured, and several runs add to one file. Knows no figure.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

Line = dict[str, Any]


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """The parser of a program whose `--help` begins with its documentation, as that is written."""
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


def append(file: Path, line: Mapping[str, Any]) -> None:
    """Add the line, and show it."""
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(line) + "\n")
    sys.stderr.write(f"{dict(line)}\n")


def write(file: Path, found: Iterable[Mapping[str, Any]]) -> None:
    """Replace the file."""
    file.write_text("".join(json.dumps(line) + "\n" for line in found), encoding="utf-8")


def read(file: Path) -> list[Line]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def grouped(lines: Iterable[Line], *names: str) -> dict[tuple[Any, ...], list[Line]]:
    """The lines by their values of these names, in order of their first appearance."""
    found: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        found.setdefault(tuple(line[name] for name in names), []).append(line)
    return found


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def head(*columns: object) -> str:
    """The two lines that a table begins with."""
    return f"{row(*columns)}\n{'|---' * len(columns)}|"


def spread(values: Sequence[float], form: str = ".0f") -> str:
    """The median and, of several values, the range."""
    middle, least, most = (format(one, form) for one in (median(values), min(values), max(values)))
    return f"{middle} ({least} to {most})" if len(values) > 1 else middle
