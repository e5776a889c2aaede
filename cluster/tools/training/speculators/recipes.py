"""The registry of training recipes for speculators: one row per `job.recipe`. It must not know how training runs.

A row names the module that builds and trains the method, which lies beside what serves it and is loaded when the recipe
is looked up. Methods that train a whole model of transformers, and so have no layers of their own, are in this folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from parallel.training.interface import Speculator, TargetShape, TrainingOptions


@dataclass(frozen=True)
class SpeculatorRecipe:
    """How one method is built and trained."""

    module: str
    """Module that has `build` and the record of options."""
    record: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the recipe sets otherwise than the record does."""
    rates: tuple[float, float] = (5e-3, 3e-3)
    """Peak rates of Muon (matrices that are no tables) and of AdamW (tables, norms, biases)."""
    writes: str = "drafter"
    """Folder of the run for the checkpoint: what it is."""

    @property
    def build(self) -> Callable[[Any, TargetShape], Speculator]:
        """`build(options, target)`: the module with fresh float32 weights, drawn from PyTorch's global generator."""
        return import_module(self.module).build

    @property
    def options(self) -> TrainingOptions:
        """Defaults of the method's own settings; `job.options={...}` replaces fields of them."""
        return getattr(import_module(self.module), self.record)(**self.settings)


def _method(folder: str, record: str, method: str = "", **settings: Any) -> SpeculatorRecipe:
    """A recipe of a folder of `parallel.speculators`; with `method`, one of several of the same modules."""
    named = {"method": method} if method else {}
    return SpeculatorRecipe(f"parallel.speculators.{folder}.training", record, named | settings)


def _whole(module: str, record: str, rates: tuple[float, float], writes: str = "drafter", **settings: Any) -> Any:
    """A recipe that tunes a model as a whole; `rates` are Muon's and AdamW's."""
    return SpeculatorRecipe(f"cluster.tools.training.speculators.{module}", record, settings, rates, writes)


_WHOLE = 5e-4, 3e-4
_DSPARK = {"anchor_first": True, "block_size": 7, "confidence": True, "cross_entropy": 0.1, "variation": 0.9}

RECIPES: dict[str, SpeculatorRecipe] = {
    "eagle": _method("eagle", "DraftLayerOptions", "eagle", steps=1, logits_weight=0.1, feature_weight=1.0, noise=0.4),
    "eagle3": _method("eagle", "DraftLayerOptions", "eagle3"),
    "eagle3.1": _method("eagle", "DraftLayerOptions", "eagle3.1"),
    "mtp": _method("eagle", "DraftLayerOptions", "mtp", steps=3, decay=0.6),
    "p_eagle": _method("eagle", "DraftLayerOptions", "p_eagle", layers=2),
    "chimera": _method("chimera", "ChimeraOptions"),
    "gloeckle": _method("gloeckle", "GloeckleOptions"),
    "glide": _method("glide", "GlideOptions"),
    "longspec": _method("glide", "GlideOptions", "longspec", reach=30_000),
    "kangaroo": _method("exits", "ExitOptions", "kangaroo"),
    "eesd": _method("exits", "ExitOptions", "eesd"),
    "layerskip": _whole("layerskip", "LayerSkipOptions", _WHOLE, "target"),
    "distill": _whole("distill", "DistillOptions", _WHOLE),
    "sorted": _whole("distill", "DistillOptions", _WHOLE, start="pocket-deep", prefixes=(2, 4)),
    "dflash": _method("block", "BlockOptions"),
    "dspark": _method("block", "BlockOptions", "dspark", corrector="markov", **_DSPARK),
    "dflash2": _method("block", "BlockOptions", "dflash2", corrector="selector", conv_taps=2),
    "domino": _method("block", "BlockOptions", "domino", corrector="gru", base_steps=300),
    "pard": _whole("pard", "PardOptions", (2e-3, 1e-3)),
    "specdiff": _whole("specdiff", "SpecdiffOptions", (2e-3, 1e-3)),
    "sdar": _whole("sdar", "SdarOptions", (2e-3, 1e-3), "target"),
    "medusa": _method("heads", "HeadsOptions", "medusa", blocks=2),
    "blockwise": _method("heads", "HeadsOptions", "blockwise", inner=128),
    "hydra": _method("heads", "HeadsOptions", "hydra", heads=4),
    "rnn": _method("heads", "HeadsOptions", "rnn", blocks=6),
    "mlp": _method("heads", "HeadsOptions", "mlp"),
    "lstm": _method("heads", "HeadsOptions", "lstm"),
    "streaming": _method("streams", "StreamsOptions", layers=3, start_rank=64),
    "mask_lora": _method("streams", "StreamsOptions", "mask_lora"),
    "s3d": _method("streams", "StreamsOptions", "s3d", skip=2),
}
"""Name -> recipe; one row per published method."""
