"""Queries over rows of other tables: every backend against products in float64, and nothing is written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallel.kv.pass_plan import TableRead, table_read
from parallel.kv.pool import KVPool
from parallel.model.layers.attention import AttentionShape, Heads
from parallel.model.layers.backends import make_backend
from tests.matrices import in_turn
from tests.parallel.backends import BACKENDS, HAS_TRITON

GROUP, KV_HEADS, SIZE, LAYERS = 3, 2, 16, 2
LENGTHS = {"none": 0, "one": 1, "run": 40, "chunks": 300, "scattered": 70}
QUERIES = (1, 3, 2, 40, 5)  # more than are folded, too
FEWER = (1, 3, 2, 7, 5)
"""In the interpreter, where a row takes milliseconds."""
HEADS = Heads(1, GROUP * KV_HEADS, KV_HEADS, SIZE, True, None)
READERS = [*BACKENDS, *(["triton"] if HAS_TRITON else [])]


def filled_pool() -> KVPool:
    """Sequences of these lengths; rows of "scattered" stand apart."""
    pool = KVPool(LAYERS, 4096, KV_HEADS, SIZE)
    generator = torch.Generator().manual_seed(3)
    for rows in (pool.keys, pool.values):
        rows.copy_(torch.randn(rows.shape, generator=generator))
    for name in LENGTHS:
        pool.open(name)
    for name, length in LENGTHS.items():
        if name == "scattered":
            pool.reserve(name, 2 * length)
            pool.commit(name, range(1, 2 * length, 2))
        elif length:
            pool.reserve(name, length)
            pool.commit(name, range(length))
    return pool


def queries_of(num_rows: int) -> Tensor:
    return torch.randn(num_rows, HEADS.num_heads, SIZE, generator=torch.Generator().manual_seed(num_rows))


def expected(pool: KVPool, read: TableRead, queries: Tensor, shape: AttentionShape) -> Tensor:
    """[rows, heads * size] in float64."""
    if not len(read.slots):
        return torch.zeros(len(queries), HEADS.num_heads * SIZE, dtype=torch.float64)
    keys, values = (rows[HEADS.layer, read.slots.copy()].double() for rows in (pool.keys, pool.values))
    grouped = queries.double().view(len(queries), KV_HEADS, GROUP, SIZE)
    scores = torch.einsum("nkgd,lkd->nkgl", grouped, keys) * (shape.scale or SIZE**-0.5)
    if shape.softcap is not None:
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
    return torch.einsum("nkgl,lkd->nkgd", scores.softmax(-1), values).flatten(1)


SHAPES = [AttentionShape(GROUP, scale=0.5, softcap=2.0), AttentionShape(GROUP, window=7)]


@pytest.mark.extended
@pytest.mark.parametrize(("name", "shape"), list(in_turn(READERS, SHAPES, times=dict.fromkeys(BACKENDS, 2))))
def test_queries_see_all_rows_of_their_tables(name: str, shape: AttentionShape) -> None:
    """Whatever window the layer has, and none of the pending rows behind them."""
    pool = filled_pool()
    backend = make_backend(name, pool, shape)
    pool.reserve("run", 3)
    before = pool.keys.clone(), pool.values.clone(), pool.num_free
    counts = FEWER if name == "triton" else QUERIES
    reads = [table_read(pool, text, count) for text, count in zip(LENGTHS, counts, strict=True)]
    assert [read.run is None for read in reads] == [text == "scattered" for text in LENGTHS]
    queries = queries_of(sum(counts))
    found = backend.plan_reads(reads).read(HEADS, queries.flatten(1))
    parts = zip(reads, queries.split(counts), strict=True)
    wanted = torch.cat([expected(pool, read, part, shape) for read, part in parts])
    torch.testing.assert_close(found.double(), wanted, atol=2e-5, rtol=1e-4)
    assert torch.equal(pool.keys, before[0]) and torch.equal(pool.values, before[1]) and pool.num_free == before[2]


@pytest.mark.parametrize("name", READERS)
def test_leading_rows_can_be_read_alone(name: str) -> None:
    pool, shape = filled_pool(), AttentionShape(GROUP)
    reads = [table_read(pool, seq_id, 2, 30) for seq_id in ("run", "scattered")]
    found = make_backend(name, pool, shape).plan_reads(reads).read(HEADS, queries_of(4).flatten(1))
    parts = zip(reads, queries_of(4).split(2), strict=True)
    wanted = torch.cat([expected(pool, read, part, shape) for read, part in parts])
    torch.testing.assert_close(found.double(), wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.skipif("ragged" not in BACKENDS, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_to_the_bit_alone_and_in_company(dtype: torch.dtype) -> None:
    """And as the last row of a chain whose key is the last of the table."""
    source = filled_pool()
    pool = KVPool(LAYERS, source.num_slots, KV_HEADS, SIZE, dtype)
    pool.keys.copy_(source.keys)
    pool.values.copy_(source.values)
    pool._tables = source._tables
    backend = make_backend("ragged", pool, AttentionShape(GROUP))
    reads = [table_read(pool, name, count) for name, count in zip(LENGTHS, QUERIES, strict=True)]
    queries = queries_of(sum(QUERIES)).to(dtype)
    together = backend.plan_reads(reads).read(HEADS, queries.flatten(1))
    parts = zip(reads, queries.split(QUERIES), together.split(QUERIES), strict=True)
    for read, part, result in parts:
        for query, row in zip(part, result, strict=True):
            one = TableRead(read.seq_id, 1, read.slots, read.run)
            assert torch.equal(backend.plan_reads([one]).read(HEADS, query.flatten()[None])[0], row)
