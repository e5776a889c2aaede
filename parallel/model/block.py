"""The blocks of a decoder: attention, MLP or experts, and the norms around them.

A block's two halves can run on different ranks or alone: `attend` computes what its attention adds to the residual
stream, `add` adds it, and `feed` runs the MLP; `finish` is both. Knows no checkpoints and no other blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.comm.group import SINGLE, Group
from parallel.kernels.norms import add_rows, weigh_rows
from parallel.model.config import Activation, DecoderConfig, NormPlacement
from parallel.model.layers.activation import activated, gated, sigmoid
from parallel.model.layers.attention import AttentionPlan, Heads, ReadPlan
from parallel.model.layers.linear import ColumnLinear, RowLinear, even_rows
from parallel.model.layers.norm import NORMS
from parallel.model.layers.rope import Rotation
from parallel.model.layers.weight import Layer, Shard, TensorOptions, join_weights

if TYPE_CHECKING:
    from parallel.kernels.experts import Mixture


class Attention(Layer):
    """This rank's heads of one block; `layer` is the block's index in this rank's KV pool. Reads rows of `inputs`
    numbers, 0 for the hidden size."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        group: Group,
        *,
        windowed: bool,
        inputs: int = 0,
        **options: Unpack[TensorOptions],
    ) -> None:
        num_heads, num_kv_heads = config.num_heads // group.size, config.local_kv_heads(group.size)
        queries, kv_rows = config.num_heads * config.head_dim, _kv_rows(config, group)
        parts = [*zip(config.names.projections, (even_rows(queries, group), kv_rows, kv_rows), strict=True)]
        self.qkv = ColumnLinear(inputs or config.hidden_size, parts, bias=config.qkv_bias, **options)
        self.o = RowLinear(config.names.o, queries, config.hidden_size, group, bias=config.o_bias, **options)
        norm = NORMS[config.norm]
        self.q_norm = norm(config.head_dim, config.norm_eps, **options) if config.qk_norm else None
        self.k_norm = norm(config.head_dim, config.norm_eps, **options) if config.qk_norm else None
        norms = (self.q_norm, self.k_norm) if self.q_norm is not None and self.k_norm is not None else None
        self.heads = Heads(layer, num_heads, num_kv_heads, config.head_dim, windowed, norms)

    def __call__(self, x: Tensor, rope: Rotation | None, plan: AttentionPlan) -> Tensor:
        return self.o(plan.attend(self.heads, self.qkv(x), rope))

    def shards(self, prefix: str) -> Iterator[Shard]:
        yield from self.qkv.shards(prefix)
        yield from self.o.shards(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.shards(f"{prefix}.q_norm")
            yield from self.k_norm.shards(f"{prefix}.k_norm")


class CrossAttention(Layer):
    """This rank's heads of one block's attention to a source, whose keys and values are written once, `layer` of the
    rank's KV pool. The heads are those of the block's own attention."""

    def __init__(self, config: DecoderConfig, layer: int, group: Group, **options: Unpack[TensorOptions]) -> None:
        num_heads, num_kv_heads = config.num_heads // group.size, config.local_kv_heads(group.size)
        queries, hidden, kv_rows = config.num_heads * config.head_dim, config.hidden_size, _kv_rows(config, group)
        q, k, v = config.names.projections
        self.q = ColumnLinear(hidden, [(q, even_rows(queries, group))], bias=config.qkv_bias, **options)
        self.kv = ColumnLinear(hidden, [(k, kv_rows), (v, kv_rows)], bias=config.qkv_bias, **options)
        self.o = RowLinear(config.names.o, queries, hidden, group, bias=config.o_bias, **options)
        self.heads = Heads(layer, num_heads, num_kv_heads, config.head_dim, windowed=False, norms=None)

    def __call__(self, x: Tensor, source: ReadPlan) -> Tensor:
        return self.o(source.read(self.heads, self.q(x)))

    def keys_and_values(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """What an encoder made of a source [S, H] -> keys and values [S, kv_heads, head_dim]."""
        k, v = self.kv(encoded).view(len(encoded), -1, self.heads.head_dim).chunk(2, 1)
        return k, v

    def shards(self, prefix: str) -> Iterator[Shard]:
        for part in (self.q, self.kv, self.o):
            yield from part.shards(prefix)


def attention_heads(layers: Sequence[Layer]) -> list[Heads]:
    """The heads of all attention within these layers, but of what reads a source."""
    return [part.heads for layer in layers for part in layer.walk() if isinstance(part, Attention)]


def _kv_rows(config: DecoderConfig, group: Group) -> slice:
    """This rank's rows of keys or of values."""
    heads = config.own_kv_heads(group.rank, group.size)
    return slice(heads.start * config.head_dim, heads.stop * config.head_dim)


class MLP(Layer):
    def __init__(self, config: DecoderConfig, group: Group, **options: Unpack[TensorOptions]) -> None:
        size, names = config.intermediate_size, config.names
        self.activation: Activation = config.activation
        self.gated = config.gated
        rows = even_rows(size, group)
        parts = [(name, rows) for name in ([names.gate, names.up] if config.gated else [names.up])]
        self.gate_up = ColumnLinear(config.hidden_size, parts, bias=config.mlp_bias, **options)
        self.down = RowLinear(names.down, size, config.hidden_size, group, bias=config.mlp_bias, **options)

    def __call__(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.down(activated(self.activation, self.gate_up(x)))
        if self.activation == "silu":
            return self.down(self.gate_up.gated(x))
        return self.down(gated(self.activation, self.gate_up(x), apart=self.is_invariant))

    def shards(self, prefix: str) -> Iterator[Shard]:
        yield from self.gate_up.shards(prefix)
        yield from self.down.shards(prefix)


class SharedExpert(Layer):
    """The MLP of a mixture that every row uses, weighted by a sigmoid of its own (Qwen 1.5-MoE)."""

    def __init__(self, config: DecoderConfig, group: Group, **options: Unpack[TensorOptions]) -> None:
        self.name = config.names.shared
        gate = config.names.shared_gate, slice(0, 1)
        self.gate = ColumnLinear(config.hidden_size, [gate], bias=False, **options)
        self.mlp = MLP(replace(config, intermediate_size=config.shared_size), group, **options)

    def __call__(self, x: Tensor) -> Tensor:
        return weigh_rows(self.mlp(x), sigmoid(self.gate(x)))

    def shards(self, prefix: str) -> Iterator[Shard]:
        yield from self.gate.shards(prefix)
        yield from self.mlp.shards(f"{prefix}.{self.name}")


_EXPERTS_PER_ENTRY = 2
"""Experts for each row and choice from which rows are few: most of those that they choose are different ones."""


class Experts(Layer):
    """A mixture of experts (arXiv 2401.04088, section 2): of `num_experts` MLPs every row uses the `experts_per_token`
    that the router scores highest, weighted by their probabilities. Each rank holds an equal share of the experts and
    the whole router; the ranks' sums are all-reduced.

    Rows are sorted by their experts on the device. Where PyTorch multiplies all groups of rows at once, the host waits
    for nothing and a pass can be captured; elsewhere it reads once per call how many rows each expert has. With Triton
    a few rows are not sorted: they read the matrices of their experts where they are. The kernels of a CPU have one for
    the whole mixture.
    """

    uses_triton = False

    def __init__(self, config: DecoderConfig, group: Group, **options: Unpack[TensorOptions]) -> None:
        share = even_rows(config.num_experts, group)
        self.group = group
        self.name = config.names.experts
        router = config.names.router, slice(0, config.num_experts)
        self.router = ColumnLinear(config.hidden_size, [router], bias=False, **options)
        self.per_token = config.experts_per_token
        self.normalize = config.normalize_expert_weights
        self.first = share.start
        self.experts = [MLP(config, SINGLE, **options) for _ in range(share.start, share.stop)]
        self.shared = SharedExpert(config, group, **options) if config.shared_size else None
        self._matrices: tuple[Tensor, Tensor] | None = None  # of all experts, [experts, outputs, inputs]
        self._mixture: Mixture | None = None  # on a CPU

    @property
    def is_grouped(self) -> bool:
        return self._matrices is not None

    @property
    def _runs_kernels(self) -> bool:
        return self.uses_triton and self.experts[0].activation == "silu"

    def pack(self) -> None:
        """Makes the experts' matrices parts of one tensor, or of one call, where all are multiplied by at once; called
        after loading.
        They stay its parts when they are loaded again."""
        if self._matrices is not None or self._mixture is not None or self.is_invariant:
            return
        weights = [expert.gate_up.weight for expert in self.experts], [expert.down.weight for expert in self.experts]
        gate_up, down = ([one.panels for one in part if one.panels is not None] for part in weights)
        is_plain = self.experts[0].gated and self.experts[0].gate_up.bias is None
        if is_plain and gate_up and down and not (gate_up[0].fills_rows or down[0].fills_rows):
            from parallel.kernels.experts import Mixture  # for models with experts alone

            self._mixture = Mixture(
                gate_up,
                down,
                self.experts[0].activation,
                first=self.first,
                num_scores=self.router.weight.outputs,
                per_token=self.per_token,
                normalizes=self.normalize,
            )
        if self.experts[0].gated and all(weight.can_group for part in weights for weight in part):
            gate_up, down = map(join_weights, weights)
            self._matrices = gate_up, down

    def keep_rows_apart(self) -> None:
        """Expert by expert: the products of groups choose their tiles by the number of rows."""
        super().keep_rows_apart()
        self._matrices = None

    def __call__(self, x: Tensor) -> Tensor:
        chosen = self._of_chosen(x)
        return chosen if self.shared is None else add_rows(chosen, self.shared(x))

    def _of_chosen(self, x: Tensor) -> Tensor:
        """What the experts that the router chooses give each row, [T, H]."""
        scores = self.router(x)
        if self._mixture is not None:
            return self.group.all_reduce(self._mixture.mix(x, scores))
        num_entries = len(x) * self.per_token
        if self._runs_kernels and self._matrices is not None:
            from parallel.kernels import mixtures  # Triton's, for GPUs

            if num_entries <= mixtures.MOST_SORTED:
                choice = mixtures.choose(scores, self.per_token, normalize=self.normalize)
                is_few = num_entries * _EXPERTS_PER_ENTRY <= scores.shape[1]
                mix = mixtures.mix_few if is_few else mixtures.mix_sorted
                return self.group.all_reduce(mix(x, choice, *self._matrices, self.first))
        weights, chosen = scores.softmax(-1, dtype=torch.float32).topk(self.per_token, -1)  # [T, experts_per_token]
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(x.dtype)
        order, ends = self._by_expert(chosen)
        if self._matrices is not None:
            return self.group.all_reduce(self._grouped(x, weights, order, ends, *self._matrices))
        rows, weights = order // self.per_token, weights.flatten()[order, None]
        total, bounds = torch.zeros_like(x), [0, *ends.tolist()]
        for expert, first, last in zip(self.experts, bounds, bounds[1:], strict=False):
            if last > first:
                own = rows[first:last]
                total.index_add_(0, own, expert(x[own]) * weights[first:last])
        return self.group.all_reduce(total)

    def _by_expert(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The entries of `chosen`, flattened, in the order of this rank's experts, then those of other ranks; and where
        those of each of its experts end."""
        num_experts = len(self.experts)
        own = chosen.flatten() - self.first
        if self.group.size > 1:
            own = torch.where((own >= 0) & (own < num_experts), own, num_experts)
        counts = (own[:, None] == torch.arange(num_experts, device=own.device)).sum(0)
        return own.argsort(stable=True), counts.cumsum(0, dtype=torch.int32)

    def _grouped(
        self, x: Tensor, weights: Tensor, order: Tensor, ends: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        """What this rank's experts give each row, [T, H]."""
        projected = F.grouped_mm(x[order // self.per_token], gate_up.transpose(1, 2), offs=ends)
        made = F.grouped_mm(gated(self.experts[0].activation, projected), down.transpose(1, 2), offs=ends)
        if self.group.size > 1:  # rows of other ranks' experts, which no product has written
            made = torch.where((torch.arange(len(made), device=made.device) < ends[-1])[:, None], made, 0)
        by_choice = torch.empty_like(made).index_copy_(0, order, made).view(*weights.shape, -1)
        return (by_choice * weights[:, :, None]).sum(1)

    def shards(self, prefix: str) -> Iterator[Shard]:
        yield from self.router.shards(prefix)
        for i, expert in enumerate(self.experts, self.first):
            yield from expert.shards(f"{prefix}.{self.name}.{i}")
        if self.shared is not None:
            yield from self.shared.shards(prefix)


def make_mlp(config: DecoderConfig, group: Group, **options: Unpack[TensorOptions]) -> MLP | Experts:
    return Experts(config, group, **options) if config.num_experts else MLP(config, group, **options)


class Block(Layer):
    """A block that normalises the input of its attention and of its MLP.

    Attention and MLP are each split over their group. `kv_layer` is the block's index in this rank's KV pool, None
    where another rank computes its attention.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        kv_layer: int | None,
        attention_group: Group,
        mlp_group: Group,
        **options: Unpack[TensorOptions],
    ) -> None:
        self.attention_name = f".{config.names.attention}" if config.names.attention else ""
        self.windowed = layer in config.windowed
        self.attention: Attention | None = None
        if kv_layer is not None:
            self.attention = Attention(config, kv_layer, attention_group, windowed=self.windowed, **options)
        self.mlp = make_mlp(config.of_layer(layer), mlp_group, **options)
        norm = NORMS[config.norm]
        self.cross: CrossAttention | None = None
        if config.encoder is not None:
            assert kv_layer is not None, "ranks that divide the layers of a model have no encoder"
            self.cross_name, self.cross_norm_name = config.names.cross, config.names.cross_norm
            self.cross = CrossAttention(config, kv_layer, attention_group, **options)
            self.cross_norm = norm(config.hidden_size, config.norm_eps, **options)
        self.norm_names = config.norm_names  # whose order `attend`, `add` and `feed` rely on
        self.norms = [norm(config.hidden_size, config.norm_eps, **options) for _ in self.norm_names]

    def __call__(
        self,
        x: Tensor,
        rope: Rotation | None,
        plan: AttentionPlan,
        source: ReadPlan | None = None,
        *,
        attends: bool = True,
        feeds: bool = True,
    ) -> Tensor:
        """x [T, H] with the parts of the block that run added: its attention, to a source too, and its MLP."""
        if not attends:
            return self.feed(x) if feeds else x
        attended = self.attend(x, rope, plan)
        if self.cross is None:
            return self.finish(x, attended) if feeds else self.add(x, attended)
        assert source is not None, "a sequence of an encoder-decoder has a source"
        x = self.read_source(self.add(x, attended), self.cross, source)
        return self.feed(x) if feeds else x

    def read_source(self, x: Tensor, cross: CrossAttention, source: ReadPlan) -> Tensor:
        """x [T, H] with what it reads of its source added."""
        return add_rows(x, cross(self.cross_norm(x), source))

    def attend(self, x: Tensor, rope: Rotation | None, plan: AttentionPlan) -> Tensor:
        """x [T, H] -> what the attention adds to it, [T, H]; only on a rank that holds the attention."""
        assert self.attention is not None, "another rank holds this block's attention"
        return self.attention(self.norms[0](x), rope, plan)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """x [T, H] with `attended` and the MLP's part added."""
        x, normed = self.norms[1].after_sum(x, attended)
        return self._feed(x, normed)

    def add(self, x: Tensor, attended: Tensor) -> Tensor:
        """x [T, H] with the attention's part added."""
        return add_rows(x, attended)

    def feed(self, x: Tensor) -> Tensor:
        """x [T, H] with the MLP's part added."""
        return self._feed(x, self.norms[1](x))

    def _feed(self, x: Tensor, normed: Tensor) -> Tensor:
        return add_rows(x, self.mlp(normed))

    def shards(self, prefix: str) -> Iterator[Shard]:
        for name, norm in zip(self.norm_names, self.norms, strict=True):
            yield from norm.shards(f"{prefix}.{name}")
        if self.attention is not None:
            yield from self.attention.shards(f"{prefix}{self.attention_name}")
        if self.cross is not None:
            yield from self.cross.shards(f"{prefix}.{self.cross_name}")
            yield from self.cross_norm.shards(f"{prefix}.{self.cross_norm_name}")
        yield from self.mlp.shards(prefix)

    def silence(self) -> None:
        """Zero what the block would add to the residual stream; before packing."""
        for part in self.walk():
            if isinstance(part, RowLinear):
                part.weight.clear()
                if part.bias is not None:
                    part.bias.zero_()


class SandwichBlock(Block):
    """Normalises the input and the output of attention and MLP."""

    def attend(self, x: Tensor, rope: Rotation | None, plan: AttentionPlan) -> Tensor:
        return self.norms[2](super().attend(x, rope, plan))

    def _feed(self, x: Tensor, normed: Tensor) -> Tensor:
        return add_rows(x, self.norms[3](self.mlp(normed)))


class PostNormBlock(Block):
    """Normalises the residual stream after attention and after the MLP (arXiv 1706.03762)."""

    def attend(self, x: Tensor, rope: Rotation | None, plan: AttentionPlan) -> Tensor:
        assert self.attention is not None, "another rank holds this block's attention"
        return self.attention(x, rope, plan)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        return self.feed(self.add(x, attended))

    def add(self, x: Tensor, attended: Tensor) -> Tensor:
        return self.norms[0].after_sum(x, attended)[1]

    def read_source(self, x: Tensor, cross: CrossAttention, source: ReadPlan) -> Tensor:
        return self.cross_norm.after_sum(x, cross(x, source))[1]

    def feed(self, x: Tensor) -> Tensor:
        return self.norms[1].after_sum(x, self.mlp(x))[1]


BLOCKS: dict[NormPlacement, type[Block]] = {"before": Block, "around": SandwichBlock, "after": PostNormBlock}
