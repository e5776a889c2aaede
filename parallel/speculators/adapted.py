"""Draft layers (EAGLE-1 to 3.1, MTP) with trainable adapters, as `parallel.model.adapted` has them for whole models.

One causal pass over a window in which every token is paired with the target's features one place before it: the first
step of a draft, at every position. Adapters change the matrices of the layers; what fuses taps, joins pairs and norms,
and the target's tables stay. Plain PyTorch without KV, in float32. Knows no data and no optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from parallel.comm.group import SINGLE
from parallel.model.adapted import AdaptedModel, Adapter, linears, normed, run_block
from parallel.model.checkpoint import resolve_checkpoint, tensor_shapes
from parallel.model.config import DecoderConfig
from parallel.model.decoder import Decoder
from parallel.model.families.registry import read_config
from parallel.model.layers.weight import Weight
from parallel.model.weights import load_shards
from parallel.speculators.config import SpeculatorConfig
from parallel.speculators.eagle.config import DraftLayerConfig
from parallel.speculators.eagle.layers import DraftLayers
from parallel.speculators.registry import read_speculator


def check_learnable(record: SpeculatorConfig) -> DraftLayerConfig:
    """ValueError, one line, for a speculator of another family."""
    if not isinstance(record, DraftLayerConfig) or record.drafts_blocks:
        raise ValueError(f"a speculator of method {record.method} cannot be adapted; EAGLE-1 to 3.1 and MTP can")
    record.block.check_adaptable()
    return record


def layer_weights(layers: DraftLayers) -> list[Weight]:
    """The matrices that adapters change, in a fixed order: four of every layer."""
    return [linear.weight for block in (layers.first, *layers.rest) for linear in linears(block)]


class AdaptedDraftLayers(AdaptedModel):
    """The speculator at `path` beside the tables of the target at `target`; with `reads_fused`, its features come as
    the fuser's vectors."""

    def __init__(
        self, path: str, target: str, device: torch.device | str, rank: int, *, reads_fused: bool = False
    ) -> None:
        shape, directory = read_config(resolve_checkpoint(target)), resolve_checkpoint(path)
        config = check_learnable(read_speculator(path, shape.num_layers))
        self.config = config
        self._tables = _open_tables(shape, target, device)
        options = {"dtype": torch.float32, "device": device}
        self._layers = DraftLayers(config, SINGLE, reads_fused=reads_fused, **options)
        load_shards(self._layers.shards(), config.tensor_shapes(), directory)  # never packed: they stay readable
        self._layers.load_vocabulary(directory)
        self._columns: Tensor | None = None
        if (chosen := self._layers.tokens_of_head) is not None:
            self._columns = torch.full((config.vocab_size,), len(chosen), device=device)
            self._columns[chosen] = torch.arange(len(chosen), device=device)
        super().__init__([weight.plain for weight in layer_weights(self._layers)], rank)

    def columns(self, token_ids: Tensor) -> Tensor:
        return token_ids if self._columns is None else self._columns[token_ids]

    def logits(
        self,
        token_ids: Tensor,
        num_rows: int,
        adapters: Sequence[Adapter] | None = None,
        scales: Sequence[float] = (),
        features: Tensor | None = None,
    ) -> Tensor:
        assert features is not None, "a speculator reads the target's features"
        layers, block, pairs = self._layers, self.config.block, self.pairs(adapters, scales)
        rope = layers.rope(torch.arange(token_ids.shape[1], device=token_ids.device))
        embedding = layers.embed(token_ids.flatten(), self._tables)
        pair = layers.first.pair(embedding, layers.fused(features.flatten(0, 1)))
        stream, x = (rows.unflatten(0, token_ids.shape) for rows in pair)
        hidden = run_block(layers.first, block, x, stream, pairs[:4], rope)
        for i, layer in enumerate(layers.rest, 1):
            hidden = run_block(layer, block, normed(hidden, layer.norms[0]), hidden, pairs[4 * i : 4 * i + 4], rope)
        last = hidden[:, -num_rows:].flatten(0, 1)
        return self._head(last if layers.norm is None else normed(last, layers.norm))

    def _head(self, hidden: Tensor) -> Tensor:
        own = self._layers.lm_head
        return self._tables.head(hidden) if own is None else own.logits(hidden)


def _open_tables(shape: DecoderConfig, path: str, device: torch.device | str) -> Decoder:
    """The target's embedding and head, readable."""
    tables = Decoder(replace(shape, num_layers=0), SINGLE, device, torch.float32)
    load_shards(tables.shards(), tensor_shapes(tables.config), resolve_checkpoint(path))
    return tables
