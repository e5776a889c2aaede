"""Compile every Triton kernel for compute capability 9.0, as launched by the engine; run by `test_triton_rows.py`.

Prints a line for each: name, bytes of shared memory, registers that spill. Needs no GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from actors.sampling import noise_kernels, truncation_kernels
from parallel.kernels import triton_attention, triton_products, triton_rows
from parallel.kernels.packing import Packing

H100 = GPUTarget("cuda", 90, 32)
SHARED = 227 * 1024
"""Bytes of shared memory that a program may have there."""
TYPES = {
    **dict.fromkeys(("partial", "partial_lse", "lse"), "*fp32"),
    **dict.fromkeys(("items", "tables", "words", "depths", "rows", "top_ks"), "*i32"),
    "top_ps": "*fp64",
    **dict.fromkeys(("positions", "slots"), "*i64"),
    **dict.fromkeys(("query_stride", "slot_stride", "stride", "size", "window"), "i32"),
    **dict.fromkeys(("num_rows", "outputs", "inputs", "num_words", "num_steps"), "i32"),
    **dict.fromkeys(("scale", "key_scale", "value_scale", "softcap", "eps"), "fp32"),
}
"""Of the arguments that are neither constants nor pointers to numbers of the model's type."""


def compile_kernel(
    kernel: triton.JITFunction,
    dtype: str,
    constants: dict[str, object],
    others: Mapping[str, str] = TYPES,
    *,
    fp8: bool = False,
    **options: int,
) -> None:
    types = {name: "constexpr" if name in constants else f"*{dtype}" for name in kernel.arg_names}
    types |= {name: "*fp8e4nv" for name in ("keys", "values") if fp8 and name in types}
    types |= {name: kind for name, kind in others.items() if name in types}
    aligned = [(i,) for i, kind in enumerate(types.values()) if kind.startswith("*") or kind == "i32"]
    attributes = {key: [["tt.divisibility", 16]] for key in aligned}  # as a launch finds of these sizes
    compiled = triton.compile(ASTSource(kernel, types, constants, attributes), target=H100, options=options)
    spills = compiled.asm["ptx"].count("st.local")
    print(kernel.__name__, dtype, compiled.metadata.shared, spills, flush=True)
    assert compiled.metadata.shared <= SHARED, f"{kernel.__name__}: {compiled.metadata.shared} bytes of shared memory"
    assert compiled.asm["cubin"]


def compile_attention(dtype: str, head_dim: int, block_m: int, *, masks: bool, fp8: bool = False) -> None:
    block_d = triton.next_power_of_2(head_dim)
    row_bytes = block_d * (4 if dtype == "fp32" else 2)
    block_n = 64 if row_bytes <= 512 else 32  # as SplitKVBackend chooses
    num_stages = 3 if block_n * row_bytes <= 1 << 14 else 2
    constants = dict(GROUP=4, D=head_dim, BLOCK_M=block_m, BLOCK_D=block_d, WANTS_LSE=masks)
    precision = "ieee" if dtype == "fp32" else "tf32"
    more = dict(BLOCK_N=block_n, WINDOWED=masks, CAPPED=masks, PRECISION=precision, WIDEN=False)
    num_warps = 8 if block_m * head_dim > 4096 else 4
    kernel = triton_attention.attend_items
    compile_kernel(kernel, dtype, constants | more, fp8=fp8, num_warps=num_warps, num_stages=num_stages)
    compile_kernel(triton_attention.merge_items, dtype, constants | dict(BLOCK_P=16))


def compile_products(dtype: str, packing: Packing, block_m: int, *, is_cut: bool) -> None:
    codes = {"int4": "*i32", "int8": "*i8", "fp8": "*fp8e4nv"}[packing.kind]
    scales = f"*{dtype}" if packing.scale_bytes == 2 else "*fp32"
    types = TYPES | {"codes": codes, "scales": scales, "zeros": "*u8" if packing.has_zeros else scales}
    constants = dict(PER_WORD=packing.per_word, SPAN=packing.span, GROUP=packing.group, HAS_ZEROS=packing.has_zeros)
    constants |= dict(BLOCK_N=64)
    compile_kernel(triton_products.unpack_matrix, dtype, constants, types)
    run = min(packing.per_word, (packing.group or 256) // packing.span)
    constants |= dict(RUN=run, BLOCK_M=block_m, HAS_BIAS=not is_cut, WIDEN=False)
    constants |= dict(PRECISION="ieee" if dtype == "fp32" else "tf32")
    if is_cut:
        types |= {"out": "*fp32"}
        compile_kernel(triton_products.merge_parts, dtype, dict(PARTS=4, HAS_BIAS=True, BLOCK=1024))
    stages = 4 if block_m < 64 else 3
    compile_kernel(triton_products.multiply_packed, dtype, constants, types, num_warps=4, num_stages=stages)


def compile_noise() -> None:
    types = {**dict.fromkeys(("scores", "out", "best", "values"), "*fp32"), "keys": "*i32", "winners": "*i32"}
    types |= {"token_ids": "*i64", "tokens": "*i64", "sampled": "*i1"}
    types |= dict.fromkeys(("row_stride", "size", "first", "vocab_size", "num_blocks", "of_none"), "i32")
    for kernel in (noise_kernels._fill_noise, noise_kernels._race_blocks):
        compile_kernel(kernel, "fp32", dict(BLOCK=4096), types)
    compile_kernel(noise_kernels._race_winners, "fp32", dict(WIDTH=32), types)


def main(which: str) -> None:
    compile_attention("bf16", 64, 16, masks=True, fp8=True)
    compile_products("bf16", Packing("int4", 128, has_zeros=True, scale_bytes=2), 16, is_cut=True)
    compile_products("bf16", Packing("fp8", 128), 16, is_cut=False)
    compile_noise()
    if which == "all":
        compile_attention("bf16", 64, 16, masks=True)
        for head_dim in (64, 96, 128, 256):
            compile_attention("bf16", head_dim, 64, masks=False, fp8=True)
        for dtype in ("bf16", "fp16", "fp32"):
            for head_dim in (64, 96, 128, 256):
                for block_m in (16, 64):
                    for masks in (False, True):
                        compile_attention(dtype, head_dim, block_m, masks=masks)
            for packing in (Packing("int4", 32), Packing("int4"), Packing("int8"), Packing("fp8"), Packing("fp8", 64)):
                for block_m in (16, 32, 64):
                    compile_products(dtype, packing, block_m, is_cut=block_m == 32)
    compile_kernel(truncation_kernels.truncate_rows, "fp32", dict(BLOCK=4096), num_warps=16)
    for dtype, on in (("bf16", True), ("fp32", False)):
        compile_kernel(triton_rows.normalize_rows, dtype, dict(ADDS=on, PLUS_ONE=on, BLOCK=4096), num_warps=8)
        compile_kernel(triton_rows.gate_rows, dtype, dict(BLOCK=1024))
        shape = dict(NUM_HEADS=32, NUM_KV_HEADS=8, HALF=64, BLOCK=64)
        kinds = dict(NORMS=on, PLUS_ONE=on, ROTATES=on, FP8=on)
        compile_kernel(triton_rows.store_heads, dtype, shape | kinds, fp8=on, num_warps=1)


if __name__ == "__main__":
    main(sys.argv[1])
