"""Seconds of one layer's attention on a CPU: `python -m docs.measurements.attention [PARTS OF NAMES ...]`.

Prints a line of a table for each case: the median and the least time of a call, the keys and values of the context that
it reads a second, and a digest of the result, which is equal where the bits are. Layers take turns, as in a pass, so
that keys and values come from memory. `--beside LIBRARY` times the kernel of another compiled version too, in random
turn and in this process (compiled kernels are kept in `~/.cache/specdec/kernels`). Use real-time priority
(`chrt -f 20`) where other programs run.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import random
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch

from parallel.kernels import attention
from parallel.kernels.attention import CHAIN, FOREST, LayerCall, PassRows


@dataclass(frozen=True)
class Case:
    """Every one of `num_sequences` has `context` committed rows and is fed `num_rows`."""

    name: str
    num_sequences: int
    context: int
    num_rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    num_layers: int = 8
    is_run: bool = True
    """Else the slots of a sequence are anywhere in the pool."""


CASES = (
    Case("16 requests, bfloat16", 16, 160, 1, 12, 12, 64, torch.bfloat16, num_layers=12),
    Case("64 requests, bfloat16", 64, 160, 1, 12, 12, 64, torch.bfloat16),
    Case("64 requests, bfloat16, scattered slots", 64, 160, 1, 12, 12, 64, torch.bfloat16, is_run=False),
    Case("64 requests, bfloat16, 4 draft tokens", 64, 160, 5, 12, 12, 64, torch.bfloat16),
    Case("64 requests, bfloat16, 32 query and 8 key heads", 64, 160, 1, 32, 8, 128, torch.bfloat16, num_layers=4),
    Case("16 requests, float32", 16, 160, 1, 6, 6, 64, torch.float32, num_layers=12),
    Case("64 requests, float32", 64, 160, 1, 6, 6, 64, torch.float32),
    Case("1 request of 200 tokens, float32", 1, 200, 1, 6, 6, 64, torch.float32, num_layers=6),
    Case("1 request of 8,000 tokens, float32", 1, 8000, 1, 6, 6, 64, torch.float32, num_layers=6),
    Case("1 request of 8,000 tokens, bfloat16", 1, 8000, 1, 12, 12, 64, torch.bfloat16, num_layers=6),
    Case("the same, 5 draft tokens", 1, 8000, 6, 12, 12, 64, torch.bfloat16, num_layers=6),
    Case("prompts of 128 tokens, bfloat16", 4, 0, 128, 12, 12, 64, torch.bfloat16, num_layers=4),
    Case("512 tokens of a prompt after 2,000, float32", 1, 2000, 512, 6, 6, 64, torch.float32, num_layers=4),
)
CASES += tuple(
    Case(f"bundled target, {num_rows} rows after {context} tokens", 1, context, num_rows, 8, 4, 48, torch.float32, 6)
    for context in (100, 150, 300, 1000)
    for num_rows in (1, 2, 4, 6, 9)
)
CASES += tuple(
    Case(f"bundled target, prompt of {num_rows} tokens", 1, 0, num_rows, 8, 4, 48, torch.float32, 6)
    for num_rows in (50, 128, 512)
)
CASES += tuple(
    Case(f"bundled target, {num} requests of {context} tokens", num, context, 1, 8, 4, 48, torch.float32, 6)
    for num in (16, 64)
    for context in (150, 400)
)
HEAD = "| case | ms a layer | least | GB/s | digest |\n|---|---|---|---|---|\n"


def lines(case: Case, repeats: int, other: Callable[..., Any] | None) -> str:
    """Rows of the table: this version, then the `other` kernel."""
    layers, rows, projected = _made(case)
    kernels: dict[str, Callable[..., Any]] = {case.name: attention._kernel()}
    if other is not None:
        kernels["the same, beside"] = other
    times: dict[str, list[float]] = {name: [] for name in kernels}
    digests = {}
    for _ in range(repeats + 2):
        for name in random.sample(sorted(kernels), len(kernels)):
            given = [_copied(projected) for _ in layers]  # a call rotates its queries in place
            with _replaced(kernels[name]):
                started = time.perf_counter()
                results = [layer.attend(rows, own, None) for layer, own in zip(layers, given, strict=True)]
                times[name].append((time.perf_counter() - started) / len(layers))
            digests[name] = hashlib.sha256(results[-1].view(torch.uint8).numpy().tobytes()).hexdigest()[:8]
    read = 2 * case.num_sequences * case.context * case.num_kv_heads * case.head_dim * projected.element_size()
    table = ""
    for name in kernels:
        middle, least = median(times[name][2:]), min(times[name][2:])
        table += f"| {name} | {1e3 * middle:.4f} | {1e3 * least:.4f} | {read / middle / 1e9:.1f} | {digests[name]} |\n"
    return table


def _copied(rows: torch.Tensor) -> torch.Tensor:
    """By NumPy: behind a copy of PyTorch's its threads keep spinning on the cores that the kernel's need."""
    return torch.from_numpy(rows.view(torch.uint8).numpy().copy()).view(rows.dtype)


def _replaced(kernel: Callable[..., Any]) -> AbstractContextManager[Any]:
    def given() -> Callable[..., Any]:  # not a mock, whose call takes as long as the kernel
        return kernel

    return mock.patch.object(attention, "_kernel", new=given)


def _kernel_of(file: str) -> Callable[..., Any]:
    kernel = ctypes.CDLL(file).attend_rows
    kernel.argtypes, kernel.restype = [*[ctypes.c_void_p] * 6, ctypes.c_int], None
    return kernel


def _made(case: Case) -> tuple[list[LayerCall], PassRows, torch.Tensor]:
    length, generator = case.context + case.num_rows, torch.Generator().manual_seed(0)
    num_slots = case.num_sequences * length
    places = np.arange(num_slots) if case.is_run else np.random.default_rng(0).permutation(num_slots)
    tables = places.reshape(case.num_sequences, length)
    spans = [
        (
            n * case.num_rows,
            case.num_rows,
            case.context,
            case.num_rows,
            int(own[0]) if case.is_run else -1,
            n * length,
            CHAIN,
            FOREST,
        )
        for n, own in enumerate(tables)
    ]
    written = tables[:, case.context :].flatten().tolist()
    rows = PassRows([number for span in spans for number in span], [places], (), written)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    shape = num_slots, case.num_kv_heads, case.head_dim
    scale = case.head_dim**-0.5
    layers = [LayerCall(drawn(*shape), drawn(*shape), case.num_heads, scale=scale) for _ in range(case.num_layers)]
    width = (case.num_heads + 2 * case.num_kv_heads) * case.head_dim
    return layers, rows, drawn(case.num_sequences * case.num_rows, width)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--beside", type=_kernel_of, metavar="LIBRARY", help="another compiled version")
    parser.add_argument("names", nargs="*", help="parts of the names of cases; none: all")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sys.stdout.write(HEAD)
    for case in CASES:
        if not options.names or any(name in case.name for name in options.names):
            sys.stdout.write(lines(case, options.repeats, options.beside))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
