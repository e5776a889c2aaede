"""The words of `job=generate` about a report that is made by hand, and which completions it shows."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from cluster.io.console import Terminal
from cluster.io.prompts import Prompt
from cluster.jobs import generate
from cluster.observability.results import Run, Served


@pytest.mark.parametrize(
    ("num_unequal", "words"),
    [(None, "–"), (0, "all equal"), (3, "3 requests differ")],  # noqa: RUF001 (not measured)
)
def test_equality_is_said_where_it_was_measured(num_unequal, words):
    report: Any = {"num_unequal_requests": num_unequal}
    assert generate._equality(report) == words


@pytest.mark.parametrize(
    ("guard", "words"),
    [
        (None, "2 probes, 1 trials"),
        ({"gain": None}, "2 probes, 1 trials"),
        ({"gain": 0.875}, "2 probes, 1 trials; last found: 0.88x of plain decoding"),
    ],
)
def test_trials_of_speculation_are_counted_with_what_they_found(guard, words):
    report: Any = {"guard": guard, "num_probes": 2, "num_trials": 1}
    assert generate._trials(report) == words


def test_waits_of_the_target_are_named_with_what_it_waited_for():
    waits = {"target_for_drafter_s": 1.25, "target_for_messages_s": 0.5, "drafter_for_target_s": 9.0}
    report: Any = {"waits": waits}
    assert generate._waiting(report) == "1.2 s for the drafter, 0.5 s for messages"
    nothing: Any = {"waits": None}
    assert generate._waiting(nothing) == "–"  # noqa: RUF001 (not measured)


def shown(num_requests: int) -> str:
    out = io.StringIO()
    served = [Served(i, Prompt(f"prompt {i}"), (1,) * i, f"text {i}", "length") for i in range(num_requests)]
    failed = Served(num_requests, Prompt("bad"), error="too long")
    generate._show(Terminal(Console(file=out, width=200)), Run([failed, *reversed(served)]))
    return out.getvalue()


def test_the_first_eight_completions_are_shown_in_the_order_of_the_prompts():
    text = shown(7)
    assert [line for line in text.splitlines() if line.startswith("…")] == [
        *(f"… prompt {i}  [{i} tokens, length]" for i in range(7)),
        "… bad  [too long]",
    ]
    assert "more in" not in text and "text 6" in text
    text = shown(9)
    assert "text 7" in text and "text 8" not in text and "and 2 more in completions.jsonl" in text


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"bound_by": None, "speedup_vs_ar": 0.5}, "slower than plain decoding (0.50x); most of a round with a draft"),
        ({"speedup_vs_ar": 0.994}, "slower than plain decoding (0.99x)"),
        ({"speedup_vs_ar": 1.0}, "1.00x the speed of plain decoding"),
        ({"num_spec_steps": 0}, "no draft was verified: plain decoding, at 1.25x of what it reached when timed"),
        ({"num_spec_steps": 0, "num_guessed_states": 7}, "1.25x the speed of plain decoding"),
        ({"role_losses": {"target": 1, "draft": 2}}, "processes were lost: draft 2 times, target 1 times"),
        ({"role_losses": None}, "1.25x the speed of plain decoding"),
        (
            {"interrupted": True, "role_losses": {"draft": 1}},
            "interrupted: the figures are of what was generated before",
        ),
        ({"interrupted": True, "num_unequal_requests": 2}, "tokens of 2 requests differ from plain decoding"),
    ],
)
def test_what_is_most_important_comes_first(changed, words):
    report: Any = {
        "num_failed": 0,
        "num_unequal_requests": 0,
        "interrupted": False,
        "role_losses": {},
        "speedup_vs_ar": 1.25,
        "tokens_per_s": 80.0,
        "bound_by": "drafter",
        "num_spec_steps": 40,
        "num_guessed_states": 0,
        "notes": [],
    }
    assert generate.finding(report | changed).startswith(words)
