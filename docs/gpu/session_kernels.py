"""Steps of the GPU session (`session.py`) about single kernels: whether they are right, and how long each takes.

Sums in float64 are taken on the same device. Where Triton's kernels do not run, as in a try on a CPU, the steps take
the padded attention in their place.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from parallel.kernels import mixtures
from parallel.kernels.attention_tiles import KeyTiles
from parallel.kernels.fixed_products import multiply_fixed
from parallel.kernels.packed_products import PackedMatrix, PackedRows, can_pack
from parallel.kernels.packing import Packing
from parallel.kernels.triton_launch import runs_on
from parallel.kv.pass_plan import PendingRows, Span, lay_out
from parallel.kv.pool import FP8, KVPool, SeqId
from parallel.model.layers.attention import AttentionShape, Heads
from parallel.model.layers.flash import FLASH_ROWS
from parallel.model.layers.padded import PaddedBackend
from parallel.model.layers.split_kv import SplitKVBackend
from parallel.model.layers.weight import groups_on

if TYPE_CHECKING:
    from docs.gpu.session import Machine

Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """Sequences of `context` committed rows, each with `rows` of a chain, or of a random tree."""

    num_seqs: int
    context: int
    rows: int
    is_tree: bool = False
    head_dim: int = 128
    kv_heads: int = 8
    group: int = 4
    fp8: bool = False
    invariant: bool = False

    @property
    def label(self) -> str:
        kind = "tree" if self.is_tree else "chain"
        said = f"{self.num_seqs} x {self.context}, {kind} of {self.rows}, heads of {self.head_dim}"
        return said + ", FP8" * self.fp8 + ", invariant" * self.invariant


EXACT = [
    Shape(1, 2048, 1),
    Shape(1, 2048, 32, is_tree=True),
    Shape(1, 32768, 1),
    Shape(16, 4096, 8, is_tree=True),
    Shape(1, 32768, 32, is_tree=True, head_dim=64),
    Shape(1, 4096, 8, is_tree=True, head_dim=256, kv_heads=4, group=2),
    Shape(1, 8192, 32, is_tree=True, fp8=True),
    Shape(1, 0, 2048),
    Shape(2, 6001, 1100),
    Shape(1, 2048, 32, is_tree=True, invariant=True),
    Shape(16, 4096, 8, is_tree=True, invariant=True),
    Shape(1, 32768, 1, fp8=True, invariant=True),
    Shape(2, 6001, 1100, invariant=True),
]
TIMED = [
    Shape(1, 2048, 1),
    Shape(1, 32768, 1),
    Shape(16, 2048, 1),
    Shape(64, 1024, 6),
    Shape(1, 2048, 32, is_tree=True),
    Shape(1, 32768, 1, head_dim=64),
    Shape(1, 32768, 1, fp8=True),
    Shape(1, 2048, 1, invariant=True),
    Shape(1, 2048, 32, is_tree=True, invariant=True),
    Shape(16, 2048, 1, invariant=True),
    Shape(1, 0, 512),
    Shape(1, 0, 2048),
    Shape(1, 0, 8192),
    Shape(1, 8192, 1024),
    Shape(1, 30720, 2048),
]
TINY_SHAPES = [
    Shape(2, 40, 5, is_tree=True, head_dim=16, kv_heads=1, group=2, invariant=invariant) for invariant in (False, True)
]
TILES = [None, KeyTiles(64, 3), KeyTiles(32, 3), KeyTiles(64, 5)]
"""Keys of a turn and stages; None: those of the engine."""
FLASH = "PyTorch's flash kernels over the pool"


class AttentionPass:
    """One layer of a pass over a pool of random keys and values."""

    def __init__(self, machine: Machine, shape: Shape, *, bucketed: bool = False, flash: bool = False) -> None:
        self.shape, self.machine = shape, machine
        device, dtype = machine.device, machine.dtype
        num_slots = shape.num_seqs * (shape.context + shape.rows) + 1
        stored: dict[str, Any] = dict(stored=FP8, scales=[(1.0, 1.0)]) if shape.fp8 and machine.on_cuda else {}
        self.pool = KVPool(1, num_slots, shape.kv_heads, shape.head_dim, dtype, device, **stored)
        for rows in (self.pool.keys, self.pool.values):
            for start in range(0, rows.shape[1], 4096):
                part = rows[:, start : start + 4096]
                part.copy_(torch.randn(part.shape, device=device, dtype=torch.float32))
        forests: dict[SeqId, PendingRows] = {}
        for seq_id in range(shape.num_seqs):
            self.pool.open(seq_id)
            forests[seq_id] = PendingRows()
            if shape.context:
                self.pool.reserve(seq_id, shape.context)
                self.pool.commit(seq_id, range(shape.context))
        draw = random.Random(0)
        parents = [-1, *[draw.randrange(row) for row in range(1, shape.rows)]] if shape.is_tree else None
        spans = [Span(seq_id, shape.rows, parents) for seq_id in range(shape.num_seqs)]
        self.laid_out = lay_out(self.pool, forests, spans)
        self.backend: SplitKVBackend | PaddedBackend
        if SplitKVBackend.runs(self.pool):
            options: Any = dict(bucketed=bucketed, flash=flash, invariant=shape.invariant)
            self.backend = SplitKVBackend(self.pool, AttentionShape(shape.group), **options)
        else:
            self.backend = PaddedBackend(self.pool, AttentionShape(shape.group), bucketed=bucketed)
        self.attention: Any = None
        self.projected = torch.empty(0)

    def plan(self) -> None:
        shape, planned = self.shape, self.backend.plan(self.laid_out, [0])
        self.attention = planned.attention
        width = (shape.group + 2) * shape.kv_heads * shape.head_dim
        torch.manual_seed(0)
        rows = torch.randn(len(planned.positions), width, device=self.machine.device)
        self.projected = rows.to(self.machine.dtype)

    @property
    def num_rows(self) -> int:
        return self.shape.num_seqs * self.shape.rows

    def run(self) -> torch.Tensor:
        """[rows, heads * head_dim]"""
        shape = self.shape
        heads = Heads(0, shape.group * shape.kv_heads, shape.kv_heads, shape.head_dim, windowed=False, norms=None)
        self.attention.prepare()
        return self.attention.attend(heads, self.projected, None)

    def expected(self) -> torch.Tensor:
        """The same in float64, a sequence and KV head at a time, from the keys that the pass has stored."""
        shape, parts = self.shape, []
        queries = self.projected[:, : shape.group * shape.kv_heads * shape.head_dim].double()
        queries = queries.view(len(queries), shape.kv_heads, shape.group, shape.head_dim)
        scales = self.pool.scales[0]
        for span in self.laid_out:
            slots = torch.as_tensor(span.slots, device=self.machine.device)
            seen = torch.zeros(span.num_rows, len(slots), dtype=torch.bool)
            seen[:, : span.context] = True
            for row in range(span.num_rows) if shape.is_tree else ():
                node = row
                while node >= 0:
                    seen[row, span.context + node] = True
                    node = span.pending.parents[node]
            if not shape.is_tree:
                seen = torch.ones_like(seen).tril(span.context)
            hidden = ~seen.to(self.machine.device)
            rows = queries[span.first : span.first + span.num_rows]
            outs = []
            for head in range(shape.kv_heads):
                keys, values = (
                    kept[0, slots, head].double() * scale
                    for kept, scale in zip((self.pool.keys, self.pool.values), scales, strict=True)
                )
                scores = torch.einsum("rgd,kd->rgk", rows[:, head], keys) * shape.head_dim**-0.5
                weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
                outs.append(torch.einsum("rgk,kd->rgd", weights, values))
            parts.append(torch.stack(outs, 1).flatten(1))
        return torch.cat(parts)


def exact(machine: Machine) -> Iterator[Row]:
    """Kernels against sums in float64 at the shapes of 8B and 1B models, eagerly and from a graph."""
    wrong = []

    def row(kernel: str, case: str, kind: str, error: float, allowed: float) -> Row:
        if not error <= allowed:  # also where it is not a number
            wrong.append(f"{kernel} {case} {kind}")
        found = {"kernel": kernel, "case": case, "kind": kind, "largest error": f"{error:.2e}"}
        return found | {"allowed": f"{allowed:.0e}", "right": error <= allowed}

    allowed = 2e-2 if machine.dtype == torch.bfloat16 else 1e-4
    for shape in TINY_SHAPES if machine.tiny else EXACT:
        is_prompt = shape.rows >= FLASH_ROWS
        for bucketed, flash in [(False, False), (False, True) if is_prompt else (True, False)]:
            if flash and (shape.invariant or not machine.on_cuda):
                continue
            one = AttentionPass(machine, shape, bucketed=bucketed, flash=flash)
            one.plan()
            if flash and len(one.attention.prompts) != shape.num_seqs:
                raise ArithmeticError(f"{shape.label}: not all parts of prompts go to flash kernels")
            found = one.run()[: one.num_rows].double()
            kinds = {"flash" if flash else "eager": found}
            if machine.on_cuda and bucketed:
                outputs: list[torch.Tensor] = []
                replay = machine.graph(lambda one=one, outputs=outputs: outputs.append(one.run()), 1)
                replay()
                machine.wait()
                kinds = {"graph": outputs[-1][: one.num_rows].double()}
            expected = one.expected()
            for kind, out in kinds.items():
                error = (out - expected).abs().max().item()
                yield row("attention", shape.label, kind + ", rounded up" * bucketed, error, allowed)
            del one
    for packing in (Packing("fp8", 128), Packing("int4", 128, has_zeros=True, scale_bytes=2), Packing("int8")):
        if not can_pack(packing, machine.device):
            continue
        size = (64, 256) if machine.tiny else (6144, 4096)
        scale_type = torch.float32 if packing.scale_bytes == 4 else torch.float16
        matrix = PackedMatrix(*size, packing, scale_type, machine.device)
        PackedRows(matrix, slice(None)).normal_(std=0.02)
        plain = matrix.unpacked(machine.dtype).double()
        for rows in (1, 6, 33, 96):
            x = torch.randn(rows, size[1], device=machine.device).to(machine.dtype)
            expected = x.double() @ plain.T
            error = ((matrix.multiply(x).double() - expected).abs().max() / expected.abs().max()).item()
            yield row("packed product", f"{packing.kind}, {rows} rows", "eager", error, 1e-2)
    for kernel, case, error in [*_fixed_products(machine), *_mixtures(machine)]:
        yield row(kernel, case, "eager", error, allowed)
    if wrong:
        raise ArithmeticError(f"{len(wrong)} of the kernels are wrong: {', '.join(wrong)}")


def _fixed_products(machine: Machine) -> Iterator[tuple[str, str, float]]:
    """Errors of products of `target.numerics=invariant`, relative to the largest result."""
    for outputs, inputs in ((64, 256),) if machine.tiny else ((6144, 4096), (4096, 14336), (28672, 4096)):
        if not runs_on(machine.device):
            continue
        weight = torch.randn(outputs, inputs, device=machine.device).to(machine.dtype)
        for rows in (1, 6, 96):
            x = torch.randn(rows, inputs, device=machine.device).to(machine.dtype)
            expected = x.double() @ weight.double().T
            error = ((multiply_fixed(x, weight).double() - expected).abs().max() / expected.abs().max()).item()
            yield "fixed product", f"{outputs} x {inputs}, {rows} rows", error


def _mixtures(machine: Machine) -> Iterator[tuple[str, str, float]]:
    """Errors of the experts of a layer of the 30B mixture, relative to the largest result."""
    num_experts, hidden, size, per_token = (4, 32, 16, 2) if machine.tiny else (128, 2048, 768, 8)
    if not runs_on(machine.device):
        return
    gate_up, down = (
        torch.randn(shape, device=machine.device).mul(0.05).to(machine.dtype)
        for shape in ((num_experts, 2 * size, hidden), (num_experts, hidden, size))
    )
    mixes = [mixtures.mix_few]
    if not machine.on_cuda or groups_on(machine.device, machine.dtype):
        mixes.append(mixtures.mix_sorted)
    for rows, mix in itertools.product((1, 8, 96), mixes):
        x = torch.randn(rows, hidden, device=machine.device).to(machine.dtype)
        scores = torch.randn(rows, num_experts, device=machine.device).to(machine.dtype)
        choice = mixtures.choose(scores, per_token, normalize=True)
        experts, all_weights = choice.chosen.long(), scores.double().softmax(-1)
        weights = all_weights.topk(per_token, -1).values
        # of equal experts either may be the last
        lost = (weights - all_weights.gather(1, experts)).abs().max().item()
        weights /= weights.sum(-1, keepdim=True)
        expected = torch.zeros(rows, hidden, dtype=torch.float64, device=machine.device)
        for i in range(per_token):
            gate, up = torch.einsum("rh,roh->ro", x.double(), gate_up[experts[:, i]].double()).chunk(2, -1)
            given = torch.einsum("rs,rhs->rh", F.silu(gate) * up, down[experts[:, i]].double())
            expected += weights[:, i, None] * given
        found = mix(x, choice, gate_up, down, 0).double()
        error = ((found - expected).abs().max() / expected.abs().max()).item()
        yield "experts", f"{mix.__name__}, {rows} rows", max(error, lost)


def attention(machine: Machine) -> Iterator[Row]:
    """One layer's attention alone, with the stages and tiles of the engine and with others, and beside it PyTorch's
    flash attention over keys in one run, which has no trees. `share of copy` counts keys and values once."""
    rate = machine.copy_rate()
    tiles = [FLASH, *TILES] if machine.on_cuda else TILES[:1]
    for shape, choice in itertools.product(TINY_SHAPES if machine.tiny else TIMED, tiles):
        if choice == FLASH and (shape.rows < FLASH_ROWS or shape.invariant):
            continue
        one = AttentionPass(machine, shape, bucketed=shape.rows <= 64, flash=choice == FLASH)
        own = getattr(one.backend, "tiles", None)
        if isinstance(choice, KeyTiles) and isinstance(one.backend, SplitKVBackend):
            if choice == own:
                continue
            one.backend.tiles = choice
        one.plan()
        try:
            work = machine.graph(one.run, 8) if machine.on_cuda else one.run
            seconds = machine.seconds(work) / (8 if machine.on_cuda else 1)
        except Exception as error:  # tiles that do not fit
            yield {"shape": shape.label, "kernel": str(choice), "us": str(error).splitlines()[0][:60]}
            continue
        item = one.pool.keys.element_size()
        read = 2 * shape.num_seqs * (shape.context + shape.rows) * shape.kv_heads * shape.head_dim * item
        used = choice or own
        name = "padded" if used is None else str(used)
        if isinstance(used, KeyTiles):
            name = f"{used.block_n} keys, {used.num_stages} stages" + " (ours)" * (not choice)
        found = {"shape": shape.label, "kernel": name, "us": round(1e6 * seconds, 1)}
        yield found | {"share of copy": round(read / seconds / rate, 3)}
    for shape in TINY_SHAPES if machine.tiny else TIMED:
        if shape.invariant:
            continue
        plain = replace(shape, is_tree=False, fp8=False)
        sizes = plain.rows, plain.context + plain.rows
        q, k, v = (
            torch.randn(plain.num_seqs, heads, rows, plain.head_dim, device=machine.device).to(machine.dtype)
            for heads, rows in (
                (plain.group * plain.kv_heads, sizes[0]),
                *[(plain.kv_heads, sizes[1])] * 2,
            )
        )
        is_prompt = not plain.context

        def dense(q: Any = q, k: Any = k, v: Any = v, is_prompt: bool = is_prompt) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_prompt, enable_gqa=True)

        work = machine.graph(dense, 8) if machine.on_cuda else dense
        seconds = machine.seconds(work) / (8 if machine.on_cuda else 1)
        yield {"shape": plain.label, "kernel": "PyTorch, keys in one run", "us": round(1e6 * seconds, 1)}
