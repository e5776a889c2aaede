"""What a job shows: exact text and styles, on a terminal and in a pipe."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cluster.io import console as module
from cluster.io.console import (
    ABSENT,
    COMPLETION_LINES,
    COMPLETION_SHOWN,
    PIPE_WIDTH,
    Terminal,
    figure,
    percent,
    trimmed,
)


def captured() -> tuple[Terminal, io.StringIO]:
    out = io.StringIO()
    return Terminal(Console(file=out, width=100, highlight=False)), out


def test_long_completions_are_trimmed_and_say_so():
    assert trimmed("\nshort\n") == "short"
    assert trimmed("\n".join("abcdefgh")) == "a\nb\nc\nd …" and COMPLETION_LINES == 4
    assert trimmed("x" * 321) == "x" * 320 + " …" and COMPLETION_SHOWN == 320
    assert trimmed("x" * 320) == "x" * 320 and trimmed("a\nb\nc\nd\n") == "a\nb\nc\nd"


def test_what_was_not_measured_is_a_dash():
    assert (figure(None), percent(None)) == (ABSENT, ABSENT)
    assert figure(1234.567) == "1,234.57"
    assert (figure(1234.567, 1), figure(2.0, 2, "x"), percent(0.256)) == ("1,234.6", "2.00x", "26%")


def test_only_a_pipe_of_its_own_has_a_width_that_suits_logs(capsys):
    Terminal().line("x")  # standard output, which is captured here and no terminal
    Terminal().table("", ("name", "says"), [("a", "b" * (PIPE_WIDTH - 20))])
    assert "b" * (PIPE_WIDTH - 20) in capsys.readouterr().out
    terminal, out = captured()
    terminal.table("", ("name", "says"), [("a", "b" * (PIPE_WIDTH - 20))])
    assert max(map(len, out.getvalue().splitlines())) == 100
    assert PIPE_WIDTH == 160


def test_text_of_models_is_shown_as_it_is():
    terminal, out = captured()
    terminal.completion("def f(x):\n    return", " x[bold]y[/bold] [/]", "5 tokens, length")
    terminal.table("Figures", ("name", "value"), [("[red]", "1")])
    shown = out.getvalue()
    assert "def f(x): return" in shown and "x[bold]y[/bold] [/]" in shown and "[red]" in shown


def test_columns_of_figures_are_right_aligned_and_words_are_not():
    terminal, out = captured()
    terminal.table("", ("name", "speed", "says"), [("a", "1.0 ms", "all equal"), ("b", "12.5-19 ms", "2 differ")])
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert " a          1.0 ms   all equal" in lines and " b      12.5-19 ms   2 differ" in lines


def test_progress_shows_counts_and_seconds():
    terminal, out = captured()
    with terminal.counting("completing", 3) as bar:
        bar.say("measuring")
        bar.advance()
        bar.advance()
    assert "measuring" in out.getvalue() and "2/3" in out.getvalue() and "0:00:0" in out.getvalue()


def test_a_bar_that_is_not_shown_is_a_line_every_half_minute(monkeypatch):
    now = 0.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    for (terminal, out), is_logged in ((captured(), True), (on_a_terminal(), False)):
        now = 0.0
        with terminal.counting("completing", 100) as bar:
            for _ in range(61):
                now += 1.0
                bar.advance()
            lines = [line for line in out.getvalue().splitlines() if line.startswith("completing: ")]
        wanted = ["completing: 30 of 100, 0 s", "completing: 60 of 100, 0 s"]
        assert [line.rstrip() for line in lines] == (wanted if is_logged else [])


@pytest.mark.parametrize("says", ["loading [1 of 2]", "[red]loading[/red] [/]"])
def test_progress_on_a_terminal_is_shown_as_it_is_and_wiped_at_the_end(says):
    terminal, out = on_a_terminal()
    with terminal.starting() as progress:
        progress(says)
    last = out.getvalue().splitlines()[-1]
    assert f" {says} " in out.getvalue() and last.endswith("\x1b[2K"), "the line is erased"
    terminal, out = on_a_terminal()
    with terminal.counting(says, 2):
        pass
    assert f"{says} " in out.getvalue() and not out.getvalue().splitlines()[-1].endswith("\x1b[2K")


def test_progress_is_drawn_four_times_a_second(monkeypatch):
    rates: list[float] = []

    class Recorded(module.Progress):
        def __init__(self, *columns: Any, refresh_per_second: float, **options: Any) -> None:
            rates.append(refresh_per_second)
            super().__init__(*columns, refresh_per_second=refresh_per_second, **options)

    monkeypatch.setattr(module, "Progress", Recorded)
    terminal, _ = captured()
    with terminal.starting(), captured()[0].counting("", 1):
        assert rates == [4, 4]


def test_a_line_is_not_broken(capsys):
    terminal, out = captured()
    terminal.line("word " * 60)
    assert out.getvalue() == "word " * 60 + "\n"


def on_a_terminal() -> tuple[Terminal, io.StringIO]:
    out = io.StringIO()
    return Terminal(Console(file=out, width=100, force_terminal=True, color_system="standard")), out


def test_prompts_and_endings_are_dim_and_completions_are_not():
    terminal, out = on_a_terminal()
    terminal.completion("x" * 10 + " " + "y" * 30 + "\n " + "z" * 29, "a\nb", "5 tokens, stop")
    shown = "y" * 30 + " " + "z" * 29
    assert out.getvalue() == f"\x1b[2m… {shown}\x1b[0m\x1b[2;3m  [5 tokens, stop]\x1b[0m\na\nb\n"


def test_a_table_is_as_wide_as_its_content():
    terminal, out = captured()
    terminal.table("T", ("name", "1st", "2nd"), [("a", "1.0", "x y z"), ("b c", "-12", "3 s")])
    assert [line.rstrip() for line in out.getvalue().splitlines()] == [
        "T",
        "",
        " name   1st   2nd",
        " ──────────────────",
        " a      1.0   x y z",
        " b c    -12   3 s",
        "",
    ]
    terminal, out = captured()
    terminal.table("T", ("", ""), [("1", "2")])
    assert [line.rstrip() for line in out.getvalue().splitlines()] == ["T", "", " 1   2", ""], "no names, no line"


def test_the_first_column_keeps_its_words_on_one_line():
    out = io.StringIO()
    terminal = Terminal(Console(file=out, width=30))
    terminal.table("", ("name", "says"), [("one two three", "many words that need several lines")])
    lines = out.getvalue().splitlines()
    assert any(line.startswith(" one two three ") for line in lines)
    assert max(map(len, lines)) <= 30


def test_the_log_of_a_batch_job_has_a_line_per_stage_and_none_twice():
    terminal, out = captured()
    with terminal.starting() as progress:
        for stage in ("reaching the cluster", "loading (1 of 2 ranks)", "loading (1 of 2 ranks)", "layout\n  target-0"):
            progress(stage)
    assert [line.rstrip() for line in out.getvalue().splitlines() if line.strip() and "0:00" not in line] == [
        "reaching the cluster",
        "loading (1 of 2 ranks)",
        "layout",
        "  target-0",
    ]


def test_a_report_stays_on_the_terminal():
    out = io.StringIO()
    terminal = Terminal(Console(file=out, width=100, highlight=False, force_terminal=True))
    with terminal.starting() as progress:
        progress("layout\n  target-0: cpu")
    assert "target-0: cpu" in out.getvalue()
