"""A decoder whose layers are divided among ranks, with two kinds of passes: exact, and fuzzy with layers side by side.

In a fuzzy pass the attention blocks of a hyper-layer all read the hidden state in front of it, each on its own rank.
After one all-gather every rank adds them and the MLPs in the order the model was trained with:

    for l in hyper-layer:  a[l] = attention_l(norm_l(h))            side by side
    for l in hyper-layer:  h = h + a[l];  h = h + mlp_l(norm'_l(h))  in order

An exact pass runs layer by layer; the layout's calibration says which ranks run it and what they send. The head is
sharded over the ranks, so the logits of all ranks agree to the bit. Source: EasySpec (arXiv 2502.02493, sections 3
and 4). Knows neither what the rows are for nor which rows are fuzzy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel.model.decoder import Decoder
from parallel.model.layers.attention import AttentionPlan, PassPlan
from parallel.model.layers.rope import Rotation
from parallel.model.partition import LayerLayout


class LayerParallelDecoder(Decoder):
    """One rank of a layer-parallel decoder; with one rank, hyper-layers are computed alone, by the same formula."""

    layout: LayerLayout

    def forward(self, token_ids: Tensor, plan: PassPlan, taps: Sequence[int] = ()) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Computes what `Decoder.forward` computes, with hyper-layers side by side where the plan allows it."""
        plan.attention.prepare()
        if self.layout.calibration == "broadcast" and self.group.size > 1 and not plan.fuzzy:
            *tapped, hidden = self._exact_on_one(token_ids, plan, taps)
        else:
            *tapped, hidden = self._walk_layers(token_ids, plan, taps)
        return self.normalize(hidden), tuple(tapped)

    def _walk_layers(self, token_ids: Tensor, plan: PassPlan, taps: Sequence[int]) -> list[Tensor]:
        """The residual stream after each of the `taps`, and after the last layer."""
        ropes = self.rotations(plan.positions)
        hidden = self.embed(token_ids, plan.positions)
        tapped = {0: hidden}
        partition = self.layout.partition if plan.fuzzy else [(i,) for i in range(len(self.layers))]
        for members in partition:
            for layer, attended in zip(members, self._attend(members, hidden, ropes, plan.attention), strict=True):
                hidden = self.layers[layer].finish(hidden, attended)
                if layer + 1 in taps:
                    tapped[layer + 1] = hidden
        return [*(tapped[tap] for tap in taps), hidden]

    def _attend(
        self,
        members: Sequence[int],
        hidden: Tensor,
        ropes: tuple[Rotation | None, Rotation | None],
        attention: AttentionPlan,
    ) -> Sequence[Tensor]:
        """What the attention of each layer of a hyper-layer adds to `hidden`, on every rank."""
        group, owner = self.group, self.layout.owner
        if group.size == 1 or (len(members) == 1 and self.layout.calibration != "owner"):
            layers = [self.layers[layer] for layer in members]
            return [layer.attend(hidden, ropes[layer.windowed], attention) for layer in layers]
        own = next((layer for layer in members if owner(layer) == group.rank), None)
        if own is None:
            attended = torch.zeros_like(hidden)  # fewer layers than ranks: this rank runs none
        else:
            layer = self.layers[own]
            attended = layer.attend(hidden, ropes[layer.windowed], attention)
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
            states = self._walk_layers(token_ids, plan, taps)
            pairs = map(plan.attention.written, range(config.num_layers))
            parts = [rows.reshape(num_rows, row) for pair in pairs for rows in pair]
            self.group.broadcast(torch.cat([*parts, *states], 1))
            return states
        message = self.group.broadcast(torch.empty(num_rows, sum(sizes), dtype=self.dtype, device=self.device))
        parts = [part.contiguous() for part in message.split(sizes, 1)]
        for place, layer in enumerate(self.held):
            k, v = (rows.view(num_rows, -1, config.head_dim) for rows in parts[2 * layer : 2 * layer + 2])
            plan.attention.write(place, k, v)
        return parts[2 * config.num_layers :]
