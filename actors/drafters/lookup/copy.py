"""`drafter=copy`: copies from the prompt, a source or a reference, on from where the output last agreed with it.

Input-guided copying as in LLMA ("Inference with Reference", arXiv 2304.04487), for answers
that repeat much of their prompt in its order: edits, corrections, extracts, quotes. A request may bring a further
reference, such as the file that it asks to edit: it is a text behind the prompt, and copying starts at its beginning.
Where the target is an encoder-decoder, what its encoder reads takes the place of the prompt, and copying starts at its
beginning too: aggressive decoding ("Instantaneous Grammatical Error Correction with Shallow Aggressive Decoding", arXiv
2106.04970).
Reads no output but to find its place in the prompt, and knows nothing of models or other requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from actors.drafters.config import DraftSetup, PlacedDrafterConfig
from actors.drafters.interface import Capabilities, Context, Draft, RequestwiseDrafter
from actors.protocol.messages import NO_TOKEN, SamplingParams, TokenTree
from parallel.ranges import Range

_TRIGGER_LEN = 2


@dataclass(frozen=True, slots=True)
class CopyDrafterConfig(PlacedDrafterConfig):
    """Tokens that follow in the prompt, or in the request's reference, where the output last agreed with it."""

    name: str = "copy"
    """Set by the choice `drafter=`."""
    num_draft_tokens: Annotated[int, Range(1, remedy="for none write drafter=none")] = 10
    """Draft tokens a round, at most."""
    trigger_len: Annotated[int, Range(1)] = _TRIGGER_LEN
    """Last tokens of the output that a place of the prompt must agree with before copying starts there."""
    is_chain = True

    @property
    def copying_names(self) -> tuple[str, ...]:
        return (self.name,)

    def build(self, setup: DraftSetup) -> tuple[CopyDrafter, dict[str, object]]:
        return CopyDrafter(self.trigger_len), {}


class CopyDrafter(RequestwiseDrafter):
    """Keeps a place in the prompt, with the reference behind it, for each request.

    Entering a prompt takes time and memory linear in its length, once. A proposal takes time linear in the tokens
    committed since the last one and in the draft, whatever the lengths of prompt and output; only the search after a
    disagreement adds the logarithm of the number of places with the same trigger.
    """

    def __init__(self, trigger_len: int) -> None:
        self.capabilities = Capabilities(prefills=self, truncates=self)
        self._trigger_len = trigger_len
        self._requests: dict[int, _Copying] = {}

    def open(self, context: Context) -> None:
        """A request arrived; its prompt is entered in `prefill`, or at the first proposal if that comes earlier."""
        self._requests.pop(context.request_id, None)

    def _propose(self, context: Context, budget: int) -> Draft:
        """A chain of the prompt's next tokens, shorter than the budget where the prompt ends; empty without a place."""
        copying = self._read(context)
        tokens = copying.next_tokens(budget) if copying is not None else []
        return Draft.chosen(TokenTree.chain(context.token_ids[-1], tokens)) if tokens else Draft.nothing(context)

    def truncate(self, context: Context) -> None:
        """Provisional output was taken back: return to the place of that time."""
        copying = self._requests.get(context.request_id)
        if copying is not None:
            copying.cut(context)

    def release(self, request_id: int) -> None:
        self._requests.pop(request_id, None)

    def _read(self, context: Context) -> _Copying | None:
        """None until the prompt is whole, which comes in chunks where it is long."""
        if len(context.token_ids) < context.prompt_len:
            return None
        copying = self._requests.get(context.request_id)
        if copying is None:
            copying = self._requests[context.request_id] = _Copying(context, self._trigger_len)
        copying.read(context)
        return copying


class _Copying:
    """The place in what is copied, prompt (or source) and reference, after every length of one request's output.

    A place is a function of the text alone: reading an output token by token, in rounds, or again after a preemption
    gives the same places, and a cut forgets those of the tokens that were cut.
    """

    def __init__(self, context: Context, trigger_len: int) -> None:
        self._trigger_len = trigger_len
        before = context.source or context.prompt
        self._source = [*before, *context.reference]
        # trigger -> positions of the tokens that follow it in the source, ascending
        self._followers: dict[tuple[int, ...], list[int]] = {}
        # the last trigger of the source is left out, since nothing follows it there
        triggers = zip(*(self._source[start:-1] for start in range(trigger_len)), strict=False)
        for follower, trigger in enumerate(triggers, start=trigger_len):
            self._followers.setdefault(trigger, []).append(follower)
        # places[i]: after i output tokens. p >= 0: copy on from source[p]; ~p: disagreed with source[p], no other found
        first = 0 if context.source and not context.reference else len(before)
        self._places = [first if context.source or context.reference else ~first]

    def read(self, context: Context) -> None:
        """Find the places of the tokens that came since the last call."""
        token_ids, source = context.token_ids, self._source
        place = self._places[-1]
        for end in range(context.prompt_len + len(self._places), len(token_ids) + 1):
            if place >= 0 and source[place] == token_ids[end - 1]:
                place += 1
                if place == len(source):
                    place = self._search(context, end, place)
            else:
                place = self._search(context, end, max(place, ~place))
            self._places.append(place)

    @property
    def place(self) -> int:
        """Where the token to copy next is in the source; negative: nowhere."""
        return self._places[-1]

    def next_tokens(self, num: int) -> list[int]:
        """The tokens of the source at the last place, at most so many; none without a place."""
        place = self.place
        return self._source[place : place + num] if place >= 0 else []

    def cut(self, context: Context) -> None:
        """Forget the places behind the text."""
        del self._places[len(context.token_ids) - context.prompt_len + 1 :]

    def _search(self, context: Context, end: int, left: int) -> int:
        """The follower of the trigger that ends the first `end` tokens: the nearest at or after `left`, where copying
        stopped, since edits move forward; else the latest. `~left` if the source lacks the trigger."""
        start = end - self._trigger_len
        if start < context.prompt_len:
            return ~left
        followers = self._followers.get(tuple(context.token_ids[start:end]))
        if followers is None:
            return ~left
        nearest = bisect_left(followers, left)
        return followers[nearest] if nearest < len(followers) else followers[-1]


def num_followed(reference: Sequence[int], output: Sequence[int]) -> int:
    """Tokens of the reference that copying from it alone foresees in the output, each counted once.

    A function of the two texts, in linear time: it does not depend on whether or how drafts were made.
    """
    context = Context(0, 0, [NO_TOKEN], 1, SamplingParams(), reference=tuple(reference))
    copying, covered = _Copying(context, _TRIGGER_LEN), set[int]()
    for token in output:
        context.token_ids.append(token)
        if (place := copying.place) >= 0 and copying.next_tokens(1) == [token]:
            covered.add(place)
        copying.read(context)
    return len(covered)
