"""The program of `docs/measurements/far_drafters.md`: its break-even delays and its table."""

from __future__ import annotations

import pytest

from cluster.tools.simulation import Language, Scenario
from docs.measurements import far_drafters
from docs.measurements.far_drafters import break_even_ms, main, scenario, shares


def test_a_break_even_delay_is_where_the_line_between_two_delays_crosses_one() -> None:
    assert break_even_ms((1, 5, 10), (1.5, 1.2, 0.9)) == pytest.approx(5 + 5 * 2 / 3)
    assert break_even_ms((1, 5), (1.5, 1.2)) is None and break_even_ms((1, 5), (0.9, 0.8)) is None


def test_the_nearer_drafter_is_the_faster_one() -> None:
    near, far = (shares(scenario("sync", 0.8, 15, delay, 60, 0)) for delay in (1, 50))
    assert near[0] > 1.5 and far[0] < 0.7
    assert far[2] > far[0], "the decision leaves it"


def test_the_table_has_a_row_for_each_case(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def shares_of(case: Scenario) -> tuple[float, float, float]:
        assert isinstance(case.language, Language)
        is_worst = (case.pipeline, case.language.seed, case.draft_link_s) == ("branches", 1, 0.03)
        return 1.5 - case.draft_link_s * 25, 1.0, 0.9 if is_worst else 1.0

    monkeypatch.setattr(far_drafters, "shares", shares_of)
    main(["--delays", "10", "30"])
    head, rule, *rows, _, least = capsys.readouterr().out.splitlines()
    assert head.count("|") == rule.count("|") == 5 and len(rows) == 12
    assert rows[0] == "| sync, 0.6, 15 ms | 1.25, 1.00, 1.00 | 0.75, 1.00, 1.00 | 20 ms |"
    assert least.count("0.900 (branches") == 6 and "15 ms, 30 ms away, text 1)" in least
