"""Token embedding and language-model head over a vocabulary that is sharded by rows.

The vocabulary is padded to a multiple of the group's size; the padded rows are zero, never looked up, and cut off the
logits. Knows no blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from parallel.comm.group import Group
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
        logits = self.weight.scores(hidden)
        if self.bias is not None:
            logits = logits + self.bias
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
