"""One stream of all tokens of several sources, and rows cut from it. Knows no models and no training."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tokenizers import Tokenizer

from cluster.tools.training.corpus import Source

END_OF_TEXT_ID = 0
"""The bundled tokenizer's token that separates sources, ends a generation and pads a batch."""


def pack(tokenizer: Tokenizer, sources: Iterable[Source]) -> torch.Tensor:
    """Return one int64 stream of all sources' tokens, each source preceded by the end-of-text token."""
    stream: list[int] = []
    for encoding in tokenizer.encode_batch([source.text for source in sources]):
        stream.append(END_OF_TEXT_ID)
        stream.extend(encoding.ids)
    return torch.tensor(stream, dtype=torch.long)


def spread_rows(stream: torch.Tensor, length: int, num_tokens: int) -> torch.Tensor:
    """Return about `num_tokens` tokens of a stream as rows of `length` + 1, evenly spread over it."""
    starts = torch.arange(0, len(stream) - length, length)
    keep = max(1, min(len(starts), num_tokens // length))
    chosen = starts[torch.linspace(0, len(starts) - 1, keep).long()]
    return stream[chosen[:, None] + torch.arange(length + 1)]
