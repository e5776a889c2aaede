"""The cost of lookup is measured on the real drafters; how large it is, no test asserts."""

from __future__ import annotations

import pytest

from cluster.bench.lookup import DRAFTERS, library_tokens, main, measure


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_lookup_drafter_is_measured(name):
    cost = measure(DRAFTERS[name], library_tokens(2_100), 2_000, num_rounds=50)
    assert 0 < cost.propose_us <= cost.propose_p99_us and cost.enter_us_per_token > 0
    assert 20 < cost.bytes_per_token < 1000


def test_it_prints_a_table(monkeypatch, capsys):
    monkeypatch.setattr("cluster.bench.lookup.LENGTHS", (100, 200))
    monkeypatch.setattr("cluster.bench.lookup.NUM_ROUNDS", 10)
    main()
    shown = capsys.readouterr().out
    assert "bytes/token" in shown and all(name in shown for name in DRAFTERS)
