"""Log-probabilities at the rows of a verifying pass, for the requests that ask for them.

A reader stands behind the pass of a `Verifier`. Rows of prompts are read at once, some at a time; rows of nodes are
kept until the accepted path is known, and only its rows are read. Logits are the model's own, before sampling
parameters apply. Where ranks of a split head chose the tokens, they exchange the whole rows that are asked for and no
others, so every rank must call `keep`; the numbers are computed by rank 0. Knows rows and tokens, not the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from actors.protocol.logprobs import Logprobs, PromptLogprobs
from actors.protocol.messages import NO_TOKEN
from parallel.kv.pass_plan import Span
from parallel.runtime.interface import Runner
from parallel.transfers import upload

if TYPE_CHECKING:
    from actors.verification.verifier import VerifyInput, VerifyResult

_ROWS_AT_ONCE = 64
"""Rows of a prompt in memory: 40 MB of float32 for a vocabulary of 152k, three times."""


class LogprobReader:
    """Reads for one `runner`."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._prompts: list[PromptLogprobs] = []
        self._nodes: dict[int, Tensor] = {}  # by sequence: whole rows of its tree's nodes

    def keep(self, inputs: Sequence[VerifyInput], spans: Sequence[Span], hidden: Tensor, logits: Tensor) -> None:
        """Keep of a pass its `hidden` [T, H], and `logits` [N, V] of the nodes, or tokens [N] where the ranks chose."""
        self._prompts, self._nodes = [], {}
        if all(one.logprobs is None and one.prompt_logprobs is None for one in inputs):
            return
        self._keep_nodes(inputs, spans, hidden, logits)
        start = 0
        for one, span in zip(inputs, spans, strict=True):
            if one.prompt_logprobs is not None:
                self._read_prompt(one, one.prompt_logprobs, hidden[start : start + one.num_fed])
            start += span.num_tokens

    def prompts(self) -> list[PromptLogprobs]:
        """Those of the prompts that the last pass read, once."""
        prompts, self._prompts = self._prompts, []
        return prompts

    def attached(self, inputs: Sequence[VerifyInput], results: Sequence[VerifyResult]) -> list[VerifyResult]:
        """The results with the log-probabilities of their tokens, where they are asked for."""
        asked = [place for place, one in enumerate(inputs) if one.seq_id in self._nodes]
        attached = list(results)
        if not asked:
            return attached
        tokens = [_tokens(inputs[place], results[place]) for place in asked]
        rows = [self._rows(results[place], inputs[place].seq_id) for place in asked]
        ks = [inputs[place].logprobs or 0 for place in asked]
        found = read_logprobs(torch.cat(rows), [*chain(*tokens)], max(ks))
        start = 0
        for place, own, k in zip(asked, tokens, ks, strict=True):
            attached[place] = replace(results[place], logprobs=found.record(k, start, start + len(own)))
            start += len(own)
        self._nodes = {}
        return attached

    def _rows(self, result: VerifyResult, seq_id: int) -> Tensor:
        """Those that the tokens of a verdict follow."""
        nodes, rows = [0, *result.path], self._nodes[seq_id]
        return rows.index_select(0, upload(nodes[:-1] if result.next_token == NO_TOKEN else nodes, rows.device))

    def _keep_nodes(self, inputs: Sequence[VerifyInput], spans: Sequence[Span], hidden: Tensor, logits: Tensor) -> None:
        """The whole rows of nodes: those of the pass, or, where it has none, exchanged by the ranks now."""
        is_whole, places, row, place = logits.dim() == 2, list[tuple[int, int, int]](), 0, 0
        for one, span in zip(inputs, spans, strict=True):
            row += span.num_tokens
            if one.logprobs is not None and span.num_logits:
                places.append((one.seq_id, place if is_whole else row - span.num_logits, span.num_logits))
            place += span.num_logits
        if is_whole:
            self._nodes = {seq_id: logits[first : first + count] for seq_id, first, count in places}
        elif places:
            wanted = [place for _, first, count in places for place in range(first, first + count)]
            parts = self._head(hidden.index_select(0, upload(wanted, hidden.device))).split([c for *_, c in places])
            self._nodes = {seq_id: rows for (seq_id, *_), rows in zip(places, parts, strict=True)}

    def _read_prompt(self, one: VerifyInput, k: int, hidden: Tensor) -> None:
        """`hidden` of its fed text; the row of a token tells of the next one."""
        first = self._runner.cached_len(one.seq_id) + 1
        tokens, parts = one.token_ids[first : min(first + len(hidden), one.prompt_len)], []
        for start in range(0, len(tokens), _ROWS_AT_ONCE):
            some = tokens[start : start + _ROWS_AT_ONCE]
            rows = self._head(hidden[start : start + len(some)])
            if self._runner.decoder.group.rank == 0:
                parts.append(read_logprobs(rows, some, k).record(k, 0, len(some)))
        if parts:
            self._prompts.append(PromptLogprobs(one.seq_id, first, Logprobs.joined(k, parts)))

    @torch.inference_mode()
    def _head(self, hidden: Tensor) -> Tensor:
        """Whole rows of logits on every rank."""
        return self._runner.decoder.head(hidden).float()


@dataclass(frozen=True, slots=True)
class FoundLogprobs:
    """Those of n rows on the host: token ids int32 and values float32 [n, 1 + k], own tokens first, and ranks int32
    [n]."""

    token_ids: np.ndarray
    values: np.ndarray
    ranks: np.ndarray

    def record(self, k: int, start: int, stop: int) -> Logprobs:
        """Those of some of these rows, with `k` of the likeliest tokens or as many as there are."""
        width = min(1 + k, self.token_ids.shape[1])
        arrays = self.token_ids[start:stop, :width], self.values[start:stop, :width], self.ranks[start:stop]
        return Logprobs(width - 1, *[array.tobytes() for array in arrays])


def read_logprobs(logits: Tensor, token_ids: Sequence[int], k: int) -> FoundLogprobs:
    """The log-softmax of rows [n, V] at a token of each and at the `k` likeliest, which do not depend on what else is
    read: of tokens that tie the lowest come first. A row with a logit that is not finite has -inf everywhere."""
    logprobs = logits.log_softmax(-1).nan_to_num_(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
    tokens = upload(token_ids, logits.device)
    own = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs >= own).sum(-1, dtype=torch.int32)
    listed, values = _likeliest(logprobs, min(k, logits.shape[-1]))
    ids = np.concatenate([np.asarray(token_ids, np.int32)[:, None], listed.astype(np.int32)], 1)
    return FoundLogprobs(ids, np.concatenate([own.cpu().numpy(), values], 1), ranks.cpu().numpy())


def _likeliest(logprobs: Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and values [n, k]."""
    if not k:
        nothing = np.empty((len(logprobs), 0))
        return nothing, nothing.astype(np.float32)
    least = logprobs.topk(k).values[:, -1:]  # `topk` promises no order among ties
    rows, token_ids = (logprobs >= least).nonzero(as_tuple=True)
    row, token, value = (one.cpu().numpy() for one in (rows, token_ids, logprobs[rows, token_ids]))
    order = np.lexsort((-value, row))  # stable: ties stay in the order of their ids
    first = np.searchsorted(row, np.arange(len(logprobs)))
    chosen = order[first[:, None] + np.arange(k)]
    return token[chosen], value[chosen]


def _tokens(one: VerifyInput, result: VerifyResult) -> list[int]:
    """The tokens of the verdict."""
    tokens = [one.tree.token_ids[node] for node in result.path]
    return tokens if result.next_token == NO_TOKEN else [*tokens, result.next_token]
