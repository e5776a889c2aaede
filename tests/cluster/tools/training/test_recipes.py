"""No setting of a recipe is ignored: each changes the module, its loss, its acceptance, or what is saved of it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.tools.training.speculators import distill, layerskip, sdar
from cluster.tools.training.speculators.recipes import RECIPES
from docs.recipes_page import page
from parallel.speculators.block import training as block
from parallel.speculators.chimera import training as chimera
from parallel.speculators.eagle import training as eagle
from parallel.speculators.exits import training as exits
from parallel.speculators.glide import training as glide
from parallel.speculators.gloeckle import training as gloeckle
from parallel.speculators.heads import training as heads
from parallel.speculators.streams import training as streams
from parallel.training.interface import TargetBatch
from tests.cluster.tools.training.test_recipe_losses import batch, target  # noqa: F401  fixtures
from tests.parallel.conftest import Checkpoint, make_checkpoint  # noqa: F401  a fixture
from tests.parallel.speculators.nets import make_net

DRAFT_LAYERS: dict[str, Any] = {"steps": 2, "depths": 2, "anchors": 0}
BASES: dict[str, tuple[Callable[..., Any], Any]] = {
    "eagle": (eagle.build, eagle.DraftLayerOptions("eagle3", **DRAFT_LAYERS)),
    "eagle with features": (eagle.build, eagle.DraftLayerOptions("eagle", feature_weight=0.5, **DRAFT_LAYERS)),
    "p_eagle": (eagle.build, eagle.DraftLayerOptions("p_eagle", **DRAFT_LAYERS)),
    "chimera": (chimera.build, chimera.ChimeraOptions(depths=2)),
    "glide": (glide.build, glide.GlideOptions(depths=2)),
    "gloeckle": (gloeckle.build, gloeckle.GloeckleOptions(heads=2)),
    "longspec": (glide.build, glide.GlideOptions(depths=2, method="longspec", window=4)),
    "exits": (exits.build, exits.ExitOptions("kangaroo", exit=1, depth=2)),
    "layerskip": (layerskip.build, layerskip.LayerSkipOptions(exit=1, depth=2)),
    "sdar": (sdar.build, sdar.SdarOptions(mask_token=7)),
    "heads": (heads.build, heads.HeadsOptions("hydra", heads=2)),
    "streams": (streams.build, streams.StreamsOptions(layers=2, start_rank=4, rank=4, heads=2)),
    "block": (block.build, block.BlockOptions(block_size=3, layers=1, taps=2, intermediate_size=40, anchors=8)),
    "block with a table": (
        block.build,
        block.BlockOptions(
            block_size=3, layers=1, taps=2, intermediate_size=40, anchors=8, corrector="markov", rank=4, confidence=True
        ),
    ),
    "block with a state": (
        block.build,
        block.BlockOptions(
            block_size=3, layers=1, taps=2, intermediate_size=40, anchors=8, corrector="gru", rank=4, state_size=6
        ),
    ),
    "block with candidates": (
        block.build,
        block.BlockOptions(
            block_size=3, layers=1, taps=2, intermediate_size=40, anchors=8, corrector="selector", rank=4, conv_taps=1
        ),
    ),
}
CHANGES: dict[str, dict[str, Any]] = {
    "eagle": dict(
        method="mtp", layers=2, taps=(1, 2, 4), intermediate_size=24, draft_vocab=50, steps=3, depths=3, anchors=4,
        decay=0.5, divergence="tvd", logits_weight=2.0, noise=0.5,
    ),
    "eagle with features": dict(feature_weight=1.5),
    "p_eagle": dict(keep=0.3, depths=3, layers=2),
    "chimera": dict(intermediate_size=24, depths=3, decay=0.5, divergence="tvd", feature_weight=2.0),
    "gloeckle": dict(heads=3, intermediate_size=24, decay=0.5, divergence="tvd"),
    "glide": dict(intermediate_size=24, depths=3, divergence="tvd", method="longspec"),
    "longspec": dict(window=3, shift=1, reach=50),
    "exits": dict(method="eesd", exit=2, intermediate_size=24, divergence="tvd", depth=3),
    "layerskip": dict(exit=2, dropout=0.9, exit_scale=0.3, curriculum="gradual", divergence="tvd", repeat=2, depth=3),
    "sdar": dict(block=3, mask_token=9),
    "heads": dict(
        method="medusa", heads=3, decay=0.5, divergence="tvd", anchors=2, blocks=2, inner=24, head="own",
        own_embedding=True,
    ),
    "streams": dict(
        method="mask_lora", layers=1, rank=2, start_rank=2, prune_rank=4, sampler=8, heads=3, decay=0.5,
        divergence="tvd", anchors=2,
    ),
    "block": dict(
        method="dflash2", layers=2, intermediate_size=24, taps=3, block_size=4, anchor_first=True, corrector="markov",
        conv_taps=2, confidence=True, anchors=3, decay=1.0, cross_entropy=0.5, variation=0.7,
        weighting="d_pace",
    ),
    "block with a table": dict(corrector="gated", rank=6, variation=0.5),
    "block with a state": dict(state_size=8, rank=6, base_steps=40),
    "block with candidates": dict(top_k=5, conv_taps=3, conv_group=8, rank=6),
}  # fmt: skip


def trace(build: Any, options: Any, target: Checkpoint, batch: TargetBatch, folder: Path) -> Iterator[Any]:  # noqa: F811
    """All that shows of a recipe's settings: shapes of weights, losses before and after steps of training, and the
    record; what is compared until it differs is computed no further."""
    folder.mkdir(parents=True)
    net = make_net(build, options, copy.deepcopy(target), folder)
    net.train()
    yield {name: tuple(one.shape) for name, one in net.state_dict().items()}, net.taps, net.reach
    optimizer = torch.optim.SGD([one for one in net.parameters() if one.requires_grad], lr=0.01)
    for step in range(2):
        loss, _ = net.loss(batch, torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield float(loss.detach())
    net.eval()
    with torch.no_grad():
        loss, metrics = net.loss(batch, torch.Generator().manual_seed(0))
    yield float(loss), {name: float(value) for name, value in metrics.items()}
    net.save(folder / "saved")
    yield json.loads((folder / "saved" / "config.json").read_text())


@pytest.mark.extended
@pytest.mark.parametrize("base", BASES)
def test_no_setting_is_ignored(base: str, target: Checkpoint, batch: TargetBatch, tmp_path: Path):  # noqa: F811
    build, options = BASES[base]
    as_it_is = list(trace(build, options, target, batch, tmp_path / "base"))
    again = list(trace(build, options, target, batch, tmp_path / "again"))
    assert as_it_is == again, "the same settings, the same run"
    for name, value in CHANGES[base].items():
        changed = replace(options, **{name: value})
        shown = zip(trace(build, changed, target, batch, tmp_path / name), as_it_is, strict=True)
        assert any(one != other for one, other in shown), f"{name}={value} changes nothing"


FILLING = {"pard", "specdiff", "sdar"}


def test_the_settings_of_every_kind_of_recipe_are_changed():
    """A new one needs a value here; those that begin with a model are tested with theirs."""
    kinds: set[Any] = {type(recipe.options) for recipe in RECIPES.values()}
    elsewhere = {"interval", "tied", "linear_skip", "skip", "start"}
    for kind in kinds - {distill.DistillOptions, *(type(RECIPES[name].options) for name in ("pard", "specdiff"))}:
        changed = {name for base, (_, options) in BASES.items() if type(options) is kind for name in CHANGES[base]}
        assert {one.name for one in fields(kind)} - changed <= elsewhere, kind.__name__


def test_the_page_of_recipes_is_as_the_registry_says():
    """If not: python -m docs.recipes_page > docs/recipes.md"""
    assert (Path(__file__).parents[4] / "docs" / "recipes.md").read_text() == page()


def test_a_model_that_is_tuned_as_a_whole_learns_slower_than_a_new_module():
    rates = {name: one.rates for name, one in RECIPES.items()}
    whole = {name for name, pair in rates.items() if pair == (5e-4, 3e-4)}
    assert whole == {"layerskip", "distill", "sorted"} and {rates[name] for name in FILLING} == {(2e-3, 1e-3)}
    assert {rates[name] for name in rates.keys() - whole - FILLING} == {(5e-3, 3e-3)}
    assert {name: one.writes for name, one in RECIPES.items() if one.writes != "drafter"} == {
        "layerskip": "target",
        "sdar": "target",
    }
