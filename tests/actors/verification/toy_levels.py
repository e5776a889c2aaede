"""A model whose law is a function of the text, behind the runner's interface: what cascades are enumerated over."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from parallel.runner import Output


class ToyRunner:
    """Rows are tokens of one sequence; the logits behind a row are the logarithm of a law of the text up to it."""

    decoder = SimpleNamespace(group=SimpleNamespace(size=1))

    def __init__(self, law, vocab_size: int, prompt_len: int) -> None:
        self.config = SimpleNamespace(max_positions=99, vocab_size=vocab_size)
        self._law = law
        self._prompt_len = prompt_len
        self._kept: list[int] = []
        self._pending: list[tuple[int, int]] = []

    def open(self, seq_id) -> None:
        self._kept, self._pending = [], []

    def close(self, seq_id) -> None:
        self._kept, self._pending = [], []

    def can_reserve(self, num_rows: int) -> bool:
        return True

    def cached_len(self, seq_id) -> int:
        return len(self._kept)

    def truncate(self, seq_id, length: int) -> None:
        assert length <= len(self._kept)
        self._kept, self._pending = self._kept[:length], []

    def commit(self, seq_id, keep) -> None:
        self._kept += [self._pending[row][0] for row in keep]
        self._pending = []

    def forward(self, spans, token_ids) -> Output:
        (span,) = spans
        parents = span.parents if span.parents is not None else range(-1, span.num_tokens - 1)
        self._pending = list(zip(token_ids, parents, strict=True))
        rows = [self._law(tuple(self._text(row)[self._prompt_len :])) for row in range(len(token_ids))]
        logits = torch.tensor(np.log(np.maximum(rows, 1e-300)), dtype=torch.float64)
        return Output(logits[len(rows) - span.num_logits :], logits, ())

    def _text(self, row: int) -> list[int]:
        path = []
        while row >= 0:
            token, row = self._pending[row]
            path.append(token)
        return self._kept + path[::-1]
