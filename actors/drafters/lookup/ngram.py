"""`drafter=ngram`: prompt lookup. The draft is what followed the last occurrence of the current n-gram.

No model, no device. Each request has a table from n-grams to the place where they last ended, extended token by token,
so a proposal costs a few dictionary look-ups whatever the length of the text. The longest matching n-gram decides, and
of it the latest occurrence. Source: Saxena, "Prompt Lookup Decoding" (2023).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Annotated

from actors.drafters.config import DraftSetup, PlacedDrafterConfig
from actors.drafters.interface import Capabilities, Context, Draft, RequestwiseDrafter
from actors.protocol.messages import TokenTree
from parallel.ranges import Range, require


@dataclass(frozen=True, slots=True)
class NgramDrafterConfig(PlacedDrafterConfig):
    """Prompt lookup: what followed the last occurrence of the current n-gram."""

    name: str = "ngram"
    num_draft_tokens: Annotated[int, Range(1, remedy="for none write drafter=none")] = 5
    """Draft tokens a round, at most."""
    max_ngram: Annotated[int, Range(1, cap=64)] = 4
    """Longest n-gram that is looked up, in tokens; the longest match wins. Every token is entered once per length."""
    min_ngram: Annotated[int, Range(1, cap=64)] = 2
    """Shortest n-gram whose continuation is drafted, in tokens."""
    is_chain = True

    def check_fields(self, where: str) -> None:
        longest = self.max_ngram
        require(longest >= self.min_ngram, f"{where}.max_ngram", longest, "must not be below drafter.min_ngram")

    def build(self, setup: DraftSetup) -> tuple[NgramDrafter, dict[str, object]]:
        return NgramDrafter(self), {}


@dataclass(slots=True)
class _NgramTable:
    """Where each n-gram of a text last ended before the current end; with every entry the one that it replaced."""

    sizes: range
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    _replaced: array[int] = field(default_factory=lambda: array("i"))  # by end and size; 0: the n-gram was new
    _token_ids: array[int] = field(default_factory=lambda: array("i"))  # the text that was entered: all but the last

    def extend(self, token_ids: list[int]) -> None:
        """Enter every n-gram that ends before the last token; what follows that one is not known yet."""
        for end in range(len(self._token_ids) + 1, len(token_ids)):
            self._token_ids.append(token_ids[end - 1])
            for size in self.sizes:
                if size <= end:
                    ngram = tuple(token_ids[end - size : end])
                    self._replaced.append(self.ends.get(ngram, 0))
                    self.ends[ngram] = end

    def truncate(self, length: int) -> None:
        """Undo the entries after the first `length` tokens of the text, the latest first."""
        while (end := len(self._token_ids)) >= max(1, length):
            for size in reversed(self.sizes):
                if size <= end:
                    ngram = tuple(self._token_ids[end - size : end])
                    if before := self._replaced.pop():
                        self.ends[ngram] = before
                    else:
                        del self.ends[ngram]
            self._token_ids.pop()


class NgramDrafter(RequestwiseDrafter):
    """Drafts a chain of the tokens that followed the current n-gram before."""

    def __init__(self, config: NgramDrafterConfig) -> None:
        self.capabilities = Capabilities(prefills=self, truncates=self)
        self._sizes = range(config.max_ngram, config.min_ngram - 1, -1)
        self._tables: dict[int, _NgramTable] = {}

    def open(self, context: Context) -> None:
        self._tables[context.request_id] = _NgramTable(self._sizes)

    def _read(self, context: Context) -> None:
        self._tables[context.request_id].extend(context.token_ids)

    def truncate(self, context: Context) -> None:
        self._tables[context.request_id].truncate(len(context.token_ids))

    def release(self, request_id: int) -> None:
        self._tables.pop(request_id)

    def _propose(self, context: Context, budget: int) -> Draft:
        table, tokens = self._tables[context.request_id], context.token_ids
        table.extend(tokens)
        for size in self._sizes:
            end = table.ends.get(tuple(tokens[-size:]))
            if end is not None:
                period = len(tokens) - end  # a copy that reaches the end of the text goes on with the draft itself
                draft = [tokens[end + i % period] for i in range(budget)]
                return Draft.chosen(TokenTree.chain(tokens[-1], draft))
        return Draft.nothing(context)
