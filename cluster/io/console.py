"""What a job shows on the terminal: progress with seconds, completions, tables.

Holds layout only; the text and the figures come from the jobs. In a pipe or a batch job's log the output is plain text.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable
from rich.text import Text

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Columns and rows."""

PROMPT_SHOWN = 60
COMPLETION_LINES = 4
COMPLETION_SHOWN = 320
PIPE_WIDTH = 160
REFRESH_HZ = 4
"""Drawing takes time from what is measured, so it is rare."""
LOG_EVERY_S = 30.0
"""The least time between two lines about a bar that is not shown."""
ABSENT = "–"  # noqa: RUF001  an en dash stands for a figure that was not measured
_FIGURE = re.compile(rf"{ABSENT}|[-+]?\d[\d.,]*(-\d[\d.,]*)?( ?[^\s\d]+)?|")
"""A number or a range with at most one word behind it, or nothing: such columns are right-aligned."""


class Bar:
    """A progress bar on the screen; without one a line now and then."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task
        self._log = RareLines(progress.console)

    def advance(self) -> None:
        self._progress.advance(self._task)
        self._log.offer(self._line)

    def say(self, text: str) -> None:
        """Replace the text before the bar."""
        self._progress.update(self._task, description=text)
        self._log.offer(self._line)

    def _line(self) -> str:
        task = self._progress.tasks[self._task]
        return f"{task.description}: {task.completed:g} of {task.total:g}, {task.elapsed or 0:.0f} s"


class RareLines:
    """Signs of life for the log of a batch job, where a bar is written at its end alone; none on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = time.monotonic()

    def offer(self, make_line: Callable[[], str]) -> None:
        """Print the line, unless the last one is younger than `LOG_EVERY_S`."""
        if not self._console.is_terminal and time.monotonic() >= self._last + LOG_EVERY_S:
            self._last = time.monotonic()
            self._console.print(Text(make_line()), soft_wrap=True)


class Terminal:
    """Standard output, or the console a test gives."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        if console is None and not self._console.is_terminal:
            self._console.width = PIPE_WIDTH

    @contextmanager
    def starting(self) -> Iterator[Callable[[str], None]]:
        """A spinner with seconds; yields a function that changes its text.

        Text of several lines is printed and stays. Without a terminal, as in the log of a batch job, every new text is
        printed as a line.
        """
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        is_terminal = self._console.is_terminal
        last = ""
        with Progress(*columns, console=self._console, refresh_per_second=REFRESH_HZ, transient=True) as progress:
            task = progress.add_task("starting")

            def show(stage: str) -> None:
                nonlocal last
                if "\n" in stage or (stage != last and not is_terminal):
                    self.line(stage)
                else:
                    progress.update(task, description=stage)
                last = stage

            yield show

    @contextmanager
    def counting(self, text: str, total: int) -> Iterator[Bar]:
        """A bar with text, count and seconds."""
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console, refresh_per_second=REFRESH_HZ) as progress:
            task = progress.add_task(text, total=total)
            yield Bar(progress, task)

    def line(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def text(self, text: str) -> None:
        """A part of a line, as it comes."""
        self._console.print(Text(text), end="", soft_wrap=True)

    def completion(self, prompt: str, text: str, ending: str) -> None:
        """The end of a prompt and the beginning of its completion."""
        shown = Text("… " + " ".join(prompt.split())[-PROMPT_SHOWN:], style="dim")
        shown.append(f"  [{ending}]\n", style="dim italic")
        shown.append(trimmed(text), style="not dim")
        self._console.print(shown)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table as wide as its content. The first column names the row; columns of figures are right-aligned."""
        table = RichTable(
            title=title,
            title_justify="left",
            title_style="bold",
            box=SIMPLE_HEAD,
            pad_edge=False,
            show_header=any(columns),
        )
        for index, column in enumerate(columns):
            is_figures = index > 0 and all(_FIGURE.fullmatch(row[index]) for row in rows)
            table.add_column(column, justify="right" if is_figures else "left", no_wrap=index == 0)
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        self._console.print(table)


def trimmed(text: str) -> str:
    """A few lines of a completion at most, with an ellipsis where something was cut."""
    lines = text.strip("\n").split("\n")
    short = "\n".join(lines[:COMPLETION_LINES])[:COMPLETION_SHOWN]
    return short if short == text.strip("\n") else f"{short} …"


def figure(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A number for a table; a dash for None, which means not measured."""
    return ABSENT if value is None else f"{value:,.{digits}f}{unit}"


def percent(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.0%}"
