"""What the checkpoint of a speculator says of itself: its method, its shape, and what it reads of the target.

A speculator is a module that was trained on the hidden states of one target and drafts for it: heads, a draft layer, a
block drafter. Each family derives its own record. Loads no PyTorch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from parallel.model.checkpoint import Shape
from parallel.model.config import DecoderConfig
from parallel.model.config_fields import MOST_LAYERS
from parallel.runtime.model_bytes import kv_bytes_per_slot

TARGET_LAYERS = "target_num_hidden_layers"
"""Field that readers of layouts find beside those of config.json, if the target is known."""
FINAL = -1
"""The tap after the target's final norm, which its head reads."""
STREAMS = 1 << 20
"""The tap that is the final hidden states of a node's streams, side by side (`target_pass.py`)."""
_KV = -2


def kv_tap(layer: int) -> int:
    """The tap that is keys after RoPE and values of all KV heads of the target's layer `layer`, from 0, side by side;
    the same function gives the layer of such a tap, which is below `FINAL`."""
    return _KV - layer


@dataclass(frozen=True, slots=True, kw_only=True)
class FuserShape:
    """A projection of all taps to one vector, and the norms beside it, by their names in the checkpoint; an empty name
    is a norm that it does not have."""

    num_taps: int
    tap_size: int
    outputs: int
    eps: float
    projection: str
    tap_norms: str = ""
    """Norm of each tap, before the projection."""
    features_norm: str = ""
    """Norm of all taps together, before the projection."""
    result_norm: str = ""

    @property
    def inputs(self) -> int:
        return self.num_taps * self.tap_size

    def tensor_shapes(self) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {f"{self.projection}.weight": (self.outputs, self.inputs)}
        if self.tap_norms:
            shapes |= {f"{self.tap_norms}.{i}.weight": (self.tap_size,) for i in range(self.num_taps)}
        for norm, size in ((self.features_norm, self.inputs), (self.result_norm, self.outputs)):
            if norm:
                shapes[f"{norm}.weight"] = (size,)
        return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculatorConfig:
    """Tap i is the target's residual stream after i layers: 0 the embedding, its number of layers the stream before the
    final norm; `FINAL` the stream after it; `kv_tap(i)` keys and values of a layer; `STREAMS` states of streams. The
    features of a token are its taps side by side."""

    method: str
    vocab_size: int
    """Tokens of the target's vocabulary."""
    max_positions: int
    target_hidden: int
    """Width of one tap."""
    taps: tuple[int, ...]

    runs_target = False
    """Whether draft tokens pass layers of the target, so that it must be on the target's ranks."""
    drafts_blocks = False
    """Whether one pass drafts all depths, behind committed text alone."""
    has_early_logits = False
    """Whether the target's passes can give up unlikely nodes before its last layers (`StreamingRunner`)."""
    reads_kv = False
    """Whether its taps are keys and values."""

    @property
    def feature_size(self) -> int:
        """Numbers of one token's features."""
        return len(self.taps) * self.target_hidden

    @property
    def fuser(self) -> FuserShape | None:
        """What makes one vector of all taps, if text is read as that alone."""
        return None

    @property
    def travels_fused(self) -> bool:
        """Whether features for ranks other than the target's are fused before they leave, which makes them narrower."""
        return self.fuser is not None and self.fuser.outputs < self.feature_size

    def bytes_per_slot(self, ranks: int, item_bytes: int) -> int:  # noqa: ARG002
        """Bytes of one token in what one of the ranks keeps of every sequence."""
        return 0

    @property
    def num_logits(self) -> int:
        """Columns of a row of logits: every speculator proposes tokens of the target's vocabulary."""
        return self.vocab_size

    def check_record(self) -> None:
        """ValueError, one line, for fields that are each in their range and make no speculator."""
        deepest = [tap for tap in self.taps if tap > MOST_LAYERS and tap != STREAMS]
        if not self.taps or deepest or (min(self.taps) < FINAL and not self.reads_kv):
            raise ValueError(f"taps={list(self.taps)}: are no layers of a target; correct config.json")

    def check_target(self, target: DecoderConfig) -> None:
        """ValueError, one line, for a target that it was not made for."""
        if target.encoder is not None:
            raise ValueError("was made for a target without an encoder; use drafter=copy, self or model")
        for name, ours, theirs in (
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("hidden_size", self.target_hidden, target.hidden_size),
        ):
            if ours != theirs:
                raise ValueError(f"was made for a target with {name}={ours}, not {theirs}; use one of its own")
        # keys and values of layer i are within layer i + 1; streams are checked with their layers
        deepest = max((max(tap, kv_tap(tap) + 1) for tap in self.taps if tap != STREAMS), default=0)
        num_layers = target.num_layers - target.stretch
        if num_layers and deepest > num_layers:  # the target's tables alone have no layers
            raise ValueError(f"reads layer {deepest} of a target that has {num_layers}; use one of its own")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersConfig(SpeculatorConfig, ABC):
    """A speculator with decoder layers of its own, whose rows it keeps in a pool of its own."""

    block: DecoderConfig
    """The shape of these layers."""

    def bytes_per_slot(self, ranks: int, item_bytes: int) -> int:
        return kv_bytes_per_slot(self.block, ranks, item_bytes)

    @abstractmethod
    def tensor_shapes(self) -> dict[str, Shape]:
        """Every tensor that they read from a checkpoint."""


def method_of(hf: Mapping[str, Any]) -> str:
    """The method that the section `speculator` of our own config.json names; empty for another layout."""
    return (hf.get("speculator") or {}).get("method", "")


def beside(target: DecoderConfig) -> dict[str, Any]:
    """The fields of a record that are those of a target of this vocabulary, length and width."""
    return {
        "vocab_size": target.vocab_size,
        "max_positions": target.max_positions,
        "target_hidden": target.hidden_size,
    }


R = TypeVar("R", bound=SpeculatorConfig)


def record_of(kind: type[R], given: Mapping[str, Any]) -> R:
    """The record whose fields the section `speculator` of our own config.json holds; ValueError, one line, for a field
    that it does not have, or lacks."""
    if unknown := sorted(given.keys() - {field.name for field in fields(kind)}):
        raise ValueError(f"speculator.{unknown[0]}: is no field of this method; correct config.json")
    values: dict[str, Any] = {name: tuple(it) if isinstance(it, list) else it for name, it in given.items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"speculator: {error}; correct config.json") from None
