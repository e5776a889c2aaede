"""Exact and fuzzy passes of one runner: which rows are exact, and batches in which both are needed."""

from __future__ import annotations

import pytest
import torch

from parallel.kv.pass_plan import Span
from parallel.model.partition import LayerLayout, partition_of
from parallel.runtime.runner import open_model

TEXTS = {"a": [5, 6, 7, 8], "b": [9, 10], "c": [11, 12, 13], "d": [14, 15, 16, 17, 18]}
LEFT_FUZZY = ("b", "d")
TAPS = (1, 3)


@pytest.fixture
def path(make_checkpoint):
    return make_checkpoint("Llama", num_hidden_layers=6, initializer_range=0.15).path


@pytest.fixture
def open_runner(path):
    def open_():
        layout = LayerLayout(partition_of((1, 4, 1), 6), 1)
        return open_model(path, layout=layout, num_slots=64)

    return open_


def feed(runner, names, *, fuzzy=False):
    """All texts in one pass; they are committed."""
    spans = [Span(name, len(TEXTS[name]), num_logits=2) for name in names]
    output = runner.forward(spans, [token for name in names for token in TEXTS[name]], TAPS, fuzzy=fuzzy)
    for name in names:
        runner.commit(name, range(len(TEXTS[name])))
    return output


def opened(runner):
    """Sequences with an exact row each; some have a fuzzy row after it."""
    for name in TEXTS:
        runner.open(name)
        runner.forward([Span(name, 1)], [3])
        runner.commit(name, [0])
        if name in LEFT_FUZZY:
            runner.forward([Span(name, 1)], [4], fuzzy=True)
            runner.commit(name, [0])
    return runner


def test_a_mixed_batch_is_its_sequences_one_by_one(open_runner):
    together, apart = opened(open_runner()), opened(open_runner())
    found = feed(together, TEXTS)
    each = [feed(apart, [name]) for name in TEXTS]
    for name in ("logits", "hidden"):
        expected = torch.cat([getattr(output, name) for output in each])
        torch.testing.assert_close(getattr(found, name), expected, atol=1e-4, rtol=1e-4)
    assert len(found.features) == len(TAPS)
    for i, features in enumerate(found.features):
        torch.testing.assert_close(features, torch.cat([output.features[i] for output in each]), atol=1e-4, rtol=1e-4)
    for runner in (together, apart):
        for name, text in TEXTS.items():
            is_fuzzy = name in LEFT_FUZZY
            assert runner.cached_len(name) == 1 + is_fuzzy + len(text)
            assert runner.exact_len(name) == (1 if is_fuzzy else 1 + len(text)), "behind a fuzzy row none is exact"


def test_fuzzy_rows_are_fed_again_and_then_all_are_those_of_the_plain_model(open_runner, path):
    runner, plain = opened(open_runner()), open_model(path, num_slots=64)
    assert [name for name in TEXTS if runner.drop_fuzzy(name)] == list(LEFT_FUZZY)
    assert [runner.cached_len(name) for name in TEXTS] == [1] * len(TEXTS) and not runner.drop_fuzzy("b")
    found = feed(runner, TEXTS)
    for name in TEXTS:
        plain.open(name)
        plain.forward([Span(name, 1)], [3])
        plain.commit(name, [0])
    torch.testing.assert_close(found.logits, feed(plain, TEXTS).logits, atol=1e-4, rtol=1e-4)
    assert [runner.exact_len(name) for name in TEXTS] == [1 + len(text) for text in TEXTS.values()]


def test_a_fuzzy_pass_is_not_the_exact_one_and_cannot_be_taken_for_it(open_runner):
    exact, fuzzy = opened(open_runner()), opened(open_runner())
    difference = feed(exact, ["a"]).logits - feed(fuzzy, ["a"], fuzzy=True).logits
    assert difference.abs().max() > 1e-3 and fuzzy.exact_len("a") == 1 and exact.exact_len("a") == 1 + len(TEXTS["a"])
    with pytest.raises(AssertionError, match="an exact pass needs exact rows"):
        fuzzy.plan([Span("a", 1)])
