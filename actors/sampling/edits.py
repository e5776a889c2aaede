"""Logit processors that change single tokens: bias, bad words, n-grams, min tokens, the three penalties, allowed and
forced tokens, for a whole batch.

The host lists the cells (row, token) that change: as many as a text has different tokens, whatever the vocabulary. They
reach the device in one transfer that nothing waits for, and every kind of edit is a few operations for all rows of all
sequences together. Knows tokens and trees; knows no truncation and no noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from actors.protocol.messages import SamplingParams
from actors.sampling.logits import BANNED, LogitRows
from parallel.transfers import to_device


def edits_by_text(params: SamplingParams) -> bool:
    """Whether the changes depend on the tokens before a place, rather than on their number alone."""
    return params.penalises or params.no_repeat_ngram_size > 0 or any(len(word) > 1 for word in params.bad_words)


@dataclass(frozen=True, slots=True)
class _Edits:
    """What the parameters of a request say of single tokens, as arrays: made once, however many its rows."""

    biased: np.ndarray
    """Tokens int64, in the order of their `biases` float32."""
    biases: np.ndarray
    banned: np.ndarray
    """Bad words of one token, banned in every row."""
    allowed: np.ndarray
    """All others are banned in every row, unless it is empty."""
    banned_early: np.ndarray
    """Tokens that would end the output, banned before it has `min_tokens`."""
    words: Mapping[tuple[int, ...], Sequence[int]]
    """Longer bad words: the last tokens by the beginning."""
    lengths: Mapping[int, Sequence[int]]
    """Lengths of these beginnings, each once, by the last token: what a row looks up, however many words there are."""

    @staticmethod
    @lru_cache(maxsize=512)  # a few times the sequences of a batch; the longest lists take 30 us to look up
    def of(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> _Edits:
        words: dict[tuple[int, ...], list[int]] = {}
        lengths: dict[int, set[int]] = {}
        for *beginning, last in dict.fromkeys(params.bad_words):
            if beginning:
                words.setdefault(tuple(beginning), []).append(last)
                lengths.setdefault(beginning[-1], set()).add(len(beginning))
        single = [word[0] for word in params.bad_words if len(word) == 1]
        return _Edits(
            np.array([token for token, _ in params.logit_bias], dtype=np.int64),
            np.array([bias for _, bias in params.logit_bias], dtype=np.float32),
            np.array(single, dtype=np.int64),
            np.array(params.allowed_token_ids, dtype=np.int64),
            np.array(sorted({*eos_token_ids, *params.stop_token_ids}), dtype=np.int64),
            words,
            {token: sorted(of_token) for token, of_token in lengths.items()},
        )

    def banned_after(self, token_ids: Sequence[int], path: Sequence[int]) -> list[int]:
        """The last token of each longer bad word after a history that ends with the rest of it."""
        lengths = self.lengths.get(path[-1] if path else token_ids[-1], ())
        if not lengths:
            return []
        history = (*token_ids[max(0, len(token_ids) - lengths[-1]) :], *path)
        ends = [history[-length:] for length in lengths if length <= len(history)]
        return [last for end in ends for last in self.words.get(end, ())]


class _Cells:
    """What changes in a batch, gathered sequence by sequence: arrays of rows and tokens, and of amounts."""

    def __init__(self) -> None:
        self.biased: list[tuple[np.ndarray, ...]] = []
        self.banned: list[tuple[np.ndarray, ...]] = []
        self.seen: list[tuple[np.ndarray, ...]] = []
        self.allowed: list[tuple[np.ndarray, ...]] = []
        self.forced: dict[int, int] = {}

    def add(self, rows: LogitRows, start: int, eos_token_ids: tuple[int, ...]) -> None:
        """The edits of one sequence, whose first row is `start`."""
        params, tree, own = rows.params, rows.tree, _Edits.of(rows.params, eos_token_ids)
        paths = [[tree.token_ids[i] for i in tree.path_to(node)] for node in rows.row_nodes()]
        places, num_rows = np.arange(start, start + len(paths)), len(paths)
        if len(own.biased):
            cells = np.repeat(places, len(own.biased)), np.tile(own.biased, num_rows), np.tile(own.biases, num_rows)
            self.biased.append(cells)
        num_generated = len(rows.token_ids) - rows.prompt_len
        early = places[[num_generated + len(path) < params.min_tokens for path in paths]]
        for banning, tokens in ((places, own.banned), (early, own.banned_early)):
            self.banned.append((np.repeat(banning, len(tokens)), np.tile(tokens, len(banning))))
        if own.words:
            for row, path in enumerate(paths, start):
                if tokens := own.banned_after(rows.token_ids, path):
                    self.banned.append((np.full(len(tokens), row), np.array(tokens, dtype=np.int64)))
        if params.no_repeat_ngram_size:
            text = np.array(rows.token_ids, dtype=np.int64)
            for row, path in enumerate(paths, start):
                tokens = repeating(np.append(text, path).astype(np.int64), params.no_repeat_ngram_size)
                self.banned.append((np.full(len(tokens), row), tokens))
        if len(own.allowed):
            self.allowed.append((places, np.repeat(places, len(own.allowed)), np.tile(own.allowed, num_rows)))
        if params.forced_token_ids:
            for row, path in enumerate(paths, start):
                if (token := _forced(params, num_generated + len(path))) is not None:
                    self.forced[row] = token
        if params.penalises:
            self._penalise(params, start, rows.token_ids, rows.prompt_len, paths)

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
        and the two amounts of their penalties; the rows that allow no others than some tokens, and rows and columns of
        these; rows and columns of forced tokens."""
        empty = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), *[np.empty(0, dtype=np.float32)] * 3
        parts = (self.biased, empty[:3]), (self.banned, empty[:2]), (self.seen, empty), (self.allowed, empty[:1] * 3)
        cells = [np.concatenate(arrays) for own, none in parts for arrays in zip(none, *own, strict=True)]
        return [*cells, *(np.array([*part], dtype=np.int64) for part in (self.forced, self.forced.values()))]


def edited(logits: Tensor, batch: Sequence[LogitRows], eos_token_ids: Sequence[int]) -> Tensor:
    """Logits [N, V], flat, after the edits of every sequence; `logits` itself if none applies in these rows, else a
    tensor of its own. End tokens that a drafter of a smaller vocabulary lacks are none of its columns."""
    cells, start, ends = _Cells(), 0, tuple([token for token in eos_token_ids if token < logits.shape[-1]])
    for rows in batch:
        if rows.params.edits_tokens:
            cells.add(rows, start, ends)
        start += len(rows.row_nodes())
    arrays = cells.arrays()
    if not any(map(len, arrays)):
        return logits
    moved = to_device(arrays, logits.device)
    (bias_rows, bias_columns, biases), (ban_rows, ban_columns) = moved[:3], moved[3:5]
    seen_rows, seen_columns, factors, frequency, presence = moved[5:10]
    scores = logits.clone()
    if len(biases):
        scores.index_put_((bias_rows, bias_columns), biases.to(scores.dtype), accumulate=True)
    if len(ban_rows):
        scores.index_put_((ban_rows, ban_columns), scores.new_full((), BANNED))
    if len(factors):  # Keskar et al., CTRL, arXiv 1909.05858, with the sign rule of transformers
        values = scores[seen_rows, seen_columns]
        values = torch.where(values > 0, values / factors, values * factors)
        scores.index_put_((seen_rows, seen_columns), values.sub_(frequency).sub_(presence))
    if cells.allowed:
        rows, allowed_rows, allowed_columns = moved[10:13]
        kept = scores[allowed_rows, allowed_columns]
        scores.index_fill_(0, rows, BANNED)
        scores.index_put_((allowed_rows, allowed_columns), kept)
    if cells.forced:
        forced_rows, forced_columns = moved[13:]
        scores.index_fill_(0, forced_rows, BANNED)
        scores.index_put_((forced_rows, forced_columns), scores.new_zeros(()))
    return scores


def repeating(text: np.ndarray, size: int) -> np.ndarray:
    """The tokens that would make the last `size` of a text [T] stand in it twice, once each."""
    if len(text) < size:
        return text[:0]
    ngrams = np.lib.stride_tricks.sliding_window_view(text, size)
    again = (ngrams[:, :-1] == text[len(text) - size + 1 :]).all(1)
    return np.unique(ngrams[again, -1])


def _forced(params: SamplingParams, num_generated: int) -> int | None:
    """The only token that may follow so many generated ones, if there is one."""
    if params.forced_eos_token_id is not None and num_generated == params.max_tokens - 1:
        return params.forced_eos_token_id
    return params.forced_bos_token_id if num_generated == 0 else None
