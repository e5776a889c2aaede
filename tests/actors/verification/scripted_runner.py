"""A runner whose rows name where they came from: what a reader or a verifier asks of a pass, and what it hands on."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from parallel.runtime.decoder_runner import DecoderRunner
from parallel.runtime.runner import ModelRunner, PassOutput

VOCAB = 97


class ScriptedRunner(ModelRunner):
    """Row `i` of a pass has hidden state `i`, `1000 * tap + i` at a tap, and logits that prefer token `(7 * t) % VOCAB`
    after token `t`. Sequence `s` has cached `cached[s]` rows, in the slots `100 * s, 100 * s + 1` and so on."""

    def __init__(self, cached, num_heads=2, pruned: Iterable[int] = ()):
        self.cached: dict[Any, int] = dict(cached)
        self.passes, self._pruned = [], frozenset(pruned)
        pool = SimpleNamespace(keys=torch.empty(0), slots=self._slots, read=self._read)
        config, group = SimpleNamespace(num_kv_heads=num_heads), SimpleNamespace(size=1)
        decoder: Any = SimpleNamespace(config=config, group=group)
        sequences: Any = SimpleNamespace(pool=pool)
        DecoderRunner.__init__(self, decoder, sequences)  # without passes of its own

    def cached_len(self, seq_id):
        return self.cached[seq_id]

    def forward(self, spans, token_ids, streams=()):
        assert len(token_ids) == sum(span.num_tokens for span in spans)
        self.passes.append((list(spans), list(token_ids), streams))
        self._end = {span.seq_id: self.cached[span.seq_id] + span.num_tokens for span in spans}
        rows = torch.arange(len(token_ids), dtype=torch.float32)[:, None]
        ends = np.cumsum([span.num_tokens for span in spans])
        read = [row for span, end in zip(spans, ends, strict=True) for row in range(end - span.num_logits, end)]
        logits = torch.eye(VOCAB)[[7 * token_ids[row] % VOCAB for row in read]] * 50
        return PassOutput(logits, rows, tuple(1000 * tap + rows for tap in streams), pruned=self._pruned)

    def _slots(self, seq_id):
        return np.arange(100 * seq_id, 100 * seq_id + self._end[seq_id])

    def _read(self, layer, slots):
        """The key of head `h` in slot `s` is `10000 * layer + 10 * s + h`, the value its negative."""
        heads = torch.arange(self.config.num_kv_heads)
        keys = (10000 * layer + 10 * slots[:, None] + heads)[:, :, None].float()
        return keys, -keys
