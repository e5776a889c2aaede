"""A decoder whose layers are shared out between ranks, and its two ways to run: exact, and fuzzy with layers side by
side.

In a fuzzy pass the attention blocks of a hyper-layer all read the hidden state in front of it, each on a rank of its
own; one all-gather later every rank adds them and the MLPs in the order the model was trained with:

    for l in hyper-layer:  a[l] = attention_l(norm_l(h))            side by side
    for l in hyper-layer:  h = h + a[l];  h = h + mlp_l(norm'_l(h))  in order

An exact pass runs layer by layer; who runs it, and what travels for it, is the layout's calibration. The head is
sharded over the ranks, so all of them see the same logits to the bit. Source: EasySpec (arXiv 2502.02493, sections 3
and 4). It must not know what the rows are for, nor which rows are fuzzy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from parallel.comm.group import SINGLE, Group
from parallel.model.config import DecoderConfig
from parallel.model.decoder import MLP, Attention, Decoder, PassPlan
from parallel.model.layers.attention import AttentionPlan
from parallel.model.layers.linear import Shard
from parallel.model.layers.norm import RMSNorm
from parallel.model.layers.weight import Layer
from parallel.model.partition import LayerLayout


class SharedLayer(Layer):
    """A layer whose attention may be on another rank; `kv_layer` is its place in this rank's pool, None if it is."""

    def __init__(
        self, config: DecoderConfig, layer: int, kv_layer: int | None, mlp_group: Group, **factory_kwargs: object
    ) -> None:
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps, **factory_kwargs)
        self.attention: Attention | None = None
        if kv_layer is not None:
            self.attention = Attention(config, layer, SINGLE, **factory_kwargs)
            self.attention.layer = kv_layer
        self.post_norm = RMSNorm(config.hidden_size, config.norm_eps, **factory_kwargs)
        self.mlp = MLP(config, mlp_group, **factory_kwargs)

    def attend(self, x: Tensor, rope: tuple[Tensor, Tensor], plan: AttentionPlan) -> Tensor:
        return self.attention(self.input_norm(x), rope, plan)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """x [T, H] with what attention found and the MLP behind it."""
        x = x + attended
        return x + self.mlp(self.post_norm(x))

    def shards(self, prefix: str) -> Iterator[Shard]:
        yield from self.input_norm.shards(f"{prefix}.input_layernorm")
        if self.attention is not None:
            yield from self.attention.shards(f"{prefix}.self_attn")
        yield from self.post_norm.shards(f"{prefix}.post_attention_layernorm")
        yield from self.mlp.shards(f"{prefix}.mlp")


class WrittenRows:
    """An attention plan that also remembers which keys and values the pass wrote, layer by layer."""

    def __init__(self, plan: AttentionPlan) -> None:
        self._plan = plan
        self.rows: list[Tensor] = []

    def prepare(self) -> None:
        self._plan.prepare()

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.rows += [k, v]
        self._plan.write(layer, k, v)

    def attend(self, layer: int, q: Tensor, *, windowed: bool) -> Tensor:
        return self._plan.attend(layer, q, windowed=windowed)


class LayerParallelDecoder(Decoder):
    """One rank of a layer-parallel decoder; with one rank, hyper-layers are computed alone, by the same formula."""

    def __init__(
        self,
        config: DecoderConfig,
        layout: LayerLayout,
        group: Group = SINGLE,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        assert group.size == layout.ranks and config.stretch == 0
        self._allocate_ends(config, group, SINGLE, device, dtype)
        self.layout = layout
        self.held = layout.held(group.rank)
        place = {layer: i for i, layer in enumerate(self.held)}
        mlp_group = group if layout.mlp == "tensor" else SINGLE
        self.layers = [
            SharedLayer(config, i, place.get(i), mlp_group, dtype=dtype, device=device)
            for i in range(config.num_layers)
        ]

    @property
    def attention_ranks(self) -> int:
        return 1

    def forward(self, token_ids: Tensor, plan: PassPlan, taps: Sequence[int] = ()) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As `Decoder.forward`; hyper-layers run side by side where the plan allows it."""
        plan.attention.prepare()
        if self.layout.calibration == "broadcast" and self.group.size > 1 and not plan.fuzzy:
            *tapped, hidden = self._exact_on_one(token_ids, plan, taps)
        else:
            *tapped, hidden = self._walk_layers(token_ids, plan, plan.attention, taps)
        return self.norm(hidden), tuple(tapped)

    def _walk_layers(
        self, token_ids: Tensor, plan: PassPlan, attention: AttentionPlan, taps: Sequence[int]
    ) -> list[Tensor]:
        """The residual stream behind each of the `taps`, and behind the last layer."""
        rope = self.rope(plan.positions)
        hidden = self.embedding.embed(token_ids)
        tapped = {0: hidden}
        partition = self.layout.partition if plan.fuzzy else [(i,) for i in range(len(self.layers))]
        for members in partition:
            for layer, attended in zip(members, self._attend(members, hidden, rope, attention), strict=True):
                hidden = self.layers[layer].finish(hidden, attended)
                if layer + 1 in taps:
                    tapped[layer + 1] = hidden
        return [*(tapped[tap] for tap in taps), hidden]

    def _attend(
        self, members: Sequence[int], hidden: Tensor, rope: tuple[Tensor, Tensor], attention: AttentionPlan
    ) -> Sequence[Tensor]:
        """What the attention blocks of one hyper-layer make of `hidden`, on every rank."""
        group, owner = self.group, self.layout.owner
        if group.size == 1 or (len(members) == 1 and self.layout.calibration != "owner"):
            return [self.layers[layer].attend(hidden, rope, attention) for layer in members]
        own = next((layer for layer in members if owner(layer) == group.rank), None)
        if own is None:
            attended = torch.zeros_like(hidden)  # fewer layers than ranks: this one has nothing to add
        else:
            attended = self.layers[own].attend(hidden, rope, attention)
        if len(members) == 1:
            return [group.broadcast(attended, owner(members[0]))]
        parts = group.all_gather(attended, 0).chunk(group.size)
        return [parts[owner(layer)] for layer in members]

    def _exact_on_one(self, token_ids: Tensor, plan: PassPlan, taps: Sequence[int]) -> list[Tensor]:
        """Rank 0 runs the pass; one message brings the KV rows and the residual stream to the others."""
        config, num_rows = self.config, len(plan.positions)
        row = config.num_kv_heads * config.head_dim
        sizes = [row] * 2 * config.num_layers + [config.hidden_size] * (len(taps) + 1)
        if self.group.rank == 0:
            written = WrittenRows(plan.attention)
            states = self._walk_layers(token_ids, plan, written, taps)
            parts = [rows.reshape(num_rows, row) for rows in written.rows]
            self.group.broadcast(torch.cat([*parts, *states], 1))
            return states
        message = self.group.broadcast(torch.empty(num_rows, sum(sizes), dtype=self.dtype, device=self.device))
        parts = [part.contiguous() for part in message.split(sizes, 1)]
        for place, layer in enumerate(self.held):
            k, v = (rows.view(num_rows, -1, config.head_dim) for rows in parts[2 * layer : 2 * layer + 2])
            plan.attention.write(place, k, v)
        return parts[2 * config.num_layers :]
