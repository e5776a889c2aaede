"""A sequence whose rows are no numbers, as those of a model that overflows, in the passes of others: on every backend
their logits keep their bits, beside it and in the slots that it leaves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallel.kv.pass_plan import Span
from parallel.model.layers.padded import PaddedBackend
from parallel.runtime.runner import ModelRunner, open_model
from tests.parallel.backends import EVERY_BACKEND

NAMES = ["first", "second", "third"]  # not as many as a size of a bucket
TEXTS = {name: [7 * i + 3 * row for row in range(5 + 4 * i)] for i, name in enumerate(NAMES)}
TREE = [-1, 0, 0, 1]


@pytest.fixture(params=[*EVERY_BACKEND, "padded in buckets"])
def open_runner(request, make_checkpoint):
    def open_() -> ModelRunner:
        runner = open_model(make_checkpoint().path, num_slots=48, backend=request.param.removesuffix(" in buckets"))
        if request.param.endswith("in buckets"):
            assert isinstance(runner._backend, PaddedBackend)
            runner._backend._bucketed = True
        return runner

    return open_


def read_texts(runner: ModelRunner) -> None:
    for name, text in TEXTS.items():
        runner.open(name)
        runner.forward([Span(name, len(text), num_logits=0)], text)
        runner.commit(name, range(len(text)))


def logits_beside(runner: ModelRunner, name: str) -> list[Tensor]:
    """Those of the other sequences: of trees, of one row, and of one row once `name` is closed; and of a text in the
    slots that it had."""
    logits = []
    for parents in (TREE, [-1]):
        size = len(parents)
        tokens = [11 + row for row in range(size * len(NAMES))]
        found = runner.forward([Span(one, size, parents, size) for one in NAMES], tokens).logits
        logits += [found[i * size : (i + 1) * size] for i, one in enumerate(NAMES) if one != name]
        for one in NAMES:
            runner.commit(one, [0])
    runner.close(name)
    others = [one for one in NAMES if one != name]
    logits.append(runner.forward([Span(one, 1) for one in others], [5] * len(others)).logits)
    runner.open("later")
    logits.append(runner.forward([Span("later", 20)], [*range(20)]).logits)
    return logits


@pytest.mark.parametrize(("broken", "size"), [*((name, torch.nan) for name in NAMES), ("first", torch.inf)])
def test_a_sequence_that_is_no_number_changes_no_other(open_runner, broken, size):
    runner, plain = open_runner(), open_runner()
    for one in (runner, plain):
        read_texts(one)
    slots = runner.pool.slots(broken)
    runner.pool.keys[:, slots] = runner.pool.values[:, slots] = size
    for found, expected in zip(logits_beside(runner, broken), logits_beside(plain, broken), strict=True):
        assert torch.equal(found, expected)
