"""Attention in rectangles, of any sizes and rounded up, against a kernel for each sequence, over random rounds."""

from __future__ import annotations

import random

import pytest
import torch

from parallel.kv.pass_plan import Span
from parallel.runtime.runner import open_model
from tests.parallel.backends import BACKENDS

LENGTHS = (1, 1, 2, 5, 7, 66, 70)  # two of them have a rectangle of their own
MOST = 128


@pytest.mark.extended
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2"])
@pytest.mark.parametrize("seed", range(3))
def test_rectangles_are_their_sequences_one_by_one(make_checkpoint, family, seed):
    """Three query heads to each of two KV heads, so that neither number can stand for the other."""
    window = {} if family == "Llama" else {"sliding_window": 9}
    path = make_checkpoint(family, hidden_size=48, num_attention_heads=6, num_key_value_heads=2, **window).path
    runners = [open_model(path, num_slots=700, backend=backend) for backend in ("sdpa", "padded", *BACKENDS[1:])]
    runners[2]._backend._bucketed = True
    draw = random.Random(seed)
    texts = dict.fromkeys(range(5), 0)
    for runner in runners:
        for name in texts:
            runner.open(name)
    for _ in range(6):
        spans, tokens, kept = [], [], {}
        for name in draw.sample(list(texts), draw.randrange(1, 6)):
            count = draw.choice([length for length in LENGTHS if texts[name] + length <= MOST] or [0])
            if not count:
                continue
            is_tree = 1 < count < 10
            parents = [draw.randrange(-1, row) for row in range(count)] if is_tree else [*range(-1, count - 1)]
            spans.append(Span(name, count, parents if is_tree else None, draw.choice([count, 1])))
            tokens += [draw.randrange(97) for _ in range(count)]
            row, kept[name] = draw.randrange(count), []
            while row >= 0:
                kept[name].insert(0, row)
                row = parents[row]
        if not spans:
            break
        outputs = [runner.forward(spans, tokens) for runner in runners]
        for output in outputs[1:]:
            torch.testing.assert_close(output.logits, outputs[0].logits, atol=2e-4, rtol=1e-3)
            torch.testing.assert_close(output.hidden, outputs[0].hidden, atol=2e-4, rtol=1e-3)
        for name, rows in kept.items():
            texts[name] += len(rows)
            for runner in runners:
                runner.commit(name, rows)
