"""The link of a pool to the coordinator of one lease, as its rank loop sees it.

An engine that holds a lease is a stranger: its records are held against its lease before anything acts on them. Inside
the pool a request has a number of the pool's own, and its scopes are those of its lease alone, so that no two engines
ever share KV rows or memories.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from actors.protocol.leases import MOST_DRAFT_TOKENS, LeaseOrder
from actors.protocol.membership import Join
from actors.protocol.messages import (
    FAR_REACH,
    LONGEST_SALT,
    SCOPE_BYTES,
    Admit,
    Commit,
    DraftBatch,
    DraftOrder,
    DraftPreviewBatch,
    ProposalBatch,
    check_tokens,
)
from actors.transport.channel import AnyLink
from actors.transport.mailbox import Mailbox

MOST_REQUESTS = 1024
"""Requests of one lease at a time."""
MOST_TOKENS = 1 << 24
"""Tokens of all their texts."""
_SCOPES = secrets.token_bytes(16)
"""Without it no engine finds a number of a scope of its own that comes out as that of another lease."""


@dataclass(slots=True)
class _Known:
    """A request at its coordinator: its number in the pool, its epoch there, the tokens of its text, and those that it
    has `beside` that."""

    number: int
    epoch: int
    num_tokens: int
    beside: int


class TenantLink(Mailbox):
    """`numbers` gives the pool's next number of a request, `heard` is called for every record that arrives, and what
    `resting` returns is entered while one is waited for. Receiving raises ValueError for a record that the lease does
    not allow."""

    def __init__(
        self,
        link: AnyLink,
        lease: LeaseOrder,
        tenant: int,
        numbers: Iterator[int],
        heard: Callable[[], None],
        resting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__(link)
        self._resting = resting
        self._lease = lease
        self._tenant = tenant
        self._numbers = numbers
        self._heard = heard
        self._known: dict[int, _Known] = {}
        self._names: dict[int, int] = {}  # number in the pool -> the coordinator's
        self._num_tokens = 0
        self.num_refused = 0
        """Records that the lease does not allow."""

    def receive(self, timeout_s: float | None = None) -> Any | None:
        with nullcontext() if timeout_s == 0 else self._resting():
            record = super().receive(timeout_s)
        if record is not None:
            self._heard()
        if isinstance(record, Join):
            self._known.clear()
            self._names.clear()
            self._num_tokens = 0
        if not isinstance(record, DraftBatch):
            return record
        try:
            return self._translated(record)
        except ValueError:
            self.num_refused += 1
            raise

    def send(self, record: Any) -> None:
        match record:
            case ProposalBatch():
                record = replace(record, proposals=self._named(record.proposals))
            case DraftPreviewBatch():
                record = DraftPreviewBatch(self._named(record.previews))
        super().send(record)

    def _named(self, records: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replaces the pool's request numbers by the coordinator's; leaves out requests released meanwhile."""
        known = [(record, self._names.get(record.request_id)) for record in records]
        return tuple([replace(record, request_id=name) for record, name in known if name is not None])

    # --- what a coordinator may say -----------------------------------------------------------------------------------

    def _translated(self, batch: DraftBatch) -> DraftBatch:
        if batch.exports:
            raise ValueError("exports: a pool is sent no hidden states")
        ordered = [order.request_id for order in batch.orders]
        if len(set(ordered)) < len(ordered):
            raise ValueError("orders: two are of one request")
        batch.costs.check()
        releases = [self._release(name) for name in batch.releases]
        return replace(
            batch,
            releases=tuple([number for number in releases if number is not None]),
            admits=tuple([self._admit(admit) for admit in batch.admits]),
            commits=tuple([self._commit(commit) for commit in batch.commits]),
            orders=tuple([self._order(order) for order in batch.orders]),
            top_tokens=(),
        )

    def _release(self, name: int) -> int | None:
        known = self._known.pop(name, None)
        if known is None:
            return None
        del self._names[known.number]
        self._num_tokens -= known.num_tokens + known.beside
        return known.number

    def _admit(self, admit: Admit) -> Admit:
        if admit.request_id in self._known:
            raise ValueError(f"admits: request {admit.request_id} is admitted already")
        if len(self._known) >= MOST_REQUESTS:
            raise ValueError(f"admits: a lease holds at most {MOST_REQUESTS} requests")
        size = len(admit.token_ids)
        if not 1 <= admit.prompt_len <= size:
            raise ValueError(f"admits: prompt_len {admit.prompt_len} is not between 1 and {size}")
        self._check_text(admit.token_ids, size)
        for name, text in (("reference", admit.reference), ("source", admit.source)):
            self._check_text(text, len(text), name)
        admit.sampling.check()
        if len(admit.cache_salt or "") > LONGEST_SALT:
            raise ValueError(f"cache_salt: has more than {LONGEST_SALT} characters")
        number = next(self._numbers)
        beside = len(admit.reference) + len(admit.source)
        self._hold(size + beside)
        self._known[admit.request_id] = _Known(number, admit.epoch, size, beside)
        self._names[number] = admit.request_id
        return replace(
            admit,
            request_id=number,
            drafter=None,
            grammar=None,
            scope=self._scope(admit.scope),
            memory_scope=self._scope(admit.memory_scope),
        )

    def _scope(self, scope: int) -> int:
        """The engine's scope as one of this lease alone."""
        text = f"{self._tenant} {scope}".encode()
        return int.from_bytes(blake2b(text, key=_SCOPES, digest_size=SCOPE_BYTES).digest())

    def _commit(self, commit: Commit) -> Commit:
        known = self._of(commit.request_id)
        if commit.epoch != known.epoch or commit.prefix_len != known.num_tokens:
            place = f"epoch {known.epoch}, {known.num_tokens} tokens"
            raise ValueError(f"commits: request {commit.request_id} is at {place}")
        if not commit.token_ids:
            raise ValueError("commits: token_ids is empty")
        known.num_tokens += len(commit.token_ids)
        self._check_text(commit.token_ids, known.num_tokens)
        self._hold(len(commit.token_ids))
        return replace(commit, request_id=known.number, settled_len=None)

    def _order(self, order: DraftOrder) -> DraftOrder:
        is_far = order.prefetched is not None and self._lease.terms.streams
        most = FAR_REACH if is_far else self._lease.num_draft_tokens
        if not 0 <= order.num_draft_tokens <= most:
            raise ValueError(f"orders: {order.num_draft_tokens} draft tokens are not between 0 and {most}")
        if order.prefetched is not None:
            order.prefetched.check()
            if order.prefetched.num_draft_tokens > MOST_DRAFT_TOKENS:
                raise ValueError(f"prefetched: has more than {MOST_DRAFT_TOKENS} draft tokens")
            check_tokens("prefetched", order.prefetched.token_ids, self._lease.vocab_size)
        return replace(order, request_id=self._of(order.request_id).number)

    def _of(self, name: int) -> _Known:
        if (known := self._known.get(name)) is None:
            raise ValueError(f"request {name}: was not admitted")
        return known

    def _hold(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        if self._num_tokens > MOST_TOKENS:
            raise ValueError(f"token_ids: the texts of a lease have at most {MOST_TOKENS} tokens")

    def _check_text(self, token_ids: tuple[int, ...], size: int, name: str = "token_ids") -> None:
        if size > self._lease.max_model_len:
            raise ValueError(f"{name}: {size} tokens do not fit the lease's {self._lease.max_model_len}")
        check_tokens(name, token_ids, self._lease.vocab_size)
