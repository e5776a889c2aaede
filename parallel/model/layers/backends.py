"""The attention backends, and which one serves a pool: a row here for each, whose module alone is loaded."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from parallel.kv.pool import KVPool
from parallel.model.layers.attention import AttentionBackend, AttentionShape
from parallel.model.layers.weight import Layer

BACKENDS = {
    "ragged": ("ragged", "RaggedBackend"),
    "triton": ("split_kv", "SplitKVBackend"),
    "sdpa": ("sdpa", "SdpaBackend"),
    "padded": ("padded", "PaddedBackend"),
}
"""Name -> the module here, and its class."""
CAPTURED = ("triton", "padded")
"""Backends whose passes can be captured as CUDA graphs."""
TAKE_BIAS = ("ragged", "sdpa")
"""Backends that add a bias to the scores."""
_NEEDS = {
    "triton": "a CUDA device, Triton and a C compiler; use padded or sdpa",
    "ragged": "float32 or bfloat16, KV rows too, a CPU and a C++ compiler; use sdpa",
}


@runtime_checkable
class TritonLayer(Protocol):
    """A layer with Triton kernels of its own."""

    uses_triton: bool


def check_invariant(backend: str) -> None:
    """ValueError unless this attention, and what runs beside it, computes each row alone."""
    if backend not in ("ragged", "triton"):
        raise ValueError(
            f"numerics=invariant: attention {backend!r} computes rows together; on a CPU it needs float32 or bfloat16 "
            "and a C++ compiler, on a GPU Triton and a C compiler"
        )


def default_backend(pool: KVPool, shape: AttentionShape | None = None) -> str:
    """The name of the attention backend that is fastest for this pool."""
    if pool.keys.device.type == "cuda":
        if shape is not None and shape.bias is not None:
            return "sdpa"
        return "triton" if _type_of("triton").runs(pool) else "padded"
    return "ragged" if _type_of("ragged").runs(pool) else "sdpa"


def make_backend(
    name: str,
    pool: KVPool,
    shape: AttentionShape,
    layers: Layer | None = None,
    *,
    bucketed: bool = False,
    invariant: bool = False,
) -> AttentionBackend:
    """The attention backend of this name; ValueError if it is unknown or cannot serve the pool. With "triton" the norms
    and the gates of `layers` use Triton's kernels too."""
    if shape.bias is not None and name not in TAKE_BIAS:
        raise ValueError(f"attention={name}: this model adds a bias to its scores, which it does not take; use auto")
    if name not in BACKENDS:
        known = ", ".join(map(repr, BACKENDS))
        raise ValueError(f"attention backend {name!r} is not known; known are {known}")
    kind = _type_of(name)
    if name in _NEEDS and not kind.runs(pool):
        raise ValueError(f"attention={name}: needs {_NEEDS[name]}")
    if name == "triton":
        for part in () if layers is None else layers.walk():
            if isinstance(part, TritonLayer):
                part.uses_triton = True
        return kind(pool, shape, bucketed=bucketed, invariant=invariant)
    return kind(pool, shape, bucketed=bucketed) if name == "padded" else kind(pool, shape)


def _type_of(name: str) -> Any:
    module, kind = BACKENDS[name]
    return getattr(import_module(f"parallel.model.layers.{module}"), kind)
