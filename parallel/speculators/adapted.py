"""Draft layers (EAGLE-1 to 3.1, MTP) with trainable adapters, as `parallel.training.adapted` has them for whole models.

One causal pass over a window in which every token is paired with the target's features one place before it: the first
step of a draft, at every position. Adapters change the matrices of the layers; what fuses taps, joins pairs and norms,
and the target's tables stay. Knows no data and no optimizer.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from parallel.comm.group import SINGLE
from parallel.model.checkpoint import resolve_checkpoint, tensor_shapes
from parallel.model.config import DecoderConfig
from parallel.model.decoder import Decoder
from parallel.model.families.registry import read_config
from parallel.model.layers.attention import PassPlan
from parallel.model.layers.weight import Weight
from parallel.model.weights import load_shards
from parallel.speculators.config import SpeculatorConfig
from parallel.speculators.eagle.config import DraftLayerConfig
from parallel.speculators.eagle.layers import DraftLayers
from parallel.speculators.registry import read_speculator
from parallel.training.adapted import AdaptedModel, block_weights


def check_learnable(record: SpeculatorConfig) -> DraftLayerConfig:
    """ValueError, one line, for a speculator of another family."""
    if not isinstance(record, DraftLayerConfig) or record.drafts_blocks:
        raise ValueError(f"a speculator of method {record.method} cannot be adapted; EAGLE-1 to 3.1 and MTP can")
    record.block.check_adaptable()
    return record


def layer_weights(layers: DraftLayers) -> list[Weight]:
    """The matrices that adapters change, in a fixed order: four of every layer."""
    return block_weights([layers.first, *layers.rest])


class AdaptedDraftLayers(AdaptedModel):
    """The speculator at `path` beside the tables of the target at `target`; with `reads_fused`, its features come as
    the fuser's vectors."""

    def __init__(
        self, path: str, target: str, device: torch.device | str, rank: int, *, reads_fused: bool = False
    ) -> None:
        shape, directory = read_config(resolve_checkpoint(target)), resolve_checkpoint(path)
        config = check_learnable(read_speculator(path, shape.num_layers))
        self._tables = _open_tables(shape, target, device)
        options = {"dtype": torch.float32, "device": device}
        self._layers = DraftLayers(config, SINGLE, reads_fused=reads_fused, **options)
        load_shards(self._layers.shards(), config.tensor_shapes(), directory)
        self._layers.load_vocabulary(directory)
        self._columns: Tensor | None = None
        if (chosen := self._layers.tokens_of_head) is not None:
            self._columns = torch.full((config.vocab_size,), len(chosen), device=device)
            self._columns[chosen] = torch.arange(len(chosen), device=device)
        super().__init__(self._layers, [self._layers.first, *self._layers.rest], rank)

    def columns(self, token_ids: Tensor) -> Tensor:
        return token_ids if self._columns is None else self._columns[token_ids]

    def _hidden(self, token_ids: Tensor, features: Tensor | None, plan: PassPlan) -> Tensor:
        assert features is not None, "a speculator reads the target's features"
        layers = self._layers
        return layers.forward(layers.embed(token_ids, self._tables), layers.fused(features), plan)[0]

    def _head(self, hidden: Tensor) -> Tensor:
        own = self._layers.lm_head
        return self._tables.head(hidden) if own is None else own.logits(hidden)


def _open_tables(shape: DecoderConfig, path: str, device: torch.device | str) -> Decoder:
    """The target's embedding and head, readable."""
    tables = Decoder(replace(shape, num_layers=0), SINGLE, device, torch.float32)
    load_shards(tables.shards(), tensor_shapes(tables.config), resolve_checkpoint(path))
    return tables
