"""One request at the coordinator: committed tokens, a few lengths, and the draft for its present prefix.

Only `commit` changes the text. Knows nothing of models, drafters or sockets.

    token_ids   [ prompt ............ | generated ........ root ]
    cached_len  [ rows the target holds .............. ]        scheduling is arithmetic on these lengths
    prefix_len  [ everything committed ....................... ]
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from actors.protocol.messages import (
    HASH_SEED,
    Commit,
    DraftPreview,
    Proposal,
    Request,
    RequestStats,
    Tokens,
    Verdict,
    extend_hash,
)

if TYPE_CHECKING:
    from actors.coordinator.request_logprobs import RequestLogprobs
    from actors.protocol.draft_tree import PreviewTree

ENTRIES_PER_PLACE = 64
"""Biases, bad words and allowed tokens whose cost, in every role and pass, is about that of one more request."""
AGEING_S = 10.0
"""Seconds of waiting that make up for a priority that is worse by one: none waits without end."""
LONGER_S = 0.01
"""Seconds of waiting that make up for one expected token less, about what a token of a batch takes."""
BLOCK = 64
"""Tokens with a digest of their own, about as many rows as a pass costs by itself."""
PROBATION = 3
"""Verdicts: the first passes after a failure read the text again, without a draft."""


@dataclass
class SpeculationCounts:
    """Verdicts on drafts that are not empty, of one request or of all; names as in vLLM's metrics."""

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    """Rounds that accepted 0, 1, 2, ... draft tokens."""

    def add_verdict(self, num_draft_tokens: int, num_accepted: int) -> None:
        """So many tokens of a draft were committed."""
        self.num_spec_steps += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted
        histogram = self.acceptance_histogram
        if num_accepted >= len(histogram):
            histogram.extend([0] * (num_accepted + 1 - len(histogram)))
        histogram[num_accepted] += 1


@dataclass(slots=True)
class DraftState:
    """The draft for a sequence's present prefix; each commit starts a new one.

    `is_answered`: the drafter answered the order, with a draft or without. `prepared` are the drafts of a preview for
    this prefix, until one of them is ordered.
    """

    num_ordered: int = 0
    is_answered: bool = False
    proposal: Proposal | None = None
    prepared: PreviewTree | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable state of one request, waiting or running."""

    request: Request
    max_len: int  # committed tokens at which the request ends: its own limit or the model's context
    token_ids: list[int] = field(default_factory=list)
    end_token_ids: frozenset[int] = frozenset()  # it ends with the first of them
    request_id: int = field(init=False)
    prompt_len: int = field(init=False)
    source_len: int = field(init=False)
    speculates: bool = field(init=False)
    is_sampled: bool = field(init=False)  # and not greedy
    prefix_hash: int = HASH_SEED
    epoch: int = 0
    cached_len: int = 0
    reserved_len: int = 0  # tokens of the whole text, where the target has rows for all of them from the start
    finish_reason: str | None = None
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    num_preemptions: int = 0
    num_admissions: int = 0  # `Admit` records sent to roles, so that each has a number of its own
    num_failures: int = 0  # passes with it that raised
    probation: int = 0  # verdicts that it has yet to get in passes of its own, after such a failure
    arrived_at: float = 0.0  # times are set by the coordinator, which has the clock
    admitted_at: float | None = None
    first_token_at: float | None = None
    draft: DraftState = field(default_factory=DraftState)
    preview: PreviewTree | None = None
    """Drafts for the outcomes of the outstanding verdict."""
    is_being_read: bool = False
    """The drafter reads this text; drafts of it are not waited for."""
    exported_len: int | None = None
    """Leading positions whose hidden states the target has sent to the drafter; None: not all from the first on."""
    num_unread: int = 0
    """Committed tokens since the drafter last drafted for this request or read its text."""
    shares_rows: bool = False
    """The roles may have KV rows of its text from other requests."""
    may_hit: bool = False
    """Whether the target may have rows of it that the coordinator does not know of: until it answers for the first time
    since its admission, and so says how many it had."""
    num_cached_tokens: int | None = None
    """Tokens of the prompt whose rows the target had at the first admission; None before."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(generated tokens before, version of the weights) where the version changed, as of `Tokens`."""
    logprobs: RequestLogprobs | None = field(init=False, default=None)
    """None for a request that asks for none."""
    _digests: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.request.logprobs is not None or self.request.prompt_logprobs is not None:
            from actors.coordinator.request_logprobs import RequestLogprobs  # few requests ask for any

            self.logprobs = RequestLogprobs(self.request)
        self.request_id, self.prompt_len = self.request.request_id, len(self.request.prompt)
        self.source_len = len(self.request.source)
        self.speculates, self.is_sampled = self.request.speculates, self.request.sampling.temperature > 0

    @staticmethod
    def start(request: Request, max_model_len: int, eos_token_ids: Collection[int] = ()) -> Sequence:
        sampling = request.sampling
        max_len = min(len(request.prompt) + sampling.max_tokens, max_model_len)
        ends = frozenset((*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)))
        sequence = Sequence(request, max_len, [*request.prompt, *request.generated], ends)
        sequence.prefix_hash = extend_hash(HASH_SEED, sequence.token_ids)
        # an earlier coordinator counted from fewer generated tokens: no number repeats
        sequence.num_admissions = len(request.generated) << 16
        return sequence

    @property
    def due(self) -> float:
        """The time as whose arrival it is served among the requests of its client."""
        expected = min(self.request.expected_tokens, self.request.sampling.max_tokens)
        return self.arrived_at + AGEING_S * self.request.priority - LONGER_S * expected

    @property
    def reads_text(self) -> bool:
        """Whether more than its root has to be read before it decodes."""
        return len(self.token_ids) - self.cached_len > 1 or self.reads_source

    @property
    def reads_source(self) -> bool:
        """Whether its next pass reads the source first, all of it."""
        return self.source_len > 0 and not self.cached_len

    @property
    def num_rows(self) -> int:
        """Slots that it has while it runs; those of its source from its admission on."""
        return max(self.cached_len, self.reserved_len) + self.source_len

    @property
    def prefix_len(self) -> int:
        return len(self.token_ids)

    @property
    def prefix(self) -> tuple[int, int, int, int]:
        """What a proposal for the present text assumes: its first fields."""
        return self.request_id, self.epoch, len(self.token_ids), self.prefix_hash

    @property
    def uncached_len(self) -> int:
        """Committed tokens that the target has to be fed; 1 if it only lacks the root."""
        return len(self.token_ids) - self.cached_len

    @property
    def block_digests(self) -> list[int]:
        """One for the text up to the end of each whole block; each is made once. Texts with equal ones begin alike, but
        for chance."""
        digests = self._digests
        for start in range(BLOCK * len(digests), len(self.token_ids) - BLOCK + 1, BLOCK):
            block = self.token_ids[start : start + BLOCK]
            digests.append(hash((digests[-1] if digests else 0, *block)))
        return digests

    def found(self, num_rows: int) -> None:
        """The target had so many rows when it was admitted, and fed what `cached_len` counts after them."""
        self.may_hit = False
        self.cached_len = min(self.cached_len + num_rows, self.prefix_len - 1)

    @property
    def weight(self) -> int:
        """Places in the batch that it counts for its client while several have requests."""
        sampling = self.request.sampling
        entries = sampling.logit_bias, sampling.bad_words, sampling.allowed_token_ids
        return 1 + sum(map(len, entries)) // ENTRIES_PER_PLACE

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens that the request may still get."""
        return self.max_len - len(self.token_ids)

    @property
    def most_draft_tokens(self) -> int:
        """Draft tokens that are of use to it, within its own bound: the target adds a token after the path, so the last
        one that remains is never worth drafting."""
        of_use, most = self.max_len - len(self.token_ids) - 1, self.request.num_draft_tokens
        if most is not None and most < of_use:
            return most
        return of_use if of_use > 0 else 0

    def is_current(self, proposal: Proposal | DraftPreview) -> bool:
        """Whether it assumes exactly the present prefix; if not, it is stale."""
        return (
            proposal.epoch == self.epoch
            and proposal.prefix_len == len(self.token_ids)
            and proposal.prefix_hash == self.prefix_hash
            and proposal.tree.token_ids[0] == self.token_ids[-1]
        )

    def commit(self, verdict: Verdict, proposal: Proposal | None) -> Commit:
        """Append the verdict's tokens, cut behind the first that ends the request and at its greatest length.

        If none can follow them, and none of them has ended the request, it ends with an error. Returns the record to
        send to the roles; sets `finish_reason` if the request ends here.
        """
        prefix_len, path, num_draft_tokens = len(self.token_ids), verdict.path, 0
        assert (verdict.epoch, verdict.prefix_len) == (self.epoch, prefix_len)
        emitted = [*verdict.token_ids]
        if proposal is not None:
            drafted = proposal.tree.token_ids
            num_draft_tokens = len(drafted) - 1
            emitted[:0] = map(drafted.__getitem__, path)
        if len(emitted) >= self.max_len - prefix_len:
            del emitted[self.max_len - prefix_len :]
            self.finish_reason = "length"
        if not self.end_token_ids.isdisjoint(emitted):
            first = next(place for place, token in enumerate(emitted) if token in self.end_token_ids)
            del emitted[first + 1 :]
            self.finish_reason = "stop"
        if verdict.none_follows and self.finish_reason is None:
            self.finish_reason = "error"
        if num_draft_tokens:
            self.counts.add_verdict(num_draft_tokens, min(len(path), len(emitted)))
        record = Commit(self.request_id, self.epoch, prefix_len, path, tuple(emitted))
        if self.probation:
            self.probation -= 1
        # without a token after the path, its last one is the root, to be fed again
        self.cached_len = prefix_len + len(path) - (not verdict.token_ids)
        self.token_ids.extend(emitted)
        self.prefix_hash = extend_hash(self.prefix_hash, emitted)
        return record

    def note_version(self, version: int) -> None:
        """The tokens that are committed next are of weights of this version."""
        if version != (self.versions[-1][1] if self.versions else 0):
            self.versions.append((self.num_generated, version))

    def versions_from(self, position: int) -> tuple[tuple[int, int], ...]:
        """Those of the generated tokens from this one on."""
        ends = [start for start, _ in self.versions[1:]] + [len(self.token_ids)]
        return tuple([one for one, end in zip(self.versions, ends, strict=False) if end > position])

    def tokens_since(self, num_generated: int) -> list[Tokens]:
        """The generated tokens after the first `num_generated`, for a client that asks again."""
        missed = tuple(self.token_ids[self.prompt_len + num_generated :])
        kept = self.logprobs
        if not missed or (kept is not None and not kept.can_resend(num_generated)):
            return []  # the client asked before it had more
        tokens = Tokens(self.request_id, num_generated, missed, versions=self.versions_from(num_generated))
        if kept is not None:
            logprobs, of_prompt = kept.since(num_generated), kept.prompt_with(num_generated)
            tokens = replace(tokens, logprobs=logprobs, prompt_logprobs=of_prompt)
        return [tokens]

    def preempt(self) -> None:
        """Drop the target's rows; the text stays, and older records become stale."""
        self.epoch += 1
        if self.logprobs is not None:
            self.logprobs.restart(self.num_generated)
        self.cached_len, self.exported_len, self.may_hit = 0, None, self.shares_rows
        self.num_preemptions += 1

    def suspect(self) -> None:
        """A pass with it raised."""
        self.num_failures += 1
        self.probation = PROBATION

    def stats(self) -> RequestStats:
        counts = self.counts
        return RequestStats(
            counts.num_spec_steps,
            counts.num_draft_tokens,
            counts.num_accepted_tokens,
            tuple(counts.acceptance_histogram),
            num_preemptions=self.num_preemptions,
            num_cached_tokens=self.num_cached_tokens or 0,
        )

    def resume(self) -> None:
        """Set `finish_reason` if the request was complete when it arrived, with the tokens that its client has."""
        if self.num_generated and self.token_ids[-1] in self.end_token_ids:
            self.finish_reason = "stop"
        elif self.remaining <= 0:
            self.finish_reason = "length"
