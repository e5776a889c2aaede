"""The likeliest tokens at the rows of a verifying pass, for drafters that learn from them.

A reader stands between a `Verifier` and its runner: it asks for the logits of further rows if prompts are read, keeps
those of the last pass, and turns them into one record by one `topk` and one transfer. Knows rows and tokens, not the
drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from actors.protocol.messages import NO_TOKEN, TopTokens
from parallel.kv.pass_plan import Span
from parallel.runtime.interface import Runner
from parallel.transfers import upload

if TYPE_CHECKING:
    from actors.verification.verifier import VerifyInput


class TopTokensReader:
    """`k` tokens of each row; `reads_prompts`: also of rows that read committed text. Only the lead keeps logits.

    `is_late`: no draft is made of them, so they are read once the verdicts have left.
    """

    def __init__(self, k: int, *, reads_prompts: bool = False, is_lead: bool = True, is_late: bool = False) -> None:
        self.is_late = is_late
        self._k = k
        self._reads_prompts = reads_prompts
        self._is_lead = is_lead
        self._logits: Tensor | None = None
        self._contexts: list[np.ndarray] = []
        self._spans: list[tuple[int, int]] = []  # (sequence, length of its text) of each of `_contexts`
        self._scopes: list[int] = []

    def forward(
        self,
        runner: Runner,
        run: Callable[[Sequence[Span], Sequence[int]], Tensor],
        spans: Sequence[Span],
        token_ids: Sequence[int],
        inputs: Sequence[VerifyInput],
    ) -> Tensor:
        """The pass of `runner`, which `run` makes; returns the logits of the rows that `spans` ask for."""
        self._contexts, self._spans, self._scopes, start = [], [], [], 0
        for span, fed in zip(spans, inputs, strict=True):
            end, before = start + span.num_tokens, runner.cached_len(span.seq_id) - 1
            num_rows = span.num_tokens if self._reads_prompts else span.num_logits
            if num_rows:
                first = fed.token_ids[before] if before >= 0 else NO_TOKEN
                self._contexts.append(_contexts(span, token_ids[start:end], first)[-num_rows:])
                self._spans.append((cast("int", span.seq_id), len(fed.token_ids)))
                self._scopes.append(fed.scope)
            start = end
        asked = [replace(span, num_logits=span.num_tokens) for span in spans] if self._reads_prompts else spans
        logits = run(asked, token_ids)
        self._logits = logits if self._is_lead else None
        if all(span.num_logits == one.num_logits for span, one in zip(spans, asked, strict=True)):
            return logits
        ends = np.cumsum([span.num_tokens for span in spans])
        wanted = [np.arange(end - span.num_logits, end) for span, end in zip(spans, ends, strict=True)]
        return logits[upload(np.concatenate(wanted), logits.device)]

    def read(self) -> TopTokens | None:
        """The top tokens of the last pass, once; rows whose logits are NaN are left out."""
        logits, self._logits = self._logits, None
        if logits is None or not len(logits):
            return None
        k = min(self._k, logits.shape[-1])
        top = logits.topk(k)
        probs = (top.values - logits.logsumexp(-1, keepdim=True)).exp()
        both = torch.cat([top.indices.int().view(torch.float32), probs], 1).cpu().numpy()  # one transfer
        contexts, sizes = np.concatenate(self._contexts), [len(rows) for rows in self._contexts]
        good = np.isfinite(both[:, k:]).all(1)
        if not good.all():
            both, contexts = both[good], contexts[good]
            sizes = [int(kept.sum()) for kept in np.split(good, np.cumsum(sizes)[:-1])]
        spans = tuple((*span, size) for span, size in zip(self._spans, sizes, strict=True))
        return TopTokens(
            k, contexts.tobytes(), both[:, :k].tobytes(), both[:, k:].tobytes(), spans, tuple(self._scopes)
        )


def _contexts(span: Span, token_ids: Sequence[int], first: int) -> np.ndarray:
    """(token before, token) of each row of the span [n, 2]; `first` is the token before the span."""
    own = np.asarray(token_ids, np.int32)
    before = np.empty_like(own)
    before[0], before[1:] = first, own[:-1]
    if span.parents is not None:
        parents = np.asarray(span.parents)
        before = np.where(parents < 0, first, own[parents])
    return np.stack([before, own], 1, dtype=np.int32)
