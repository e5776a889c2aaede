"""Compile every Triton kernel for compute capabilities 8.0, 8.9 and 9.0, as launched by the engine; run by
`test_triton_rows.py`.

A kernel fits where its shared memory and registers are within the limits of such a GPU and no register spills, or few
of packed products. Kernels that are to load ahead wait for few of their loads, and those that the host cuts into so
many programs for each processor have room for them there. Prints a line for each: name, type, capability, shared memory
in bytes, registers, programs beside each other, and the loads under way at each wait. Needs no GPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from actors.sampling import noise_kernels, truncation_kernels
from parallel.kernels import packed_products, triton_attention, triton_experts, triton_products, triton_rows
from parallel.kernels.attention_tiles import KeyTiles, num_warps
from parallel.kernels.packing import Packing
from parallel.model.layers import split_kv


@dataclass(frozen=True)
class Gpu:
    """Limits of a compute capability, from NVIDIA's tables."""

    shared: int
    """Bytes of shared memory that a program may have; a processor has one KiB more, and so much is lost to each."""
    threads: int
    """Of a processor."""
    programs: int
    """At most, of a processor."""
    registers: int = 65536
    """Of a processor, and at most of a program."""


GPUS = {80: Gpu(163 << 10, 2048, 32), 89: Gpu(99 << 10, 1536, 24), 90: Gpu(227 << 10, 2048, 32)}
"""A100, Ada, H100."""
_RESERVED = 1 << 10
_FP8_FROM = 89
_ANY = 1 << 20
"""Registers of float32 models may spill: they are for tests."""
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
    capabilities: Sequence[int] = (90,),
    fp8: bool = False,
    on_way: int = 0,
    programs: int = 1,
    spilled: int = 0,
    **options: int,
) -> None:
    """`on_way`: loads, or groups of them, that are under way at some wait at least; `programs`: beside each other on a
    processor at least; `spilled`: bytes of a thread's registers that may lie in memory."""
    types = {name: "constexpr" if name in constants else f"*{dtype}" for name in kernel.arg_names}
    types |= {name: "*fp8e4nv" for name in ("keys", "values") if fp8 and name in types}
    types |= {name: kind for name, kind in others.items() if name in types}
    aligned = [(i,) for i, kind in enumerate(types.values()) if kind.startswith("*") or kind == "i32"]
    attributes = {key: [["tt.divisibility", 16]] for key in aligned}  # as a launch finds of these sizes
    for capability in capabilities:
        if capability < _FP8_FROM and "*fp8e4nv" in types.values():
            continue  # the engine asks for none there
        gpu, target = GPUS[capability], GPUTarget("cuda", capability, 32)
        compiled = triton.compile(ASTSource(kernel, types, constants, attributes), target=target, options=options)
        registers, in_memory = resources(compiled.asm["cubin"])
        threads, shared = 32 * compiled.metadata.num_warps, compiled.metadata.shared
        room = (gpu.shared + _RESERVED) // (shared + _RESERVED), gpu.threads // threads
        beside = min(*room, gpu.registers // (registers * threads), gpu.programs)
        waits = [int(left) for left in re.findall(r"cp\.async\.wait_group\s+(\d+)", compiled.asm["ptx"])]
        what = f"{kernel.__name__} {dtype} {capability}"
        print(what, shared, registers, beside, *waits, flush=True)
        assert shared <= gpu.shared, f"{what}: {shared} bytes of shared memory"
        assert registers * threads <= gpu.registers, f"{what}: {registers} registers of {threads} threads"
        assert in_memory <= spilled, f"{what}: {in_memory} bytes of registers spill"
        assert max(waits, default=0) >= on_way, f"{what} waits for all its loads: {waits}"
        assert beside >= programs, f"{what}: {beside} programs on a processor, {programs} wanted"


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and the bytes of it that do not fit into them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def compile_attention(
    dtype: str,
    head_dim: int,
    block_m: int,
    *,
    masks: bool,
    fp8: bool = False,
    capabilities: Sequence[int] = (90,),
    paths: bool = False,
) -> None:
    block_d, is_wide = triton.next_power_of_2(head_dim), dtype == "fp32"
    constants = dict(GROUP=4, D=head_dim, BLOCK_M=block_m, BLOCK_D=block_d, WANTS_LSE=masks)
    more = dict(WINDOWED=masks, CAPPED=masks, PATHS=paths, PRECISION="ieee" if is_wide else "tf32", WIDEN=False)
    for capability in capabilities:
        tiles = KeyTiles.choose(block_d, 4 if is_wide else 2, GPUS[capability].shared)
        on_way = 0
        if capability == 89 and not is_wide:
            # keys of later tiles are on their way while those of one are multiplied; fewer behind the reads of paths
            on_way = 2 if paths else 4
        # the host cuts keys for so many; float32 is for tests, and large heads are few
        is_usual = not is_wide and block_m == 16 and block_d <= 128
        compile_kernel(
            triton_attention.attend_items,
            dtype,
            constants | more | dict(BLOCK_N=tiles.block_n),
            capabilities=[capability],
            fp8=fp8,
            on_way=on_way,
            programs=split_kv._PROGRAMS_PER_PROCESSOR if is_usual else 1,
            spilled=_ANY if is_wide else 0,
            num_stages=tiles.num_stages,
            num_warps=num_warps(block_m, head_dim),
        )
    merges = constants | dict(BLOCK_P=split_kv._MERGED_AT_ONCE)
    compile_kernel(triton_attention.merge_items, dtype, merges, capabilities=capabilities)


def compile_products(
    dtype: str, packing: Packing, block_m: int, *, is_cut: bool, capabilities: Sequence[int] = (90,)
) -> None:
    codes = {"int4": "*i32", "int8": "*i8", "fp8": "*fp8e4nv"}[packing.kind]
    scales = f"*{dtype}" if packing.scale_bytes == 2 else "*fp32"
    types = TYPES | {"codes": codes, "scales": scales, "zeros": "*u8" if packing.has_zeros else scales}
    constants = dict(PER_WORD=packing.per_word, SPAN=packing.span, GROUP=packing.group, HAS_ZEROS=packing.has_zeros)
    constants |= dict(BLOCK_N=64)
    compile_kernel(triton_products.unpack_matrix, dtype, constants, types, capabilities=capabilities)
    run = min(packing.per_word, (packing.group or 256) // packing.span)
    constants |= dict(RUN=run, BLOCK_M=block_m, HAS_BIAS=not is_cut, WIDEN=False)
    constants |= dict(PRECISION="ieee" if dtype == "fp32" else "tf32")
    if is_cut:
        types |= {"out": "*fp32"}
        merges = dict(PARTS=4, HAS_BIAS=True, BLOCK=1024)
        compile_kernel(triton_products.merge_parts, dtype, merges, capabilities=capabilities)
    stages, is_usual = packed_products._STAGES[packing.kind], dtype != "fp32" and block_m == 16
    is_fine = packing.kind == "int4" and 0 < packing.group < 128  # a scale for each product of a tile, or two
    spilled = _ANY if dtype == "fp32" else 512 if is_fine else 8
    compile_kernel(
        triton_products.multiply_packed,
        dtype,
        constants,
        types,
        capabilities=capabilities,
        on_way=2 if stages > 2 and is_usual else 0,
        programs=packed_products._PROGRAMS_PER_PROCESSOR[packing.kind] if is_usual and not is_fine else 1,
        spilled=spilled,
        num_warps=4,
        num_stages=stages,
    )


def compile_fixed_product(dtype: str, *, is_cut: bool, capabilities: Sequence[int] = (90,)) -> None:
    constants = dict(BLOCK_K=64, BLOCK_N=64, BLOCK_M=64, HAS_BIAS=not is_cut, WIDEN=False)
    constants |= dict(PRECISION="ieee" if dtype == "fp32" else "tf32")
    types = TYPES | ({"out": "*fp32"} if is_cut else {})
    is_wide = dtype == "fp32"
    compile_kernel(
        triton_products.multiply_plain,
        dtype,
        constants,
        types,
        capabilities=capabilities,
        on_way=0 if is_wide else 2,
        programs=1 if is_wide else 2,  # as `fixed_products` splits the inputs for
        spilled=_ANY if is_wide else 0,
        num_warps=4,
        num_stages=2 if is_wide else 3,
    )


def compile_experts(dtype: str, *, normalize: bool, capabilities: Sequence[int] = (90,)) -> None:
    """As `mixtures.py` launches them, of 128 experts and 8 for a row."""
    types = TYPES | {"chosen": "*i32", "places": "*i32", "rows": "*i32", "ends": "*i32", "given": f"*{dtype}"}
    types |= dict.fromkeys(("num_experts", "num_entries", "num_blocks", "first", "hidden", "size"), "i32")
    types |= dict.fromkeys(("scores", "weights", "gate_up", "down", "made"), f"*{dtype}")
    tiles = dict(BLOCK_N=16, BLOCK_K=256)
    kernels = triton_experts
    for kernel, constants in (
        (kernels.route_rows, dict(K=8, BLOCK_K=8, BLOCK=128, NORMALIZE=normalize)),
        (kernels.sort_entries, dict(K=8, BLOCK=64, CHUNK=128)),
        (kernels.feed_entries, dict(K=8) | tiles),
        (kernels.give_entries, tiles),
        (kernels.sum_entries, dict(K=8, BLOCK=1024, SORTED=normalize)),
    ):
        compile_kernel(kernel, dtype, constants, types, capabilities=capabilities)


def compile_sampling() -> None:
    types = {**dict.fromkeys(("scores", "out", "best", "values"), "*fp32"), "keys": "*i32", "winners": "*i32"}
    types |= {"token_ids": "*i64", "tokens": "*i64", "sampled": "*i1"}
    types |= dict.fromkeys(("row_stride", "size", "first", "vocab_size", "num_blocks", "of_none"), "i32")
    for kernel in (noise_kernels._fill_noise, noise_kernels._race_blocks):
        compile_kernel(kernel, "fp32", dict(BLOCK=4096), types, capabilities=ALL)
    compile_kernel(noise_kernels._race_winners, "fp32", dict(WIDTH=32), types, capabilities=ALL)
    kernel = truncation_kernels.truncate_rows
    compile_kernel(kernel, "fp32", dict(BLOCK=4096), capabilities=ALL, num_warps=16)


def compile_rows(dtype: str, *, on: bool) -> None:
    norms = dict(ADDS=on, PLUS_ONE=on, BLOCK=4096)
    compile_kernel(triton_rows.normalize_rows, dtype, norms, capabilities=ALL, num_warps=8)
    compile_kernel(triton_rows.gate_rows, dtype, dict(BLOCK=1024), capabilities=ALL)
    shape = dict(NUM_HEADS=32, NUM_KV_HEADS=8, HALF=64, BLOCK=64, NORMS=on, PLUS_ONE=on, ROTATES=on)
    for fp8 in (False, True):
        compile_kernel(triton_rows.store_heads, dtype, shape | dict(FP8=fp8), fp8=fp8, capabilities=ALL, num_warps=1)


ALL = tuple(GPUS)
PACKINGS = (
    Packing("int4", 128, has_zeros=True, scale_bytes=2),
    Packing("int4", 64),
    Packing("int4", 32),
    Packing("int4"),
    Packing("int8"),
    Packing("fp8"),
    Packing("fp8", 64),
)


def main(which: str) -> None:
    """`some`: each kernel for all capabilities, and the variants that take most; `all`: all variants."""
    compile_attention("bf16", 128, 16, masks=False, capabilities=ALL)
    compile_attention("bf16", 64, 16, masks=True, fp8=True)
    # the most shared memory of those with the least
    compile_attention("bf16", 256, 64, masks=True, paths=True, capabilities=[89])
    compile_products("bf16", Packing("int4", 128, has_zeros=True, scale_bytes=2), 16, is_cut=True, capabilities=ALL)
    compile_products("bf16", Packing("fp8", 128), 16, is_cut=False, capabilities=ALL)
    compile_fixed_product("bf16", is_cut=True, capabilities=ALL)
    compile_experts("bf16", normalize=True, capabilities=ALL)
    compile_rows("bf16", on=True)
    compile_sampling()
    if which == "some":
        return
    compile_attention("bf16", 64, 16, masks=True)
    compile_attention("bf16", 128, 64, masks=False, paths=True, capabilities=ALL)
    for head_dim in (64, 96, 128, 256):
        compile_attention("bf16", head_dim, 64, masks=False, fp8=True)
    for dtype in ("bf16", "fp16", "fp32"):
        for head_dim in (64, 96, 128, 256):
            for block_m in (16, 64):
                compile_attention(dtype, head_dim, block_m, masks=False)
                compile_attention(dtype, head_dim, block_m, masks=True, capabilities=ALL)
        compile_attention(dtype, 256, 64, masks=True, paths=True, capabilities=[89])
        compile_fixed_product(dtype, is_cut=False, capabilities=ALL)
        for packing in PACKINGS:
            for block_m in (16, 32, 64):
                compile_products(dtype, packing, block_m, is_cut=block_m == 32, capabilities=ALL)
    compile_experts("fp32", normalize=False)
    compile_rows("fp32", on=False)


if __name__ == "__main__":
    main(sys.argv[1])
