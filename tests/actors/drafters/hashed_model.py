"""A decoder whose logits are a hash of the rows that a row sees, under the engine's own runner, pool and pass plans.

Every KV row holds the token and the position it was written for. A row that sees one stale, missing or misplaced row
gets other logits, so a drafter whose rows are wrong proposes other tokens than one that reads the text from scratch.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from parallel.comm.group import SINGLE
from parallel.kv.pool import KVPool
from parallel.model.layers.attention import AttentionShape, PassPlan
from parallel.runtime.layer_parallel_runner import LayerParallelRunner
from parallel.runtime.runner import ModelRunner

VOCAB_SIZE = 6
_MARKS = np.random.default_rng(0).integers(-(2**62), 2**62, (512, VOCAB_SIZE))  # by position and token


class HashedDecoder:
    """Two models of different `seed` agree on most tokens. `max_positions` is asserted in every pass."""

    device, group = torch.device("cpu"), SINGLE
    encoder, layout = None, SimpleNamespace(has_fuzzy=True)
    waits_for_nothing = True

    def __init__(self, seed: int, max_positions: int) -> None:
        self.config = SimpleNamespace(
            max_positions=max_positions, vocab_size=VOCAB_SIZE, num_logits=VOCAB_SIZE, num_experts=0, encoder=None
        )
        common, own = (torch.rand(4093, VOCAB_SIZE, generator=torch.Generator().manual_seed(s)) for s in (0, seed))
        self._logits = 4 * (common + 0.3 * own)

    def attention_shape(self) -> AttentionShape:
        return AttentionShape(group=1)

    def forward(self, token_ids, plan, taps):
        """Hidden state [T, 1]: the hash of what the row sees."""
        pool, laid_out = plan.attention
        hashes = []
        for rows in laid_out:
            tokens = token_ids[rows.rows]
            positions = np.array(rows.positions())
            assert positions.max() < self.config.max_positions, "a position beyond the model's context"
            pool.keys[0, rows.written_slots, 0, 0] = tokens
            pool.values[0, rows.written_slots, 0, 0] = torch.from_numpy(positions)
            marks = marks_of(pool, rows.slots)
            seen = rows.pending.visible(rows.first_pending).astype(np.int64) @ marks[rows.context :]
            hashes.append(marks[: rows.context].sum() + seen)
        return torch.from_numpy(np.concatenate(hashes))[:, None], ()

    def head(self, hidden):
        return self._logits[hidden[:, 0] % len(self._logits)]

    def logits_after(self, token_ids):
        """[1, V], of a drafter that makes no mistake."""
        return self.head(torch.tensor([[marks_of_text(token_ids).sum()]]))


def marks_of(pool, slots):
    """What the rows at these slots were written for."""
    return _MARKS[pool.values[0, slots, 0, 0].numpy(), pool.keys[0, slots, 0, 0].numpy()]


def marks_of_text(token_ids):
    """What the rows of a text are to be written for."""
    return _MARKS[range(len(token_ids)), token_ids]


class _Backend:
    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def plan(self, laid_out, wanted) -> PassPlan:
        positions = [position for rows in laid_out for position in rows.positions()]
        logit_rows = torch.tensor(wanted, dtype=torch.int64)  # there may be none
        return PassPlan(len(positions), torch.tensor(positions), logit_rows, (self._pool, laid_out))


def hashed_runner(seed: int, num_slots: int, max_positions: int, *, layer_parallel: bool = False) -> ModelRunner:
    pool = KVPool(1, num_slots, 1, 1, torch.int64)
    runner = (LayerParallelRunner if layer_parallel else ModelRunner)(HashedDecoder(seed, max_positions), pool)
    runner._backend = _Backend(pool)
    return runner
