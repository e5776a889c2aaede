"""Random passes for tests of the attention kernel: batches of chains, trees and copies of blocks, with what attention
row by row in float64 gives."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import pytest
import torch
from torch import Tensor

from parallel.kernels.attention import FOREST, LayerCall, PassRows
from parallel.kv.pass_plan import BlockCopies

NUM_SLOTS = 2400


@dataclass
class Sequence:
    """`context` committed rows, then pending ones; the last `num_rows` are fed. `parents` None is a chain, unless there
    are `copies`, of which all rows are fed."""

    context: int
    table: list[int]
    parents: list[int] | None
    num_rows: int
    copies: BlockCopies | None = None

    def path(self, row: int) -> list[int]:
        """Indices in the table of the pending rows that fed row `row` sees."""
        num_pending = len(self.table) - self.context
        if self.copies is not None:
            return (self.context + np.flatnonzero(self.copies.visible(0)[row])).tolist()
        parents = self.parents or list(range(-1, num_pending - 1))
        at, path = num_pending - self.num_rows + row, []
        while at >= 0:
            path.insert(0, self.context + at)
            at = parents[at]
        return path

    def seen(self, row: int, window: int = 0) -> list[int]:
        """The slots that fed row `row` sees, within a window unless it is 0."""
        slots = [self.table[i] for i in [*range(self.context), *self.path(row)]]
        return slots[max(0, self.place(row) + 1 - window) :] if window else slots

    def place(self, row: int) -> int:
        """The place of the row itself among these."""
        return self.context + (self.path(row).index(len(self.table) - self.num_rows + row))


@dataclass
class Case:
    """One layer, and a pass over it."""

    num_heads: int
    head_dim: int
    window: int
    softcap: float
    sequences: list[Sequence]
    keys: Tensor
    values: Tensor
    projected: Tensor
    rotation: tuple[Tensor, Tensor] | None
    bias: tuple[Tensor, Tensor] | None = None

    def rounded(self) -> Case:
        """The same with bfloat16 numbers, and rotations whose products need no further bits, so that they round in one
        way."""
        quarters = self.rotation and tuple((part * 2).round().clamp(-4, 4).div(4).bfloat16() for part in self.rotation)
        numbers = {name: getattr(self, name).bfloat16() for name in ("keys", "values", "projected")}
        bias = self.bias and (self.bias[0].bfloat16(), self.bias[1])
        return replace(self, **numbers, rotation=quarters, bias=bias)

    @property
    def spans(self) -> list[slice]:
        """The rows of every sequence."""
        stops = np.cumsum([sequence.num_rows for sequence in self.sequences]).tolist()
        return [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]

    def attend(self, sequences: list[Sequence], rows: slice) -> Tensor:
        """The kernel's results for `sequences`, which are fed `rows` of the case."""
        call = LayerCall(
            self.keys,
            self.values,
            self.num_heads,
            scale=self.head_dim**-0.5,
            window=self.window,
            softcap=self.softcap,
            bias=self.bias,
        )
        spans, slots, parents, written = [], [], [], []
        first = 0
        for one in sequences:
            run = one.table[0] if one.table == [*range(one.table[0], one.table[0] + len(one.table))] else -1
            num_pending = len(one.table) - one.context
            spans += [
                first,
                one.num_rows,
                one.context,
                num_pending,
                run,
                len(slots),
                len(parents) if one.parents or one.copies else -1,
                one.copies.num_common if one.copies else FOREST,
            ]
            slots += one.table
            parents += [*chain.from_iterable(one.copies.ranges())] if one.copies else one.parents or []
            written += one.table[-one.num_rows :]
            first += one.num_rows
        numbers = PassRows(spans, [np.array(slots, dtype=np.int64)], parents, written)
        rotation = self.rotation and (self.rotation[0][rows].clone(), self.rotation[1][rows].clone())
        return call.attend(numbers, self.projected[rows].clone(), rotation)

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Attention row by row, and the pool afterwards."""
        keys, values = self.keys.clone(), self.values.clone()
        num_kv_heads, rows = keys.shape[1], self.projected.view(len(self.projected), -1, self.head_dim)
        rotated, v = rows.split([self.num_heads + num_kv_heads, num_kv_heads], 1)
        if self.rotation is not None:
            cos, sin = (part[:, None] for part in self.rotation)
            rotated, cos, sin = rotated.float(), cos.float(), sin.float()
            rotated = (rotated * cos + rotated.roll(self.head_dim // 2, -1) * sin).to(keys.dtype)
        q, k = rotated.split([self.num_heads, num_kv_heads], 1)
        results = []
        for sequence, span in zip(self.sequences, self.spans, strict=True):
            written = sequence.table[-sequence.num_rows :]
            keys[written], values[written] = k[span], v[span]
            for row in range(sequence.num_rows):
                seen = sequence.seen(row, self.window)
                grouped = q[span][row].double().view(num_kv_heads, -1, self.head_dim)
                scores = torch.einsum("kgd,lkd->kgl", grouped, keys[seen].double()) * self.head_dim**-0.5
                if self.softcap:
                    scores = torch.tanh(scores / self.softcap) * self.softcap
                if self.bias is not None:
                    table, buckets = self.bias
                    places = torch.arange(len(sequence.seen(row)))[-len(seen) :]
                    back = (sequence.place(row) - places).clamp(0, len(buckets) - 1)
                    scores += table.double()[buckets[back]].T.view(num_kv_heads, -1, len(seen))
                results.append(torch.einsum("kgl,lkd->kgd", scores.softmax(-1), values[seen].double()).flatten())
        return torch.stack(results), keys, values


def random_case(seed: int) -> Case:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    num_kv_heads, head_dim = draw.choice([1, 2, 3]), draw.choice([12, 16, 48, 80, 128])
    num_heads = num_kv_heads * draw.choice([1, 2, 3, 5])
    sequences, first = [], 0
    for _ in range(draw.randrange(1, 5)):
        # around the borders of the kernel's vectors, blocks and chunks
        context, num_rows = draw.choice([0, 1, 17, 100, 250, 256, 300]), draw.choice([1, 2, 5, 9, 70])
        num_pending = num_rows + draw.choice([0, 0, 4])
        table = list(range(first, first + context + num_pending))
        first += len(table)
        if draw.random() < 0.4:
            draw.shuffle(table)
        copies = None
        if draw.random() < 0.3:
            block = draw.choice([2, 4, 16])
            num_text, num_copies, copy_rows = block * draw.randrange(5), draw.randrange(4), block * draw.choice([1, 2])
            num_pending = num_rows = num_text + max(num_copies, num_text == 0) * copy_rows
            copies = BlockCopies(num_text, [copy_rows] * max(num_copies, num_text == 0), block)
            first -= len(table)
            table = list(range(first, first + context + num_pending))
            first += len(table)
        is_tree = copies is None and draw.random() < 0.5
        parents = [draw.randrange(-1, i) for i in range(num_pending)] if is_tree else None
        sequences.append(Sequence(context, table, parents, num_rows, copies))
    num_rows = sum(one.num_rows for one in sequences)
    softcap = draw.choice([0.0, 0.0, 2.0])
    has_bias = not softcap and draw.random() < 0.5
    return Case(
        num_heads,
        head_dim,
        window=draw.choice([0, 0, 5, 40, 270]),
        softcap=softcap,
        sequences=sequences,
        keys=torch.randn(NUM_SLOTS, num_kv_heads, head_dim),
        values=torch.randn(NUM_SLOTS, num_kv_heads, head_dim),
        projected=torch.randn(num_rows, (num_heads + 2 * num_kv_heads) * head_dim),
        rotation=(torch.randn(num_rows, head_dim), torch.randn(num_rows, head_dim)) if seed % 4 else None,
        bias=(torch.randn(7, num_heads), torch.randint(7, (120,))) if has_bias else None,
    )


def numbers_of(case: Case, dtype: torch.dtype) -> Case:
    return case.rounded() if dtype == torch.bfloat16 else case


TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
