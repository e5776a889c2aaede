"""`drafter=maxgram`: the longest match wins, and something is said wherever a bigram is known.

Of the latest earlier places where the last token stands, those survive that agree furthest to the left; the leftmost
survivor is copied from. Behind its end the draft goes on by bigrams: what last followed each token in this request, or
else in finished ones. Places are found through a chain per token and compared in strides, so that a proposal costs the
same behind any text, periodic ones too. Base drafter of Cascade Speculative Drafting (arXiv 2312.11462), whose bigrams
come from a corpus instead. No model.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated

from actors.drafters.config import DrafterConfig, DraftSetup
from actors.drafters.interface import Context, Draft, IdleDrafter
from actors.protocol.messages import Commit, TokenTree
from actors.ranges import Range

_LONGEST = 64
"""Tokens of agreement behind which a longer one tells nothing more; in a periodic text they would never end."""
_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class MaxgramDrafterConfig(DrafterConfig):
    """What followed the longest match of the text's end, then bigrams: always says something. Base of cascades."""

    name: str = "maxgram"
    """Set by the choice `drafter=`."""
    num_draft_tokens: Annotated[int, Range(1, remedy="for none write drafter=none")] = 5
    """Draft tokens a round, at most."""
    max_places: Annotated[int, Range(1)] = 64
    """Earlier occurrences of the last token that are compared, the latest first; bounds the time of a draft."""
    shared_bigrams: bool = True
    """Also use the bigrams of finished requests where a request has none of its own; false = requests share nothing."""

    def build(self, setup: DraftSetup) -> tuple[MaxgramDrafter, dict[str, object]]:
        return MaxgramDrafter(self), {}


@dataclass(slots=True)
class _Text:
    """A request's text, and where its tokens stand: the latest place of each, and for every place the one before it."""

    context: Context
    shared_len: int  # of a request that comes back: what it left in the shared bigrams before
    tokens: array[int] = field(default_factory=lambda: array("i"))
    latest: dict[int, int] = field(default_factory=dict)
    before: array[int] = field(default_factory=lambda: array("i"))

    def extend(self) -> None:
        token_ids = self.context.token_ids
        for place in range(len(self.tokens), len(token_ids)):
            token = token_ids[place]
            self.tokens.append(token)
            self.before.append(self.latest.get(token, _NOWHERE))
            self.latest[token] = place

    def take_back(self, length: int) -> None:
        """Only the first `length` tokens of the text stand."""
        while len(self.tokens) > length:
            token, before = self.tokens.pop(), self.before.pop()
            if before == _NOWHERE:
                del self.latest[token]
            else:
                self.latest[token] = before

    def survivor(self, max_places: int) -> int:
        """The leftmost of the latest places of the last token behind which most tokens agree."""
        tokens, last = self.tokens, len(self.tokens) - 1
        alive, place = [], self.before[last]
        while place != _NOWHERE and len(alive) < max_places:
            alive.append(place)
            place = self.before[place]
        length, stride, grows = 1, 1, True  # strides double while somebody agrees, then halve: the exact length
        while len(alive) > 1 and stride and length < _LONGEST:
            reach = length + stride
            wanted = tokens[last + 1 - reach : last + 1 - length]
            behind = ((place, place + 1 - reach) for place in alive)
            longer = [place for place, start in behind if start >= 0 and tokens[start : start + stride] == wanted]
            if longer:
                alive, length = longer, reach
            grows = grows and bool(longer)
            stride = 2 * stride if grows else stride // 2
        return alive[-1] if alive else _NOWHERE

    def follower(self, token: int) -> int | None:
        """What last followed it here."""
        place = self.latest.get(token, _NOWHERE)
        if place == len(self.tokens) - 1:
            place = self.before[place]
        return None if place == _NOWHERE else self.tokens[place + 1]


class MaxgramDrafter(IdleDrafter):
    """A chain as long as it is asked to be, cut where not even a bigram is known."""

    def __init__(self, config: MaxgramDrafterConfig) -> None:
        self._max_places = config.max_places
        self._shares = config.shared_bigrams
        self._texts: dict[int, _Text] = {}
        self._next_of: dict[int, int] = {}

    def open(self, context: Context) -> None:
        self._texts[context.request_id] = _Text(context, context.num_returned)

    def prepare(self, contexts: Sequence[Context]) -> None:
        for context in contexts:
            self._texts[context.request_id].extend()

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        return [self._propose(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def observe(self, context: Context, commit: Commit) -> None:
        """Nothing to do: places are read off the text itself."""

    def truncate(self, context: Context) -> None:
        self._texts[context.request_id].take_back(len(context.token_ids))

    def release(self, request_id: int) -> None:
        text = self._texts.pop(request_id)
        if self._shares:
            start, context = max(0, text.shared_len - 1), text.context
            self._next_of.update(pairwise(context.token_ids[start : context.settled_len]))

    def _propose(self, context: Context, budget: int) -> Draft:
        text = self._texts[context.request_id]
        text.extend()
        place = text.survivor(self._max_places)
        draft = [] if place == _NOWHERE else context.token_ids[place + 1 : place + 1 + budget]
        token = draft[-1] if draft else context.token_ids[-1]
        while len(draft) < budget:
            following = text.follower(token)
            token = self._next_of.get(token) if following is None else following
            if token is None:
                break
            draft.append(token)
        return Draft.chosen(TokenTree.chain(context.token_ids[-1], draft))
