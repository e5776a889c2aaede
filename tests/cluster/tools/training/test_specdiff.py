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
from parallel.speculators.pard import MUTUAL_FIELD, PardRunner, filling_masks
from parallel.training.interface import TargetBatch
from parallel.training.losses import acceptance

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


def drafted(net: SpecdiffDrafter, text: list[int], num_steps: int, start: int | None = None) -> torch.Tensor:
    """Logits [depth, V] of a draft behind a text, step by step, each a pass over all of it. One of several drafts fills
    its first token, `start`, after the first pass, and no other."""
    anchor, num_masks = len(text) - 1, DEPTH - 1
    rows = net.blocks(torch.tensor([anchor]))
    tokens, shown = torch.tensor([[*text, *[MASK] * num_masks]]), torch.zeros(num_masks, dtype=torch.bool)
    found = torch.zeros(DEPTH, 64)
    for step in range(num_steps):
        whole = net.hidden(tokens, rows, shown)[0]
        logits = net.model.lm_head(torch.cat((whole[anchor : anchor + 1], whole[tokens.shape[1] :])))
        found = torch.where(torch.tensor([*shown, False])[:, None], found, logits)
        if start is not None and not step:
            tokens[0, len(text)], shown[0] = start, True
            continue
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


@pytest.mark.extended
@torch.no_grad()
@pytest.mark.parametrize("num_steps", [2, 3])
@pytest.mark.parametrize("is_mutual", [True, False])
def test_each_of_several_drafts_follows_its_first_token(
    net: SpecdiffDrafter, tmp_path: Path, num_steps: int, is_mutual: bool, monkeypatch: pytest.MonkeyPatch
):
    if not is_mutual:  # PARD's masks
        monkeypatch.setattr(net, "is_mutual", False)
        monkeypatch.setattr(net.model.config, MUTUAL_FIELD, False)
    net.save(tmp_path)
    runner = filling_masks(open_model(tmp_path), tmp_path, num_steps, num_drafts=2)
    assert isinstance(runner, PardRunner)
    texts = {"a": TOKENS[0].tolist(), "b": TOKENS[1, :9].tolist()}
    for seq_id in texts:
        runner.open(seq_id)
    first = runner.forward(
        [Span(seq_id, len(text)) for seq_id, text in texts.items()], [*texts["a"], *texts["b"]]
    ).logits
    likeliest = [row.topk(3).indices.tolist() for row in first]
    starts = [[row[1], row[0], row[2]] for row in likeliest]  # the third has no draft of its own
    spans = [Span(seq_id, 3, [len(text) - 1] * 3, 3) for seq_id, text in texts.items()]
    rows = [runner.forward(spans, [token for row in starts for token in row], fuzzy=True).logits.view(2, 3, -1)]
    for depth in range(2, DEPTH):
        above = 3 * depth - 6
        spans = [Span(seq_id, 3, [len(text) + above + i for i in range(3)], 3) for seq_id, text in texts.items()]
        rows.append(runner.forward(spans, [9] * 6, fuzzy=True).logits.view(2, 3, -1))
    for place, text in enumerate(texts.values()):
        for branch, start in enumerate((likeliest[place][1], likeliest[place][0], likeliest[place][0])):
            expected = drafted(net, text, num_steps, start)
            torch.testing.assert_close(
                torch.stack([row[place, branch] for row in rows]), expected[1:], atol=1e-4, rtol=0
            )
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
    of_text = blocks = 2 * 7  # rows of text learn where a block begins
    # where all is shown the last depth is left, whose label is behind the block
    assert counted == [of_text + blocks * (DEPTH - 1), of_text + blocks]


def test_the_loss_of_streaks_is_the_share_of_a_draft_that_is_rejected(
    net: SpecdiffDrafter, monkeypatch: pytest.MonkeyPatch
):
    """Every block by itself: tokens that are shown count as accepted but for the first, which a row of text predicts;
    what is behind the labels as rejected."""
    head = torch.nn.Linear(16, 64, bias=False)
    hidden = torch.randn(2, LENGTH, 16, generator=torch.Generator().manual_seed(2))
    is_label = torch.ones(2, LENGTH, dtype=torch.bool)
    is_label[1, 10:] = False
    batch = TargetBatch(TOKENS, {FINAL: hidden}, is_label, head, head)
    rows = net.trained_rows(LENGTH, torch.Generator().manual_seed(3))
    shown = torch.rand(len(rows.anchors), generator=torch.Generator().manual_seed(4)) < 0.4
    monkeypatch.setattr(net, "trained_rows", lambda *_: rows)
    monkeypatch.setattr(net, "shown_rows", lambda *_: shown)
    losses = list[torch.Tensor]()
    net.train()
    for weight in (0.0, 0.5):
        monkeypatch.setattr(net, "_streak", weight)
        losses.append(net.loss(batch, torch.Generator())[0])
    net.eval()
    with torch.no_grad():
        drafts = net.model.lm_head(net.hidden(TOKENS, rows, shown))
        goals, streaks = head(hidden), list[float]()
        count = len(rows.anchors) // (DEPTH - 1)
        for text in range(2):
            for block, anchor in enumerate(rows.anchors[:count].tolist()):
                streak, chance = 0.0, 1.0
                for depth in range(DEPTH):
                    row = LENGTH + (depth - 1) * count + block if depth else anchor
                    place = anchor + depth
                    if 0 < depth < DEPTH - 1 and shown[depth * count + block]:
                        rate = 1.0
                    elif place + 1 < LENGTH and is_label[text, place + 1]:
                        rate = float(acceptance(goals[text, place], drafts[text, row], 1.0))
                    else:
                        rate = 0.0
                    chance *= rate
                    streak += chance / DEPTH
                streaks.append(1 - streak)
    assert (losses[1] - losses[0]).item() == pytest.approx(0.5 * sum(streaks) / len(streaks), abs=1e-5)
    losses[1].backward()
    assert all(parameter.grad is not None for parameter in net.parameters())
    net.zero_grad()
