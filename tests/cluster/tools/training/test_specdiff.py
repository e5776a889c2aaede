"""Blocks that are filled in steps: what is trained is what the engine computes, and no row sees its own label."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.tools.training.models import drafter_config, initialised
from cluster.tools.training.speculators.specdiff import SpecdiffDrafter, SpecdiffOptions
from parallel.kv.pass_plan import Span
from parallel.runtime.runner import open_model
from parallel.speculators.config import FINAL
from parallel.speculators.pard import PardRunner, filling_masks
from parallel.training.interface import TargetBatch

DEPTH, LENGTH, MASK = 6, 14, 7
TOKENS = torch.randint(8, 64, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def net() -> SpecdiffDrafter:
    config = drafter_config(64)
    config.initializer_range = 0.2
    options = SpecdiffOptions(depth=DEPTH, mask_token=MASK, steps=3, keep=0.5)
    made = SpecdiffDrafter(initialised(config, 0, "cpu"), options)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(parameter.bfloat16())  # as saved
    return made


def drafted(net: SpecdiffDrafter, text: list[int], num_steps: int) -> torch.Tensor:
    """Logits [depth, V] of a draft behind a text, step by step, each a pass over all of it."""
    anchor, num_masks = len(text) - 1, DEPTH - 1
    rows = net.rows(torch.full((num_masks,), anchor), torch.arange(1, DEPTH))
    tokens, shown = torch.tensor([[*text, *[MASK] * num_masks]]), torch.zeros(num_masks, dtype=torch.bool)
    found = torch.zeros(DEPTH, 64)
    for step in range(num_steps):
        whole = net.hidden(tokens, rows, shown)[0]
        logits = net.model.lm_head(torch.cat((whole[anchor : anchor + 1], whole[tokens.shape[1] :])))
        found = torch.where(torch.tensor([*shown, False])[:, None], found, logits)
        num_filled = num_masks * (step + 1) // num_steps
        sure = found[:-1].softmax(-1).max(-1).values.masked_fill(shown, -1)
        for place in sure.topk(num_filled - int(shown.sum())).indices.tolist():
            tokens[0, len(text) + place], shown[place] = found[place].argmax(), True
    return found


@torch.no_grad()
@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
def test_the_engine_fills_as_was_trained(net: SpecdiffDrafter, tmp_path: Path, num_steps: int):
    net.save(tmp_path)
    runner = filling_masks(open_model(tmp_path), tmp_path, num_steps)
    assert isinstance(runner, PardRunner) and runner.num_steps == num_steps
    default = filling_masks(open_model(tmp_path), tmp_path)
    assert isinstance(default, PardRunner) and default.num_steps == 3
    texts = {"a": TOKENS[0].tolist(), "b": TOKENS[1, :9].tolist()}
    for seq_id in texts:
        runner.open(seq_id)
    spans = [Span(seq_id, len(text)) for seq_id, text in texts.items()]
    first = runner.forward(spans, [token for text in texts.values() for token in text]).logits
    rows = [first]
    for _ in range(DEPTH - 1):
        rows.append(runner.forward([Span(seq_id, 1) for seq_id in texts], [9, 9], fuzzy=True).logits)
    for place, text in enumerate(texts.values()):
        expected = drafted(net, text, num_steps)
        assert (torch.stack([row[place] for row in rows]) - expected).abs().max() < 1e-4
    runner.runner.pool.check()


@torch.no_grad()
def test_steps_change_what_is_drafted(net: SpecdiffDrafter):
    once, twice = (drafted(net, TOKENS[0].tolist(), steps) for steps in (1, 2))
    assert torch.equal(once[0], twice[0]) and (once[1:] - twice[1:]).abs().max() > 1e-2


@torch.no_grad()
def test_masks_of_a_block_see_each_other_and_no_other_block(net: SpecdiffDrafter):
    rows = net.trained_rows(LENGTH, torch.Generator().manual_seed(0))
    visible = rows.visible(LENGTH)
    anchors, depths = rows.anchors, rows.depths
    assert len({*anchors.tolist()}) == 7 and (depths.bincount()[1:] == 7).all(), "whole blocks"
    for row in range(len(anchors)):
        own = visible[LENGTH + row]
        assert own[:LENGTH].tolist() == [place <= anchors[row] for place in range(LENGTH)]
        assert torch.equal(own[LENGTH:], anchors == anchors[row])
    assert torch.equal(visible[:LENGTH, :LENGTH], torch.ones(LENGTH, LENGTH).tril().bool())
    assert not visible[:LENGTH, LENGTH:].any()


def test_a_row_whose_label_is_shown_is_not_trained(net: SpecdiffDrafter, monkeypatch: pytest.MonkeyPatch):
    head = torch.nn.Linear(16, 64, bias=False)
    hidden = torch.randn(2, LENGTH, 16, generator=torch.Generator().manual_seed(2))
    batch = TargetBatch(TOKENS, {FINAL: hidden}, torch.ones(2, LENGTH, dtype=torch.bool), head, head)
    counted, loss = list[int](), net._loss

    def counting(p: torch.Tensor, q: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        counted.append(len(labels))
        return loss(p, q, labels)

    monkeypatch.setattr(net, "_loss", counting)
    net.train()
    for is_shown in (False, True):
        monkeypatch.setattr(net, "shown_rows", lambda rows, _, one=is_shown: torch.full((len(rows.anchors),), one))
        net.loss(batch, torch.Generator().manual_seed(0))
    of_text, blocks = 2 * (LENGTH - 1), 2 * 7
    # where all is shown the last depth is left, whose label is behind the block
    assert counted == [of_text + blocks * (DEPTH - 1), of_text + blocks]
