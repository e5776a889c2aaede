"""Layouts of published quantised checkpoints: which tensors hold a matrix, under which names and in which shapes.

`quantization_config` of config.json says how matrices were quantised; which ones were, the checkpoint itself says by
the tensors that it has. `dequantize.py` computes the numbers. Loads no PyTorch; knows no ranks and no layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from parallel.kernels.packing import Packing

Shape = tuple[int, ...]
Method = Literal["scaled", "packed", "awq", "gptq"]
"""FP8 or int8 numbers with scales; int4 of compressed-tensors; int4 of AutoAWQ (gemm); int4 of GPTQ."""

SUPPORTED = (
    "FP8 (compressed-tensors or quant_method=fp8), symmetric int8 and int4 of compressed-tensors, int4 AWQ (gemm) and "
    "int4 GPTQ are"
)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint's matrices [outputs, inputs] are stored. `block` (outputs, inputs) share a scale of FP8 blocks;
    `group` inputs of an output share one of int4, 0 for all; `zero_offset` is added to a GPTQ zero point."""

    method: Method
    block: tuple[int, int] = (128, 128)
    group: int = 0
    zero_offset: int = 0

    def tensors(self, name: str, shape: Shape, available: Collection[str]) -> dict[str, tuple[Shape, ...]]:
        """The tensors that hold tensor `name` of this shape, each with the shapes that it may have."""
        module = name.removesuffix(".weight")
        if len(shape) != 2 or module == name:
            return {name: (shape,)}
        from parallel.kernels.packing import PER_WORD  # few checkpoints are quantised

        outputs, inputs = shape
        words_out, words_in, groups = _up(outputs, PER_WORD), _up(inputs, PER_WORD), _up(inputs, self.group or inputs)
        if self.method == "scaled":
            blocks = _up(outputs, self.block[0]), _up(inputs, self.block[1])
            for scale in (f"{module}.weight_scale", f"{module}.weight_scale_inv"):
                if scale in available:
                    return {name: (shape,), scale: ((), (1,), (1, 1), (outputs,), (outputs, 1), blocks)}
        elif self.method == "packed" and f"{module}.weight_packed" in available:
            found = {f"{module}.weight_packed": (outputs, words_in), f"{module}.weight_scale": (outputs, groups)}
            return {one: (size,) for one, size in found.items()} | self._order(
                f"{module}.weight_g_idx", inputs, available
            )
        elif self.method in ("awq", "gptq") and f"{module}.qweight" in available:
            weight = (inputs, words_out) if self.method == "awq" else (words_in, outputs)
            found = {"qweight": weight, "qzeros": (groups, words_out), "scales": (groups, outputs)}
            order = self._order(f"{module}.g_idx", inputs, available) if self.method == "gptq" else {}
            return {f"{module}.{part}": (size,) for part, size in found.items()} | order
        return {name: (shape,)}

    def packing(self) -> Packing:
        """How the matrices are kept for kernels, of the most bytes: `scaled` ones as if every block had a scale."""
        from parallel.kernels.packing import Packing

        if self.method == "scaled":
            return Packing("fp8", self.block[1])
        return Packing("int4", self.group, has_zeros=self.method != "packed", scale_bytes=2)

    @staticmethod
    def _order(name: str, inputs: int, available: Collection[str]) -> dict[str, tuple[Shape, ...]]:
        """The group of every input, where they were quantised in an order of their own."""
        return {name: ((inputs,),)} if name in available else {}


def _up(size: int, step: int) -> int:
    return -(-size // step)


def read_quantization(hf: Mapping[str, Any]) -> Quantization | None:
    """How config.json says that matrices are stored, None for plain numbers; ValueError, one line, if it is unknown."""
    config = hf.get("quantization_config") or hf.get("compression_config")
    if not config:
        return None
    method = str(config.get("quant_method", "")).lower()
    if method == "compressed-tensors":
        return _compressed_tensors(config)
    if method == "fp8":
        block = config.get("weight_block_size") or (128, 128)
        return Quantization("scaled", (int(block[0]), int(block[1])))
    bits, group = (
        config.get("bits", config.get("w_bit")),
        int(config.get("group_size", config.get("q_group_size", 0)) or 0),
    )
    if method == "awq":
        version = str(config.get("version", "gemm")).lower()
        if version != "gemm" or not config.get("zero_point", True):
            raise _unsupported(f"awq with version={version}, zero_point={config.get('zero_point')}")
    elif method != "gptq":
        raise _unsupported(f"quant_method={config.get('quant_method')}")
    if bits != 4:
        raise _unsupported(f"{method} with bits={bits}")
    if method == "awq":
        return Quantization("awq", group=max(0, group))
    layout = str(config.get("checkpoint_format", "gptq")).lower()
    if layout not in ("gptq", "gptq_v2"):
        raise _unsupported(f"gptq with checkpoint_format={layout}")
    return Quantization("gptq", group=max(0, group), zero_offset=int(layout == "gptq"))


def _compressed_tensors(config: Mapping[str, Any]) -> Quantization:
    """The one scheme of the weights of all groups; how activations were to be quantised changes no weight."""
    schemes = [group.get("weights") or {} for group in (config.get("config_groups") or {}).values()]
    if not schemes:
        raise _unsupported("compressed-tensors without config_groups")
    kinds = {(one.get("type"), one.get("num_bits"), one.get("group_size")) for one in schemes}
    if len(kinds) > 1 or not all(one.get("symmetric", True) for one in schemes):
        raise _unsupported("compressed-tensors with several schemes or with zero points")
    ((kind, bits, group),) = kinds
    if (kind, bits) in (("float", 8), ("int", 8)) and config.get("format") != "pack-quantized":
        block = schemes[0].get("block_structure") or (128, 128)
        return Quantization("scaled", (int(block[0]), int(block[1])))
    if (kind, bits, config.get("format")) == ("int", 4, "pack-quantized"):
        return Quantization("packed", group=max(0, int(group or 0)))
    raise _unsupported(f"compressed-tensors with format={config.get('format')}, type={kind}, num_bits={bits}")


def _unsupported(what: str) -> ValueError:
    return ValueError(f"quantization_config: {what} is not supported; {SUPPORTED}, as are unquantised weights")
