"""Caching the KV rows of text ahead of a draft, in chunks."""

from __future__ import annotations

from collections.abc import Sequence

from parallel.kv.pass_plan import Span
from parallel.kv.pool import SeqId
from parallel.runtime.interface import Runner


def prefill(runner: Runner, seq_id: SeqId, token_ids: Sequence[int], *, leave: int, chunk: int) -> None:
    """Cache the text until at most its last `leave` tokens are uncached, `chunk` rows a pass; stops where the pool or
    the model's context is full."""
    end = min(len(token_ids) - leave, runner.longest_text)
    while (missing := end - (start := runner.cached_len(seq_id))) > 0:
        rows = token_ids[start : start + min(missing, chunk)]
        if not runner.can_reserve(len(rows)):
            return
        runner.forward([Span(seq_id, len(rows), num_logits=0)], rows)
        runner.commit(seq_id, range(len(rows)))
