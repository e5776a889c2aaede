"""Prompts that are cut to a number of tokens: which of them are kept.

It must not know requests or the context of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Encoding


@dataclass(frozen=True, slots=True)
class Truncation:
    """Keeps `most` tokens: the last ones, or with `keeps_start` the first."""

    most: int
    keeps_start: bool = False

    def of_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """Those of a prompt that came as tokens."""
        return list(token_ids[: self.most] if self.keeps_start else token_ids[-self.most :])

    def of_text(self, encoding: Encoding) -> list[int]:
        """Those of a text: the ones that the tokenizer added before and behind it, and as many of its own as fit beside
        them. `Encoding.truncate` would keep all others in as many records as fit."""
        token_ids, added = encoding.ids, encoding.special_tokens_mask
        start, end = 0, len(token_ids)
        while start < end and added[start]:
            start += 1
        while start < end and added[end - 1]:
            end -= 1
        room = max(0, self.most - (start + len(token_ids) - end))
        own = token_ids[start : min(end, start + room)] if self.keeps_start else token_ids[max(start, end - room) : end]
        return self.of_tokens([*token_ids[:start], *own, *token_ids[end:]])
