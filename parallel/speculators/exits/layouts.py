"""The record of a layer behind an early exit, and the layout of its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from parallel.model.checkpoint import Shape, block_tensors
from parallel.model.families.fields import HfConfig
from parallel.model.families.registry import read_config
from parallel.speculators.config import LayersConfig, beside
from parallel.speculators.layout import CheckpointLayout, opened_by

METHODS = {"kangaroo": False, "eesd": True}
"""Method -> whether its layer has an MLP."""
MLP_NORM = "post_attention_layernorm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitConfig(LayersConfig):
    runs_target = True

    @property
    def exit_layer(self) -> int:
        """Layers of the target that a token passes before this one: its only tap."""
        return self.taps[0]

    @property
    def has_mlp(self) -> bool:
        return METHODS[self.method]

    def tensor_shapes(self) -> dict[str, Shape]:
        of_mlp = () if self.has_mlp else ("mlp.", MLP_NORM)
        shapes = {name: shape for name, shape, _ in block_tensors(self.block) if not name.startswith(of_mlp)}
        return {"norm.weight": (self.block.hidden_size,)} | {f"layer.{name}": shape for name, shape in shapes.items()}


def read_own(hf: HfConfig) -> ExitConfig:
    """The record of a checkpoint that `job=train job.recipe=kangaroo` or `eesd` made."""
    block, ours = read_config(hf), hf["speculator"]
    return ExitConfig(method=ours["method"], **beside(block), taps=(ours["exit"],), block=block)


OWN = CheckpointLayout(read_own, opened_by("exits.runner"))
