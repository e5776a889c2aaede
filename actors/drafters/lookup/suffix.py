"""`drafter=suffix`: the draft is what followed the longest suffix of the text that occurred before.

No model, no device. Sources are the request's own text, the answers of finished requests and an optional corpus. Each
is a suffix automaton, and a match follows the text in it token by token, so a proposal costs the same after ten tokens
and after ten thousand. The longer the match, the longer the draft; a draft ends early where followers disagree. The
source with the most expected tokens drafts (SuffixDecoding, arXiv 2411.04975).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Annotated

from actors.drafters.config import DraftSetup
from actors.drafters.corpus import CorpusDrafterConfig
from actors.drafters.interface import Capabilities, Context, Draft, RequestwiseDrafter
from actors.drafters.lookup.suffix_automaton import Automaton, suffix_automaton
from actors.drafters.scoped import ScopedMemory, Share
from actors.protocol.messages import TokenTree
from parallel.ranges import Range

_REACH = 32
"""Latest tokens with which a match in another text is looked for."""

MOST_UNREAD = 4096
"""Tokens of finished requests' answers that wait for a draft to be read, a single longer answer excepted: 2 ms, and 20
times as much on a machine without kernels."""

_ROOM = 64
"""Tokens that take as much memory as a history without any."""

_REVOCABLE = 32
"""Tokens that an automaton can take back once any were taken back; doubled whenever that was too few."""


@dataclass(frozen=True, slots=True)
class SuffixDrafterConfig(CorpusDrafterConfig):
    """Suffix lookup: what followed the longest match in this request's text, in others' answers and in a corpus."""

    name: str = "suffix"
    num_draft_tokens: Annotated[int, Range(1, remedy="for none write drafter=none")] = 8
    """Draft tokens a round, at most."""
    min_match: Annotated[int, Range(1)] = 2
    """Shortest match whose continuation is drafted, in tokens."""
    tokens_per_match: Annotated[float, Range(above=0)] = 2.0
    """Draft tokens for every matched token: the longer the match, the longer the draft."""
    min_probability: Annotated[float, Range(0, 1)] = 0.1
    """A draft ends where the share of matches that continue along its path falls below this."""
    width: Annotated[int, Range(1)] = 1
    """Children per node, the likeliest continuations first; 1 = a chain."""
    shared_tokens: Annotated[int, Range(0, zero="requests share nothing")] = 250_000
    """Tokens of finished requests' answers to draft from, the oldest dropped first; 0 = requests share nothing."""
    share: Share = Share.client
    """client: answers to the same client; all: to any client, whose answers then show in acceptance."""

    @property
    def is_chain(self) -> bool:
        return self.width == 1

    def build(self, setup: DraftSetup) -> tuple[SuffixDrafter, dict[str, object]]:
        corpus = self.documents()
        return SuffixDrafter(self, corpus), {"corpus_tokens": sum(map(len, corpus))}


@dataclass(slots=True)
class _Match:
    """The match of a request's text in an automaton of another text."""

    state: int = 0
    matched: int = 0
    read_len: int = 0  # tokens of the request's text that were read
    num_tokens: int = -1  # size of the automaton then: one that has grown is matched anew


@dataclass(slots=True)
class _RequestText:
    """A request's text as an automaton, and its matches in the other automata."""

    context: Context
    own: Automaton
    shared_len: int  # leading tokens that are not shared again: the prompt, or the text before the request came back
    matches: dict[Automaton, _Match] = field(default_factory=dict)


@dataclass(slots=True)
class History:
    """Answers of finished requests, at most `capacity` tokens in two generations; the older is dropped as a whole.

    An answer is read once it is drafted from: reading takes microseconds a token, which is lost if nothing is drafted.
    Of what was not read the latest `MOST_UNREAD` tokens are kept, so that the first draft does not wait for long.
    """

    capacity: int
    _generations: list[Automaton] = field(default_factory=list)
    _unread: deque[Sequence[int]] = field(default_factory=deque)
    _num_unread: int = 0

    def add(self, token_ids: Sequence[int]) -> None:
        """Keep the end of an answer, at most half the capacity."""
        if not (half := self.capacity // 2):
            return
        self._unread.append(token_ids[-half:])
        self._num_unread += len(self._unread[-1])
        while self._num_unread > MOST_UNREAD and len(self._unread) > 1:
            self._num_unread -= len(self._unread.popleft())

    @property
    def num_tokens(self) -> int:
        return self._num_unread + sum([one.num_tokens for one in self._generations])

    @property
    def generations(self) -> list[Automaton]:
        """The newer one first."""
        while self._unread:
            self._read(self._unread.popleft())
        self._num_unread = 0
        return self._generations

    def _read(self, token_ids: Sequence[int]) -> None:
        if not self._generations or self._generations[0].num_tokens + len(token_ids) > self.capacity // 2:
            self._generations = [suffix_automaton(), *self._generations[:1]]
        self._generations[0].add_text(token_ids)


class SuffixDrafter(RequestwiseDrafter):
    """Drafts a chain, or a small tree, of what followed the longest match."""

    def __init__(self, config: SuffixDrafterConfig, corpus: Sequence[Sequence[int]] = ()) -> None:
        self.capabilities = Capabilities(prefills=self, truncates=self)
        self._config = config
        self._texts: dict[int, _RequestText] = {}
        full = config.shared_tokens
        self._histories = ScopedMemory(lambda: History(full), config.share, lambda one: _ROOM + one.num_tokens, full)
        self._num_revocable = 0
        self._corpus = suffix_automaton()
        for token_ids in corpus:
            self._corpus.add_text(token_ids)

    def open(self, context: Context) -> None:
        own = suffix_automaton(self._num_revocable)
        self._texts[context.request_id] = _RequestText(context, own, context.readmitted_len or context.prompt_len)

    def truncate(self, context: Context) -> None:
        """Take tokens back; an automaton that cannot go back so far is built again, with a longer memory."""
        text = self._texts[context.request_id]
        if not text.own.take_back(max(0, text.own.num_tokens - len(context.token_ids))):
            self._num_revocable = max(_REVOCABLE, 2 * self._num_revocable)
            text.own = suffix_automaton(self._num_revocable)
        text.matches = {}

    def release(self, request_id: int) -> None:
        text = self._texts.pop(request_id)
        settled = text.context.token_ids[: text.context.settled_len]
        if len(settled) > text.shared_len:
            self._histories.of(text.context.scope).add(settled[max(0, text.shared_len - _REACH) :])

    def _propose(self, context: Context, budget: int) -> Draft:
        config, text = self._config, self._read(context)
        best, best_score = None, 0.0
        for matched, source, state in self._matches(text):
            length = min(budget, int(config.tokens_per_match * matched))
            if matched < config.min_match or length <= best_score:  # `length` bounds the expected tokens
                continue
            token_ids, parents, score = source.likeliest(state, length, config.width, config.min_probability)
            if score > best_score:
                best_score = score
                best = TokenTree((context.token_ids[-1], *token_ids), (-1, *parents))
        return Draft.nothing(context) if best is None else Draft.chosen(best)

    def _matches(self, text: _RequestText) -> list[tuple[int, Automaton, int]]:
        """(length, source, state) of the match in every source, the longest first; of equals the own text first."""
        state, matched = text.own.match
        matches = [(matched, text.own, state)]
        matches += [(match.matched, source, match.state) for source, match in text.matches.items()]
        return sorted(matches, key=itemgetter(0), reverse=True)

    def _read(self, context: Context) -> _RequestText:
        """Bring the request's automaton and its matches in the others up to the text."""
        text, token_ids = self._texts[context.request_id], context.token_ids
        if text.own.num_tokens < len(token_ids):
            text.own.extend(token_ids[text.own.num_tokens :])
        generations = self._histories.of(context.scope).generations
        sources = [source for source in (*generations, self._corpus) if source.num_tokens]
        text.matches = {source: text.matches.get(source) or _Match() for source in sources}
        for source, match in text.matches.items():
            if match.num_tokens != source.num_tokens or len(token_ids) - match.read_len > _REACH:
                match.state = match.matched = 0
                match.read_len, match.num_tokens = max(0, len(token_ids) - _REACH), source.num_tokens
            if match.read_len < len(token_ids):
                match.state, match.matched = source.read(match.state, match.matched, token_ids[match.read_len :])
                match.read_len = len(token_ids)
        return text
