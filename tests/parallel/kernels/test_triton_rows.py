"""Triton's kernels for rows against PyTorch's operators, on the GPU or in its interpreter; and all kernels compiled for
a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from parallel.kernels import triton_launch
from parallel.kernels.triton_launch import has_triton
from parallel.kv.pass_plan import PendingRows, Span, lay_out
from parallel.kv.pool import FP8, KVPool
from parallel.model.layers.attention import AttentionShape, Heads
from parallel.model.layers.norm import RMSNorm, RMSNormPlusOne
from parallel.model.layers.split_kv import SplitKVBackend

pytestmark = pytest.mark.skipif(not has_triton(), reason="needs triton (pip install triton)")
TYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: {}, torch.bfloat16: {"atol": 0, "rtol": 0.04}}  # the interpreter rounds towards zero


@pytest.mark.parametrize("kind", [RMSNorm, RMSNormPlusOne])
@pytest.mark.parametrize("dtype", TYPES)
def test_norms(kind, dtype, device):
    norm = kind(40, 1e-5, dtype=dtype, device=device)
    norm.weight.normal_(mean=1 - kind.offset)
    x, added = torch.randn(2, 3, 40, dtype=dtype).to(device).unbind(0)
    expected = norm(x), *norm.after_sum(x, added)
    norm.uses_triton = True
    for ours, theirs in zip((norm(x), *norm.after_sum(x, added)), expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TYPES)
def test_gates(dtype, device):
    x = torch.randn(3, 2 * 1100, dtype=dtype)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(triton_launch.gated(x.to(device)).cpu(), F.silu(gate) * up, **TOLERANCE[dtype])


@pytest.mark.extended
@pytest.mark.parametrize("norms", [None, RMSNorm, RMSNormPlusOne])
@pytest.mark.parametrize("rotates", [False, True])
def test_heads_are_normalised_rotated_and_stored(norms, rotates, device):
    num_heads, kv_heads, head_dim = 3, 1, 12
    pool = KVPool(2, 9, kv_heads, head_dim, device=device)
    pool.open(0)
    plan = SplitKVBackend(pool, AttentionShape(3)).plan(lay_out(pool, {0: PendingRows()}, [Span(0, 2)]), [0])
    kinds = norms and tuple(norms(head_dim, 1e-6, dtype=torch.float32, device=device) for _ in range(2))
    for norm in kinds or ():
        norm.weight.normal_()
    heads = Heads(1, num_heads, kv_heads, head_dim, False, kinds)
    angles = torch.randn(2, 1, head_dim).to(device)
    rotation = (angles.cos(), angles.sin()) if rotates else None
    projected = torch.randn(2, (num_heads + 2 * kv_heads) * head_dim).to(device)
    q, k, v = heads.split(projected, rotation)
    queries = projected.clone()
    plan.attention._store(heads, queries, rotation)
    slots = pool.slots(0).tolist()
    keys, values = pool.keys.cpu(), pool.values.cpu()
    torch.testing.assert_close(queries[:, : num_heads * head_dim].cpu(), q.flatten(1).cpu())
    torch.testing.assert_close(keys[1, slots], k.cpu())
    torch.testing.assert_close(values[1, slots], v.cpu())
    assert not keys[0].any() and keys[1].count_nonzero() == k.cpu().count_nonzero()


@pytest.mark.extended
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_fp8_rows_are_stored_as_pytorch_rounds_them(dtype, device):
    """All numbers between two of e4m3 that round otherwise than their neighbours: ties, subnormals, the largest."""
    exact = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    ties = (exact[1:] + exact[:-1]) / 2
    positive = torch.cat((exact, ties, ties * 1.008, ties * 0.992, torch.tensor([449.0, 464.0, 1e4]), torch.randn(15)))
    numbers = torch.cat((positive, -positive)).to(dtype)[:1040].view(65, 16).to(device)
    pools = [KVPool(1, 70, 1, 8, dtype, device, stored=FP8, scales=[(1.0, 0.7)]) for _ in range(2)]
    for pool in pools:
        pool.open(0)
    ours, theirs = (
        SplitKVBackend(pool, AttentionShape(1)).plan(lay_out(pool, {0: PendingRows()}, [Span(0, 65)]), [0])
        for pool in pools
    )
    heads, projected = Heads(0, 1, 1, 8, False, None), torch.cat((numbers[:, :8], numbers), 1)
    ours.attention._store(heads, projected.contiguous(), None)
    slots = theirs.attention.written_slots
    theirs.attention.write(0, *heads.split(projected, None)[1:])
    for stored, expected in zip(*(pool.read(0, slots) for pool in pools), strict=True):
        assert torch.equal(stored.cpu(), expected.cpu())
    keys = projected.view(65, 3, 8)[:, 1:2].float().clamp(-448, 448).to(FP8)
    assert torch.equal(pools[1].keys[0, slots].float().cpu(), keys.float().cpu())


COMPILE = Path(__file__).with_name("compile_triton.py")


@pytest.mark.extended
@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_kernels_compile_and_fit_three_gpus(which):
    """The interpreter accepts what the compiler refuses, and needs no registers; compiling needs no GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, str(COMPILE), which],
        env=environment | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "attend_items" in done.stdout and "store_heads" in done.stdout
