"""Logit processors that change single tokens: bias, bad words, min tokens and the three penalties, for a whole batch.

The host lists the cells (row, token) that change: as many as a text has different tokens, whatever the vocabulary. They
reach the device in one transfer that nothing waits for, and every kind of edit is a few operations for all rows of all
sequences together. Knows tokens and trees; knows no truncation and no noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from actors.protocol.messages import SamplingParams, TokenTree
from parallel.transfers import to_device

BANNED = -torch.inf


class EditedRows(Protocol):
    """One sequence's logit rows: `actors.sampling.logits.LogitRows`."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def prompt_len(self) -> int: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def tree(self) -> TokenTree: ...
    def row_nodes(self) -> Sequence[int]: ...


def edits(params: SamplingParams) -> bool:
    """Whether the parameters change the logits of single tokens."""
    return bool(params.logit_bias or params.bad_words or params.min_tokens) or _penalises(params)


def _penalises(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


class _Cells:
    """What changes in a batch, gathered sequence by sequence."""

    def __init__(self) -> None:
        self.biased: list[tuple[int, int, float]] = []
        self.banned: list[tuple[int, int]] = []
        self.seen: list[tuple[np.ndarray, ...]] = []

    def add(self, rows: EditedRows, start: int, eos_token_ids: Sequence[int]) -> None:
        """The edits of one sequence, whose first row is `start`."""
        params, tree = rows.params, rows.tree
        paths = [[tree.token_ids[i] for i in tree.path_to(node)] for node in rows.row_nodes()]
        for row, path in enumerate(paths, start):
            self.biased += [(row, token, bias) for token, bias in params.logit_bias]
            self._ban_words(params.bad_words, row, rows.token_ids, path)
            if len(rows.token_ids) - rows.prompt_len + len(path) < params.min_tokens:
                self.banned += [(row, token) for token in {*eos_token_ids, *params.stop_token_ids}]
        if _penalises(params):
            self._penalise(params, start, rows.token_ids, rows.prompt_len, paths)

    def _ban_words(
        self, bad_words: Sequence[Sequence[int]], row: int, token_ids: Sequence[int], path: list[int]
    ) -> None:
        """Ban the last token of each bad word after a history that ends with the rest of it."""
        reach = max(map(len, bad_words), default=1) - 1
        history = (*token_ids[max(0, len(token_ids) - reach) :], *path)
        for *beginning, last in bad_words:
            if history[len(history) - len(beginning) :] == tuple(beginning):
                self.banned.append((row, last))

    def _penalise(
        self, params: SamplingParams, start: int, token_ids: Sequence[int], prompt_len: int, paths: list[list[int]]
    ) -> None:
        """The tokens of the output, and for the repetition penalty of the prompt, with the output's counts."""
        first = 0 if params.repetition_penalty != 1.0 else prompt_len
        text = np.array(token_ids[first:], dtype=np.int64)
        tokens, places = np.unique(text, return_inverse=True)
        counts = np.bincount(places[prompt_len - first :], minlength=len(tokens))
        for row, path in enumerate(paths, start):
            own_tokens, own_counts = tokens, counts
            if path:
                together = np.concatenate([tokens, np.array(path)])
                own_tokens, places = np.unique(together, return_inverse=True)
                weights = np.concatenate([counts, np.ones(len(path), dtype=np.int64)])
                own_counts = np.zeros(len(own_tokens), dtype=np.int64)
                np.add.at(own_counts, places, weights)
            factors = np.full(len(own_tokens), params.repetition_penalty, dtype=np.float32)
            frequency = own_counts.astype(np.float32) * np.float32(params.frequency_penalty)
            presence = (own_counts > 0) * np.float32(params.presence_penalty)
            self.seen.append((np.full(len(own_tokens), row), own_tokens, factors, frequency, presence))

    def arrays(self) -> list[np.ndarray]:
        """Rows, columns and amounts of biases; rows and columns of bans; of seen tokens rows, columns and the factor
        and the two amounts of their penalties."""
        biased = np.array([cell[:2] for cell in self.biased], dtype=np.int64).reshape(-1, 2).T
        banned = np.array(self.banned, dtype=np.int64).reshape(-1, 2).T
        amounts = np.array([cell[2] for cell in self.biased], dtype=np.float32)
        seen = [np.concatenate(parts) for parts in zip(*self.seen, strict=True)] if self.seen else _NONE_SEEN
        return [*biased, amounts, *banned, *seen]


_NONE_SEEN = [np.empty(0, dtype=np.int64)] * 2 + [np.empty(0, dtype=np.float32)] * 3


def edited(logits: Tensor, batch: Sequence[EditedRows], eos_token_ids: Sequence[int]) -> Tensor:
    """Logits [N, V], flat, after the edits of every sequence; a tensor of its own."""
    cells, start = _Cells(), 0
    for rows in batch:
        if edits(rows.params):
            cells.add(rows, start, eos_token_ids)
        start += len(rows.row_nodes())
    moved = to_device(cells.arrays(), logits.device)
    (bias_rows, bias_columns, biases), (ban_rows, ban_columns) = moved[:3], moved[3:5]
    seen_rows, seen_columns, factors, frequency, presence = moved[5:]
    scores = logits.clone()
    if len(biases):
        scores.index_put_((bias_rows, bias_columns), biases.to(scores.dtype), accumulate=True)
    if len(ban_rows):
        scores.index_put_((ban_rows, ban_columns), scores.new_full((), BANNED))
    if len(factors):  # Keskar et al., CTRL, arXiv 1909.05858, with the sign rule of transformers
        values = scores[seen_rows, seen_columns]
        values = torch.where(values > 0, values / factors, values * factors)
        scores.index_put_((seen_rows, seen_columns), values.sub_(frequency).sub_(presence))
    return scores
