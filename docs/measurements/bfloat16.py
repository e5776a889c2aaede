"""Products of bfloat16 rows on this CPU against what the processor can do, and against PyTorch's (oneDNN).

Reads: all weights of a pass at few rows, against a loop that only reads as many bytes. Dot products: many rows, against
a loop that only multiplies registers. Everything is timed in turn in one run; medians. Needs a processor with
AVX512-BF16 and a C++ compiler. Knows no checkpoints: weights are random.

    python docs/measurements/bfloat16.py --threads 2 --repeats 9
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F

from parallel.kernels.library import find_compiler
from parallel.kernels.products import Panels

LIMITS = r"""
#include <immintrin.h>
#include <cstdint>
extern "C" {
void read_all(const char *from, int64_t size, float *out) {
    __m512i total[8] = {};
    for (int64_t i = 0; i + 512 <= size; i += 512)
        for (int k = 0; k < 8; k++) {
            _mm_prefetch(from + i + 64 * k + 2048, _MM_HINT_T0);
            total[k] = _mm512_xor_si512(total[k], _mm512_loadu_si512(from + i + 64 * k));
        }
    for (int k = 1; k < 8; k++) total[0] = _mm512_xor_si512(total[0], total[k]);
    *out = _mm512_reduce_add_epi32(total[0]);
}
void multiply_registers(int64_t count, float *out) {
    const __m512 one = _mm512_set1_ps(1.0f);  // equal sums would be computed once
    __m512 a = {}, b = a + one, c = b + one, d = c + one, e = d + one, f = e + one, g = f + one, h = g + one;
    const __m512bh x = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    for (int64_t i = 0; i < count; i++) {
        a = _mm512_dpbf16_ps(a, x, x), b = _mm512_dpbf16_ps(b, x, x), c = _mm512_dpbf16_ps(c, x, x);
        d = _mm512_dpbf16_ps(d, x, x), e = _mm512_dpbf16_ps(e, x, x), f = _mm512_dpbf16_ps(f, x, x);
        g = _mm512_dpbf16_ps(g, x, x), h = _mm512_dpbf16_ps(h, x, x);
    }
    *out = _mm512_cvtss_f32(a + b + c + d + e + f + g + h);
}
}
"""
MODELS = {"115M": (768, 12, 2048, 32000), "500M": (1536, 16, 4608, 32000)}
"""Hidden size, layers, inner size of the MLP and vocabulary of Llama shapes."""
FEW, MANY = (1, 2, 4, 6), (16, 64, 512)


def shapes(hidden: int, layers: int, inner: int, vocab: int) -> list[tuple[int, int]]:
    return [(3 * hidden, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)] * layers + [(vocab, hidden)]


def seconds(run: Callable[[], object]) -> float:
    """Seconds of the call; with one thread its CPU time, which other processes change less than the wall time."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    run()
    return clock() - start


def in_threads(run: Callable[[int], object], threads: int) -> float:
    """Seconds of run(0) .. run(threads - 1) at once; foreign functions release the interpreter."""
    if threads == 1:
        return seconds(lambda: run(0))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: time.sleep(0.01), range(threads)))
        return seconds(lambda: list(pool.map(run, range(threads))))


def open_limits() -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp())
    (folder / "limits.cpp").write_text(LIMITS)
    flags = ["-O3", "-march=native", "-shared", "-fPIC"]
    subprocess.run([find_compiler(), *flags, str(folder / "limits.cpp"), "-o", str(folder / "limits.so")], check=True)
    return ctypes.CDLL(str(folder / "limits.so"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    limits, out = open_limits(), (ctypes.c_float * 64)()
    memory = mmap.mmap(-1, 1 << 30)
    memory.madvise(mmap.MADV_HUGEPAGE)  # as the memory of the kernels
    room = torch.frombuffer(memory, dtype=torch.int32).fill_(1)
    share, num_loops = room.nbytes // options.threads, 3_000_000

    def read(i: int) -> None:
        limits.read_all(ctypes.c_void_p(room.data_ptr() + i * share), ctypes.c_int64(share), ctypes.byref(out, 4 * i))

    def multiply(i: int) -> None:
        limits.multiply_registers(ctypes.c_int64(num_loops), ctypes.byref(out, 4 * i))

    found: dict[tuple[object, ...], list[float]] = {}
    cases = []
    for name in options.models:
        matrices = [torch.randn(shape).bfloat16() for shape in shapes(*MODELS[name])]
        panels = [Panels(one, rows=torch.bfloat16) for one in matrices]
        cases.append((name, matrices, panels))
    with torch.inference_mode():
        for _ in range(options.repeats):
            found.setdefault(("read",), []).append(room.nbytes / in_threads(read, options.threads) / 1e9)
            flops = options.threads * num_loops * 8 * 64
            found.setdefault(("peak",), []).append(flops / in_threads(multiply, options.threads) / 1e9)
            for name, matrices, panels in cases:
                for rows in FEW + MANY:
                    xs = {one.inputs: torch.randn(rows, one.inputs).bfloat16() for one in panels}
                    ours = seconds(lambda: [one.multiply(xs[one.inputs]) for one in panels])  # noqa: B023
                    theirs = seconds(lambda: [F.linear(xs[one.shape[1]], one) for one in matrices])  # noqa: B023
                    found.setdefault((name, rows, "ours"), []).append(ours)
                    found.setdefault((name, rows, "torch"), []).append(theirs)
    medians = {key: statistics.median(values) for key, values in found.items()}
    read_gbs, peak = medians["read",], medians["peak",]
    print(f"{options.threads} threads: reads {read_gbs:.1f} GB/s, dot products {peak:.0f} GFLOP/s")
    for name, matrices, _ in cases:
        size = sum(one.nbytes for one in matrices)
        for rows in FEW + MANY:
            ours, theirs = medians[name, rows, "ours"], medians[name, rows, "torch"]
            gbs, flops = size / ours / 1e9, size * rows / ours / 1e9
            print(
                f"{name} {rows:4} rows: {1e3 * ours:7.2f} ms, torch {1e3 * theirs:7.2f} ms, "
                f"{gbs:5.1f} GB/s ({gbs / read_gbs:4.0%}), {flops:5.0f} GFLOP/s ({flops / peak:4.0%})"
            )


if __name__ == "__main__":
    main()
