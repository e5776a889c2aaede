"""Attention of new rows over the pool of KV rows: what a layer's heads are, and the steps that every backend shares.

What a row may see was decided when the pass was planned; a backend's plan brings it as slots, paths
or masks. Backends: `ragged.py` takes all sequences in one call of a kernel of ours, `padded.py` takes them as one
rectangle with a fixed number of kernels, and `sdpa.py` one by one: it is the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from parallel.kv.pass_plan import SpanRows, TableRead
from parallel.kv.pool import KVPool
from parallel.model.layer_plan import LayerPlan
from parallel.model.layers.norm import Norm
from parallel.model.layers.rope import Rotation, rotate

if TYPE_CHECKING:
    from parallel.model.config import DecoderConfig
    from parallel.model.layers.score_bias import ScoreBias


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What all attention layers of a model share: `group` query heads per KV head, the sliding window of the layers
    that have one, the factor of the scores (None: 1/sqrt(head_dim)), the bound on them (None: unbounded) and what is
    added to them for the distance of a key."""

    group: int
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    bias: ScoreBias | None = None

    @classmethod
    def of(cls, config: DecoderConfig, ranks: int, bias: ScoreBias | None = None) -> AttentionShape:
        """That of a decoder on one of so many ranks."""
        group = config.num_heads // ranks // config.local_kv_heads(ranks)
        return cls(group, config.window, config.attention_scale, config.attention_softcap, bias)


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """One layer's heads on this rank. `layer` is its index in the rank's KV pool; `norms` those of queries and keys."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windowed: bool
    norms: tuple[Norm, Norm] | None

    def split(self, projected: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, normalised and rotated, and values: [T, heads, head_dim] each."""
        num_heads, num_kv_heads = self.num_heads, self.num_kv_heads
        heads = projected.view(projected.shape[0], -1, self.head_dim)
        rotated, v = heads.split_with_sizes((num_heads + num_kv_heads, num_kv_heads), 1)
        if self.norms is not None:
            q, k = rotated.split_with_sizes((num_heads, num_kv_heads), 1)
            rotated = torch.cat((self.norms[0](q), self.norms[1](k)), 1)
        if rotation is not None:
            rotated = rotate(rotated, rotation)
        q, k = rotated.split_with_sizes((num_heads, num_kv_heads), 1)
        return q, k, v


class AttentionPlan(Protocol):
    """What an attention backend prepared for all layers of one pass."""

    def prepare(self) -> None:
        """Derive on the device what all layers share; called once, at the start of the pass."""

    def attend(self, heads: Heads, projected: Tensor, rotation: Rotation | None) -> Tensor:
        """Queries, keys and values [T, (num_heads + 2 num_kv_heads) * head_dim] as projected -> [T, num_heads *
        head_dim]; keys and values go to their slots. May overwrite `projected`."""
        ...

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Put rows k, v [T, kv_heads, head_dim] into the pass's slots."""

    def written(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [T, kv_heads, head_dim] in the pass's slots."""
        ...


class PooledPlan(AttentionPlan):
    """A plan whose new rows go to slots of a pool."""

    pool: KVPool
    written_slots: Tensor

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.pool.write(layer, self.written_slots, k, v)

    def written(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.pool.read(layer, self.written_slots)


class ReadPlan(Protocol):
    """What an attention backend prepared for queries over rows of other tables (`pass_plan.TableRead`). Windows do not
    apply."""

    def read(self, heads: Heads, queries: Tensor) -> Tensor:
        """Queries [T, num_heads * head_dim], normalised and rotated, those of each table one after the other -> as many
        numbers; 0 where a table has no rows. Nothing is written."""
        ...


@dataclass(slots=True)
class PassPlan:
    """One pass over T rows with logits for N of them: for all where `logit_rows` is None.

    `places` are the rows' positions, or what makes a tensor of them once it is asked for. They may be longer than T
    where a backend rounds a pass up, and `logit_rows` longer than N = `num_logits`; what follows is padding. `fuzzy`
    lets a decoder that can run layers side by side do so. `layers` are the sublayers that run, None for all; the first
    reads `entering` where it is given, not the embedding.
    """

    num_rows: int
    places: Tensor | Callable[[], Tensor]  # [>= T]
    logit_rows: Tensor | None  # [N]
    attention: AttentionPlan
    fuzzy: bool = False
    layers: LayerPlan | None = None
    entering: Tensor | None = None  # [as positions, H]
    source: ReadPlan | None = None  # of sequences that have sources
    num_logits: int | None = None  # None for all of `logit_rows`

    @property
    def positions(self) -> Tensor:
        if not isinstance(self.places, Tensor):
            self.places = self.places()
        return self.places

    def asked(self, rows: Tensor) -> Tensor:
        """Those of the pass's rows, [T, ...], whose logits are asked for."""
        return rows if self.logit_rows is None else rows.index_select(0, self.logit_rows)


class AttentionBackend(Protocol):
    """Plans passes over one pool for a model of one attention shape."""

    def plan(self, laid_out: Sequence[SpanRows], wanted: list[int]) -> PassPlan:
        """Build the plan of a pass; `wanted` are the rows whose logits are asked for."""
        ...

    def plan_reads(self, reads: Sequence[TableRead]) -> ReadPlan:
        """Build the plan of queries over other tables, which write nothing."""
        ...


@runtime_checkable
class ChainBackend(AttentionBackend, Protocol):
    """One that plans the passes of a chain together."""

    def plan_chain(self, laid_out: Sequence[SpanRows], num_steps: int) -> list[PassPlan]: ...


def check_window(shape: AttentionShape, laid_out: Sequence[SpanRows]) -> None:
    """Assert that a backend that takes positions for indices has no window to apply where they differ."""
    assert shape.window is None or not any(rows.skipped for rows in laid_out), "a window over rows that were dropped"


def capped_attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None, softcap: float
) -> Tensor:
    """`scaled_dot_product_attention` with scores bounded by softcap * tanh(score / softcap); softmax in float32."""
    scores = q @ keys.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ values
