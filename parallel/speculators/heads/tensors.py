"""The tensors of heads on a rank: matrices whole, tables of the vocabulary split over the group as the target's are."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from parallel.model.layers.embedding import VocabTable
from parallel.model.layers.weight import EVERY, Layer, Shard, Weight
from parallel.speculators.heads.config import TARGET_TABLE, HeadShapes, Sources, as_named
from parallel.speculators.place import SpeculatorPlace


class LoadedTensors(Layer):
    """Those of one method, allocated uninitialised; `sources` tells what they are called in the checkpoint."""

    def __init__(self, shapes: HeadShapes, place: SpeculatorPlace, sources: Sources = as_named) -> None:
        options = place.options
        self._embed_target = place.tables.embedding.embed  # the table itself is none of these layers
        self._matrices = {name: Weight(size.outputs, size.inputs, **options) for name, size in shapes.matrices.items()}
        self._biases = {
            name: torch.empty(size.outputs, **options) for name, size in shapes.matrices.items() if size.bias
        }
        self._vectors = {name: torch.empty(size, **options) for name, size in shapes.vectors.items()}
        names = {name: f"{sources(name)[0]}.weight" for name in shapes.tables}
        self._tables = {
            name: VocabTable(names[name], shapes.config.vocab_size, width, place.group, **options)
            for name, width in shapes.tables.items()
        }
        self._sources = sources
        self.parts = [*self._matrices.values(), *self._tables.values()]
        """All that is stored and packed."""

    def linear(self, name: str, x: Tensor) -> Tensor:
        return self._matrices[name].multiply(x, self._biases.get(name))

    def vector(self, name: str) -> Tensor:
        return self._vectors[name]

    def embed(self, table: str, token_ids: Tensor) -> Tensor:
        return self._embed_target(token_ids) if table == TARGET_TABLE else self._tables[table].embed(token_ids)

    def project(self, table: str, rows: Tensor) -> Tensor:
        """Logits [rows, V] by an output layer of its own, on every rank."""
        return self._tables[table].logits(rows)

    def shards(self) -> Iterator[Shard]:
        """Every checkpoint tensor and where it goes."""
        for name, weight in self._matrices.items():
            sources = self._sources(name)
            share = weight.outputs // len(sources)
            for i, source in enumerate(sources):
                own = slice(i * share, (i + 1) * share)
                yield weight.shard(f"{source}.weight", EVERY, own=own)
                if name in self._biases:
                    yield Shard(f"{source}.bias", (EVERY,), self._biases[name][own])
        for name, vector in self._vectors.items():
            owner, part = name.rsplit(".", 1)
            yield Shard(f"{self._sources(owner)[0]}.{part}", (EVERY,), vector)
        for table in self._tables.values():
            yield from table.shards()
