"""What enters the first block: embeddings of tokens, scaled, with what is added for their positions, normalised.

The same for decoders and encoders; most models only look tokens up. Knows no blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

import torch
from torch import Tensor

from parallel.comm.group import SINGLE
from parallel.model.config import DecoderConfig
from parallel.model.layers.embedding import VocabTable
from parallel.model.layers.norm import NORMS, Norm
from parallel.model.layers.weight import Layer, Shard, TensorOptions


class InputRows(Layer):
    """`embedding` is the table of tokens, whose shards are not among those of this layer."""

    def __init__(self, config: DecoderConfig, embedding: VocabTable, **options: Unpack[TensorOptions]) -> None:
        self.embedding = embedding
        self._names = config.names
        self._offset = config.position_offset
        # a tensor of the model's type, because transformers rounds the factor to it
        self._scale = config.embedding_scale and torch.tensor(config.embedding_scale, **options)
        self.positions: VocabTable | None = None
        self._has_sines = config.positions == "sinusoidal"
        if config.rope is None and config.positions != "none":
            name, num_rows = f"{config.names.positions}.weight", config.max_positions + config.position_offset
            self.positions = VocabTable(name, num_rows, config.hidden_size, SINGLE, **options)
            if self._has_sines:
                self.positions.weight.plain.copy_(sinusoids(num_rows, config.hidden_size))
        self.norm: Norm | None = None
        if config.embedding_norm:
            self.norm = NORMS[config.norm](config.hidden_size, config.norm_eps, **options)

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """token_ids, positions [T] -> [T, H]."""
        hidden = self.embedding.embed(token_ids)
        if self._scale is not None:
            hidden = hidden * self._scale
        if self.positions is not None:
            # a drafted row may lie after the last position; it is never committed
            rows = (positions + self._offset).clamp(max=self.positions.vocab_size - 1)
            hidden = hidden + self.positions.embed(rows)
        return hidden if self.norm is None else self.norm(hidden)

    def shards(self) -> Iterator[Shard]:
        if self.positions is not None and not self._has_sines:
            yield from self.positions.shards()
        if self.norm is not None:
            yield from self.norm.shards(self._names.embedding_norm)


def sinusoids(num_positions: int, size: int) -> Tensor:
    """Sines of all frequencies, then cosines (arXiv 1706.03762, section 3.5, not interleaved, as Marian has them):
    [num_positions, size]."""
    exponents = 2 * (torch.arange(size, dtype=torch.float64) // 2) / size
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] / torch.pow(10000.0, exponents)
    return torch.cat((angles[:, 0::2].sin(), angles[:, 1::2].cos()), 1).float()
