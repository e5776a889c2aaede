"""Which records the coordinator accepts from which link, checked before anything acts on them.

The codec has refused records of the wrong shape. Here the sender must be one that may send such a record, and what the
record says must be possible: ranks that exist, tokens of the target's vocabulary, trees, finite times. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import inf, isfinite

from actors.coordinator.clients import CLIENT, Clients
from actors.protocol.membership import Alive, ClientKeys, Hello, PassFailed, RankLost, Ready, Stop
from actors.protocol.messages import (
    MOST_FORCED,
    Abort,
    DraftBatch,
    DraftPreviewBatch,
    ProposalBatch,
    ReportOrder,
    Request,
    UpdateWeights,
    VerdictBatch,
    check_tokens,
)
from actors.transport.channel import link_name
from actors.transport.keys import OUT
from parallel.ranges import LARGEST

_OF_CLIENTS = (Request, Abort, ReportOrder, Hello)
_OF_OWNER = (*_OF_CLIENTS, RankLost, Stop, ClientKeys, UpdateWeights)
_OF_TARGET = (Alive, Ready, PassFailed, VerdictBatch)
_OF_DRAFT = (Alive, Ready, PassFailed, ProposalBatch, DraftPreviewBatch, DraftBatch)
_MOST_NAMED = 64
"""Characters of a phase."""
_TARGET_SIZES = {
    "kv_slots": 1,
    "max_model_len": 1,
    "vocab_size": 1,
    "max_source_len": 0,
    "block_size": 0,
    "whole_texts": 0,
}


class RecordChecks:
    """Checks records of roles of these `sizes`; `vocab_size`, `max_model_len` and `max_source_len` are set once the
    target is known."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        num_draft_tokens: int,
        clients: Clients,
        drafters: Collection[str] | None = None,
    ) -> None:
        self.vocab_size = 2**63
        self.max_model_len = LARGEST
        self.max_source_len: int | None = None
        self._sizes = sizes
        self._num_draft_tokens = num_draft_tokens
        self._drafters = drafters
        self._clients = clients
        self._allowed: dict[str, tuple[type, ...]] = {}  # by link, of ranks that have sent something

    def check(self, link: str, record: object) -> None:
        """Raise ValueError unless this link may send this record."""
        if not isinstance(record, self._allowed.get(link) or self._find_allowed(link)):
            raise ValueError(f"{link} may not send {type(record).__name__}")
        match record:
            case VerdictBatch():
                self._check_verdicts(record)
            case ProposalBatch():
                self._check_proposals(record)
            case DraftBatch():
                self._check_orders(record)
            case DraftPreviewBatch():
                self._check_previews(record)
            case _:
                self._check_sender(link, record)

    def _check_sender(self, link: str, record: object) -> None:
        """A client numbers its requests and the owner its weights, and a rank reports itself."""
        match record:
            case UpdateWeights() if not 0 <= record.weights.version <= LARGEST:
                raise ValueError(f"version: {record.weights.version} must be between 0 and {LARGEST}")
            case Request():
                self._check_request(link, record)
            case RankLost() if not 0 <= record.rank < self._sizes.get(record.role, 0):
                raise ValueError(f"there is no rank {record.rank} of {record.role}")
            case Alive() | Ready() | PassFailed() if link.partition("/")[0] != link_name(
                record.identity, record.incarnation
            ):
                raise ValueError(f"{link} is not {record.identity}, process {record.incarnation}")
            case ReportOrder() if len(record.phase) > _MOST_NAMED or not record.phase.isprintable():
                raise ValueError(f"phase: must be at most {_MOST_NAMED} printable characters")
            case Ready("target"):
                for name, least in _TARGET_SIZES.items():
                    if type(size := record.facts.get(name, 0)) is not int or size < least:
                        raise ValueError(f"{name}: {size!r} is no number from {least} on")

    def _find_allowed(self, link: str) -> tuple[type, ...]:
        client = link.removesuffix(OUT)
        if client == CLIENT:
            return _OF_OWNER
        if client.startswith(f"{CLIENT}:"):
            return _OF_CLIENTS
        role, _, rank = link.partition("#")[0].rpartition("-")
        if not rank.isdecimal() or int(rank) >= self._sizes.get(role, 0):
            return ()
        allowed = self._allowed[link] = _OF_TARGET if role == "target" else _OF_DRAFT
        return allowed

    def _check_request(self, link: str, request: Request) -> None:
        request.check(self.vocab_size, self.max_model_len, self._drafters, self.max_source_len)
        if self._clients.has_another(link, request):
            raise ValueError(f"request_id: {request.request_id} is that of another request in flight")

    def _check_orders(self, batch: DraftBatch) -> None:
        """Those of one level of a cascade to another."""
        for top_tokens in batch.top_tokens:
            top_tokens.check(self.vocab_size)
        if batch.exports:
            raise ValueError("exports: no level of a cascade is sent hidden states")

    def _check_previews(self, batch: DraftPreviewBatch) -> None:
        for preview in batch.previews:
            preview.tree.check()
            check_tokens("tree", preview.tree.token_ids, self.vocab_size)
            _check_finite(preview.values)
            if len(preview.values) not in (0, len(preview.tree.token_ids)):
                raise ValueError("values: must be one per node")

    def _check_verdicts(self, batch: VerdictBatch) -> None:
        _check_finite((batch.started, batch.finished, batch.committed))
        if batch.exported is not None:
            _check_finite(batch.exported)
        if not 0 <= batch.dropped_s < inf:
            raise ValueError(f"dropped_s: {batch.dropped_s} is no time")
        guessed, accepted = batch.guesses
        if not 0 <= accepted <= guessed:
            raise ValueError(f"guesses: {accepted} of {guessed} cannot have been accepted")
        if batch.top_tokens is not None:
            batch.top_tokens.check(self.vocab_size)
        if batch.drafts is not None:
            self._check_proposals(batch.drafts)
        if batch.export is not None:
            batch.export.check(batch.num_tokens + sum([num_rows for _, num_rows in batch.hits]))
        for part in batch.prompt_logprobs:
            part.logprobs.check(self.vocab_size)
        for verdict in batch.verdicts:
            check_tokens("token_ids", verdict.token_ids, self.vocab_size)
            if verdict.logprobs is not None:
                verdict.logprobs.check(self.vocab_size)
            if verdict.forced:
                check_tokens("forced", verdict.forced, self.vocab_size)
                if len(verdict.forced) > MOST_FORCED:
                    raise ValueError(f"forced: {len(verdict.forced)} tokens; at most {MOST_FORCED}")

    def _check_proposals(self, batch: ProposalBatch) -> None:
        _check_finite((batch.started, batch.finished))
        if batch.imported is not None:
            _check_finite(batch.imported)
        if not 0 <= batch.read_s < inf:
            raise ValueError(f"read_s: {batch.read_s} is no time")
        if (learned := batch.learning) is not None:
            times, shares = (learned.busy_s, learned.delayed_s), (learned.adapted_share, learned.shipped_share)
            _check_finite((*times, *shares, learned.loss))
        for work in batch.levels:
            _check_finite((work.busy_s, *(time for span in work.spans for time in span)))
        for started, finished, _ in batch.ahead:
            _check_finite((started, finished))
        for proposal in batch.proposals:
            proposal.check(self.vocab_size)
            if (size := proposal.tree.num_draft_tokens) > self._num_draft_tokens:
                raise ValueError(f"a proposal of {size} draft tokens was not ordered")


def _check_finite(numbers: Iterable[float]) -> None:
    if not all(map(isfinite, numbers)):
        raise ValueError("a number is not finite")
