"""Drafting from streams, which ran through the target's own layers: their logits are those of the target's head.

Streams of the target's verifying pass arrive as features of the last accepted node (`target_pass.py`); S3D (arXiv
2405.20314) runs them when it drafts, the newest token and masks behind it, over the target's KV rows and through some
of its layers. In both, a draft is read as those of heads are: every depth has its stream. A sampler (arXiv 2507.11851)
adds to a stream what follows from the token before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.kv.pass_plan import Span
from parallel.model.layer_plan import LayerPlan
from parallel.runtime.decoder_runner import DecoderRunner
from parallel.self_speculation.runner import SelfDraftRunner
from parallel.speculators.heads.cells import HeadCell, Tensors
from parallel.speculators.heads.config import TARGET_TABLE, stored_shapes
from parallel.speculators.heads.runner import FedRow, HeadsRunner
from parallel.speculators.heads.tensors import LoadedTensors
from parallel.speculators.place import SpeculatorPlace
from parallel.speculators.streams.layers import StreamLayers, open_stream_layers
from parallel.speculators.streams.layouts import StreamsConfig
from parallel.transfers import upload


class StreamsCell(HeadCell):
    """A state is all streams and, for the sampler, the embedding of the newest token of the path."""

    config: StreamsConfig

    def __init__(self, config: StreamsConfig) -> None:
        super().__init__(config)
        self.reads_tokens = config.inner > 0

    def start(self, tensors: Tensors, hidden: Tensor) -> Tensor:  # noqa: ARG002
        return F.pad(hidden, (0, self.config.target_hidden)) if self.reads_tokens else hidden

    def step(self, tensors: Tensors, depth: int, states: Tensor, token_ids: Tensor) -> Tensor:  # noqa: ARG002
        if not self.reads_tokens:
            return states
        token = tensors.embed(TARGET_TABLE, token_ids).to(states.dtype)
        return torch.cat((states[..., : -self.config.target_hidden], token), -1)

    def read(self, tensors: Tensors, depth: int, states: Tensor) -> Tensor:
        size = self.config.target_hidden
        stream = states[..., depth * size : (depth + 1) * size]
        if not self.reads_tokens:
            return stream
        inner = tensors.linear("sampler.stream", stream) + tensors.linear("sampler.token", states[..., -size:])
        return stream + tensors.linear("sampler.output", F.silu(inner))


class StreamsDraftRunner(HeadsRunner):
    """Runs the streams of a root itself: a draft pass over the target's KV rows, whose own rows go back at once."""

    self_draft: SelfDraftRunner

    def __init__(self, cell: StreamsCell, tensors: LoadedTensors, layers: StreamLayers, target: DecoderRunner) -> None:
        super().__init__(cell, tensors, target.decoder)
        self.self_draft = SelfDraftRunner(target, LayerPlan(cell.config.layers, cell.config.layers))
        self._layers = layers

    def can_reserve(self, num_rows: int) -> bool:  # noqa: ARG002  of its text no rows are kept
        return self.self_draft.can_reserve(len(self._rows) * self.cell.config.num_heads)

    def _read_target(self, text: Sequence[FedRow], features: Tensor, token_ids: Tensor) -> Tensor:
        """Zeros for text before the newest token, which nothing is drafted after."""
        draft, decoder, count = self.self_draft, self.decoder, self.cell.config.num_heads
        states = features.new_zeros(len(text), count * self.cell.config.target_hidden, dtype=decoder.dtype)
        roots = [i for i, row in enumerate(text) if row.position == draft.cached_len(row.seq_id)]
        if not roots:
            return states
        plan = draft.plan([Span(text[i].seq_id, count) for i in roots])
        tokens = token_ids.index_select(0, upload([text[i].place for i in roots], token_ids.device))
        begun = self._layers.begin(decoder.embed(tokens, plan.positions[: len(roots)])).flatten(0, 1)
        rows = F.pad(begun, (0, 0, 0, len(plan.positions) - len(begun)))
        hidden = self._layers.run(rows, plan, torch.arange(len(begun), device=rows.device))[: len(begun)]
        draft.release_rows()
        return states.index_copy_(0, upload(roots, states.device), decoder.normalize(hidden).view(len(roots), -1))


def open_runner(directory: Path, config: StreamsConfig, place: SpeculatorPlace) -> HeadsRunner:
    """What drafts. ValueError, one line, where it cannot."""
    cell = StreamsCell(config)
    tensors = LoadedTensors(cell.shapes, place)
    if cell.reads_tokens:
        place.load(tensors, stored_shapes(cell.shapes), directory)
    if not config.reads_root:
        return HeadsRunner(cell, tensors, place.tables)
    target = place.its_target(directory, "s3d")
    return StreamsDraftRunner(cell, tensors, open_stream_layers(directory, config, target.decoder), target)
