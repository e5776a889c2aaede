"""The shape of a decoder, read from a checkpoint's config.json. Knows no weights and no device."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

_DEFAULTS: dict[str, dict[str, int]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"max_position_embeddings": 32768, "sliding_window": 4096},
    "Qwen3ForCausalLM": {"max_position_embeddings": 32768, "sliding_window": 4096, "head_dim": 128},
}
"""The supported architectures, each with what its config.json may leave out."""

SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn")
"""The scalings of rotary frequencies that `layers/rope.py` computes."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Parameters of one scaling, under the names of `rope_parameters` in a checkpoint's config.json."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder of the Llama family: what differs between its members is a field, not a class.

    Layers named in `windowed` look back `window` positions, the others all the way. The last `stretch` of `num_layers`
    layers add nothing to the residual stream: the same tokens at the cost of a larger model.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    max_positions: int
    rope: RopeScaling
    window: int | None
    windowed: frozenset[int]
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    stretch: int = 0

    @staticmethod
    def from_hf(source: str | Path | dict[str, Any]) -> DecoderConfig:
        """Read a checkpoint directory, its config.json, or that file's content; ValueError if we cannot run it."""
        hf = source if isinstance(source, dict) else _read_json(Path(source))
        architecture = (hf.get("architectures") or [None])[0]
        if architecture not in _DEFAULTS:
            raise ValueError(f"architecture {architecture!r} is not supported; use one of {', '.join(_DEFAULTS)}")
        hf = _DEFAULTS[architecture] | hf
        if hf.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act={hf['hidden_act']!r} is not supported; supported is 'silu'")
        if hf.get("quantization_config"):
            raise ValueError("quantization_config: quantized checkpoints are not supported; use unquantized weights")
        required = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        missing = [name for name in required if not isinstance(hf.get(name), int)]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        window, windowed = _window(hf, architecture)
        attention_bias = bool(hf.get("attention_bias", False))
        config = DecoderConfig(
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            num_layers=hf["num_hidden_layers"],
            num_heads=hf["num_attention_heads"],
            num_kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
            head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
            intermediate_size=hf["intermediate_size"],
            norm_eps=hf.get("rms_norm_eps", 1e-6),
            max_positions=hf["max_position_embeddings"],
            rope=_rope(hf),
            window=window,
            windowed=windowed,
            tied=bool(hf.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
            o_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
            mlp_bias=bool(hf.get("mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
        )
        if config.num_heads % config.num_kv_heads:
            raise ValueError(f"num_key_value_heads={config.num_kv_heads} must divide {config.num_heads} query heads")
        return config

    def stretched(self, num_layers: int) -> DecoderConfig:
        """The same model with `num_layers` more layers that change nothing but the cost."""
        total = self.num_layers + num_layers
        windowed = self.windowed
        if self.num_layers - 1 in windowed:
            windowed |= set(range(self.num_layers, total))
        return replace(self, num_layers=total, stretch=self.stretch + num_layers, windowed=windowed)

    def check_ranks(self, size: int) -> None:
        """ValueError unless the model can be split over `size` ranks."""
        if self.num_heads % size or self.intermediate_size % size:
            raise ValueError(
                f"tp={size} must divide num_attention_heads={self.num_heads} and "
                f"intermediate_size={self.intermediate_size}"
            )
        if self.num_kv_heads % size and size % self.num_kv_heads:
            raise ValueError(f"tp={size} must divide num_key_value_heads={self.num_kv_heads} or be a multiple of it")

    def local_kv_heads(self, size: int) -> int:
        """KV heads per rank; with more ranks than heads each head is held by several ranks."""
        return max(1, self.num_kv_heads // size)


def _read_json(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError:
        raise ValueError(f"{file}: no such file; a checkpoint directory needs a config.json") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: not readable as JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: holds no JSON object")
    return content


def _rope(hf: dict[str, Any]) -> RopeScaling:
    """`rope_parameters` (transformers 5), or `rope_scaling` beside `rope_theta` (before)."""
    given = {**(hf.get("rope_parameters") or hf.get("rope_scaling") or {})}
    rope_type = given.get("rope_type") or given.get("type") or "default"
    if rope_type not in SCALINGS:
        raise ValueError(f"rope_type={rope_type!r} is not supported; use one of {', '.join(SCALINGS)}")
    if given.get("partial_rotary_factor", hf.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("partial_rotary_factor other than 1.0 is not supported")
    max_positions = hf["max_position_embeddings"]
    original = hf.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    given |= {"rope_type": rope_type, "original_max_position_embeddings": original or max_positions}
    given.setdefault("rope_theta", hf.get("rope_theta"))
    if rope_type == "yarn" and given.get("factor") is None:
        given["factor"] = max_positions / given["original_max_position_embeddings"]
    elif rope_type in ("linear", "llama3") and given.get("factor") is None:
        raise ValueError(f"rope_type={rope_type!r} needs a factor")
    known = {field.name for field in fields(RopeScaling)}
    return RopeScaling(**{name: value for name, value in given.items() if name in known and value is not None})


def _window(hf: dict[str, Any], architecture: str) -> tuple[int | None, frozenset[int]]:
    """The sliding window and its layers: Qwen's is switched on explicitly and per layer, Mistral's where it is set."""
    window, num_layers = hf.get("sliding_window"), hf["num_hidden_layers"]
    if architecture == "MistralForCausalLM":
        layers = range(num_layers)
    elif architecture == "LlamaForCausalLM" or not hf.get("use_sliding_window"):
        layers = range(0)
    elif hf.get("layer_types"):
        layers = [i for i, kind in enumerate(hf["layer_types"]) if kind == "sliding_attention"]
    else:
        layers = range(min(num_layers, hf.get("max_window_layers", 28)), num_layers)
    return (window, frozenset(layers)) if window and layers else (None, frozenset())
