"""The modules of a causal language model by what they do, whatever its family calls them.

Names and scalings are those by which the engine reads the family's checkpoints, so what is trained on a part here reads
the same there. It must not know losses or speculators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.model.config import DecoderConfig
from parallel.model.families.registry import read_config


@dataclass(frozen=True)
class ModelParts:
    """The modules of a model of transformers."""

    config: DecoderConfig
    trunk: nn.Module
    """Computes from tokens what the head reads: `trunk(input_ids=...)`."""
    blocks: nn.Module
    """Holds the blocks as `layers`."""
    embedding: nn.Embedding
    norm: nn.Module | None
    """The final norm; None where the head reads the residual stream."""
    lm_head: nn.Linear

    @property
    def layers(self) -> nn.ModuleList:
        return self.blocks.layers  # pyright: ignore[reportReturnType]

    def use_layers(self, layers: nn.ModuleList) -> None:
        """Run these from now on."""
        self.blocks.layers = layers

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows of the embedding, neither scaled nor with positions, as speculators read them."""
        return F.embedding(tokens, self.embedding.weight)

    def normalize(self, stream: Tensor) -> Tensor:
        """The stream after any layer -> what the head would read of it."""
        return stream if self.norm is None else self.norm(stream)

    def head(self, hidden: Tensor) -> Tensor:
        """What the final norm gives -> logits, bounded as the model bounds them."""
        logits, cap = F.linear(hidden, self.lm_head.weight.to(hidden.dtype)), self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


def parts_of(model: Any) -> ModelParts:
    """ValueError, one line, for a family that the engine does not know."""
    config = read_config(model.config.to_dict() | {"architectures": [type(model).__name__]})  # a fresh one has none
    names = config.names
    return ModelParts(
        config,
        model.base_model,
        model.get_submodule(names.blocks.rpartition(".")[0]),
        model.get_submodule(names.embedding),
        model.get_submodule(names.final_norm) if config.final_norm else None,
        model.get_output_embeddings(),
    )
