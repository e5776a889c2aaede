"""Attention by Triton's kernels, on the GPU or in its interpreter, against sums in float64 that look at one key at a
time."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch

from parallel.kv.pass_plan import MutualRows, PendingRows, Span, SpanRows, lay_out
from parallel.kv.pool import FP8, KVPool
from parallel.model.layers import split_kv
from parallel.model.layers.attention import AttentionShape, Heads
from parallel.model.layers.split_kv import SplitKVBackend


@dataclass
class Case:
    """Sequences of (committed rows, parents of the rows of the pass; a number of rows is a chain)."""

    sequences: list[tuple[int, list[int] | int]]
    group: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    dtype: torch.dtype = torch.float32
    mutual: bool = False
    bucketed: bool = False
    fp8: bool = False


def random_tree(seed: int, size: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(-1, row) for row in range(size)]


CASES = {
    "one row": Case([(5, 1)]),
    "ragged": Case([(90, 1), (3, 2), (0, 4)], group=3, kv_heads=2),
    "trees": Case([(70, random_tree(0, 9)), (9, 1), (0, random_tree(1, 4))], group=4),
    "more pending rows than a word has bits": Case([(10, random_tree(2, 40))], group=1),
    "a window over a tree": Case([(90, random_tree(3, 8)), (2, 3)], window=6),
    "a window over a prompt": Case([(0, 40)], window=9, group=1),
    "softcap and scale": Case([(30, random_tree(4, 5))], softcap=2.0, scale=0.7, window=50),
    "rows that see each other": Case([(20, 6), (130, 6)], mutual=True),
    "rounded up": Case([(140, random_tree(5, 3)), (5, 2)], bucketed=True, kv_heads=2),
    "head of 96": Case([(70, 2)], head_dim=96),
    "head of 12": Case([(9, 2)], head_dim=12, group=7),
    "bfloat16": Case([(70, random_tree(6, 5))], dtype=torch.bfloat16, head_dim=64),
    "float16": Case([(9, 3)], dtype=torch.float16),
    "FP8 rows": Case([(70, random_tree(7, 5)), (3, 1)], dtype=torch.bfloat16, fp8=True),
}
SLOW = {"a prompt": Case([(10, 40)], group=2)} | {
    f"{head_dim}, {dtype}": Case(
        [(300, random_tree(head_dim, 40)), (1, 1), (129, 33), (0, 65)],
        group=group,
        kv_heads=2,
        head_dim=head_dim,
        window=window,
        dtype=dtype,
        bucketed=window is None,
    )
    for head_dim, group, window in ((64, 8, None), (96, 1, 37), (128, 4, None), (128, 5, 100), (256, 2, 70))
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
}


class Pass:
    """A pool of random rows and a planned pass over it."""

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(0)
        num_slots = sum(context + (rows if isinstance(rows, int) else len(rows)) for context, rows in case.sequences)
        self.case = case
        stored = dict(stored=FP8, scales=[(1.0, 1.0), (0.5, 2.0)]) if case.fp8 else {}
        self.pool = KVPool(2, num_slots + 40, case.kv_heads, case.head_dim, case.dtype, device, **stored)
        for rows in (self.pool.keys, self.pool.values):
            rows.copy_(torch.randn(rows.shape))
        shape = AttentionShape(case.group, case.window, case.scale, case.softcap)
        self.backend = SplitKVBackend(self.pool, shape, bucketed=case.bucketed)
        forests: dict[object, PendingRows] = {}
        for i in range(len(case.sequences)):
            self.pool.open(i)
            forests[i] = PendingRows()
        for _, (i, (context, _)) in zip(range(2), enumerate(case.sequences), strict=False):  # not in one run
            self.pool.reserve(i, context // 2) if context else None
        for i, (context, _) in enumerate(case.sequences):
            missing = context - self.pool.pending_len(i)
            self.pool.reserve(i, missing) if missing else None
            self.pool.commit(i, range(context))
        spans = [
            Span(i, rows if isinstance(rows, int) else len(rows), None if isinstance(rows, int) else rows)
            for i, (_, rows) in enumerate(case.sequences)
        ]
        if case.mutual:
            self.laid_out, first = [], 0
            for span in spans:
                context = self.pool.cached_len(span.seq_id)
                self.pool.reserve(span.seq_id, span.num_tokens)
                size, slots = span.num_tokens, self.pool.slots(span.seq_id)
                self.laid_out.append(SpanRows(span.seq_id, first, size, context, size, slots, None, MutualRows(size)))
                first += size
        else:
            self.laid_out = lay_out(self.pool, forests, spans)
        self.plan = self.backend.plan(self.laid_out, [0])
        self.attention = self.plan.attention
        self.attention.wants_lse = True
        width = (case.group + 2) * case.kv_heads * case.head_dim
        self.projected = torch.randn(len(self.plan.positions), width, dtype=case.dtype).to(device)

    def run(self, layer: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        case = self.case
        heads = Heads(layer, case.group * case.kv_heads, case.kv_heads, case.head_dim, case.window is not None, None)
        self.attention.prepare()
        return self.attention.attend(heads, self.projected, None).cpu(), self.attention.lse.cpu()

    def expected(self, layer: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, heads, head_dim] and [T, heads]."""
        case, outs, sums = self.case, [], []
        num_heads = case.group * case.kv_heads
        rows = self.projected.cpu().double().view(len(self.projected), -1, case.head_dim)
        for span in self.laid_out:
            kept = zip((self.pool.keys, self.pool.values), self.pool.scales[layer], strict=True)
            keys, values = (rows[layer].cpu()[span.slots].double() * scale for rows, scale in kept)
            depths, positions = span.pending.depths, list(span.positions())
            for i in range(span.num_rows):
                seen = list(range(span.context))
                pending, node = [], span.first_pending + i
                if case.mutual:
                    pending = list(range(span.num_pending))
                while not case.mutual and node >= 0:
                    pending.append(node)
                    node = span.pending.parents[node]
                where = {n: n for n in seen} | {span.context + j: span.context + depths[j] for j in pending}
                seen = [n for n, at in where.items() if case.window is None or at > positions[i] - case.window]
                for head in range(num_heads):
                    q, kv = rows[span.first + i, head], head // case.group
                    scores = keys[seen, kv] @ q * (case.scale or case.head_dim**-0.5)
                    if case.softcap:
                        scores = torch.tanh(scores / case.softcap) * case.softcap
                    outs.append(scores.softmax(0) @ values[seen, kv])
                    sums.append(scores.logsumexp(0))
        return torch.stack(outs).view(-1, num_heads, case.head_dim), torch.stack(sums).view(-1, num_heads)


@pytest.mark.extended
@pytest.mark.parametrize(
    "case",
    [*CASES.values(), *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW.values())],
    ids=[*CASES, *SLOW],
)
def test_rows_read_what_they_see(case, device):
    planned = Pass(case, device)
    out, lse = planned.run()
    expected, sums = planned.expected()
    exact = case.dtype == torch.float32
    num_rows = planned.plan.num_rows
    atol = 1e-5 if exact else 0.03 if case.dtype == torch.bfloat16 else 0.005
    torch.testing.assert_close(out[:num_rows].double(), expected.flatten(1), atol=atol, rtol=0)
    torch.testing.assert_close(lse[:num_rows].double(), sums, atol=1e-5 if exact else 1e-3, rtol=0)
    assert not out[num_rows:].any(), "rows that only round a pass up are zero"
    assert not planned.pool.keys[0].cpu().isnan().any()


@pytest.fixture
def few_cuts(monkeypatch):
    """Keys are cut as on a device of few processors."""
    monkeypatch.setattr(split_kv, "_most_cuts", lambda *_: 4)


def test_long_sequences_are_cut_and_short_ones_are_not(device):
    planned = Pass(Case([(1500, 1), (20, 1), (30, 1)]), device)
    items = planned.attention.items.cpu()
    assert [int((items[:, 0] == row).sum()) for row in range(3)] == [len(items) - 2, 1, 1]
    lengths = (items[:, 3] - items[:, 2]).tolist()
    assert max(lengths) < 1501 / 3 and sum(lengths) == 1501 + 21 + 31
    assert planned.attention.num_partials == len(items) - 2


def test_rounded_up_passes_of_the_same_rows_have_the_same_shapes_whatever_their_contexts(device, few_cuts):
    """A tree of them, too."""
    rows = [3, [-1, 0, 0]]
    contexts = (1, 70, 900, 3000)
    keys = {
        Pass(Case([(n, r), (10, 1)], bucketed=True), device).attention.key()
        for n, r in zip(contexts, rows * 2, strict=True)
    }
    assert len(keys) == 1
    assert math.prod(Pass(Case([(3000, 3)], bucketed=True), device).attention.items.shape) < 1000


def test_a_plan_sends_new_rows_only(device, few_cuts):
    backend = Pass(Case([(1000, 1), (500, 1)]), device).backend
    pool, forests = backend.pool, {i: PendingRows() for i in range(2)}
    first = backend.num_bytes_sent
    for i in range(2):
        pool.commit(i, [0])
    backend.plan(lay_out(pool, forests, [Span(0, 4, [-1, 0, 0, 2]), Span(1, 1)]), [0, 1])
    second = backend.num_bytes_sent - first
    assert first > 12 * 1500 and second < 12 * 200


@pytest.mark.extended
def test_the_mirror_is_the_tables_over_random_edits(device):
    """Sequences grow, are cut, keep paths of trees, end and begin again; more often than a half of the mirror holds."""
    draw = random.Random(0)
    pool = KVPool(1, 60, 1, 2, device=device)
    backend = SplitKVBackend(pool, AttentionShape(1))
    forests: dict[object, PendingRows] = {}
    halves, ended = set(), [0] * 4
    for _ in range(100):
        seat = draw.randrange(4)
        name = seat, ended[seat]
        if name not in forests:
            pool.open(name)
            forests[name] = PendingRows()
        if draw.random() < 0.1:
            pool.truncate(name, draw.randint(0, pool.cached_len(name)))
            forests[name] = PendingRows()
        spans = []
        for seq_id in forests:
            size = draw.randint(1, 4)
            if draw.random() < 0.7 and pool.num_free >= size + 8:
                spans.append(Span(seq_id, size, random_tree(draw.randrange(99), size)))
        if spans:
            laid_out = lay_out(pool, forests, spans)
            plan = backend.plan(laid_out, [0]).attention
            items, tables = plan.items.cpu(), backend.mirror.tables.cpu()
            halves.add(items[0, 7].item() >= len(tables) // 2)
            for rows in laid_out:
                table = items[items[:, 0] == rows.first][0, 7]
                assert tables[table : table + len(rows.slots)].tolist() == rows.slots.tolist()
            for rows in laid_out:
                node, keep = draw.randrange(rows.num_pending), []
                while node >= 0:
                    keep.insert(0, node)
                    node = rows.pending.parents[node]
                forests[rows.seq_id] = rows.pending.after_commit(keep, [])
                pool.commit(rows.seq_id, keep)
        if draw.random() < 0.15:
            pool.close(name)
            del forests[name]
            ended[seat] += 1
    assert halves == {False, True}
