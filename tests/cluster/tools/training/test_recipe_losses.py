"""The loss and the acceptance of every recipe against their definitions, anchor by anchor and depth by depth.

An anchor is the newest token of a text; at depth k after it a drafter proposes token anchor + k + 1, k from 0, and is
held against the target's law at row anchor + k, where that token is a label. The drafts are those of each family's
training forward, which its own tests hold against the engine's passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.tools.training.models import drafter_config, initialised
from cluster.tools.training.speculators import distill, pard
from docs.measurements.pocket.models import save_model
from parallel.speculators.block import training as block
from parallel.speculators.chimera import training as chimera
from parallel.speculators.config import FINAL
from parallel.speculators.eagle import training as eagle
from parallel.speculators.exits import training as exits
from parallel.speculators.glide import training as glide
from parallel.speculators.gloeckle import training as gloeckle
from parallel.speculators.heads import training as heads
from parallel.speculators.streams import training as streams
from parallel.training.interface import Speculator, TargetBatch
from parallel.training.losses import acceptance, cross_entropy, forward_kl
from tests.matrices import in_turn
from tests.parallel.conftest import Checkpoint, make_checkpoint  # noqa: F401  a fixture
from tests.parallel.speculators.nets import make_net, read_text

LENGTH, DEPTHS, DECAY = 16, 3, 0.7
LABELS = (5, LENGTH), (3, 12)
"""Labels of the two texts: behind the prompt, up to the end of text."""


# --- what is drafted after every anchor: [texts, anchors, depths, V], with NaN where there is no draft ----------------


def nothing(batch: TargetBatch, num_tokens: int) -> Tensor:
    return torch.full((*batch.tokens.shape, DEPTHS, num_tokens), math.nan)


def of_draft_layers(net: Any, batch: TargetBatch) -> Tensor:
    features = torch.cat([batch.taps[tap] for tap in net.taps], -1)
    if isinstance(net, eagle.ParallelNet):
        steps = net.rows(batch, features, [torch.arange(LENGTH - 1)] * DEPTHS)
    else:
        steps = [rows[:, :-1] for rows in net.unroll(batch, features, DEPTHS)]
    logits = torch.stack([net.logits(rows, batch) for rows in steps], 2)
    drafts = nothing(batch, logits.shape[-1])
    drafts[:, 1:] = logits
    return drafts


def of_heads(net: Any, batch: TargetBatch) -> Tensor:
    drafts = nothing(batch, net.config.vocab_size)
    anchors = torch.arange(1, LENGTH - DEPTHS)
    for text in range(len(drafts)):
        drafts[text, anchors] = torch.stack(net.unroll(batch, torch.full_like(anchors, text), anchors), 1)
    return drafts


def of_later_heads(net: Any, batch: TargetBatch) -> Tensor:
    drafts = nothing(batch, net.hf["vocab_size"])
    drafts[:, 1:] = torch.stack([batch.head(read[:, :-1]) for read in net.read(batch)], 2)
    return drafts


def of_chimera(net: Any, batch: TargetBatch) -> Tensor:
    drafts = nothing(batch, net.hf["vocab_size"])
    for depth, (_, read) in enumerate(net.unroll(batch, DEPTHS)):
        drafts[:, : LENGTH - depth, depth] = batch.head(read)
    return drafts


def of_chain(logits: Tensor, batch: TargetBatch) -> Tensor:
    """The loss of drafters whose row of a token does not depend on whether it was drafted."""
    drafts = nothing(batch, logits.shape[-1])
    for depth in range(DEPTHS):
        drafts[:, : LENGTH - depth, depth] = logits[:, depth:]
    return drafts


def of_blocks(net: Any, batch: TargetBatch) -> Tensor:
    return net.logits_at(batch, torch.arange(LENGTH).expand(len(batch.tokens), -1))[-1]


def of_masks(net: Any, batch: TargetBatch) -> Tensor:
    anchors, further = torch.arange(LENGTH), torch.arange(1, DEPTHS)
    rows = pard.MaskRows(anchors.repeat(len(further)), further.repeat_interleave(LENGTH), net.is_mutual)
    hidden = net.hidden(batch.tokens, rows)
    return torch.stack(net.model.lm_head(hidden).split(LENGTH, 1), 2)


# --- the definitions --------------------------------------------------------------------------------------------------


def per_anchor(
    batch: TargetBatch, drafts: Tensor, value: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """value(target's logits, drafted logits, label) [texts, anchors, depths], and which of them have a label."""
    goals, found = batch.target_logits(), torch.zeros(drafts.shape[:3])
    is_label = torch.zeros(drafts.shape[:3], dtype=torch.bool)
    for anchor in range(LENGTH):
        for depth in range(min(DEPTHS, LENGTH - 1 - anchor)):
            row, label = goals[:, anchor + depth], batch.tokens[:, anchor + depth + 1]
            found[:, anchor, depth] = value(row, drafts[:, anchor, depth], label)
            is_label[:, anchor, depth] = batch.loss_mask[:, anchor + depth + 1]
    return found, is_label


def whole_anchors(drafts: Tensor) -> Tensor:
    """Those with a draft whose depths all lie within the text."""
    inside = torch.arange(LENGTH) + DEPTHS < LENGTH
    return inside & ~drafts.isnan().any(-1).any(-1)


def kl(goal: Tensor, draft: Tensor, _: Tensor) -> Tensor:
    return forward_kl(goal, draft)


def by_depth(batch: TargetBatch, drafts: Tensor, weights: list[float]) -> float:
    """The weighted mean over depths of each depth's mean over the anchors with labels up to there."""
    values, is_label = per_anchor(batch, drafts, kl)
    counted = is_label.cummin(-1).values & whole_anchors(drafts)[..., None]
    means = [values[..., k][counted[..., k]].mean() for k in range(DEPTHS)]
    return float(sum(weight * mean for weight, mean in zip(weights, means, strict=True)) / sum(weights))


def decayed(batch: TargetBatch, drafts: Tensor) -> float:
    return by_depth(batch, drafts, [DECAY**k for k in range(DEPTHS)])


def by_position(batch: TargetBatch, drafts: Tensor) -> float:
    """The mean over the labels, each drafted by the row before it."""
    values, is_label = per_anchor(batch, drafts, kl)
    return float(values[..., 0][is_label[..., 0]].mean())


def over_all_rows(batch: TargetBatch, drafts: Tensor) -> float:
    """The mean over rows of text and of masks that have a label."""
    values, is_label = per_anchor(batch, drafts, kl)
    return float(values[is_label].mean())


def over_blocks(batch: TargetBatch, drafts: Tensor) -> float:
    """Cross entropy, weighted by exp(-k / decay), after anchors that are labels themselves."""
    values, is_label = per_anchor(batch, drafts, lambda _, draft, label: cross_entropy(draft, label))
    weights = is_label * batch.loss_mask[..., None] * torch.exp(-torch.arange(DEPTHS) / 4.0)
    return float((values.nan_to_num() * weights).sum() / weights.sum())


def measured(batch: TargetBatch, drafts: Tensor, anchors: Tensor, temperature: float = 0.0) -> dict[str, float]:
    """Acceptance by depth and tokens per round after bool [texts, anchors]."""
    rates, is_label = per_anchor(batch, drafts, lambda goal, draft, _: acceptance(goal, draft, temperature))
    accepted, tried, lengths = [0.0] * DEPTHS, [0.0] * DEPTHS, []
    for text, anchor in anchors.nonzero().tolist():
        survival = 1.0
        for depth in range(DEPTHS):
            if not is_label[text, anchor, depth]:
                break
            tried[depth] += survival
            survival *= float(rates[text, anchor, depth])
            accepted[depth] += survival
        else:
            lengths.append(1 + float(rates[text, anchor].cumprod(0).sum()))
    found = {f"accept_{k + 1}": a / max(t, 1e-6) for k, (a, t) in enumerate(zip(accepted, tried, strict=True))}
    return found | {"length": sum(lengths) / len(lengths)}


# --- the recipes ------------------------------------------------------------------------------------------------------

DRAFT_LAYERS = {"decay": DECAY, "steps": DEPTHS, "depths": DEPTHS, "anchors": 0}
HEADS = {"decay": DECAY, "heads": DEPTHS}
FAMILIES: dict[str, tuple[Any, Any, Any, Any]] = {
    "eagle3": (eagle.build, eagle.DraftLayerOptions("eagle3", **DRAFT_LAYERS), of_draft_layers, decayed),
    "mtp": (eagle.build, eagle.DraftLayerOptions("mtp", **DRAFT_LAYERS), of_draft_layers, decayed),
    "p_eagle": (eagle.build, eagle.DraftLayerOptions("p_eagle", **DRAFT_LAYERS, keep=1.0), of_draft_layers, decayed),
    "medusa": (heads.build, heads.HeadsOptions(method="medusa", **HEADS), of_heads, decayed),
    "hydra": (heads.build, heads.HeadsOptions(method="hydra", **HEADS), of_heads, decayed),
    "streaming": (streams.build, streams.StreamsOptions(layers=2, start_rank=4, rank=4, **HEADS), of_heads, decayed),
    "chimera": (
        chimera.build,
        chimera.ChimeraOptions(decay=DECAY, depths=DEPTHS, feature_weight=0.0),
        of_chimera,
        decayed,
    ),
    "gloeckle": (gloeckle.build, gloeckle.GloeckleOptions(heads=DEPTHS, decay=DECAY), of_later_heads, decayed),
    "kangaroo": (
        exits.build,
        exits.ExitOptions("kangaroo", exit=1, depth=DEPTHS),
        lambda net, batch: of_chain(batch.head(net.read(batch)), batch),
        by_position,
    ),
    "dflash": (
        block.build,
        block.BlockOptions(block_size=DEPTHS + 1, layers=1, taps=2, intermediate_size=40, anchors=LENGTH),
        of_blocks,
        over_blocks,
    ),
    "distill": (
        distill.build,
        distill.DistillOptions(depth=DEPTHS),
        lambda net, batch: of_chain(net.model(batch.tokens).logits, batch),
        by_position,
    ),
    "pard": (
        pard.build,
        pard.PardOptions(depth=DEPTHS, mask_token=7, keep=1.0, keep_least=1.0),
        of_masks,
        over_all_rows,
    ),
}
GREEDY_ALONE = ("eagle3", "mtp", "p_eagle", "chimera")
"""Recipes whose held-out acceptance is that of the likeliest tokens at every temperature."""


@pytest.fixture
def target(make_checkpoint: Callable[..., Checkpoint]) -> Checkpoint:  # noqa: F811
    return make_checkpoint("Llama", num_hidden_layers=4)


@pytest.fixture
def batch(target: Checkpoint) -> TargetBatch:
    tokens = torch.randint(97, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    place = torch.arange(LENGTH)
    mask = torch.stack([(place >= begin) & (place < end) for begin, end in LABELS])
    return replace(read_text(target, tokens), loss_mask=mask)


def made(name: str, target: Checkpoint, folder: Path) -> Any:
    build, options, *_ = FAMILIES[name]
    if hasattr(options, "start"):
        config = drafter_config(97, 2)
        config.hidden_size, config.intermediate_size, config.initializer_range = 32, 48, 0.3
        save_model(initialised(config, 1, "cpu"), folder / "start")
        options = replace(options, start=str(folder / "start"))
    return make_net(build, options, target, folder)


def evaluated(net: Speculator, batch: TargetBatch) -> tuple[float, dict[str, float]]:
    with torch.no_grad():
        loss, metrics = net.loss(batch, torch.Generator().manual_seed(0))
    return float(loss), {name: float(value) for name, value in metrics.items()}


@pytest.mark.extended
@pytest.mark.parametrize("name", FAMILIES)
def test_the_loss_is_taken_at_the_labels_of_every_depth(
    name: str, target: Checkpoint, batch: TargetBatch, tmp_path: Path
) -> None:
    """This holds in evaluation, and in training where nothing is drawn at random."""
    net, (_, _, drafted, defined) = made(name, target, tmp_path), FAMILIES[name]
    if name == "pard":  # an evaluation has masks only where all depths are within the text: without labels at its end
        batch = replace(batch, loss_mask=batch.loss_mask & (torch.arange(LENGTH) < LENGTH - DEPTHS))
    with torch.no_grad():
        expected = defined(batch, drafted(net, batch))
    for is_training in (False, True):
        assert evaluated(net.train(is_training), batch)[0] == pytest.approx(expected, rel=1e-4), is_training


@pytest.mark.extended
@pytest.mark.parametrize(("name", "temperature"), list(in_turn(FAMILIES, [0.0, 0.8])))
def test_held_out_acceptance_is_that_of_the_drafts_by_depth(
    name: str, target: Checkpoint, batch: TargetBatch, tmp_path: Path, temperature: float
) -> None:
    net, (_, _, drafted, _) = made(name, target, tmp_path).eval(), FAMILIES[name]
    with torch.no_grad():
        drafts = drafted(net, batch)
    anchors = whole_anchors(drafts) if name != "dflash" else batch.loss_mask
    heat = 0.0 if name in GREEDY_ALONE else temperature
    _, found = evaluated(net, replace(batch, temperature=temperature))
    expected = measured(batch, drafts, anchors, heat)
    assert found == pytest.approx(expected, abs=1e-4)


# --- parts of a loss that one recipe has ------------------------------------------------------------------------------


def block_net(target: Checkpoint, folder: Path, **options: Any) -> Any:
    chosen = {"block_size": DEPTHS + 1, "layers": 1, "taps": 2, "intermediate_size": 40, "anchors": LENGTH, "rank": 8}
    return make_net(block.build, block.BlockOptions(**chosen | {"state_size": 12} | options), target, folder)


@torch.no_grad()
def test_the_loss_moves_from_the_plain_block_to_the_corrected_one(
    target: Checkpoint, batch: TargetBatch, tmp_path: Path
) -> None:
    """It moves by a fourth in every step of training, and evaluations take none; a resumed run goes on from its
    step."""
    net = block_net(target, tmp_path, corrector="gru", base_steps=4)
    anchors = torch.arange(LENGTH).expand(2, -1)
    plain, corrected = batch.head(net.hidden_states(batch, anchors)), net.logits_at(batch, anchors)[-1]
    begin, end = (over_blocks(batch, drafts) for drafts in (plain, corrected))
    assert abs(begin - end) > 1e-3
    for share in (1.0, 0.75, 0.5, 0.25, 0.0, 0.0):
        for mode in (False, True):
            loss, _ = evaluated(net.train(mode), batch)
            assert loss == pytest.approx(share * begin + (1 - share) * end, rel=1e-4), mode
    again = block_net(target, tmp_path, corrector="gru", base_steps=4)
    again.load_state_dict(net.state_dict())
    assert int(again.steps) == 6


@torch.no_grad()
def test_confidence_learns_the_probability_of_acceptance(
    target: Checkpoint, batch: TargetBatch, tmp_path: Path
) -> None:
    net = block_net(target, tmp_path, corrector="markov", confidence=True, cross_entropy=0.0).eval()
    anchors = torch.arange(LENGTH).expand(2, -1)
    hidden, drafts = net.hidden_states(batch, anchors), net.logits_at(batch, anchors)[-1]
    overlaps, is_label = per_anchor(batch, drafts, lambda goal, draft, _: acceptance(goal, draft, 1.0))
    tokens = torch.nn.functional.pad(batch.tokens, (0, DEPTHS)).unfold(1, DEPTHS, 1)[:, :LENGTH]  # before each depth
    said = net.predicted(hidden, tokens)
    weights = is_label * batch.loss_mask[..., None] * torch.exp(-torch.arange(DEPTHS) / 4.0)
    each = -(overlaps * said.sigmoid().log() + (1 - overlaps) * (1 - said.sigmoid()).log())
    loss, metrics = evaluated(net, batch)
    assert loss == pytest.approx(float((each * weights).sum() / weights.sum()), rel=1e-4)
    counted = is_label & batch.loss_mask[..., None]
    off = (said.sigmoid() - overlaps).abs()[counted].mean()
    assert metrics["confidence_error"] == pytest.approx(float(off), rel=1e-4)


@torch.no_grad()
def test_the_distance_of_laws_is_added_by_its_weight(target: Checkpoint, batch: TargetBatch, tmp_path: Path) -> None:
    net = block_net(target, tmp_path, cross_entropy=0.0, variation=0.9).eval()
    drafts = net.logits_at(batch, torch.arange(LENGTH).expand(2, -1))[-1]
    overlaps, is_label = per_anchor(batch, drafts, lambda goal, draft, _: acceptance(goal, draft, 1.0))
    weights = is_label * batch.loss_mask[..., None] * torch.exp(-torch.arange(DEPTHS) / 4.0)
    expected = 0.9 * 2 * ((1 - overlaps) * weights).sum() / weights.sum()
    assert evaluated(net, batch)[0] == pytest.approx(float(expected), rel=1e-4)


@torch.no_grad()
def test_early_logits_learn_the_law_of_the_next_token(target: Checkpoint, batch: TargetBatch, tmp_path: Path) -> None:
    options = streams.StreamsOptions(layers=2, start_rank=4, rank=4, prune_rank=4, **HEADS)
    net = make_net(streams.build, options, target, tmp_path)
    values = []
    for text, (begin, _) in enumerate(LABELS):
        for anchor in range(begin - 1, LENGTH - DEPTHS):
            if batch.loss_mask[text, anchor + 1]:
                early = net.early(batch, torch.tensor([text]), torch.tensor([anchor]))
                values.append(float(forward_kl(batch.target_logits()[text, anchor], early[0])))
    loss, metrics = evaluated(net.eval(), batch)
    assert metrics["early"] == pytest.approx(sum(values) / len(values), rel=1e-4)
    net.config = replace(net.config, prune_rank=0)
    assert loss - metrics["early"] == pytest.approx(evaluated(net, batch)[0], rel=1e-4)


@torch.no_grad()
def test_chimera_learns_the_hidden_states_too(target: Checkpoint, batch: TargetBatch, tmp_path: Path) -> None:
    options = chimera.ChimeraOptions(decay=DECAY, depths=DEPTHS, feature_weight=0.5)
    net = make_net(chimera.build, options, target, tmp_path).eval()
    expected = decayed(batch, of_chimera(net, batch))
    for depth, (states, _) in enumerate(net.unroll(batch, DEPTHS)):
        apart = (states - batch.taps[FINAL][:, depth:]).square().mean(-1)
        labels = torch.stack([batch.loss_mask[:, 1 + k : LENGTH - DEPTHS + 1 + k] for k in range(depth + 1)], -1).all(
            -1
        )
        distance = apart[:, : LENGTH - DEPTHS][labels].mean()
        expected += 0.5 * DECAY**depth * float(distance) / sum(DECAY**k for k in range(DEPTHS))
    assert evaluated(net, batch)[0] == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
def test_glide_learns_at_every_label_whatever_its_place_in_a_block(
    target: Checkpoint, batch: TargetBatch, tmp_path: Path
) -> None:
    net = make_net(glide.build, glide.GlideOptions(depths=DEPTHS), target, tmp_path).eval()
    goals, drafts = batch.target_logits()[:, :-1], batch.head(net.rows(batch, DEPTHS))[:, :-1]
    loss, metrics = evaluated(net, batch)
    labels = batch.loss_mask[:, 1:]
    assert loss == pytest.approx(float(forward_kl(goals, drafts)[labels].mean()), rel=1e-4)
    of_anchors = torch.full((2, LENGTH, DEPTHS, 97), math.nan)
    anchors = torch.zeros(2, LENGTH, dtype=torch.bool)
    for anchor in range(DEPTHS, LENGTH - DEPTHS, DEPTHS):
        of_anchors[:, anchor], anchors[:, anchor] = drafts[:, anchor : anchor + DEPTHS], True
    assert metrics == pytest.approx(measured(batch, of_anchors, anchors), abs=1e-4)
