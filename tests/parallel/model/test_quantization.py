"""Quantised checkpoints, written here as their tools write them, against plain ones that hold the same numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel.kernels.packing import Packing
from parallel.kernels.triton_launch import runs_on
from parallel.kv.pass_plan import Span
from parallel.model.checkpoint import (
    block_tensors,
    find_tensors,
    quantized_layers,
    stores_bfloat16,
    tensor_shapes,
)
from parallel.model.families.registry import read_config
from parallel.runtime.model_bytes import weight_bytes
from parallel.runtime.runner import open_model

TOKENS = list(range(20))
GROUP = 16
BLOCK = (16, 16)

Written = tuple[dict[str, Tensor], Tensor]
"""The tensors of a matrix, by their names after its module's, and the numbers that they stand for."""


# --- writers: loops, as in the tools that publish these layouts -------------------------------------------------------


def fp8(weight: Tensor, scales: Tensor, spread: Tensor, name: str) -> Written:
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, name: scales}, codes.float() * spread


def fp8_per_tensor(weight: Tensor) -> Written:
    scale = (weight.abs().max() / 448).reshape(1)
    written, numbers = fp8(weight, scale, scale, "weight_scale")
    return written | {"input_scale": torch.ones(1)}, numbers


def fp8_per_channel(weight: Tensor) -> Written:
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    return fp8(weight, scale, scale.float(), "weight_scale")


def int8_per_channel(weight: Tensor) -> Written:
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def fp8_blocks(weight: Tensor, name: str = "weight_scale_inv") -> Written:
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
    spread = torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            where = slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1])
            scales[i, j] = spread[where] = weight[where].abs().max() / 448
    return fp8(weight, scales, spread, name)


def int4(weight: Tensor, groups: Tensor, *, symmetric: bool) -> tuple[np.ndarray, np.ndarray, Tensor, Tensor]:
    """Codes [in, out], zero points [groups, out], scales [groups, out] in float16, and the numbers [out, in]."""
    num_groups = int(groups.max()) + 1
    codes, numbers = torch.empty(weight.T.shape, dtype=torch.int64), torch.empty_like(weight)
    zeros = torch.empty(num_groups, len(weight), dtype=torch.int64)
    scales = torch.empty(num_groups, len(weight), dtype=torch.float16)
    for group in range(num_groups):
        part = weight[:, groups == group]
        if symmetric:
            scale, zero = part.abs().amax(1) / 7, torch.full((len(weight),), 8)
        else:
            scale = (part.amax(1) - part.amin(1)) / 15
            zero = (-part.amin(1) / scale).round().clamp(1, 15).long()
        scales[group], zeros[group] = scale.half(), zero
        scale = scales[group].float()
        own = ((part / scale[:, None]).round() + zero[:, None]).clamp(0, 15).long()
        codes[groups == group] = own.T
        numbers[:, groups == group] = (own - zero[:, None]) * scale[:, None]
    return codes.numpy(), zeros.numpy(), scales, numbers


def words(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.uint32).view(np.int32))


def along_outputs(codes: np.ndarray, order: tuple[int, ...]) -> Tensor:
    packed = np.zeros((codes.shape[0], codes.shape[1] // 8), dtype=np.uint64)
    for column in range(packed.shape[1]):
        for i in range(8):
            packed[:, column] |= codes[:, column * 8 + order[i]].astype(np.uint64) << np.uint64(4 * i)
    return words(packed)


def along_inputs(codes: np.ndarray) -> Tensor:
    packed = np.zeros((codes.shape[0] // 8, codes.shape[1]), dtype=np.uint64)
    for row in range(codes.shape[0]):
        packed[row // 8] |= codes[row].astype(np.uint64) << np.uint64(4 * (row % 8))
    return words(packed)


def awq(weight: Tensor) -> Written:
    """AutoAWQ's `WQLinear_GEMM.from_linear`."""
    codes, zeros, scales, numbers = int4(weight, torch.arange(weight.shape[1]) // GROUP, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    written = {"qweight": along_outputs(codes, order), "qzeros": along_outputs(zeros, order), "scales": scales}
    return written, numbers


def gptq(weight: Tensor, *, act_order: bool = False, minus: int = 1, group: int = GROUP) -> Written:
    """AutoGPTQ's `QuantLinear.pack`; the first format stores zero points less one."""
    group = group if group > 0 else weight.shape[1]
    groups = torch.arange(weight.shape[1]) // group
    if act_order:
        groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(0))]
    codes, zeros, scales, numbers = int4(weight, groups, symmetric=False)
    plain = tuple(range(8))
    return {
        "qweight": along_inputs(codes),
        "qzeros": along_outputs(zeros - minus, plain),
        "scales": scales,
        "g_idx": groups.to(torch.int32),
    }, numbers


def packed(weight: Tensor) -> Written:
    """`pack_to_int32` of compressed-tensors: numbers plus 8, along the inputs of each output."""
    codes, _, scales, numbers = int4(weight, torch.arange(weight.shape[1]) // GROUP, symmetric=True)
    return {
        "weight_packed": along_inputs(codes).T.contiguous(),
        "weight_scale": scales.T.contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }, numbers


def compressed(kind: str, bits: int, format_: str, **weights: object) -> dict[str, object]:
    scheme = {"type": kind, "num_bits": bits, "symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
        "quantization_status": "compressed",
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
LAYOUTS: dict[str, tuple[dict[str, object], Callable[[Tensor], Written]]] = {
    "fp8 per tensor": (compressed("float", 8, "float-quantized", strategy="tensor"), fp8_per_tensor),
    "fp8 per channel": (compressed("float", 8, "float-quantized", strategy="channel"), fp8_per_channel),
    "fp8 blocks of compressed-tensors": (
        compressed("float", 8, "float-quantized", strategy="block", block_structure=list(BLOCK)),
        lambda weight: fp8_blocks(weight, "weight_scale"),
    ),
    "fp8 blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)},
        fp8_blocks,
    ),
    "fp8 static": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_per_tensor),
    "int8": (compressed("int", 8, "int-quantized", strategy="channel"), int8_per_channel),
    "int4 of compressed-tensors": (compressed("int", 4, "pack-quantized", group_size=GROUP), packed),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        awq,
    ),
    "gptq": (GPTQ, gptq),
    "gptq, act order": (GPTQ | {"desc_act": True}, lambda weight: gptq(weight, act_order=True)),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda weight: gptq(weight, minus=0)),
    "gptq, one group": (GPTQ | {"group_size": -1}, lambda weight: gptq(weight, group=-1)),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def pair(request, make_checkpoint, tmp_path_factory) -> tuple[str, Path, Path]:
    """The name of a layout, a checkpoint in it, and one with its numbers in float32."""
    scheme, write = LAYOUTS[request.param]
    source = make_checkpoint().path
    folder = tmp_path_factory.mktemp("quantized")
    ours, plain = shutil.copytree(source, folder / "quantized"), shutil.copytree(source, folder / "plain")
    tensors = load_file(source / "model.safetensors")
    numbers = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        written, numbers[name] = write(tensors.pop(name))
        tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in written.items()}
    save_file(tensors, ours / "model.safetensors", metadata={"format": "pt"})
    save_file(
        {n: one.contiguous() for n, one in numbers.items()}, plain / "model.safetensors", metadata={"format": "pt"}
    )
    config = json.loads((ours / "config.json").read_text())
    (ours / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}))
    return request.param, ours, plain


def logits(path, **options):
    model = open_model(path, num_slots=32, **options)
    model.open(0)
    return model.forward([Span(0, 20, num_logits=20)], TOKENS).logits


@pytest.mark.extended
def test_a_quantised_checkpoint_is_the_model_of_its_numbers(pair):
    _, ours, plain = pair
    assert torch.equal(logits(ours), logits(plain))
    assert torch.equal(logits(ours, weights=torch.int8), logits(plain, weights=torch.int8))
    assert not stores_bfloat16(ours, read_config(ours))
    assert find_tensors(ours, tensor_shapes(read_config(ours)))


RANKS = "fp8 per channel", "fp8 blocks", "int4 of compressed-tensors", "awq", "gptq, act order"
"""Layouts of each kind of share; the others' are slow."""


@pytest.mark.extended
@pytest.mark.parametrize(
    "pair", [pytest.param(name, marks=[] if name in RANKS else pytest.mark.slow) for name in LAYOUTS], indirect=True
)
def test_two_ranks_hold_the_parts_of_its_numbers(pair, on_ranks):
    """Shares of 12 key rows and 24 inputs, which fill neither words of 8 nor groups and blocks of 16. Codes are kept
    but of inputs in an order of their own, and of a share that begins within a group."""
    name, ours, plain = pair

    def parts(path, weights=None):
        def of(group):
            layer = open_model(path, num_slots=32, group=group, weights=weights).decoder.layers[0]
            held = [one.weight for one in (layer.attention.qkv, layer.attention.o, layer.mlp.down)]
            return [(one.multiply(torch.eye(one.inputs)).T, one.packed) for one in held]

        return on_ranks(2, of)

    is_grouped = "block" in name or name in ("int4 of compressed-tensors", "awq", "gptq", "gptq v2")
    kept = [[True, not (is_grouped and rank)] for rank in (0, 1)] if name != "gptq, act order" else [[False] * 2] * 2
    expected = parts(plain)
    for weights in (None, "packed") if runs_on(torch.device("cpu")) else (None,):
        for ours_, theirs, (of_qkv, of_rest) in zip(parts(ours, weights), expected, kept, strict=True):
            assert all(torch.equal(one, other) for (one, _), (other, _) in zip(ours_, theirs, strict=True))
            if weights:
                are_codes = [packed is not None and packed.dtype != torch.float32 for _, packed in ours_]
                assert are_codes == [of_qkv, of_rest, of_rest]


@pytest.mark.extended
@pytest.mark.parametrize(
    "pair",
    ["fp8 per channel", "awq", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp8 blocks", "int8"))],
    indirect=True,
)
def test_products_of_codes_give_the_same_tokens(pair, device):
    """Numbers are float32, where only sums have another order; one layout of each kind."""
    name, ours, _ = pair
    model = open_model(ours, device=device, num_slots=32, weights="packed")
    model.open(0)
    found, expected = model.forward([Span(0, 20, num_logits=20)], TOKENS).logits.cpu(), logits(ours)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    counted = weight_bytes(model.config, 1, 4, weights="packed", path=str(ours))
    excess = counted - model.decoder.nbytes()
    assert excess > 0 if name == "fp8 per channel" else excess == 0, "scales in two bytes are counted as four"


def test_bytes_of_a_packed_matrix_are_those_of_its_codes_scales_and_zero_points():
    """A matrix of 6 outputs and 256 inputs."""
    one_byte = 6 * 256
    assert Packing("fp8", 128).num_bytes(6, 256) == Packing("int8", 128).num_bytes(6, 256) == one_byte + 6 * 2 * 4
    assert Packing("fp8").num_bytes(6, 256) == one_byte + 6 * 4
    assert Packing("int4", 128, scale_bytes=2).num_bytes(6, 256) == one_byte // 2 + 6 * 2 * 2
    assert Packing("int4", 128, has_zeros=True, scale_bytes=2).num_bytes(6, 256) == one_byte // 2 + 6 * 2 * 3


@pytest.mark.extended
@pytest.mark.parametrize("layer", [0, 1])
def test_copies_of_the_last_layer_are_quantised_where_it_is(pair, tmp_path, layer):
    """One of two layers is quantised; three copies follow the last of them."""
    _, ours, plain = pair
    config = read_config(ours)
    mixed = shutil.copytree(ours, tmp_path / "mixed")
    by_source = [load_file(path / "model.safetensors") for path in (plain, ours)]
    tensors = {name: one for name, one in by_source[1].items() if f".{layer}." in name or ".layers." not in name}
    tensors |= {name: one for name, one in by_source[0].items() if f".layers.{1 - layer}." in name}
    save_file(tensors, mixed / "model.safetensors", metadata={"format": "pt"})
    matrices = {name for name, shape, _ in block_tensors(config) if len(shape) == 2}
    assert quantized_layers(mixed, config) == dict.fromkeys(matrices, 1)
    assert quantized_layers(mixed, config.stretched(3)) == dict.fromkeys(matrices, 1 + 3 * layer)
    assert quantized_layers(plain, config.stretched(3)) == {}


def test_a_damaged_part_is_named_before_a_process_starts(pair, tmp_path):
    _, ours, _ = pair
    broken = shutil.copytree(ours, tmp_path / "copy")
    tensors = load_file(broken / "model.safetensors")
    scale = next(
        name for name in tensors if "down_proj" in name and ("weight_scale" in name or name.endswith("scales"))
    )
    tensors[scale] = torch.ones(5, 7)
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"tensor {scale} is \[5, 7\], config.json asks"):
        find_tensors(broken, tensor_shapes(read_config(broken)))


def test_transformers_reads_the_same_numbers_from_fp8_blocks(make_checkpoint):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = torch.randn(48, 32)
    written, numbers = fp8_blocks(weight)
    theirs = Fp8Dequantize(None)._dequantize_one(written["weight"], written["weight_scale_inv"], torch.float32)
    assert torch.equal(theirs, numbers)


def test_a_scheme_that_does_not_say_so_is_symmetric(make_checkpoint):
    config = json.loads((make_checkpoint().path / "config.json").read_text())
    scheme: Any = compressed("int", 4, "pack-quantized", group_size=GROUP)
    said = read_config(config | {"quantization_config": scheme})
    del scheme["config_groups"]["group_0"]["weights"]["symmetric"]
    assert read_config(config | {"quantization_config": scheme}) == said


@pytest.mark.parametrize(
    ("scheme", "line"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method=bitsandbytes is not supported; FP8"),
        (GPTQ | {"bits": 3}, "gptq with bits=3"),
        (GPTQ | {"checkpoint_format": "marlin"}, "gptq with checkpoint_format=marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq with version=gemv"),
        (compressed("float", 4, "nvfp4-pack-quantized"), "compressed-tensors with format=nvfp4-pack-quantized"),
        (compressed("int", 4, "pack-quantized") | {"config_groups": {}}, "without config_groups"),
        (compressed("int", 4, "pack-quantized", symmetric=False), "with zero points"),
    ],
)
def test_what_cannot_be_read_is_refused_with_one_line(make_checkpoint, scheme, line):
    config = json.loads((make_checkpoint().path / "config.json").read_text())
    with pytest.raises(ValueError, match=line) as caught:
        read_config(config | {"quantization_config": scheme})
    assert "\n" not in str(caught.value)
