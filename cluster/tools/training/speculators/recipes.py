"""The registry of training recipes for speculators: one row per `job.recipe`. It must not know how training runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.tools.training.speculators import (
    block,
    chimera,
    distill,
    eagle,
    exits,
    glide,
    heads,
    layerskip,
    pard,
    streams,
)
from cluster.tools.training.speculators.block import BlockOptions
from cluster.tools.training.speculators.interface import Speculator, TargetShape
from parallel.ranges import Section


@dataclass(frozen=True)
class SpeculatorRecipe:
    """How one method is built and trained."""

    build: Callable[[Any, TargetShape], Speculator]
    """`build(options, target)`: the module with fresh float32 weights, drawn from PyTorch's global generator."""
    options: Section
    """Defaults of the method's own settings; `job.options={...}` replaces fields of them."""
    matrix_learning_rate: float = 5e-3
    """Peak rate of Muon (matrices that are no tables)."""
    other_learning_rate: float = 3e-3
    """Peak rate of AdamW (tables, norms, biases)."""
    num_parts: Callable[[Any], int] = lambda _: 1
    """Of these options: the parts of the module that ranks can train by themselves."""
    writes: str = "drafter"
    """Folder of the run for the checkpoint: what it is."""


RECIPES: dict[str, SpeculatorRecipe] = {
    "eagle": SpeculatorRecipe(
        eagle.build,
        eagle.DraftLayerOptions("eagle", steps=1, logits_weight=0.1, feature_weight=1.0, noise=0.4),
    ),
    "eagle3": SpeculatorRecipe(eagle.build, eagle.DraftLayerOptions("eagle3")),
    "eagle3.1": SpeculatorRecipe(eagle.build, eagle.DraftLayerOptions("eagle3.1")),
    "mtp": SpeculatorRecipe(eagle.build, eagle.DraftLayerOptions("mtp", steps=3, decay=0.6)),
    "p_eagle": SpeculatorRecipe(eagle.build, eagle.DraftLayerOptions("p_eagle", layers=2)),
    "chimera": SpeculatorRecipe(chimera.build, chimera.ChimeraOptions()),
    "glide": SpeculatorRecipe(glide.build, glide.GlideOptions()),
    "kangaroo": SpeculatorRecipe(exits.build, exits.ExitOptions("kangaroo")),
    "eesd": SpeculatorRecipe(exits.build, exits.ExitOptions("eesd")),
    "layerskip": SpeculatorRecipe(layerskip.build, layerskip.LayerSkipOptions(), 5e-4, 3e-4, writes="target"),
    "distill": SpeculatorRecipe(distill.build, distill.DistillOptions(), 5e-4, 3e-4, distill.num_parts),
    "sorted": SpeculatorRecipe(
        distill.build, distill.DistillOptions(start="pocket-deep", prefixes=(2, 4)), 5e-4, 3e-4, distill.num_parts
    ),
    "dflash": SpeculatorRecipe(block.build, BlockOptions()),
    "dspark": SpeculatorRecipe(
        block.build,
        BlockOptions(
            method="dspark",
            anchor_first=True,
            block_size=7,
            corrector="markov",
            confidence=True,
            cross_entropy=0.1,
            variation=0.9,
        ),
    ),
    "dflash2": SpeculatorRecipe(block.build, BlockOptions(method="dflash2", corrector="selector", conv_taps=2)),
    "domino": SpeculatorRecipe(block.build, BlockOptions(method="domino", corrector="gru", base_steps=300)),
    "pard": SpeculatorRecipe(pard.build, pard.PardOptions(), 2e-3, 1e-3),
    "medusa": SpeculatorRecipe(heads.build, heads.HeadsOptions("medusa", blocks=2)),
    "blockwise": SpeculatorRecipe(heads.build, heads.HeadsOptions("blockwise", inner=128)),
    "hydra": SpeculatorRecipe(heads.build, heads.HeadsOptions("hydra", heads=4)),
    "rnn": SpeculatorRecipe(heads.build, heads.HeadsOptions("rnn", blocks=6)),
    "mlp": SpeculatorRecipe(heads.build, heads.HeadsOptions("mlp")),
    "lstm": SpeculatorRecipe(heads.build, heads.HeadsOptions("lstm")),
    "streaming": SpeculatorRecipe(streams.build, streams.StreamsOptions(layers=3, start_rank=64)),
    "mask_lora": SpeculatorRecipe(streams.build, streams.StreamsOptions("mask_lora")),
    "s3d": SpeculatorRecipe(streams.build, streams.StreamsOptions("s3d", skip=2)),
}
"""Name -> recipe, e.g. `"eagle3": SpeculatorRecipe(eagle.build, EagleOptions(...))`; one row per published method."""
