"""Parts of prompts by PyTorch's kernels, beside rows that the own kernel takes in the same pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

from parallel.kernels.triton_launch import has_triton
from parallel.kv.pass_plan import MutualRows, PendingRows, Span, lay_out
from parallel.kv.pool import FP8, KVPool
from parallel.model.layers import flash, split_kv
from parallel.model.layers.attention import AttentionShape, Heads
from parallel.model.layers.flash import flash_runs, takes_flash
from parallel.model.layers.sdpa import SdpaBackend
from parallel.model.layers.split_kv import SplitKVBackend
from tests.parallel.model.test_split_kv import Launches, meta_runner

GROUP, KV_HEADS, HEAD = 3, 2, 16
HEADS = Heads(0, GROUP * KV_HEADS, KV_HEADS, HEAD, windowed=True, norms=None)
TREE = [-1, 0, 0, 1]
SHAPE = AttentionShape(GROUP)


@pytest.fixture
def short_parts(monkeypatch):
    """The interpreter is slow, and parts of 5 rows are as good as of 128. PyTorch makes no tensors of classes of its
    own while operators are watched, as on the test's device."""
    monkeypatch.setattr(flash, "FLASH_ROWS", 5)

    def mask(*size):
        with _disable_current_modes():
            return causal_lower_right(*size)

    monkeypatch.setattr(flash, "causal_lower_right", mask)


@pytest.fixture
def parts_of_128(monkeypatch):
    monkeypatch.setattr(flash, "FLASH_ROWS", 128)


def fed(*sequences, device="cpu", dtype=torch.float32, scattered=()):
    """A pool of random rows and the rows of a pass of sequences of (committed rows, rows of a chain or parents)."""
    pool, forests = KVPool(1, 700, KV_HEADS, HEAD, dtype, device), {}
    generator = torch.Generator().manual_seed(0)
    for kept in (pool.keys, pool.values):
        kept.copy_(torch.randn(kept.shape, generator=generator).to(dtype))
    for i, (context, _) in enumerate(sequences):
        pool.open(i)
        forests[i] = PendingRows()
        if context:
            pool.reserve(i, context + 1)
            skipped = 1 if i in scattered else context
            pool.commit(i, [row for row in range(context + 1) if row != skipped])
    spans = [Span(i, *((r, None) if isinstance(r, int) else (len(r), r))) for i, (_, r) in enumerate(sequences)]
    return pool, lay_out(pool, forests, spans)


def attended(backend, laid_out, dtype=torch.float32, device="cpu"):
    """[rows, heads * head_dim], and what the pool has after that."""
    attention: Any = backend.plan(laid_out, [0]).attention
    num_rows = sum(rows.num_rows for rows in laid_out)
    rows = torch.randn(num_rows, (GROUP + 2) * KV_HEADS * HEAD, generator=torch.Generator().manual_seed(1))
    attention.prepare()
    return attention, attention.attend(HEADS, rows.to(dtype).to(device), None).cpu()


MIXED = [(0, 6), (20, 1), (36, 5), (9, TREE), (20, 7), (40, 3)]


@pytest.mark.extended
@pytest.mark.skipif(not has_triton(), reason="needs triton (pip install triton)")
@pytest.mark.parametrize(
    ("sequences", "shape", "scattered", "prompts", "dtype"),
    [
        ([(0, 6)], SHAPE, (), [0], torch.float32),
        ([(37, 5)], AttentionShape(GROUP, scale=0.4), (), [0], torch.float32),
        pytest.param(MIXED, SHAPE, (), [0, 2, 4], torch.float32, marks=pytest.mark.slow),
        (MIXED, SHAPE, (), [0, 2, 4], torch.bfloat16),
        (MIXED, SHAPE, (2,), [0, 4], torch.float32),
        pytest.param(MIXED, AttentionShape(GROUP, window=33), (), [0, 4], torch.float32, marks=pytest.mark.slow),
        pytest.param(MIXED, AttentionShape(GROUP, softcap=2.0), (), [], torch.float32, marks=pytest.mark.slow),
    ],
    ids=["prompt", "part", "mixed", "bfloat16", "fragmented", "window", "softcap"],
)
@pytest.mark.usefixtures("short_parts")
def test_rows_of_both_kernels_are_those_of_the_oracle(sequences, shape, scattered, prompts, dtype, device):
    pool, laid_out = fed(*sequences, device=device, dtype=dtype, scattered=scattered)
    backend = SplitKVBackend(pool, shape, flash=True)
    backend._num_cuts = 4  # long sequences are cut, and merged
    attention, out = attended(backend, laid_out, dtype, device)
    assert [span.rows for span in attention.prompts] == [laid_out[i].rows for i in prompts]
    own = [rows.first for i, rows in enumerate(laid_out) if i not in prompts]
    assert set(attention.items[:, 0].tolist()) == set(own), "items are of the other sequences, and of all of them"
    reference, laid_out = fed(*sequences, scattered=scattered)
    _, expected = attended(SdpaBackend(reference, shape), laid_out)
    atol = 1e-5 if dtype == torch.float32 else 0.06
    torch.testing.assert_close(out.float(), expected, atol=atol, rtol=0)
    for kept, theirs in ((pool.keys, reference.keys), (pool.values, reference.values)):
        torch.testing.assert_close(kept.cpu().float(), theirs, atol=0 if dtype == torch.float32 else 0.02, rtol=0)


@pytest.mark.usefixtures("parts_of_128")
def test_what_goes_to_the_flash_kernels():
    """Long chains over one run of slots, no window or cap in the way."""
    _, (chain, after, short, tree) = fed((0, 128), (40, 130), (9, 127), (0, [-1] * 128))
    assert takes_flash(SHAPE, chain) and takes_flash(SHAPE, after)
    assert not takes_flash(SHAPE, short) and not takes_flash(SHAPE, tree)
    assert takes_flash(AttentionShape(GROUP, window=170), after)
    assert not takes_flash(AttentionShape(GROUP, window=169), after)
    assert not takes_flash(AttentionShape(GROUP, softcap=30.0), chain)
    assert not takes_flash(SHAPE, after.seeing(np.arange(20)))
    _, (scattered,) = fed((40, 130), scattered=(0,))
    assert not takes_flash(SHAPE, scattered)
    chain.pending = MutualRows(128)
    assert not takes_flash(SHAPE, chain)


@pytest.mark.skipif(not has_triton(), reason="needs triton (pip install triton)")
def test_the_host_waits_for_nothing_of_a_part(monkeypatch):
    """Tensors are on `meta`, where a number that it reads is an error; and no result of the own kernel is merged."""
    monkeypatch.setattr(flash, "FLASH_ROWS", 512)
    model = meta_runner()
    assert isinstance(model._backend, SplitKVBackend)
    model._backend.flash = True
    model.open(0)
    model.pool.reserve(0, 700)
    model.pool.commit(0, range(700))
    plan: Any = model.plan([Span(0, 512)])
    with Launches(monkeypatch) as launches:
        model.run(plan, torch.zeros(512, dtype=torch.int64, device="meta"))
    assert len(plan.attention.prompts) == 1 and not len(plan.attention.items)
    assert launches.seen["store_heads"] == 3 and not launches.seen["merge_items"]


def test_a_pass_that_is_captured_has_none():
    assert flash.FLASH_ROWS > split_kv._LONG_SPAN


@pytest.mark.parametrize(
    ("changes", "runs"),
    [
        ({}, True),
        ({"dtype": torch.float16}, True),
        ({"dtype": torch.float32}, False),
        ({"dtype": FP8}, False),
        ({"head": 256}, True),
        ({"head": 272}, False),
        ({"head": 12}, False),
        ({"capability": (7, 5)}, False),
        ({"built": False}, False),
        ({"enabled": False}, False),
        ({"device": "meta"}, False),
    ],
)
def test_where_the_flash_kernels_run(monkeypatch, changes, runs):
    given = {"dtype": torch.bfloat16, "head": 80, "capability": (8, 6), "built": True, "enabled": True}
    given |= {"device": "cuda:0"} | changes
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: given["capability"])
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: given["built"])
    monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: given["enabled"])
    keys = SimpleNamespace(device=torch.device(given["device"]), dtype=given["dtype"], shape=(1, 9, 2, given["head"]))
    pool: Any = SimpleNamespace(keys=keys)
    assert flash_runs(pool) is runs


@pytest.mark.usefixtures("parts_of_128")
@pytest.mark.parametrize("invariant", [False, True])
def test_invariant_passes_are_the_own_kernels_alone(monkeypatch, invariant):
    monkeypatch.setattr(split_kv, "flash_runs", lambda pool: True)
    pool, laid_out = fed((3, 128))
    backend = SplitKVBackend(pool, SHAPE, invariant=invariant)
    attention: Any = backend.plan(laid_out, [0]).attention
    assert len(attention.prompts) == (not invariant)
