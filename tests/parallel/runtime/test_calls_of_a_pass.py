"""How many calls the host makes around the one into C++ that computes a recorded pass, Python's own and those of
PyTorch and NumPy. A pass leaves nothing of them in the processor's caches, so each costs several times what it takes in
a loop; those that make a tensor cost most.

Run as `pytest -s tests/parallel/runtime/test_calls_of_a_pass.py` it prints the counts.
"""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch

from actors.protocol.messages import SamplingParams
from actors.sampling.logits import ChoicesAhead
from parallel.kernels.attention import has_attention
from parallel.kv.pass_plan import Span
from parallel.runtime import recorded_passes
from parallel.runtime.runner import open_model

pytestmark = pytest.mark.skipif(not has_attention(), reason="no compiler")

MAKERS = ("from_numpy", "frombuffer", "empty", "tensor", "zeros", "arange", "index_select", "cat", "to", "contiguous")
"""Calls that make a tensor or an array, or may."""
TREE = [-1, 0, 0, 1, 1, 2, 3, 3, 4]


class Calls:
    """Functions that this thread calls inside the block, by their names: those in Python, and those in C."""

    def __init__(self):
        self.of_python: Counter[str] = Counter()
        self.of_c: Counter[str] = Counter()

    @property
    def making(self):
        return sum(count for name, count in self.of_c.items() if name.rpartition(".")[2] in MAKERS)

    def __enter__(self):
        sys.setprofile(self._called)
        return self

    def __exit__(self, *exception):
        sys.setprofile(None)
        del self.of_c["setprofile"]

    def _called(self, frame, event, argument):
        if event == "call":
            self.of_python[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            self.of_c[argument.__qualname__] += 1


@pytest.fixture
def model(tiny_checkpoint, monkeypatch):
    """One whose passes and chains are recorded, with 65 sequences of 10 rows, of which the last is no run of slots."""
    monkeypatch.setattr(recorded_passes, "WORTH_RECORDING", 1)
    model = open_model(tiny_checkpoint("Llama"), num_slots=20_000, backend="ragged")
    for seq_id in range(65):
        model.open(seq_id)
        model.forward([Span(seq_id, 10)], [7] * 10)
        model.commit(seq_id, range(10))
    model.forward([Span(64, 5, [-1, -1, -1, 0, 0])], [7] * 5)
    model.commit(64, [2])
    model.forward([Span(64, 3)], [7] * 3)
    model.commit(64, range(3))
    assert model.pool.run(64) is None and model.pool.run(0) is not None
    return model


def of_pass(model, spans) -> Calls:
    """Of the second pass of this kind."""
    token_ids = [7] * sum(span.num_tokens for span in spans)
    for _ in range(2):
        with Calls() as calls:
            model.forward(spans, token_ids)
        for span in spans:
            model.drop_pending(span.seq_id)
    return calls


MOST = {"1 row": (45, 45, 4), "9 rows": (45, 45, 4), "a tree of 9 rows": (48, 60, 4), "9 rows, no run": (52, 52, 4)}
"""Calls in Python, in C, and of the latter those that make tensors or arrays."""
SPANS = {
    "1 row": [Span(0, 1)],
    "9 rows": [Span(0, 9, num_logits=9)],
    "a tree of 9 rows": [Span(0, 9, TREE, num_logits=9)],
    "9 rows, no run": [Span(64, 9, num_logits=9)],
}


@pytest.mark.parametrize("kind", MOST)
def test_a_recorded_pass_takes_few_calls(model, kind):
    calls = of_pass(model, SPANS[kind])
    counts = calls.of_python.total(), calls.of_c.total(), calls.making
    print(f"{kind}: {counts[0]} calls in Python, {counts[1]} in C, {counts[2]} of which make a tensor or an array")
    assert all(count <= most for count, most in zip(counts, MOST[kind], strict=True))


def test_every_further_sequence_takes_few_more(model):
    several = [of_pass(model, [Span(seq_id, 5, num_logits=5) for seq_id in range(count)]) for count in (16, 64)]
    few, many = several
    in_python = (many.of_python.total() - few.of_python.total()) / 48
    in_c = (many.of_c.total() - few.of_c.total()) / 48
    print(f"each sequence: {in_python:.1f} calls in Python, {in_c:.1f} in C")
    assert in_python <= 10.5 and in_c <= 4.5
    assert several[0].making == several[1].making, "tensors are made for the pass, not for each of its sequences"


def test_a_chain_of_five_steps_takes_few_calls(model):
    greedy = [SamplingParams()]
    for _ in range(2):
        choices = ChoicesAhead.of(greedy, [11], 5, torch.device("cpu"))
        with Calls() as calls:
            model.extend([Span(0, 1)], [7], choices)
        model.drop_pending(0)
    counts = calls.of_python.total(), calls.of_c.total(), calls.making
    print(f"five steps: {counts[0]} calls in Python, {counts[1]} in C, {counts[2]} of which make a tensor or an array")
    assert counts[0] <= 64 and counts[1] <= 70 and counts[2] <= 2
