"""Logits behind rows of an earlier text are those of a text that is read from its first token, to the bit."""

from __future__ import annotations

import pytest
import torch

from parallel.kv.pass_plan import Span
from parallel.kv.pool import KVPool
from parallel.kv.prefix_tree import Text
from parallel.runtime.runner import open_model
from tests.parallel.backends import BACKENDS

TEXT = [3 + i * 7 % 90 for i in range(60)]


def read(runner, seq_id, token_ids, *, chunk=17, text=True):
    """Logits at all rows that were fed, and how many rows were there."""
    runner.open(seq_id, Text(token_ids, "scope") if text else None)
    found = start = runner.cached_len(seq_id)
    parts = []
    while start < len(token_ids):
        rows = token_ids[start : start + chunk]
        parts.append(runner.forward([Span(seq_id, len(rows), num_logits=len(rows))], rows).logits)
        runner.commit(seq_id, range(len(rows)))
        start += len(rows)
    return torch.cat(parts), found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("between", [0, 5])
def test_logits_behind_known_rows(llama, between, backend):
    """The same text, one that leaves it, and one behind which another's rows stand in the pool."""
    cold = open_model(llama.path, num_slots=200, backend=backend)
    runner = open_model(llama.path, num_slots=200, backend=backend)
    read(runner, "first", TEXT)
    for i in range(between):
        read(runner, ("between", i), [5 + i, 6, 7])
    texts = (("same", TEXT, 59), ("other", [*TEXT[:33], 9, 9, 4], 33), ("longer", [*TEXT, 8, 5], 60))
    for seq_id, text, length in texts:
        logits, found = read(runner, seq_id, text)
        expected, _ = read(cold, seq_id, text, text=False)
        assert found == length
        if runner.attention == "ragged":
            assert torch.equal(logits, expected[found:])
        else:
            torch.testing.assert_close(logits, expected[found:], rtol=1e-4, atol=1e-5)
        runner.close(seq_id)
        cold.close(seq_id)
    runner.pool.check()


def test_a_row_of_another_text_shows(llama, monkeypatch):
    """The control: logits behind one row too many differ."""
    cold, runner = (open_model(llama.path, num_slots=200) for _ in range(2))
    read(runner, "first", TEXT)
    table_of = KVPool._table_of
    monkeypatch.setattr(KVPool, "_table_of", lambda pool, text: table_of(pool, Text([*TEXT[:34], 1], text.scope)))
    text = [*TEXT[:33], 9, 9, 4]
    logits, found = read(runner, "other", text)
    assert found == 34
    assert not torch.allclose(logits, read(cold, "other", text, text=False)[0][found:])
