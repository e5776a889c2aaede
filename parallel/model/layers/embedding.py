"""What enters the first block and what reads the last: tables over a vocabulary that is sharded by rows.

A vocabulary is padded to a multiple of the group's size; the padded rows are zero, never looked up, and cut off the
logits. Embeddings of tokens may be scaled and normalised, with others added for their positions; most models only look
tokens up. Knows no blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from parallel.comm.group import SINGLE, Group
from parallel.kernels.norms import add_rows
from parallel.kernels.steps import recording, take_rows
from parallel.model.config import DecoderConfig
from parallel.model.layers.activation import scaled
from parallel.model.layers.norm import NORMS, Norm
from parallel.model.layers.weight import EVERY, Layer, Shard, TensorOptions, Weight


class VocabTable(Layer):
    """This rank's rows of a [vocab, hidden] table: the embedding, the head, or, tied, both.

    With `picked` the table consists of these rows of the checkpoint's, in this order; `vocab_size` is their number.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden: int,
        group: Group,
        picked: tuple[int, ...] | None = None,
        **options: Unpack[TensorOptions],
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.picked = picked
        self.group = group
        share = -(-vocab_size // group.size)
        self.first = group.rank * share
        self.num_real = max(0, min(share, vocab_size - self.first))
        self.weight = Weight(share, hidden, **options)
        self.weight.plain[self.num_real :] = 0
        self.bias: Tensor | None = None
        """Bias of the logits of this rank's rows, where the model has one."""
        self._bias_name = ""
        self.gathers = True
        """Whether `logits` brings the whole row to every rank."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] -> [T, hidden]."""
        if self.group.size == 1:
            return self.weight.look_up(token_ids)
        local = token_ids - self.first
        elsewhere = (local < 0) | (local >= self.num_real)
        rows = self.weight.look_up(local.masked_fill_(elsewhere, 0))
        return self.group.all_reduce(rows.masked_fill_(elsewhere[:, None], 0))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden] -> [T, vocab] on every rank; this rank's columns unless it `gathers`."""
        logits = self.weight.scores(hidden, self.bias)
        if not self.gathers:
            return logits[:, : self.num_real]
        logits = self.group.all_gather(logits)
        return logits if logits.shape[-1] == self.vocab_size else logits[:, : self.vocab_size]

    def add_bias(self, name: str) -> None:
        """The checkpoint has a bias [1, vocab] of the logits under this name."""
        plain = self.weight.plain
        self._bias_name = name
        self.bias = torch.zeros(self.weight.outputs, dtype=plain.dtype, device=plain.device)

    def bias_shards(self) -> Iterator[Shard]:
        if self.bias is not None:
            rows = slice(self.first, self.first + self.num_real)
            yield Shard(self._bias_name, (EVERY, rows), self.bias[None, : self.num_real])

    @contextmanager
    def ungathered(self) -> Iterator[None]:
        """Context in which each rank computes only the logits of its own rows, tokens `first` to `first + num_real`."""
        self.gathers = False
        try:
            yield
        finally:
            self.gathers = True

    def shards(self) -> Iterator[Shard]:
        rows, own = slice(self.first, self.first + self.num_real), slice(self.num_real)
        if self.picked is None:
            yield self.weight.shard(self.name, rows, own=own)
        else:
            yield replace(self.weight.shard(self.name, EVERY, own=own), picked=self.picked[rows])


class InputRows(Layer):
    """`embedding` is the table of tokens, whose shards are not among those of this layer."""

    def __init__(self, config: DecoderConfig, embedding: VocabTable, **options: Unpack[TensorOptions]) -> None:
        self.embedding = embedding
        self._names = config.names
        self._offset = config.position_offset
        # of the model's type, because transformers rounds the factor to it
        self._scale = config.embedding_scale and torch.tensor(config.embedding_scale, dtype=options["dtype"]).item()
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
            hidden = scaled(hidden, self._scale)
        if self.positions is not None:
            hidden = add_rows(hidden, self._of_positions(positions, self.positions))
        return hidden if self.norm is None else self.norm(hidden)

    def _of_positions(self, positions: Tensor, table: VocabTable) -> Tensor:
        """positions [T] -> [T, H]. A drafted row may lie after the last position; it is never committed."""
        rows = table.weight.plain
        if recording() is not None:
            return take_rows(rows, positions, shift=self._offset, last=len(rows) - 1)
        return table.embed((positions + self._offset).clamp(max=table.vocab_size - 1))

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
