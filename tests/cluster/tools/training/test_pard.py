"""Mask rows trained in one pass are those of passes over the text and its masks alone, and see nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from actors.drafters.model.config import ModelDrafterConfig
from actors.drafters.model.loading import open_draft_model
from actors.options import SchedulerConfig
from cluster.tools.training.models import drafter_config, initialised
from cluster.tools.training.speculators.pard import MaskRows, PardDrafter, PardOptions, dropped_rows
from docs.measurements.pocket.models import save_model
from parallel.comm.group import SINGLE
from parallel.kv.pass_plan import Span
from parallel.runtime.runner import ModelRunner, open_model
from parallel.speculators.pard import PardRunner, filling_masks

DEPTH, LENGTH, MASK = 4, 10, 7


@pytest.fixture(scope="module")
def net() -> PardDrafter:
    config = drafter_config(64)
    config.initializer_range = 0.2
    return PardDrafter(initialised(config, 0, "cpu"), PardOptions(depth=DEPTH, mask_token=MASK))


@pytest.fixture
def rows() -> MaskRows:
    return dropped_rows(LENGTH, DEPTH, 0.7, 0.2, torch.Generator().manual_seed(0))


TOKENS = torch.randint(8, 64, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def test_later_depths_have_fewer_anchors_all_of_the_depth_before(rows: MaskRows):
    by_depth = [set(rows.anchors[rows.depths == k].tolist()) for k in range(1, DEPTH)]
    assert [len(anchors) for anchors in by_depth] == [7, 5, 3]
    assert by_depth[2] < by_depth[1] < by_depth[0]
    least = dropped_rows(20, 8, 0.5, 0.25, torch.Generator().manual_seed(0))
    assert [int((least.depths == k).sum()) for k in (1, 2, 5, 7)] == [10, 5, 5, 5]


@torch.no_grad()
def test_a_mask_row_is_that_of_a_causal_pass_over_its_text_and_masks(net: PardDrafter, rows: MaskRows):
    hidden = net.hidden(TOKENS, rows)
    text = net.model.model(TOKENS).last_hidden_state
    assert (hidden[:, :LENGTH] - text).abs().max() < 1e-4
    for row, (anchor, depth) in enumerate(zip(rows.anchors.tolist(), rows.depths.tolist(), strict=True)):
        alone = torch.cat((TOKENS[:, : anchor + 1], torch.full((2, depth), MASK)), dim=1)
        expected = net.model.model(alone).last_hidden_state[:, -1]
        assert (hidden[:, LENGTH + row] - expected).abs().max() < 1e-4


@torch.no_grad()
def test_nothing_behind_the_anchor_leaks_into_its_masks(net: PardDrafter, rows: MaskRows):
    changed = TOKENS.clone()
    changed[:, 5:] = 3
    before, after = (net.hidden(tokens, rows)[:, LENGTH:] for tokens in (TOKENS, changed))
    same = rows.anchors < 5
    assert torch.equal(before[:, same], after[:, same])
    assert ((before - after)[:, ~same].abs().amax(-1) > 1e-3).all()


def test_the_engine_drafts_what_was_trained_in_the_order_of_any_verdicts(net: PardDrafter, tmp_path: Path):
    """Logits at every depth, whatever was accepted of the drafts before (T5 and T7)."""
    net.save(tmp_path)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(parameter.bfloat16())  # as saved
    plain = open_model(tmp_path)
    runner = filling_masks(plain, tmp_path)
    assert isinstance(runner, PardRunner) and runner.longest_draft == DEPTH
    text, choice = TOKENS[0].tolist(), random.Random(0)
    runner.open("a")
    runner.forward([Span("a", 3, None, 0)], text[:3])
    runner.commit("a", range(3))
    for accepted in (0, DEPTH, 2, 1, 0):
        suffix = text[runner.cached_len("a") :]
        rows = [runner.forward([Span("a", len(suffix))], suffix).logits]
        drafted = [choice.randrange(8, 64) for _ in range(DEPTH)]
        rows += [runner.forward([Span("a", 1)], [token], fuzzy=True).logits for token in drafted]
        masks = MaskRows(torch.full((DEPTH - 1,), len(text) - 1), torch.arange(1, DEPTH))
        with torch.no_grad():
            hidden = net.hidden(torch.tensor([text]), masks)[0, len(text) - 1 :]
            expected = net.model.lm_head(hidden)
        assert (torch.cat(rows[:DEPTH]) - expected).abs().max() < 1e-4
        assert (rows[DEPTH] == -torch.inf).all(), "no mask is that deep"
        runner.commit("a", range(len(suffix) + accepted))
        runner.commit("a", [])  # no further row is kept
        assert runner.drop_fuzzy("a") is (accepted > 0)
        assert runner.cached_len("a") == len(text)
        text += [*drafted[:accepted], choice.randrange(8, 64)]
    runner.truncate("a", 4)
    assert runner.cached_len("a") == 4


def test_a_checkpoint_without_masks_drafts_one_token_a_pass(tmp_path: Path):
    save_model(initialised(drafter_config(64), 0, "cpu"), tmp_path)
    runner, facts = open_draft_model(ModelDrafterConfig(path=str(tmp_path)), SchedulerConfig(), SINGLE, "cpu")
    assert isinstance(runner, ModelRunner) and "passes_per_draft" not in facts
