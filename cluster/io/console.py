"""What a job shows on the terminal: progress with seconds, completions, tables.

Knows how things look and nothing of how they came about. In a pipe or a batch job's log it prints plain text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

PROMPT_SHOWN = 60
COMPLETION_LINES = 4
COMPLETION_SHOWN = 320
PIPE_WIDTH = 160
REFRESH_HZ = 4
"""Low: what is drawn takes its time from what is measured."""
ABSENT = "–"


class Bar:
    """A progress bar that is on the screen."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def advance(self) -> None:
        self._progress.advance(self._task)

    def say(self, what: str) -> None:
        self._progress.update(self._task, description=what)


class Terminal:
    """Standard output, or where a test wants it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        if console is None and not self._console.is_terminal:
            self._console.width = PIPE_WIDTH

    @contextmanager
    def starting(self) -> Iterator[Callable[[str], None]]:
        """A spinner with seconds; yields what changes its text. What has several lines is a report, and stays.

        Where there is no terminal, as in the log of a batch job, every stage is a line.
        """
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        is_terminal = self._console.is_terminal
        last = ""
        with Progress(*columns, console=self._console, refresh_per_second=REFRESH_HZ, transient=True) as progress:
            task = progress.add_task("starting", total=None)

            def show(stage: str) -> None:
                nonlocal last
                if "\n" in stage or (stage != last and not is_terminal):
                    self.line(stage)
                else:
                    progress.update(task, description=stage)
                last = stage

            yield show

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator[Bar]:
        """A bar with seconds."""
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console, refresh_per_second=REFRESH_HZ) as progress:
            task = progress.add_task(what, total=total)
            yield Bar(progress, task)

    def line(self, text: str) -> None:
        self._console.print(Text(text))

    def completion(self, prompt: str, text: str, ending: str) -> None:
        """The end of a prompt and the beginning of what followed it."""
        shown = Text("… " + " ".join(prompt.split())[-PROMPT_SHOWN:], style="dim")
        shown.append(f"  [{ending}]\n", style="dim italic")
        shown.append(trimmed(text), style="not dim")
        self._console.print(shown, "")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """The first column names its row, the others hold figures."""
        style = {"box": SIMPLE_HEAD, "pad_edge": False, "show_header": any(columns)}
        table = Table(title=title, title_justify="left", title_style="bold", **style)
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index else "left", no_wrap=index == 0)
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        self._console.print(table)


def trimmed(text: str) -> str:
    """At most a few lines of a completion; an ellipsis says that there is more."""
    lines = text.strip("\n").split("\n")
    short = "\n".join(lines[:COMPLETION_LINES])[:COMPLETION_SHOWN]
    return short if short == text.strip("\n") else f"{short} …"


def figure(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A number for a table; a dash where it was not measured."""
    return ABSENT if value is None else f"{value:,.{digits}f}{unit}"


def percent(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.0%}"
