"""A chain of a model that fills masks takes no pass after the one that fills them, and is that of its steps."""

from __future__ import annotations

import pytest
import torch

from actors.protocol.messages import SamplingParams
from actors.sampling.logits import ChoicesAhead, choose_plain
from cluster.tools.training.models import drafter_config, initialised
from cluster.tools.training.speculators.specdiff import SpecdiffDrafter, SpecdiffOptions
from parallel.kv.pass_plan import Span
from parallel.runtime.interface import Runner
from parallel.runtime.runner import open_model
from parallel.speculators.pard import PardRunner, filling_masks

VOCAB, DEPTH = 11, 5
TEXTS = [[1, 3, 0, 2, 1], [4, 4, 7]]
SAMPLING = [SamplingParams(), SamplingParams(temperature=1.0, seed=3)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("specdiff")
    config = drafter_config(VOCAB)
    config.initializer_range = 0.3
    options = SpecdiffOptions(depth=DEPTH, mask_token=VOCAB - 1, steps=2)
    SpecdiffDrafter(initialised(config, 0, "cpu"), options).save(path)
    return path


@pytest.mark.parametrize(("num_steps", "num_drafts"), [(1, 1), (2, 1), (2, 2)])
def test_a_chain_is_that_of_its_steps(path, num_steps, num_drafts):
    runners = [filling_masks(open_model(path, num_slots=200), path, num_steps, num_drafts) for _ in range(2)]
    lengths, seq_ids = [len(text) for text in TEXTS], range(len(TEXTS))
    spans = [Span(seq_id, length) for seq_id, length in enumerate(lengths)]
    found = []
    for runner, extend in zip(runners, (PardRunner.extend, Runner.extend), strict=True):
        assert isinstance(runner, PardRunner)
        for seq_id in seq_ids:
            runner.open(seq_id)
        logits = runner.forward(spans, [token for text in TEXTS for token in text]).logits
        first = choose_plain(logits, SAMPLING, lengths)
        choice = ChoicesAhead.of(SAMPLING, [length + 1 for length in lengths], DEPTH - 2, torch.device("cpu"))
        chain = extend(runner, seq_ids, first, choice)
        last = runner.forward([Span(seq_id, 1) for seq_id in seq_ids], chain[-1], fuzzy=True).logits
        for seq_id, length in enumerate(lengths):
            runner.commit(seq_id, range(length + 2))  # the text and two draft tokens
        again = runner.forward([Span(seq_id, 3) for seq_id in seq_ids], [5, 6, 7, 8, 9, 1]).logits
        found.append((first, chain, last, again))
    for fast, slow in zip(*found, strict=True):
        assert torch.equal(fast, slow)
    assert len({tuple(column) for column in found[0][1].T.tolist()}) == len(TEXTS), "the two draft alike"
