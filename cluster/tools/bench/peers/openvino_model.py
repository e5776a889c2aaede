"""A checkpoint as a stateful graph of OpenVINO in float32, in the form that its LLM pipelines and fusions expect.

The form is that of the exporters of OpenVINO: inputs by their names, keys and values in variables that `beam_idx`
reorders, RMS norm, rotation by halves and attention as the sub-graphs that the CPU plugin replaces by one operation.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from cluster.tools.bench.peers.gguf_file import check_family, head_dim_of
from cluster.tools.bench.peers.hf_transformers import load_model

_MASKED = -65504.0
_END = 2**63 - 1


def write_openvino(checkpoint: str, folder: Path, stretch: int = 0) -> None:
    """Raises ValueError, one line, for a checkpoint of another family."""
    import openvino  # pyright: ignore[reportMissingImports] (the user's to install)
    from openvino_tokenizers import convert_tokenizer  # pyright: ignore[reportMissingImports] (comes with its LLM pipelines)
    from transformers import AutoTokenizer

    model = load_model(checkpoint, "float32", stretch=stretch)
    check_family("openvino-genai", checkpoint, model.config)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    folder.mkdir(parents=True)
    graph = _Graph(weights, model.config).build()
    openvino.save_model(graph, folder / "openvino_model.xml", compress_to_fp16=False)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for part, name in zip(
        convert_tokenizer(tokenizer, with_detokenizer=True), ("tokenizer", "detokenizer"), strict=True
    ):
        openvino.save_model(part, folder / f"openvino_{name}.xml")
    for name in ("config.json", "generation_config.json"):
        if (Path(checkpoint) / name).is_file():
            shutil.copy(Path(checkpoint) / name, folder)


class _Graph:
    """Builds the graph of one model; shapes are [batch, heads, tokens, head_dim] inside attention."""

    def __init__(self, weights: dict[str, np.ndarray], config: Any) -> None:
        from openvino import opset13  # pyright: ignore[reportMissingImports] (the user's to install)

        self._ops = opset13
        self._weights = weights
        self._config = config
        self._head_dim = head_dim_of(config)
        self._sinks: list[Any] = []

    def build(self) -> Any:
        import openvino  # pyright: ignore[reportMissingImports] (the user's to install)

        ops, config = self._ops, self._config
        ids, mask, positions = (
            self._input(name, [-1, -1], np.int64) for name in ("input_ids", "attention_mask", "position_ids")
        )
        self._beams = self._input("beam_idx", [-1], np.int32)
        self._batch = ops.gather(ops.shape_of(ids), self._ints([0]), self._ints(0))
        total = ops.gather(ops.shape_of(mask), self._ints(1), self._ints(0))
        seen = ops.less_equal(
            ops.range(self._ints(0), total, self._ints(1), "i64"), ops.unsqueeze(positions, self._ints([1, 3]))
        )
        self._mask = ops.select(seen, self._float(0.0), self._float(_MASKED))
        self._cos, self._sin = self._rotation(positions)
        x = ops.gather(ops.constant(self._weights["model.embed_tokens.weight"]), ids, self._ints(0))
        for index in range(config.num_hidden_layers):
            x = self._block(x, index)
        logits = ops.matmul(
            self._norm(x, "model.norm"), ops.constant(self._weights["lm_head.weight"]), False, transpose_b=True
        )
        logits.output(0).set_names({"logits"})
        return openvino.Model([ops.result(logits)], self._sinks, [ids, mask, positions, self._beams], "decoder")

    def _block(self, x: Any, index: int) -> Any:
        ops, config, name = self._ops, self._config, f"model.layers.{index}"
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        normed = self._norm(x, f"{name}.input_layernorm")
        query = self._rotated(self._heads(normed, f"{attention}.q", config.num_attention_heads))
        key = self._rotated(self._heads(normed, f"{attention}.k", config.num_key_value_heads))
        value = self._heads(normed, f"{attention}.v", config.num_key_value_heads)
        key, value = (
            self._cached(new, f"past_key_values.{index}.{kind}present.{index}.{kind}")
            for new, kind in ((key, "key"), (value, "value"))
        )
        mixed = ops.scaled_dot_product_attention(query, key, value, self._mask, causal=False)
        width = config.num_attention_heads * self._head_dim
        mixed = ops.reshape(ops.transpose(mixed, self._ints([0, 2, 1, 3])), self._ints([0, 0, width]), True)
        x = ops.add(x, self._linear(mixed, f"{attention}.o_proj"))
        normed = self._norm(x, f"{name}.post_attention_layernorm")
        gated = ops.multiply(
            ops.swish(self._linear(normed, f"{mlp}.gate_proj")), self._linear(normed, f"{mlp}.up_proj")
        )
        return ops.add(x, self._linear(gated, f"{mlp}.down_proj"))

    def _rotation(self, positions: Any) -> tuple[Any, Any]:
        ops, theta = self._ops, self._config.rope_parameters["rope_theta"]
        exponents = np.arange(0, self._head_dim, 2, dtype=np.float32) / self._head_dim
        frequencies = (1.0 / theta**exponents).astype(np.float32)[None, :, None]
        batched = ops.concat([self._batch, self._ints([1]), self._ints([1])], 0)
        angles = ops.matmul(
            ops.broadcast(ops.constant(frequencies), batched, broadcast_spec="BIDIRECTIONAL"),
            ops.convert(ops.unsqueeze(positions, self._ints(1)), "f32"),
            False,
            transpose_b=False,
        )
        angles = ops.transpose(angles, self._ints([0, 2, 1]))
        both = ops.concat([angles, angles], -1)
        return ops.unsqueeze(ops.cos(both), self._ints(1)), ops.unsqueeze(ops.sin(both), self._ints(1))

    def _rotated(self, x: Any) -> Any:
        ops, half, axis, step = self._ops, self._ints([self._head_dim // 2]), self._ints([3]), self._ints([1])
        first = ops.slice(x, self._ints([0]), half, step, axis)
        second = ops.slice(x, half, self._ints([_END]), step, axis)
        turned = ops.concat([ops.multiply(second, self._float(-1.0)), first], -1)
        return ops.add(ops.multiply(x, self._cos), ops.multiply(turned, self._sin))

    def _heads(self, x: Any, name: str, count: int) -> Any:
        ops = self._ops
        split = ops.reshape(self._linear(x, f"{name}_proj"), self._ints([0, 0, count, self._head_dim]), True)
        if f"{name}_norm.weight" in self._weights:
            split = self._norm(split, f"{name}_norm")
        return ops.transpose(split, self._ints([0, 2, 1, 3]))

    def _cached(self, new: Any, variable: str) -> Any:
        """All keys or values, those of one head repeated for the query heads that share it."""
        import openvino  # pyright: ignore[reportMissingImports] (the user's to install)

        ops, shared = self._ops, self._config.num_key_value_heads
        empty = ops.concat([self._batch, self._ints([shared]), self._ints([0]), self._ints([self._head_dim])], 0)
        shape = openvino.PartialShape([-1, shared, -1, self._head_dim])
        past = ops.read_value(ops.broadcast(self._float(0.0), empty), variable, openvino.Type.f32, shape)
        every = ops.concat([ops.gather(past, self._beams, self._ints(0)), new], 2)
        self._sinks.append(ops.assign(every, variable))
        heads = self._config.num_attention_heads
        if heads == shared:
            return every
        batch, length = (ops.gather(ops.shape_of(every), self._ints([axis]), self._ints(0)) for axis in (0, 2))
        repeats, head_dim = self._ints([heads // shared]), self._ints([self._head_dim])
        shape = ops.concat([batch, self._ints([shared]), repeats, length, head_dim], 0)
        repeated = ops.broadcast(ops.unsqueeze(every, self._ints(2)), shape, broadcast_spec="BIDIRECTIONAL")
        return ops.reshape(repeated, self._ints([0, heads, -1, self._head_dim]), True)

    def _norm(self, x: Any, name: str) -> Any:
        ops = self._ops
        square = ops.reduce_mean(ops.power(x, self._float(2.0)), self._ints([-1]), True)
        root = ops.sqrt(ops.add(square, self._float(self._config.rms_norm_eps)))
        scaled = ops.multiply(ops.divide(self._float(1.0), root), x)
        return ops.multiply(scaled, ops.constant(self._weights[f"{name}.weight"]))

    def _linear(self, x: Any, name: str) -> Any:
        ops = self._ops
        product = ops.matmul(x, ops.constant(self._weights[f"{name}.weight"]), False, transpose_b=True)
        bias = self._weights.get(f"{name}.bias")
        return product if bias is None else ops.add(product, ops.constant(bias))

    def _input(self, name: str, shape: list[int], dtype: type) -> Any:
        node = self._ops.parameter(shape, dtype, name=name)
        node.output(0).set_names({name})
        return node

    def _ints(self, values: int | list[int]) -> Any:
        return self._ops.constant(np.array(values, dtype=np.int64))

    def _float(self, value: float) -> Any:
        return self._ops.constant(np.array(value, dtype=np.float32))
