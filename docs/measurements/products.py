"""Products on this CPU against what the processor can do, and against PyTorch's: rows of float32 times matrices that
are stored in bfloat16, rows and matrices of bfloat16, and of int8 (`weights=w8a8`, rows of float32 that are rounded on
the way).

Reads: all weights of a pass at few rows, against a loop that only reads as many bytes. Dot products: many rows, against
a loop that only multiplies registers, or tiles of AMX where the kernels do. Everything is timed in turn in one run;
medians. PyTorch multiplies float32, by float32 matrices, and bfloat16 by its libraries; of int8 `int_mm` multiplies
rows that are rounded already, `dynamic` rounds all rows by one factor. Needs a C++ compiler and a processor with
AVX512-BF16 and AVX512-VNNI, or one with AVX2, where the peak is that of multiply-adds and, for int8, of products of
pairs of 16 bits with their addition. Knows no checkpoints: weights are random.

    python -m docs.measurements.products --types w8a8 --threads 2 --repeats 9

`--passes` times all products of a pass in one call, as a recorded pass makes them, gates with their products: once
behind others of the same, once behind a product with 64 MiB, which push its weights out of the caches.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.kernels.library import find_compiler
from parallel.kernels.products import LARGEST_CODE, Panels, has_tiles
from parallel.kernels.steps import Arena, Recorder

LIMITS = r"""
#include <immintrin.h>
#include <cstdint>
extern "C" {
#if defined(__AVX512F__)
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
void multiply_float32(int64_t count, float *out) {
    const __m512 x = _mm512_set1_ps(0.5f);
    __m512 total[8];
    for (int k = 0; k < 8; k++) total[k] = _mm512_set1_ps(k);
    for (int64_t i = 0; i < count; i++)
        for (int k = 0; k < 8; k++) total[k] = _mm512_fmadd_ps(total[k], x, x);
    for (int k = 1; k < 8; k++) total[0] += total[k];
    *out = _mm512_reduce_add_ps(total[0]);
}
void multiply_bfloat16(int64_t count, float *out) {
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
void multiply_w8a8(int64_t count, float *out) {
    __m512i total[8], x = _mm512_set1_epi32(0x01010101);
    for (int k = 0; k < 8; k++) total[k] = _mm512_set1_epi32(k);
    for (int64_t i = 0; i < count; i++) {
        for (int k = 0; k < 8; k++) total[k] = _mm512_dpbusd_epi32(total[k], x, x);
        asm volatile("" : "+v"(x));  // a loop of integers would be computed beforehand
    }
    for (int k = 1; k < 8; k++) total[0] = _mm512_add_epi32(total[0], total[k]);
    *out = _mm512_reduce_add_epi32(total[0]);
}
#else
void read_all(const char *from, int64_t size, float *out) {
    __m256i total[8] = {};
    for (int64_t i = 0; i + 256 <= size; i += 256)
        for (int k = 0; k < 8; k++)
            total[k] = _mm256_xor_si256(total[k], _mm256_loadu_si256((const __m256i *)(from + i + 32 * k)));
    for (int k = 1; k < 8; k++) total[0] = _mm256_xor_si256(total[0], total[k]);
    *out = _mm256_extract_epi32(total[0], 0) ^ _mm256_extract_epi32(total[0], 7);
}
void multiply_float32(int64_t count, float *out) {
    const __m256 x = _mm256_set1_ps(0.5f);
    __m256 total[8];
    for (int k = 0; k < 8; k++) total[k] = _mm256_set1_ps(k);
    for (int64_t i = 0; i < count; i++)
        for (int k = 0; k < 8; k++) total[k] = _mm256_fmadd_ps(total[k], x, x);
    for (int k = 1; k < 8; k++) total[0] += total[k];
    *out = total[0][0] + total[0][7];
}
void multiply_bfloat16(int64_t count, float *out) { multiply_float32(count, out); }
void multiply_w8a8(int64_t count, float *out) {
    const __m256i x = _mm256_set1_epi32(0x00010001);
    __m256i total[8];
    for (int k = 0; k < 8; k++) total[k] = _mm256_set1_epi32(k);
    for (int64_t i = 0; i < count; i++)
        for (int k = 0; k < 8; k++) total[k] = _mm256_add_epi32(total[k], _mm256_madd_epi16(total[k], x));
    for (int k = 1; k < 8; k++) total[0] = _mm256_add_epi32(total[0], total[k]);
    *out = _mm256_extract_epi32(total[0], 0);
}
#endif
#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
struct Shapes {
    Shapes() {
        alignas(64) uint8_t shapes[64] = {1};
        for (int tile = 0; tile < 8; tile++) shapes[16 + 2 * tile] = 64, shapes[48 + tile] = 16;
        asm volatile("ldtilecfg %0\n tilezero %%tmm0\n tilezero %%tmm1\n tilezero %%tmm2\n tilezero %%tmm3\n"
                     "tilezero %%tmm4\n tilezero %%tmm5" :: "m"(shapes));
    }
    ~Shapes() { asm volatile("tilerelease"); }
};
void tiles_bfloat16(int64_t count, float *) {
    const Shapes shapes;
    for (int64_t i = 0; i < count; i++)
        asm volatile("tdpbf16ps %tmm5, %tmm4, %tmm0\n tdpbf16ps %tmm5, %tmm4, %tmm1\n"
                     "tdpbf16ps %tmm5, %tmm4, %tmm2\n tdpbf16ps %tmm5, %tmm4, %tmm3");
}
void tiles_float32(int64_t count, float *out) { tiles_bfloat16(count, out); }
void tiles_w8a8(int64_t count, float *) {
    const Shapes shapes;
    for (int64_t i = 0; i < count; i++)
        asm volatile("tdpbsud %tmm5, %tmm4, %tmm0\n tdpbsud %tmm5, %tmm4, %tmm1\n"
                     "tdpbsud %tmm5, %tmm4, %tmm2\n tdpbsud %tmm5, %tmm4, %tmm3");
}
#endif
}
"""
MODELS = {"pocket": (384, 6, 896, 4096), "115M": (768, 12, 2048, 32000), "500M": (1536, 16, 4608, 32000)}
"""Hidden size, layers, inner size of the MLP and vocabulary of Llama shapes; "pocket" is the bundled target's."""
FEW, MANY = (1, 2, 4, 6), (16, 64, 512)
Product = Callable[[Tensor], object]


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of products."""

    open_products: Callable[[tuple[int, int]], tuple[Panels, Mapping[str, Product]]]
    """A random matrix of this shape, and PyTorch's products with it."""
    per_instruction: int
    """Operations of a dot product of registers of 64 bytes."""
    without_avx512: int
    """Operations of what multiplies registers of 32 bytes."""
    per_tiles: float
    """Operations of a product of tiles of AMX; rows of float32 take three."""


def in_float32(shape: tuple[int, int]) -> tuple[Panels, Mapping[str, Product]]:
    matrix = torch.randn(shape).bfloat16()
    wide = matrix.float()
    return Panels(matrix), {"linear": lambda x: F.linear(x, wide)}


def in_bfloat16(shape: tuple[int, int]) -> tuple[Panels, Mapping[str, Product]]:
    matrix = torch.randn(shape).bfloat16()
    return Panels(matrix, rows=torch.bfloat16), {"linear": lambda x: F.linear(x, matrix)}


def in_int8(shape: tuple[int, int]) -> tuple[Panels, Mapping[str, Product]]:
    codes = torch.randint(-LARGEST_CODE, LARGEST_CODE + 1, shape, dtype=torch.int8)
    turned = codes.t().contiguous()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        outputs = torch.full((shape[0],), 0.01), torch.zeros(shape[0], dtype=torch.int64)
        prepacked = torch.ops.quantized.linear_prepack(
            torch.quantize_per_channel(codes.float() / 100, *outputs, 0, torch.qint8), None
        )
    return Panels(codes, torch.full((shape[0],), 0.01), rounds=True), {
        "int_mm": lambda x: torch.ops.aten._int_mm(x.to(torch.int8), turned),
        "dynamic": lambda x: torch.ops.quantized.linear_dynamic(x, prepacked),
    }


KINDS = {
    "float32": Kind(in_float32, 32, 16, 16 * 16 * 64 / 3),
    "bfloat16": Kind(in_bfloat16, 64, 16, 16 * 16 * 64),
    "w8a8": Kind(in_int8, 128, 32, 16 * 16 * 128),
}


def shapes(hidden: int, layers: int, inner: int, vocab: int) -> list[tuple[int, int]]:
    return [(3 * hidden, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)] * layers + [(vocab, hidden)]


def open_pass(matrices: Sequence[Panels], num_rows: int) -> Callable[[], None]:
    """All products of a pass of so many rows, in one call."""
    xs = {one.inputs: torch.randn(num_rows, one.inputs).to(one.dtype) for one in matrices}
    recorder = Recorder(Arena(), num_rows, [x.data_ptr() for x in xs.values()])
    with recorder:
        for place, one in enumerate(matrices):
            one.multiply(xs[one.inputs], gated=place % 4 == 2)
    steps = recorder.steps([])

    def run() -> None:
        steps.run([num_rows, *[x.data_ptr() for x in xs.values()]])

    return run


def seconds_of_pass(run: Callable[[], object], before: Callable[[], object]) -> float:
    """Seconds of the call just behind another one, while the threads of the kernels are awake."""
    for _ in range(3):
        run()
    before()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def seconds(run: Callable[[], object]) -> float:
    """Seconds of the call; with one thread its CPU time, which other processes change less than the wall time."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    time.sleep(0.02)  # threads of what was timed before spin on their cores for milliseconds
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--passes", action="store_true", help="all products of a pass in one call, hot and cold")
    parser.add_argument("--rows", type=int, nargs="+", default=[*FEW, *MANY])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    limits, out = open_limits(), (ctypes.c_float * 64)()
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    memory = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)  # as the memory of the kernels
    room = torch.frombuffer(memory, dtype=torch.int32).fill_(1)
    share, num_loops = room.nbytes // options.threads, 4_000_000

    def read(i: int) -> None:
        limits.read_all(ctypes.c_void_p(room.data_ptr() + i * share), ctypes.c_int64(share), ctypes.byref(out, 4 * i))

    found: dict[tuple[object, ...], list[float]] = {}

    def keep(value: float, *key: object) -> None:
        found.setdefault(key, []).append(value)

    large, row = Panels(torch.zeros(1 << 15, 1 << 10, dtype=torch.bfloat16)), torch.zeros(1, 1 << 10)

    def fill_caches() -> None:
        large.multiply(row)

    cases = [
        (name, kind, [KINDS[kind].open_products(shape) for shape in shapes(*MODELS[name])])
        for name in options.models
        for kind in options.types
    ]
    with torch.inference_mode():
        for _ in range(options.repeats):
            keep(room.nbytes / in_threads(read, options.threads) / 1e9, "read")
            for kind in options.types:
                multiply = getattr(limits, f"{'tiles' if has_tiles() else 'multiply'}_{kind}")
                loop = lambda i: multiply(ctypes.c_int64(num_loops), ctypes.byref(out, 4 * i))  # noqa: B023, E731
                one = KINDS[kind].per_instruction if has_avx512 else KINDS[kind].without_avx512
                per_loop = 4 * KINDS[kind].per_tiles if has_tiles() else 8 * one
                operations = options.threads * num_loops * per_loop
                keep(operations / in_threads(loop, options.threads) / 1e9, "peak", kind)
            for name, kind, products in cases:
                for rows in options.rows:
                    if options.passes:
                        run = open_pass([panels for panels, _ in products], rows)
                        keep(seconds_of_pass(run, run), name, kind, rows, "hot")
                        keep(seconds_of_pass(run, fill_caches), name, kind, rows, "cold")
                        continue
                    xs = {panels.inputs: torch.randn(rows, panels.inputs).to(panels.dtype) for panels, _ in products}
                    for who in ("ours", *products[0][1]):
                        calls = [
                            (panels, panels.multiply if who == "ours" else peers[who]) for panels, peers in products
                        ]
                        run = lambda: [multiply(xs[panels.inputs]) for panels, multiply in calls]  # noqa: B023, E731
                        keep(seconds(run), name, kind, rows, who)
    medians = {key: statistics.median(values) for key, values in found.items()}
    peaks = ", ".join(f"dot products of {kind} {medians['peak', kind]:.0f} G/s" for kind in options.types)
    print(f"{options.threads} threads: reads {medians['read',]:.1f} GB/s, {peaks}")
    for name, kind, products in cases:
        num_weights = sum(outputs * inputs for outputs, inputs in shapes(*MODELS[name]))
        size = num_weights * (1 if kind == "w8a8" else 2)
        for rows in options.rows:
            whose = ("hot", "cold") if options.passes else ("ours", *products[0][1])
            times = {who: medians[name, kind, rows, who] for who in whose}
            gbs, operations = size / times[whose[0]] / 1e9, 2 * num_weights * rows / times[whose[0]] / 1e9
            print(
                f"{name} {kind} {rows:4} rows: {', '.join(f'{who} {1e3 * s:7.2f} ms' for who, s in times.items())}, "
                f"{gbs:5.1f} GB/s ({gbs / medians['read',]:4.0%}), "
                f"{operations:5.0f} G/s ({operations / medians['peak', kind]:4.0%})"
            )


if __name__ == "__main__":
    main()
