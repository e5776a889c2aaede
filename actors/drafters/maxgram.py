"""`drafter=maxgram`: the longest match wins, however long, and something is always said.

Of all earlier places where the last token stands, those survive that agree furthest to the left; the leftmost survivor
is copied from. Behind its end the draft goes on by bigrams: what last followed each token in any text seen so far.
Base drafter of Cascade Speculative Drafting (arXiv 2312.11462), whose bigrams come from a corpus instead. No model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.drafter import Context, Draft, IdleDrafter
from actors.messages import Commit, TokenTree
from actors.options import MaxgramDrafterConfig


@dataclass(slots=True)
class _Places:
    """Where each token of a request's text stands, up to `indexed_len`."""

    of_token: dict[int, list[int]] = field(default_factory=dict)
    indexed_len: int = 0


class MaxgramDrafter(IdleDrafter):
    """A chain as long as it is asked to be, cut where not even a bigram is known."""

    def __init__(self, config: MaxgramDrafterConfig) -> None:
        self._max_places = config.max_places
        self._places: dict[int, _Places] = {}
        self._next_of: dict[int, int] = {}

    def open(self, context: Context) -> None:
        self._places[context.request_id] = _Places()

    def prepare(self, contexts: Sequence[Context]) -> None:
        for context in contexts:
            self._index(context)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        return [self._propose(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def observe(self, context: Context, commit: Commit) -> None:
        """Nothing to do: places are read off the text itself."""

    def truncate(self, context: Context) -> None:
        """Places in text that was taken back are forgotten where they are met."""
        places = self._places[context.request_id]
        places.indexed_len = min(places.indexed_len, len(context.token_ids))

    def release(self, request_id: int) -> None:
        del self._places[request_id]

    def _propose(self, context: Context, budget: int) -> Draft:
        self._index(context)
        tokens = context.token_ids
        draft = self._copy(tokens, self._survivor(tokens, self._places[context.request_id]), budget)
        while len(draft) < budget:
            following = self._next_of.get((draft or tokens)[-1])
            if following is None:
                break
            draft.append(following)
        return Draft.chosen(TokenTree.chain(tokens[-1], draft))

    def _survivor(self, tokens: list[int], places: _Places) -> int | None:
        """The leftmost of the earlier places of the last token behind which most tokens agree."""
        last = len(tokens) - 1
        alive = [at for at in places.of_token.get(tokens[last], ()) if at < last and tokens[at] == tokens[last]]
        alive, length = alive[-self._max_places :], 1
        while len(alive) > 1:
            longer = [place for place in alive if place >= length and tokens[place - length] == tokens[last - length]]
            if not longer:
                break
            alive, length = longer, length + 1
        return alive[0] if alive else None

    @staticmethod
    def _copy(tokens: list[int], place: int | None, budget: int) -> list[int]:
        return [] if place is None else tokens[place + 1 : place + 1 + budget]

    def _index(self, context: Context) -> None:
        places, tokens = self._places[context.request_id], context.token_ids
        for place in range(places.indexed_len, len(tokens)):
            known = places.of_token.setdefault(tokens[place], [])
            while known and known[-1] >= place:
                known.pop()  # it stood in text that was taken back
            known.append(place)
            if place:
                self._next_of[tokens[place - 1]] = tokens[place]
        places.indexed_len = len(tokens)
