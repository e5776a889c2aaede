"""Mask rows trained in one pass are those of passes over the text and its masks alone, and see nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.tools.training.models import drafter_config, initialised
from cluster.tools.training.speculators.pard import MaskRows, PardDrafter, PardOptions, dropped_rows

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


def test_the_checkpoint_says_how_it_drafts(net: PardDrafter, tmp_path: Path):
    net.save(tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert '"pard_token": 7' in text and '"method": "pard"' in text
