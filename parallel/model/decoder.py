"""A decoder on one group of ranks: token ids and a pass plan in, hidden states out.

The plan says where rows are and what they attend to; keys and values go to the pool it names. The decoder has no state
but its weights. Knows no sequences, no trees and no model families.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from parallel.comm.group import SINGLE, Group
from parallel.kv.pool import KVPool
from parallel.model.block import BLOCKS, Block, Experts, SharedExpert
from parallel.model.config import DecoderConfig
from parallel.model.layer_plan import LayerPlan
from parallel.model.layers.activation import scaled, soft_capped
from parallel.model.layers.attention import AttentionShape, PassPlan
from parallel.model.layers.embedding import InputRows, VocabTable
from parallel.model.layers.norm import NORMS
from parallel.model.layers.rope import Rope, Rotation
from parallel.model.layers.weight import Layer, Shard, Stored, TensorOptions, Weight

if TYPE_CHECKING:
    from parallel.model.encoder import Encoder
    from parallel.model.layers.score_bias import ScoreBias
    from parallel.model.partition import LayerLayout


class Decoder(Layer):
    """Every layer is split over the group; with a `layout`, a `LayerParallelDecoder`, only the head is.

    Weights are allocated uninitialised; `weights.load_weights` fills them. `weights` is the type in which matrices are
    stored, None for `dtype`, that of everything else.
    """

    def __init__(
        self,
        config: DecoderConfig,
        group: Group = SINGLE,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        layout: LayerLayout | None = None,
        weights: Stored | None = None,
    ) -> None:
        if layout is None:
            config.check_ranks(group.size)
            attention_group, mlp_group, held = group, group, range(config.num_layers)
        else:
            assert group.size == layout.ranks
            assert config.stretch == 0, "a draft model is not stretched"
            mlp_group = group if layout.mlp == "tensor" else SINGLE
            attention_group, held = SINGLE, layout.held(group.rank)  # layers whose attention and KV rows this rank has
        self.config = config
        self.layout = layout
        self.group = group
        self.device = torch.device(device)
        self.dtype = dtype
        self.held = held
        self.attention_ranks = attention_group.size
        options, names = TensorOptions(dtype=dtype, device=device), config.names
        table, embedding = (config.vocab_size, config.hidden_size), f"{names.embedding}.weight"
        self.embedding = VocabTable(embedding, *table, attention_group, **options)
        self.norm = NORMS[config.norm](config.hidden_size, config.norm_eps, **options) if config.final_norm else None
        self._columns: Tensor | None = None  # of the logits, where the head has only some rows
        if config.tied and attention_group.size == group.size and config.head is None:
            self.lm_head = self.embedding
        else:
            name, picked = embedding if config.tied else f"{names.head}.weight", None
            if config.head is not None:
                picked = config.head.rows
                self._columns = torch.tensor(config.head.columns, device=device)
            self.lm_head = VocabTable(name, config.num_head_rows, config.hidden_size, group, picked, **options)
        if config.head_bias:
            self.lm_head.add_bias(names.head_bias)
        self.rope = config.rope and Rope(config.rope, config.head_dim, dtype, device)
        self.local_rope = config.local_rope and Rope(config.local_rope, config.head_dim, dtype, device)
        self._input_rows = InputRows(config, self.embedding, **options)
        needs_all = config.relative_bias is not None or config.encoder is not None
        assert not (needs_all and layout), "ranks that divide layers have no encoder and no bias of scores"
        self.bias = _score_bias(config, group, options)
        self.encoder = _encoder(config, self.embedding, group, options)

        block, kv_layer = BLOCKS[config.norm_placement], {layer: i for i, layer in enumerate(held)}
        self.layers: list[Block] = []
        self._whole = LayerPlan.whole(config.num_layers)
        for i in range(config.num_layers):
            self.layers.append(block(config, i, kv_layer.get(i), attention_group, mlp_group, **options))
            self._store(self.layers[-1], weights)  # one after the other: room for all in `dtype` need not be there
        for layer in () if self.encoder is None else self.encoder.layers:
            self._store(layer, weights)
        if weights != "packed":  # checkpoints seldom quantise their tables, if ever
            for one in {id(one): one for one in (self.embedding, self.lm_head)}.values():
                self._store(one, weights)

    def make_pool(
        self,
        num_slots: int,
        stored: torch.dtype | None = None,
        scales: Sequence[tuple[float, float]] | None = None,
    ) -> KVPool:
        """A pool for the attention that this rank has, with one scale of keys and of values for each layer it holds."""
        shape = self.config.local_kv_heads(self.attention_ranks), self.config.head_dim
        return KVPool(len(self.held), num_slots, *shape, self.dtype, self.device, stored=stored, scales=scales)

    @property
    def waits_for_nothing(self) -> bool:
        """Whether the host reads no number that a pass computes."""
        parts = [part for layer in self.layers for part in layer.walk()]
        return all(part.is_grouped for part in parts if isinstance(part, Experts))

    def compute_rows_apart(self) -> None:
        """Makes a row's results have the same bits whatever rows are beside it, as far as layers decide it: on a CPU by
        the project's kernels, on a GPU by Triton's, and by sums over ranks in their order."""
        for part in self.walk():
            part.keep_rows_apart()
        if self.group.size > 1:
            self.group.sums_in_order = True

    def attention_shape(self) -> AttentionShape:
        return AttentionShape.of(self.config, self.attention_ranks, self.bias)

    def forward(self, token_ids: Tensor, plan: PassPlan, taps: Sequence[int] = ()) -> tuple[Tensor, tuple[Tensor, ...]]:
        """token_ids [T] -> final hidden states [T, H] and, for every tap i, the residual stream [T, H] after i layers.

        Tap 0 is the embedding; tap `num_layers` is the stream before the final norm.
        """
        hidden = self.embed(token_ids, plan.positions) if plan.entering is None else plan.entering
        hidden, tapped = self.run_layers(hidden, plan, plan.layers, taps)
        return self.normalize(hidden), tapped

    def run_layers(
        self, hidden: Tensor, plan: PassPlan, layers: LayerPlan | None = None, taps: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The residual stream [T, H] after the sublayers of `layers`, None for all, and after the layers `taps`.

        A tap at a layer of which nothing runs is the stream that passes there.
        """
        plan.attention.prepare()
        return self.run_blocks(hidden, self.rotations(plan.positions), plan, layers, taps)

    def run_blocks(
        self,
        hidden: Tensor,
        ropes: tuple[Rotation | None, Rotation | None],
        plan: PassPlan,
        layers: LayerPlan | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The same with the rotations of the pass, whose attention is prepared."""
        steps = self._whole.steps() if layers is None else layers.steps()
        tapped = {tap: hidden for tap in taps if not steps or tap <= steps[0][0]}
        for place, (index, attends, feeds) in enumerate(steps, 1):
            layer = self.layers[index]
            rope = ropes[layer.windowed]
            hidden = layer(hidden, rope, plan.attention, plan.source, attends=attends, feeds=feeds)
            if taps:
                following = steps[place][0] if place < len(steps) else len(self.layers)
                tapped |= {tap: hidden for tap in taps if index < tap <= following}
        return hidden, tuple(tapped[tap] for tap in taps)

    def rotations(self, positions: Tensor) -> tuple[Rotation | None, Rotation | None]:
        """The rotations of layers without and with a sliding window; None where positions are learned."""
        rotation = self.rope and self.rope(positions)
        return rotation, self.local_rope(positions) if self.local_rope else rotation

    @property
    def learns_positions(self) -> bool:
        """Whether `embed` adds a row of a table for each position."""
        return self._input_rows.positions is not None

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """token_ids, positions [T] -> the stream that enters the first layer, [T, H]."""
        return self._input_rows(token_ids, positions)

    def write_source(self, token_ids: Tensor, pool: KVPool, slots: Tensor) -> None:
        """Read a source, token_ids [S], and put what each block's rows read of it into these slots [S]."""
        assert self.encoder is not None, "this model has no encoder"
        encoded = self.encoder(token_ids)
        for layer in self.layers:
            assert layer.cross is not None
            pool.write(layer.cross.heads.layer, slots, *layer.cross.keys_and_values(encoded))

    def normalize(self, hidden: Tensor) -> Tensor:
        """The residual stream after the last layer, [T, H] -> final hidden states."""
        return hidden if self.norm is None else self.norm(hidden)

    def head(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> logits [N, `num_logits`], on every rank."""
        if self.config.head_scale is not None:
            hidden = scaled(hidden, self.config.head_scale)
        logits, softcap = self.lm_head.logits(hidden), self.config.logit_softcap
        if softcap is not None:
            logits = soft_capped(logits, softcap)
        if self._columns is None:
            return logits
        return logits.new_full((len(logits), self.config.num_logits), -torch.inf).index_copy_(1, self._columns, logits)

    def pass_bytes(self) -> int:
        """Bytes of the weights that a pass reads: of a table of tokens that is not the head too, some rows; of an
        encoder, nothing."""
        read = [*self.layers, *([] if self.norm is None else [self.norm]), self.lm_head]
        return sum([part.nbytes() for part in read])

    def shards(self) -> Iterator[Shard]:
        """Every checkpoint tensor this rank needs and where its part goes."""
        yield from self._end_shards()
        if self.encoder is not None:
            yield from self.encoder.shards()
        for i, layer in enumerate(self.layers):
            yield from layer.shards(self.config.block_name(i))

    def _end_shards(self) -> Iterator[Shard]:
        """Those of what is before and after all blocks."""
        yield from self.embedding.shards()
        yield from self._input_rows.shards()
        if self.bias is not None:
            yield from self.bias.shards()
        if self.norm is not None:
            yield from self.norm.shards(self.config.names.final_norm)
        if self.lm_head is not self.embedding:
            yield from self.lm_head.shards()
        yield from self.lm_head.bias_shards()

    def reopened_shards(self) -> Iterator[list[Shard]]:
        """The shards of a decoder that was loaded, part by part: each part is filled before the next is asked for, and
        of packed matrices only those of one part are kept twice. Every number stays at its address."""
        self.lm_head.weight.reopen()
        yield [*self._end_shards()]
        self.lm_head.weight.pack()
        for layer in () if self.encoder is None else self.encoder.layers:
            reopen_weights(layer)
        if self.encoder is not None:
            yield [*self.encoder.shards()]
            for layer in self.encoder.layers:
                pack_weights(layer)
        for i, layer in enumerate(self.layers):
            reopen_weights(layer)
            yield [*layer.shards(self.config.block_name(i))]
            if i >= self.config.num_layers - self.config.stretch:
                layer.silence()
            pack_weights(layer)

    def silence_stretch(self) -> None:
        """Zero what the stretched layers would add to the residual stream."""
        for layer in self.layers[self.config.num_layers - self.config.stretch :]:
            layer.silence()

    def _store(self, part: Layer, stored: Stored | None) -> None:
        """Keep its matrices in this type: all but those of routers, whose choices rounding would change, and
        what weighs a shared expert."""
        if stored in (None, self.dtype):
            return
        routers = [one.router.weight for one in part.walk() if isinstance(one, Experts)]
        routers += [one.gate.weight for one in part.walk() if isinstance(one, SharedExpert)]
        for one in part.walk():
            if isinstance(one, Weight) and one not in routers:
                one.store_as(stored)

    def pack(self) -> None:
        """Puts the weights that are multiplied by into the order in which they are read; called after loading."""
        for layer in (*self.layers, *([] if self.encoder is None else self.encoder.layers)):
            pack_weights(layer)
        self.lm_head.weight.pack()


def run_pass(
    decoder: Decoder, token_ids: Tensor, plan: PassPlan, taps: Sequence[int] = ()
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """A whole pass: hidden states, a stream for every tap, and the logits of `plan.logit_rows` in the model's type."""
    hidden, features = decoder.forward(token_ids, plan, taps)
    return hidden, features, wanted_logits(decoder, hidden, plan)


def wanted_logits(decoder: Decoder, hidden: Tensor, plan: PassPlan) -> Tensor:
    """The logits of `plan.logit_rows` of final hidden states, in the model's type or float32."""
    rows = plan.asked(hidden)
    return decoder.head(rows) if len(rows) else rows.new_empty(0, decoder.config.num_logits)


def _score_bias(config: DecoderConfig, group: Group, options: TensorOptions) -> ScoreBias | None:
    if config.relative_bias is None:
        return None
    from parallel.model.layers.score_bias import ScoreBias

    return ScoreBias(config.relative_bias, config.names.relative_bias, config.num_heads, group, **options)


def _encoder(config: DecoderConfig, embedding: VocabTable, group: Group, options: TensorOptions) -> Encoder | None:
    if config.encoder is None:
        return None
    from parallel.model.encoder import Encoder

    return Encoder(config.encoder, embedding, group, **options)


class ServedLayers(Protocol):
    """Layers that name the tensors of their checkpoint and where each goes."""

    def walk(self) -> Iterator[Layer]: ...

    def shards(self) -> Iterator[Shard]: ...


def pack_weights(layer: Layer | ServedLayers) -> None:
    """Pack every weight within `layer`, and then what is made of several."""
    parts = list(layer.walk())
    for kind in (Weight, Experts):
        for part in parts:
            if isinstance(part, kind):
                part.pack()


def reopen_weights(layer: Layer) -> None:
    """Make room in every packed weight within `layer`, to load it again."""
    for part in layer.walk():
        if isinstance(part, Weight):
            part.reopen()
