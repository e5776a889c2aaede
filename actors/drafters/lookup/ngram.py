"""`drafter=ngram`: prompt lookup. What followed the last occurrence of the current n-gram is the draft.

No model, no device. Each request keeps a table from n-grams to where they last ended, extended token by token, so a
proposal costs a few dictionary look-ups whatever the length of the text. Source: Saxena, "Prompt Lookup Decoding"
(2023); the longest matching n-gram wins, the latest occurrence of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from actors.drafters.config import DrafterConfig, DraftSetup
from actors.drafters.interface import Context, Draft, IdleDrafter
from actors.protocol.messages import Commit, TokenTree
from actors.ranges import Range, require


@dataclass(frozen=True, slots=True)
class NgramDrafterConfig(DrafterConfig):
    """Prompt lookup: what followed the last occurrence of the current n-gram."""

    name: str = "ngram"
    """Set by the choice `drafter=`."""
    num_draft_tokens: Annotated[int, Range(1, remedy="for none write drafter=none")] = 5
    """Draft tokens a round, at most."""
    max_ngram: Annotated[int, Range(1, cap=64)] = 4
    """Longest n-gram that is looked up, in tokens; the longest match wins. Every token is entered once per length."""
    min_ngram: Annotated[int, Range(1, cap=64)] = 2
    """Shortest n-gram whose continuation is drafted, in tokens."""

    def check_fields(self, where: str) -> None:
        longest = self.max_ngram
        require(longest >= self.min_ngram, f"{where}.max_ngram", longest, "must not be below drafter.min_ngram")

    def build(self, setup: DraftSetup) -> tuple[NgramDrafter, dict[str, object]]:
        return NgramDrafter(self), {}


@dataclass(slots=True)
class _Table:
    """Where each n-gram of a text last ended, *before* its current end; every entry knows the one it replaced."""

    sizes: range
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    _replaced: array[int] = field(default_factory=lambda: array("i"))  # by end and size; 0: the n-gram was new
    _token_ids: array[int] = field(default_factory=lambda: array("i"))  # all that was entered, the text but its last

    def extend(self, token_ids: list[int]) -> None:
        """Enter every n-gram that ends before the last token; the last one has no continuation yet."""
        for end in range(len(self._token_ids) + 1, len(token_ids)):
            self._token_ids.append(token_ids[end - 1])
            for size in self.sizes:
                if size <= end:
                    ngram = tuple(token_ids[end - size : end])
                    self._replaced.append(self.ends.get(ngram, 0))
                    self.ends[ngram] = end

    def take_back(self, length: int) -> None:
        """Only the first `length` tokens of the text stand."""
        while (end := len(self._token_ids)) >= max(1, length):
            for size in reversed(self.sizes):
                if size <= end:
                    ngram = tuple(self._token_ids[end - size : end])
                    if before := self._replaced.pop():
                        self.ends[ngram] = before
                    else:
                        del self.ends[ngram]
            self._token_ids.pop()


class NgramDrafter(IdleDrafter):
    """A chain of the tokens that once followed the current n-gram."""

    def __init__(self, config: NgramDrafterConfig) -> None:
        self._sizes = range(config.max_ngram, config.min_ngram - 1, -1)
        self._tables: dict[int, _Table] = {}

    def open(self, context: Context) -> None:
        self._tables[context.request_id] = _Table(self._sizes)

    def prepare(self, contexts: Sequence[Context]) -> None:
        for context in contexts:
            self._tables[context.request_id].extend(context.token_ids)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        return [self._propose(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def observe(self, context: Context, commit: Commit) -> None:
        """Nothing to do: the table is extended from the text itself."""

    def truncate(self, context: Context) -> None:
        """Take entries back one by one: text that the level above tried out leaves no trace."""
        self._tables[context.request_id].take_back(len(context.token_ids))

    def release(self, request_id: int) -> None:
        self._tables.pop(request_id)

    def _propose(self, context: Context, budget: int) -> Draft:
        table, tokens = self._tables[context.request_id], context.token_ids
        table.extend(tokens)
        for size in self._sizes:
            end = table.ends.get(tuple(tokens[-size:]))
            if end is not None:
                # An occurrence close to the end repeats itself: read on through the draft.
                period = len(tokens) - end
                draft = [tokens[end + i % period] for i in range(budget)]
                return Draft.chosen(TokenTree.chain(tokens[-1], draft))
        return Draft.nothing(context)
