"""A model that reads whole texts beside the engine: logits behind the rows a check asks for, in any shape of pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel.comm.group import SINGLE
from parallel.runtime.kv_sizing import choose_dtype
from parallel.runtime.runner import Span, open_model

_TEXT = "text"


class Reader:
    """One rank of its own, in the dtype the engine uses; texts and children together hold at most `num_slots` rows."""

    def __init__(self, path: str, device: str, dtype: str, num_slots: int, stretch: int = 0) -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = choose_dtype(dtype, device)
        self._runner = open_model(path, SINGLE, device, self.dtype, num_slots, stretch=stretch)

    @property
    def vocab_size(self) -> int:
        return self._runner.config.vocab_size

    def behind(self, token_ids: Sequence[int], children: Sequence[int] = ()) -> Tensor:
        """Logits behind the text and behind the text with each child, [1 + C, V] on the host, in one pass."""
        root = len(token_ids) - 1
        parents = [*range(-1, root), *[root] * len(children)]
        span = Span(_TEXT, len(parents), parents, 1 + len(children))
        return self._read([(span, [*token_ids, *children])])

    def in_one_pass(self, token_ids: Sequence[int], start: int) -> Tensor:
        """Logits [n, V] that chose each of `token_ids[start:]`, all rows fed together."""
        fed = list(token_ids[:-1])
        return self._read([(Span(_TEXT, len(fed), num_logits=len(token_ids) - start), fed)])

    def row_by_row(self, token_ids: Sequence[int], start: int) -> Tensor:
        """The same as plain decoding computes it: the text up to `start`, then one row a pass."""
        passes = [(Span(_TEXT, start), list(token_ids[:start]))]
        passes += [(Span(_TEXT, 1), [token]) for token in token_ids[start:-1]]
        return self._read(passes)

    def _read(self, passes: Sequence[tuple[Span, list[int]]]) -> Tensor:
        self._runner.open(_TEXT)
        try:
            logits = []
            for span, token_ids in passes:
                logits.append(self._runner.forward([span], token_ids).logits.cpu())
                if len(passes) > 1:
                    self._runner.commit(_TEXT, range(len(token_ids)))
            return torch.cat(logits)
        finally:
            self._runner.close(_TEXT)
