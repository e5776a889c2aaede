"""`drafter=maxgram`: copies from the longest match, and goes on by bigrams where the match ends.

Of the latest places where the last token stands, those survive whose preceding tokens agree furthest with the text's
end; the draft copies from the leftmost survivor. After the end of the text it goes on by bigrams: what last followed
each token in this request, or else in finished ones. A chain per token links its places, and candidates are compared in
strides, so a proposal costs the same after any text, periodic ones too. No model. This is the base drafter of Cascade
Speculative Drafting (arXiv 2312.11462), whose bigrams come from a corpus instead.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated

from actors.drafters.config import DraftSetup, PlacedDrafterConfig
from actors.drafters.interface import Capabilities, Context, Draft, RequestwiseDrafter
from actors.drafters.scoped import ScopedMemory, Share
from actors.protocol.messages import TokenTree
from parallel.ranges import Range

_LONGEST = 64
"""Tokens of agreement that are compared at most; in a periodic text the comparison would not end."""
_NOWHERE = -1
_MOST_BIGRAMS = 1 << 17
"""Bigrams of a full memory: one for each token of a vocabulary."""


@dataclass(frozen=True, slots=True)
class MaxgramDrafterConfig(PlacedDrafterConfig):
    """What followed the longest match of the text's end, then bigrams: it nearly always drafts. Base of cascades."""

    name: str = "maxgram"
    num_draft_tokens: Annotated[int, Range(1, remedy="for none write drafter=none")] = 5
    """Draft tokens a round, at most."""
    max_places: Annotated[int, Range(1)] = 64
    """Earlier occurrences of the last token that are compared, the latest first; bounds the time of a draft."""
    shared_bigrams: bool = True
    """Also use the bigrams of finished requests where a request has none of its own; false = requests share nothing."""
    share: Share = Share.client
    """client: finished requests of the same client; all: of any client, whose texts then show in acceptance."""
    is_chain = True

    def build(self, setup: DraftSetup) -> tuple[MaxgramDrafter, dict[str, object]]:
        return MaxgramDrafter(self), {}


@dataclass(slots=True)
class _TokenPlaces:
    """A request's text, with the latest place of each token and, for each place, the one before it of that token."""

    context: Context
    shared_len: int  # leading tokens whose bigrams were shared before the request came back
    tokens: array[int] = field(default_factory=lambda: array("i"))
    latest: dict[int, int] = field(default_factory=dict)
    before: array[int] = field(default_factory=lambda: array("i"))

    def extend(self) -> None:
        """Enter what the context has gained."""
        token_ids = self.context.token_ids
        for place in range(len(self.tokens), len(token_ids)):
            token = token_ids[place]
            self.tokens.append(token)
            self.before.append(self.latest.get(token, _NOWHERE))
            self.latest[token] = place

    def truncate(self, length: int) -> None:
        """Remove all but the first `length` tokens."""
        while len(self.tokens) > length:
            token, before = self.tokens.pop(), self.before.pop()
            if before == _NOWHERE:
                del self.latest[token]
            else:
                self.latest[token] = before

    def longest_match(self, max_places: int) -> int:
        """The leftmost place with the longest agreement before it, among the latest places of the last token."""
        tokens, last = self.tokens, len(self.tokens) - 1
        alive, place = [], self.before[last]
        while place != _NOWHERE and len(alive) < max_places:
            alive.append(place)
            place = self.before[place]
        # Strides double while a candidate agrees, then halve: a binary search for the exact length.
        length, stride, grows = 1, 1, True
        while len(alive) > 1 and stride and length < _LONGEST:
            reach = length + stride
            wanted = tokens[last + 1 - reach : last + 1 - length]
            starts = ((place, place + 1 - reach) for place in alive)
            longer = [place for place, start in starts if start >= 0 and tokens[start : start + stride] == wanted]
            if longer:
                alive, length = longer, reach
            grows = grows and bool(longer)
            stride = 2 * stride if grows else stride // 2
        return alive[-1] if alive else _NOWHERE

    def follower(self, token: int) -> int | None:
        """What last followed the token in this text."""
        place = self.latest.get(token, _NOWHERE)
        if place == len(self.tokens) - 1:
            place = self.before[place]
        return None if place == _NOWHERE else self.tokens[place + 1]


class MaxgramDrafter(RequestwiseDrafter):
    """Drafts a chain of the budget's length, shorter where no bigram is known."""

    def __init__(self, config: MaxgramDrafterConfig) -> None:
        self.capabilities = Capabilities(prefills=self, truncates=self)
        self._max_places = config.max_places
        self._shares = config.shared_bigrams
        self._texts: dict[int, _TokenPlaces] = {}
        # bigrams of finished requests
        self._next_of: ScopedMemory[dict[int, int]] = ScopedMemory(dict, config.share, len, _MOST_BIGRAMS)

    def open(self, context: Context) -> None:
        self._texts[context.request_id] = _TokenPlaces(context, context.readmitted_len)

    def _read(self, context: Context) -> None:
        self._texts[context.request_id].extend()

    def truncate(self, context: Context) -> None:
        self._texts[context.request_id].truncate(len(context.token_ids))

    def release(self, request_id: int) -> None:
        text = self._texts.pop(request_id)
        if self._shares:
            start, context = max(0, text.shared_len - 1), text.context
            self._next_of.of(context.scope).update(pairwise(context.token_ids[start : context.settled_len]))

    def _propose(self, context: Context, budget: int) -> Draft:
        text = self._texts[context.request_id]
        text.extend()
        place = text.longest_match(self._max_places)
        draft = [] if place == _NOWHERE else context.token_ids[place + 1 : place + 1 + budget]
        token, next_of = draft[-1] if draft else context.token_ids[-1], self._next_of.of(context.scope)
        while len(draft) < budget:
            own = text.follower(token)
            following = next_of.get(token) if own is None else own
            if following is None:
                break
            token = following
            draft.append(token)
        return Draft.chosen(TokenTree.chain(context.token_ids[-1], draft))
