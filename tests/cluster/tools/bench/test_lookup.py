"""The cost of lookup is measured on the real drafters; how large it is, no test asserts."""

from __future__ import annotations

import pytest

from cluster.tools.bench.lookup import DRAFTERS, TEXTS, main, measure, with_datastore


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_lookup_drafter_is_measured(name, text, monkeypatch, tmp_path):
    monkeypatch.setattr("cluster.tools.bench.lookup.STORED", 1_000)
    cost = measure(with_datastore(DRAFTERS[name], tmp_path), TEXTS[text](1_120), 1_000, num_rounds=50)
    assert 0 < cost.propose_us <= cost.propose_p99_us and cost.enter_us_per_token > 0 and cost.take_back_us > 0
    assert 0 < cost.bytes_per_token < 2000


def test_it_prints_a_table_and_draws_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("cluster.tools.bench.lookup.LENGTHS", (100, 200))
    monkeypatch.setattr("cluster.tools.bench.lookup.NUM_ROUNDS", 10)
    monkeypatch.setattr("cluster.tools.bench.lookup.STORED", 1_000)
    monkeypatch.setenv("COLUMNS", "160")
    main(["--plot", str(tmp_path / "lookup.png")])
    shown = capsys.readouterr().out
    assert "bytes/token" in shown and all(name in shown for name in (*DRAFTERS, *TEXTS))
    assert (tmp_path / "lookup.png").read_bytes().startswith(b"\x89PNG")
