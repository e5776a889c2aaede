"""Readers of config.json fields that several model families share. Each names what it cannot accept in a ValueError."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, get_args

from parallel.model.config import Activation, RopeScaling
from parallel.model.config_fields import HfConfig

_ATTENTION_KINDS = ("full_attention", "sliding_attention")
SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn")
"""The scalings of rotary frequencies that `layers/rope.py` computes."""


def architecture_of(hf: HfConfig) -> str:
    """The first of the architectures, which are a list in most files and a name in some; empty if there is none."""
    named = hf.get("architectures") or [""]
    return named if isinstance(named, str) else named[0]


def require(hf: HfConfig, *names: str) -> None:
    """ValueError unless all these fields are integers."""
    missing = [name for name in names if not isinstance(hf.get(name), int)]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}; fetch the file again")


def refuse(hf: HfConfig, name: str, *supported: object) -> None:
    """ValueError if the field is set to anything but the `supported` values."""
    if hf.get(name) and hf[name] not in supported:
        only = f"; supported is {', '.join(map(repr, supported))}" if supported else ""
        raise ValueError(f"{name}={hf[name]!r} is not supported{only}")


def read_activation(hf: HfConfig, name: str, default: Activation) -> Activation:
    value = hf.get(name) or default
    value = "silu" if value == "swish" else value
    refuse({name: value}, name, *get_args(Activation))
    return value


def read_rope(hf: HfConfig, given: Mapping[str, Any] | None) -> RopeScaling:
    """`given` is an entry of `rope_parameters` (transformers 5) or `rope_scaling` beside `rope_theta` (before)."""
    rope = {**(given or {})}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in SCALINGS:
        raise ValueError(f"rope_type={rope_type!r} is not supported; use one of {', '.join(SCALINGS)}")
    if rope.get("partial_rotary_factor", hf.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("partial_rotary_factor other than 1.0 is not supported")
    max_positions = hf["max_position_embeddings"]
    original = hf.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    rope |= {"rope_type": rope_type, "original_max_position_embeddings": original or max_positions}
    rope.setdefault("rope_theta", hf.get("rope_theta"))
    if rope_type == "yarn" and rope.get("factor") is None:
        rope["factor"] = max_positions / rope["original_max_position_embeddings"]
    elif rope_type in ("linear", "llama3") and rope.get("factor") is None:
        raise ValueError(f"rope_type={rope_type!r} needs a factor")
    known = {field.name for field in fields(RopeScaling)}
    scaling = RopeScaling(**{name: value for name, value in rope.items() if name in known and value is not None})
    if rope_type == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ValueError(f"high_freq_factor={scaling.high_freq_factor}: must be above low_freq_factor; correct it")
    return scaling


def sliding_layers(hf: HfConfig, default: Iterable[int]) -> Iterable[int]:
    """The layers that `layer_types` calls sliding; `default` without that field. It may name more layers than there
    are, as that of a module cut out of its target does."""
    types, num_layers = (hf.get("layer_types") or [])[: hf["num_hidden_layers"]], hf["num_hidden_layers"]
    for kind in types:
        refuse({"layer_types": kind}, "layer_types", *_ATTENTION_KINDS)
    if types and len(types) < num_layers:
        raise ValueError(f"layer_types: names {len(types)} layers, num_hidden_layers={num_layers}; correct one of them")
    return [i for i, kind in enumerate(types) if kind == "sliding_attention"] if types else default
