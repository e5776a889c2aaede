"""A decoder and its KV pool as one thing that runs passes: what the rest of the engine calls a model.

Sequences are names here; which tokens they hold, and why rows form trees, is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from parallel.config import DecoderConfig
from parallel.decoder import Decoder
from parallel.kv import KVPool, SeqId
from parallel.mesh import SINGLE, Group
from parallel.plan import PendingRows, Plan, Span, lay_out, logit_rows, row_positions, sdpa_plan
from parallel.weights import load_weights, resolve_checkpoint


@dataclass(frozen=True, slots=True)
class Output:
    """logits [N, vocab] float32 of the rows that wanted them; hidden [T, H]; one [T, H] per tap."""

    logits: Tensor
    hidden: Tensor
    features: tuple[Tensor, ...]


class ModelRunner:
    """Passes of one model over one pool. `forward` is `run(plan(...))`; plans may also be built ahead."""

    def __init__(self, decoder: Decoder, pool: KVPool) -> None:
        self.decoder = decoder
        self.pool = pool
        self._pending: dict[SeqId, PendingRows] = {}
        self._window = min((window for window in decoder.config.windows if window is not None), default=None)

    @property
    def config(self) -> DecoderConfig:
        return self.decoder.config

    # --- sequences ---------------------------------------------------------------------------------------------------

    def open(self, seq_id: SeqId) -> None:
        self.pool.open(seq_id)
        self._pending[seq_id] = PendingRows()

    def close(self, seq_id: SeqId) -> None:
        self.pool.close(seq_id)
        del self._pending[seq_id]

    def cached_len(self, seq_id: SeqId) -> int:
        return self.pool.cached_len(seq_id)

    def pending_len(self, seq_id: SeqId) -> int:
        return self.pool.pending_len(seq_id)

    def can_reserve(self, num_rows: int) -> bool:
        return self.pool.can_reserve(num_rows)

    def commit(self, seq_id: SeqId, keep: Sequence[int], retain: Sequence[int] = ()) -> None:
        """Keep the pending rows `keep`, a path from the committed rows down; `retain` stay pending behind it."""
        self._pending[seq_id] = self._pending[seq_id].select(keep, retain)
        self.pool.commit(seq_id, keep, retain)

    def drop_pending(self, seq_id: SeqId) -> None:
        self.pool.drop_pending(seq_id)
        self._pending[seq_id] = PendingRows()

    def truncate(self, seq_id: SeqId, length: int) -> None:
        self.pool.truncate(seq_id, length)
        self._pending[seq_id] = PendingRows()

    # --- passes ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def plan(self, spans: Sequence[Span]) -> Plan:
        """Reserve rows and lay out a pass; ask `can_reserve` first."""
        assert self.pool.can_reserve(sum(span.num_tokens for span in spans)), "ask can_reserve before planning"
        device = self.pool.keys.device
        laid_out = lay_out(self.pool, self._pending, spans)
        positions = [position for rows in laid_out for position in row_positions(rows)]
        wanted = logit_rows(spans)
        rows = None if len(wanted) == len(positions) else torch.tensor(wanted, dtype=torch.int64, device=device)
        attention = sdpa_plan(self.pool, laid_out, self._window, self.decoder.dtype)
        return Plan(len(positions), torch.tensor(positions, device=device), rows, attention)

    @torch.inference_mode()
    def run(self, plan: Plan, token_ids: Tensor | Sequence[int], taps: Sequence[int] = ()) -> Output:
        """Run a plan on its rows' tokens, [T]; a tensor on the device is used without the host waiting for it."""
        if not isinstance(token_ids, Tensor):
            token_ids = torch.tensor(token_ids, dtype=torch.int64)
        assert token_ids.shape == (plan.num_rows,), f"{plan.num_rows} rows planned, tokens {tuple(token_ids.shape)}"
        hidden, features = self.decoder(token_ids.to(self.decoder.device), plan, taps)
        wanted = hidden if plan.logit_rows is None else hidden.index_select(0, plan.logit_rows)
        return Output(self.decoder.head(wanted).float(), hidden, features)

    def forward(self, spans: Sequence[Span], token_ids: Tensor | Sequence[int], taps: Sequence[int] = ()) -> Output:
        return self.run(self.plan(spans), token_ids, taps)


def open_model(
    path: str | Path,
    group: Group = SINGLE,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    num_slots: int = 4096,
    stretch: int = 0,
) -> ModelRunner:
    """Load this rank's part of a checkpoint and give it a pool of `num_slots` rows."""
    directory = resolve_checkpoint(str(path))
    config = DecoderConfig.from_hf(directory).stretched(stretch)
    decoder = Decoder(config, group, device, dtype)
    load_weights(decoder, directory)
    kv_heads = config.local_kv_heads(group.size)
    return ModelRunner(decoder, KVPool(config.num_layers, num_slots, kv_heads, config.head_dim, dtype, device))


def weight_bytes(config: DecoderConfig, tp_size: int, dtype: torch.dtype) -> int:
    """Bytes of one rank's parameters."""
    heads, kv_heads = config.num_heads // tp_size, config.local_kv_heads(tp_size)
    hidden, middle = config.hidden_size, config.intermediate_size // tp_size
    qkv = (heads + 2 * kv_heads) * config.head_dim
    layer = hidden * (qkv + heads * config.head_dim + 3 * middle) + 2 * hidden
    layer += config.qkv_bias * qkv + config.o_bias * hidden + config.mlp_bias * (2 * middle + hidden)
    layer += config.qk_norm * 2 * config.head_dim
    vocab = -(-config.vocab_size // tp_size) * hidden * (1 if config.tied else 2)
    return (layer * config.num_layers + vocab + hidden) * dtype.itemsize


def kv_bytes_per_slot(config: DecoderConfig, tp_size: int, dtype: torch.dtype) -> int:
    """Bytes one token takes in one rank's pool."""
    return 2 * config.num_layers * config.local_kv_heads(tp_size) * config.head_dim * dtype.itemsize
