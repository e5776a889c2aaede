from __future__ import annotations

import io

from rich.console import Console

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
    assert trimmed("x" * 1000) == "x" * COMPLETION_SHOWN + " …"


def test_what_was_not_measured_is_a_dash():
    assert (figure(None), percent(None)) == (ABSENT, ABSENT)
    assert (figure(1234.567, 1), figure(2.0, 2, "x"), percent(0.256)) == ("1,234.6", "2.00x", "26%")


def test_only_a_pipe_of_its_own_has_a_width_that_suits_logs(capsys):
    Terminal().line("x")  # standard output, which is captured here and no terminal
    Terminal().table("", ("name", "says"), [("a", "b" * (PIPE_WIDTH - 20))])
    assert "b" * (PIPE_WIDTH - 20) in capsys.readouterr().out
    terminal, out = captured()
    terminal.table("", ("name", "says"), [("a", "b" * (PIPE_WIDTH - 20))])
    assert max(map(len, out.getvalue().splitlines())) == 100


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
    with terminal.starting() as progress:
        progress("loading [1 of 2]")


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
