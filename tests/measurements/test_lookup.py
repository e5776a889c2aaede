"""The cost of lookup is measured on the real drafters; how large it is, no test asserts."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from docs.measurements.lookup import DRAFTERS, TEXTS, LookupCost, draw, main, measure, with_datastore
from tests.matrices import in_turn


@pytest.mark.extended
@pytest.mark.parametrize(("name", "text"), list(in_turn(DRAFTERS, TEXTS)))
def test_every_lookup_drafter_is_measured(name, text, monkeypatch, tmp_path):
    monkeypatch.setattr("docs.measurements.lookup.STORED", 1_000)
    cost = measure(with_datastore(DRAFTERS[name], tmp_path), TEXTS[text](1_120), 1_000, num_rounds=50)
    assert 0 < cost.propose_us <= cost.propose_p99_us and cost.enter_us_per_token > 0 and cost.take_back_us > 0
    assert 0 < cost.bytes_per_token < 2000


def test_a_line_of_the_picture_is_one_drafter_on_one_text(monkeypatch, tmp_path):
    pictures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: path.touch() or pictures.append(figure))
    names = ("ngram", "suffix")
    keys = [(name, text, length) for text in TEXTS for name in names for length in (100, 200)]
    costs = {key: LookupCost(10 * i + 1, 0, 10 * i + 2, 0, 0) for i, key in enumerate(keys)}
    draw(costs, tmp_path / "lookup.png")
    for i, (panel, text) in enumerate(zip(pictures[0].axes, TEXTS, strict=True)):
        assert panel.get_title(loc="left") == f"{text} text"
        drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in panel.lines]
        first, second = 40 * i, 40 * i + 20
        assert drawn == [
            ([100, 200], [first + 1, first + 11]),
            ([100, 200], [first + 2, first + 12]),
            ([100, 200], [second + 1, second + 11]),
            ([100, 200], [second + 2, second + 12]),
        ], "times of a proposal, and behind tokens that were taken back"


@pytest.mark.extended
def test_it_prints_a_table_and_draws_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("docs.measurements.lookup.LENGTHS", (100, 200))
    monkeypatch.setattr("docs.measurements.lookup.NUM_ROUNDS", 10)
    monkeypatch.setattr("docs.measurements.lookup.STORED", 1_000)
    monkeypatch.setenv("COLUMNS", "160")
    main(["--plot", str(tmp_path / "lookup.png")])
    shown = capsys.readouterr().out
    assert "bytes/token" in shown and all(name in shown for name in (*DRAFTERS, *TEXTS))
    assert (tmp_path / "lookup.png").read_bytes().startswith(b"\x89PNG")
