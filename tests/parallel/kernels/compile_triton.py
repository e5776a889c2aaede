"""Compile every Triton kernel for compute capability 9.0, and attention for 8.0 and 8.9 too, as launched by the engine;
run by `test_triton_rows.py`.

Prints a line for each: name, type, capability, bytes of shared memory, registers that spill. Needs no GPU.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from actors.sampling import noise_kernels, truncation_kernels
from parallel.kernels import triton_attention, triton_experts, triton_products, triton_rows
from parallel.kernels.attention_tiles import KeyTiles, num_warps
from parallel.kernels.packing import Packing

SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}
"""Bytes of shared memory that a program may have, by compute capability: A100, Ada, H100."""
TYPES = {
    **dict.fromkeys(("partial", "partial_lse", "lse"), "*fp32"),
    **dict.fromkeys(("items", "tables", "words", "depths", "rows", "top_ks"), "*i32"),
    "top_ps": "*fp64",
    **dict.fromkeys(("positions", "slots"), "*i64"),
    **dict.fromkeys(("query_stride", "slot_stride", "stride", "size", "window"), "i32"),
    **dict.fromkeys(("num_rows", "outputs", "inputs", "num_words", "num_steps"), "i32"),
    **dict.fromkeys(("scale", "key_scale", "value_scale", "softcap", "eps"), "fp32"),
}
"""Types of the arguments that are neither constants nor pointers to numbers of the model's type."""


def compile_kernel(
    kernel: triton.JITFunction,
    dtype: str,
    constants: dict[str, object],
    others: Mapping[str, str] = TYPES,
    *,
    fp8: bool = False,
    capability: int = 90,
    **options: int,
) -> str:
    """Its PTX."""
    types = {name: "constexpr" if name in constants else f"*{dtype}" for name in kernel.arg_names}
    types |= {name: "*fp8e4nv" for name in ("keys", "values") if fp8 and name in types}
    types |= {name: kind for name, kind in others.items() if name in types}
    aligned = [(i,) for i, kind in enumerate(types.values()) if kind.startswith("*") or kind == "i32"]
    attributes = {key: [["tt.divisibility", 16]] for key in aligned}  # as a launch finds of these sizes
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(ASTSource(kernel, types, constants, attributes), target=target, options=options)
    spills, shared = compiled.asm["ptx"].count("st.local"), compiled.metadata.shared
    print(kernel.__name__, dtype, capability, shared, spills, flush=True)
    assert shared <= SHARED[capability], f"{kernel.__name__}: {shared} bytes of shared memory for {capability}"
    assert compiled.asm["cubin"]
    return compiled.asm["ptx"]


def compile_attention(
    dtype: str,
    head_dim: int,
    block_m: int,
    *,
    masks: bool,
    fp8: bool = False,
    capability: int = 90,
    paths: bool = False,
) -> None:
    block_d = triton.next_power_of_2(head_dim)
    tiles = KeyTiles.choose(block_d, 4 if dtype == "fp32" else 2, SHARED[capability])
    constants = dict(GROUP=4, D=head_dim, BLOCK_M=block_m, BLOCK_D=block_d, WANTS_LSE=masks)
    precision = "ieee" if dtype == "fp32" else "tf32"
    more = dict(BLOCK_N=tiles.block_n, WINDOWED=masks, CAPPED=masks, PATHS=paths, PRECISION=precision, WIDEN=False)
    kernel, options = triton_attention.attend_items, dict(num_warps=num_warps(block_m, head_dim))
    ptx = compile_kernel(
        kernel, dtype, constants | more, fp8=fp8, capability=capability, num_stages=tiles.num_stages, **options
    )
    waits = [int(left) for left in re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)]
    # keys of later tiles are on their way while those of one are multiplied; fewer behind the reads of paths
    assert tiles.num_stages < 5 or max(waits) >= (2 if paths else 4), f"attend_items waits for all its loads: {waits}"
    compile_kernel(triton_attention.merge_items, dtype, constants | dict(BLOCK_P=16), capability=capability)


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
    stages = 2 if packing.kind == "int4" else 3
    compile_kernel(triton_products.multiply_packed, dtype, constants, types, num_warps=4, num_stages=stages)


def compile_fixed_product(dtype: str, capabilities: Iterable[int], *, is_cut: bool) -> None:
    constants = dict(BLOCK_K=64, BLOCK_N=64, BLOCK_M=64, HAS_BIAS=not is_cut, WIDEN=False)
    constants |= dict(PRECISION="ieee" if dtype == "fp32" else "tf32")
    types = TYPES | ({"out": "*fp32"} if is_cut else {})
    stages = 2 if dtype == "fp32" else 3
    for capability in capabilities:
        kernel = triton_products.multiply_plain
        compile_kernel(kernel, dtype, constants, types, capability=capability, num_warps=4, num_stages=stages)


def compile_experts(dtype: str, *, normalize: bool) -> None:
    """As `mixtures.py` launches them, of 128 experts and 8 for a row."""
    types = TYPES | {"chosen": "*i32", "places": "*i32", "rows": "*i32", "ends": "*i32", "given": f"*{dtype}"}
    types |= dict.fromkeys(("num_experts", "num_entries", "num_blocks", "first", "hidden", "size"), "i32")
    types |= dict.fromkeys(("scores", "weights", "gate_up", "down", "made"), f"*{dtype}")
    tiles = dict(BLOCK_N=16, BLOCK_K=256)
    kernels = triton_experts
    compile_kernel(kernels.route_rows, dtype, dict(K=8, BLOCK_K=8, BLOCK=128, NORMALIZE=normalize), types)
    compile_kernel(kernels.sort_entries, dtype, dict(K=8, BLOCK=64, CHUNK=128), types)
    compile_kernel(kernels.feed_entries, dtype, dict(K=8) | tiles, types)
    compile_kernel(kernels.give_entries, dtype, tiles, types)
    compile_kernel(kernels.sum_entries, dtype, dict(K=8, BLOCK=1024, SORTED=normalize), types)


def compile_noise() -> None:
    types = {**dict.fromkeys(("scores", "out", "best", "values"), "*fp32"), "keys": "*i32", "winners": "*i32"}
    types |= {"token_ids": "*i64", "tokens": "*i64", "sampled": "*i1"}
    types |= dict.fromkeys(("row_stride", "size", "first", "vocab_size", "num_blocks", "of_none"), "i32")
    for kernel in (noise_kernels._fill_noise, noise_kernels._race_blocks):
        compile_kernel(kernel, "fp32", dict(BLOCK=4096), types)
    compile_kernel(noise_kernels._race_winners, "fp32", dict(WIDTH=32), types)


def main(which: str) -> None:
    compile_attention("bf16", 64, 16, masks=True, fp8=True)
    # the most shared memory of those with the least
    compile_attention("bf16", 256, 64, masks=True, paths=True, capability=89)
    compile_products("bf16", Packing("int4", 128, has_zeros=True, scale_bytes=2), 16, is_cut=True)
    compile_products("bf16", Packing("fp8", 128), 16, is_cut=False)
    compile_noise()
    compile_fixed_product("bf16", SHARED if which == "all" else [90], is_cut=True)
    if which == "all":
        compile_attention("bf16", 64, 16, masks=True)
        compile_attention("bf16", 128, 64, masks=False, paths=True)
        for head_dim in (64, 96, 128, 256):
            compile_attention("bf16", head_dim, 64, masks=False, fp8=True)
        for dtype in ("bf16", "fp16", "fp32"):
            for head_dim in (64, 96, 128, 256):
                for block_m in (16, 64):
                    for masks in (False, True):
                        compile_attention(dtype, head_dim, block_m, masks=masks)
                    for capability in (80, 89):
                        compile_attention(dtype, head_dim, block_m, masks=True, capability=capability)
            compile_attention(dtype, 256, 64, masks=True, paths=True, capability=89)
            compile_fixed_product(dtype, SHARED, is_cut=False)
            for packing in (Packing("int4", 32), Packing("int4"), Packing("int8"), Packing("fp8"), Packing("fp8", 64)):
                for block_m in (16, 32, 64):
                    compile_products(dtype, packing, block_m, is_cut=block_m == 32)
    compile_kernel(truncation_kernels.truncate_rows, "fp32", dict(BLOCK=4096), num_warps=16)
    for dtype, on in [("bf16", True), ("fp32", False)][: 2 if which == "all" else 1]:
        compile_experts(dtype, normalize=on)
        compile_kernel(triton_rows.normalize_rows, dtype, dict(ADDS=on, PLUS_ONE=on, BLOCK=4096), num_warps=8)
        compile_kernel(triton_rows.gate_rows, dtype, dict(BLOCK=1024))
        shape = dict(NUM_HEADS=32, NUM_KV_HEADS=8, HALF=64, BLOCK=64)
        kinds = dict(NORMS=on, PLUS_ONE=on, ROTATES=on, FP8=on)
        compile_kernel(triton_rows.store_heads, dtype, shape | kinds, fp8=on, num_warps=1)


if __name__ == "__main__":
    main(sys.argv[1])
