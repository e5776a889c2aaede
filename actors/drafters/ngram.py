"""`drafter=ngram`: prompt lookup. What followed the last occurrence of the current n-gram is the draft.

No model, no device. Each request keeps a table from n-grams to where they last ended, extended token by token, so a
proposal costs a few dictionary look-ups whatever the length of the text. Source: Saxena, "Prompt Lookup Decoding"
(2023); the longest matching n-gram wins, the latest occurrence of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.drafter import Context, Draft, IdleDrafter
from actors.messages import Commit, TokenTree
from actors.options import NgramDrafterConfig


@dataclass(slots=True)
class _Table:
    """Where each n-gram of a request's text last ended, *before* its current end."""

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    indexed_len: int = 0


class NgramDrafter(IdleDrafter):
    """A chain of the tokens that once followed the current n-gram."""

    def __init__(self, config: NgramDrafterConfig) -> None:
        self._sizes = range(config.max_ngram, config.min_ngram - 1, -1)
        self._tables: dict[int, _Table] = {}

    def open(self, context: Context) -> None:
        self._tables[context.request_id] = _Table()

    def prepare(self, contexts: Sequence[Context]) -> None:
        for context in contexts:
            self._index(context)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        return [self._propose(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def observe(self, context: Context, commit: Commit) -> None:
        """Nothing to do: the table is extended from the text itself."""

    def truncate(self, context: Context) -> None:
        """Entries from text that was taken back stay until they are met: `_end` looks whether they still hold."""
        table = self._tables[context.request_id]
        table.indexed_len = min(table.indexed_len, len(context.token_ids))

    def release(self, request_id: int) -> None:
        self._tables.pop(request_id)

    def _propose(self, context: Context, budget: int) -> Draft:
        self._index(context)
        tokens, ends = context.token_ids, self._tables[context.request_id].ends
        for size in self._sizes:
            end = _end(tokens, size, ends)
            if end is not None:
                # An occurrence close to the end repeats itself: read on through the draft.
                period = len(tokens) - end
                draft = [tokens[end + i % period] for i in range(budget)]
                return Draft.chosen(TokenTree.chain(tokens[-1], draft))
        return Draft.nothing(context)

    def _index(self, context: Context) -> None:
        """Enter every n-gram that ends before the last token; the last one has no continuation yet."""
        table, tokens = self._tables[context.request_id], context.token_ids
        for end in range(max(1, table.indexed_len), len(tokens)):
            for size in self._sizes:
                if size <= end:
                    table.ends[tuple(tokens[end - size : end])] = end
        table.indexed_len = len(tokens)


def _end(tokens: list[int], size: int, ends: dict[tuple[int, ...], int]) -> int | None:
    """Where the last `size` tokens ended before, if they did."""
    ngram = tuple(tokens[-size:])
    end = ends.get(ngram) if size <= len(tokens) else None
    return end if end is not None and end < len(tokens) and tuple(tokens[end - size : end]) == ngram else None
