"""The drafter of a pool as one of its tenants sees it: the contract of drafters, with passes that are merged with those
of other tenants and KV rows for as much text as the lease's share holds.

What a drafter remembers of, or shows to, one tenant never reaches another: previews are handed to their own, KV rows
and memories are kept apart by the scopes that `tenant_link.py` sets. Capabilities that would mix tenants are not
offered.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from actors.drafters.draft_ahead.width import Step, WidthChooser
from actors.drafters.interface import Capabilities, Context, Draft
from actors.policy.estimators import Ewma
from actors.pool.merged_passes import MergedPasses
from actors.pool.order_choice import OrderHistory
from actors.pool.shares import next_part, share_of, within_share
from actors.protocol.messages import Commit, DraftPreview, TokenTree

ROWS_BESIDE_TEXT = 64
"""KV slots that a request is counted with beside its text, for the rows of drafts."""
ROWS_BESIDE_FAR_TEXT = 192
"""The same where previews stream: the drafter works further ahead."""


@dataclass(slots=True)
class LeaseCounts:
    """What a lease was given so far: drafts by request, those that were left out for the sake of other engines, and
    those for which its share of KV rows had no room; passes for its drafts, and those that had drafts of other leases
    too; records of its coordinator that were refused."""

    num_drafts: int = 0
    num_left_out: int = 0
    num_beyond_share: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_passes: int = 0
    num_merged_passes: int = 0
    num_refused_records: int = 0


class SharedDrafter:
    """The drafter of all tenants. `kv_slots` are those of its pool of KV rows; None: it holds none. Of texts at most
    `read_chunk` tokens are read at a time. A step of draft-ahead whose width is not chosen by measured costs feeds
    `ahead_width` nodes for each tenant, 0: as the drafter does."""

    def __init__(self, passes: MergedPasses, kv_slots: int | None, read_chunk: int, ahead_width: int = 0) -> None:
        self.passes = passes
        passes.restart = self._restart
        self.kv_slots = kv_slots
        self.read_chunk = read_chunk
        self.ahead_width = ahead_width
        self.draft_s = Ewma()
        """Seconds from an order to its drafts."""
        self.tenants: list[TenantDrafter] = []
        self._shown: dict[int, dict[int, DraftPreview]] = defaultdict(dict)  # tenant -> request -> its latest preview
        self._owners: dict[int, int] = {}

    def join(self, counts: LeaseCounts | None = None, *, streams: bool = False) -> TenantDrafter:
        """A new tenant, which counts in `counts`; the shares of the others become smaller at once."""
        tenant = TenantDrafter(self, LeaseCounts() if counts is None else counts, streams=streams)
        with self.passes.turn():
            self.tenants.append(tenant)
            for other in self.tenants:
                other.drop_beyond_share()
        return tenant

    def leave(self, tenant: TenantDrafter) -> None:
        """Its requests are released."""
        with self.passes.turn():
            tenant.release_all()
            self.tenants.remove(tenant)
            self._shown.pop(id(tenant), None)

    @property
    def share(self) -> int | None:
        return None if self.kv_slots is None else share_of(self.kv_slots, len(self.tenants))

    @property
    def step_width(self) -> int:
        """Nodes for each request of a step: those of all tenants, divided among all requests."""
        if not self.ahead_width:
            return 0
        counts = [tenant.num_requests for tenant in self.tenants if tenant.num_requests]
        return max(1, self.ahead_width * len(counts) // max(1, sum(counts)))

    def _restart(self, request_ids: Sequence[int] | None) -> None:
        """A pass over these requests has failed, None: over any; they are read again. In turn."""
        for tenant in self.tenants:
            tenant.restart(request_ids)

    def own(self, request_id: int, tenant: TenantDrafter) -> None:
        self._owners[request_id] = id(tenant)

    def disown(self, request_id: int, tenant: TenantDrafter) -> None:
        self._owners.pop(request_id, None)
        self._shown[id(tenant)].pop(request_id, None)

    def previews_of(self, tenant: TenantDrafter) -> list[DraftPreview]:
        """The latest of each of its requests since the last call."""
        with self.passes.turn() as drafter:
            shows = drafter.capabilities.sends_previews
            for preview in shows.previews() if shows is not None else ():
                if (owner := self._owners.get(preview.request_id)) is not None:
                    self._shown[owner][preview.request_id] = preview
            return [*self._shown.pop(id(tenant), {}).values()]


class TenantDrafter:
    """A drafter, as `actors/drafters/interface.py` says, of one tenant's requests. With `streams` it is asked for no
    draft, but shown what the target verifies."""

    waits_for_child = False

    def __init__(self, shared: SharedDrafter, counts: LeaseCounts, *, streams: bool = False) -> None:
        self._rows_beside = ROWS_BESIDE_FAR_TEXT if streams else ROWS_BESIDE_TEXT
        self._streams = streams
        self._shared = shared
        self._passes = shared.passes
        self._contexts: dict[int, Context] = {}
        self._with_rows: set[int] = set()
        self._num_read: dict[int, int] = {}  # tokens of its text that the drafter has read, of a request with rows
        self.counts = counts
        self._history = OrderHistory()
        self._answered_at: float | None = None  # its last order; None: its verdicts have come since
        self._num_drafted: dict[int, int] = {}  # draft tokens whose verdict is awaited
        self._may_work_ahead = True
        can = shared.passes.drafter.capabilities
        self.capabilities = Capabilities(
            can.vocab_size,
            prefills=self if can.prefills is not None else None,
            truncates=self if can.truncates is not None else None,
            works_ahead=self if can.works_ahead is not None else None,
            sends_previews=self if can.sends_previews is not None else None,
        )

    # --- the required verbs -------------------------------------------------------------------------------------------

    def open(self, context: Context) -> None:
        with self._passes.turn() as drafter:
            self._contexts[context.request_id] = context
            self._shared.own(context.request_id, self)
            drafter.open(context)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        started = time.monotonic()
        drafts = {context.request_id: Draft.nothing(context) for context in contexts}
        fitting = self._fitting()
        able = [(one, budget) for one, budget in zip(contexts, budgets, strict=True) if one.request_id in fitting]
        self.counts.num_beyond_share += len(contexts) - len(able)
        if able:
            drafts |= self._propose([context for context, _ in able], [budget for _, budget in able])
        self._answered_at = time.monotonic()
        self._shared.draft_s.update(self._answered_at - started)
        return [drafts[context.request_id] for context in contexts]

    def _propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> dict[int, Draft]:
        """Drafts by request; none if they are left out."""
        self._read(contexts, leave=self._shared.read_chunk)
        proposed = self._passes.propose(contexts, budgets, self._history)
        self.counts.num_passes = self._history.num_passes
        self.counts.num_merged_passes = self._history.num_merged_passes
        if proposed is None:
            self.counts.num_left_out += len(contexts)
            return {}
        read = {one.request_id: len(one.token_ids) for one in contexts}
        with self._passes.turn():  # rows that were given back meanwhile are there again
            self._with_rows |= read.keys()
            self._num_read |= read
        self.counts.num_drafts += len(contexts)
        for context, draft in zip(contexts, proposed, strict=True):
            if not context.is_unverified:  # else no verdict tells what is accepted
                self._offered(context, draft.tree)
        return {context.request_id: draft for context, draft in zip(contexts, proposed, strict=True)}

    def _offered(self, context: Context, tree: TokenTree) -> None:
        """The draft goes to the target."""
        self._num_drafted[context.request_id] = tree.num_draft_tokens
        self.counts.num_draft_tokens += tree.num_draft_tokens

    def observe(self, context: Context, commit: Commit) -> None:
        if self._answered_at is not None:
            self._history.rest_s.update(time.monotonic() - self._answered_at)
            self._answered_at = None
        # what another drafter of the engine, or a grammar, has proposed is accepted too
        num_drafted = self._num_drafted.pop(context.request_id, 0)
        num_accepted = min(len(commit.path), len(commit.token_ids), num_drafted)
        self._history.accepted(num_drafted, num_accepted)
        self.counts.num_accepted_tokens += num_accepted
        with self._passes.turn() as drafter:
            drafter.observe(context, commit)

    def release(self, request_id: int) -> None:
        with self._passes.turn() as drafter:
            if self._contexts.pop(request_id, None) is not None:
                self._with_rows.discard(request_id)
                self._num_read.pop(request_id, None)
                self._num_drafted.pop(request_id, None)
                self._shared.disown(request_id, self)
                drafter.release(request_id)

    # --- capabilities -------------------------------------------------------------------------------------------------

    def prefill(self, contexts: Sequence[Context]) -> None:
        fitting = self._fitting()
        able = [context for context in contexts if context.request_id in fitting]
        self._read(able, leave=0)

    def _read(self, contexts: Sequence[Context], leave: int) -> None:
        """Read their texts, but for `leave` tokens or fewer; the passes of others come between the parts."""
        by_id = {context.request_id: context for context in contexts}
        with self._passes.turn():
            self._with_rows |= by_id.keys()
        while part := self._next_part(by_id, leave):
            self._passes.prefill(
                [replace(by_id[number], token_ids=by_id[number].token_ids[:end]) for number, end in part]
            )
            with self._passes.turn():
                self._num_read |= {number: end for number, end in part if number in self._with_rows}

    def _next_part(self, contexts: dict[int, Context], leave: int) -> list[tuple[int, int]]:
        with self._passes.turn():
            unread = [
                (number, self._num_read.get(number, 0), len(context.token_ids))
                for number, context in contexts.items()
                if number in self._with_rows  # they may have been given back meanwhile
            ]
        longer = [one for one in unread if one[2] - one[1] > leave]
        return next_part(longer, self._shared.read_chunk)

    def truncate(self, context: Context) -> None:
        with self._passes.turn() as drafter:
            assert drafter.capabilities.truncates is not None
            drafter.capabilities.truncates.truncate(context)

    @property
    def may_work_ahead(self) -> bool:
        return self._may_work_ahead

    @may_work_ahead.setter
    def may_work_ahead(self, may: bool) -> None:
        """The drafter works ahead while any tenant's policy has it so."""
        self._may_work_ahead = may
        with self._passes.turn() as drafter:
            assert drafter.capabilities.works_ahead is not None
            drafter.capabilities.works_ahead.may_work_ahead = any(one._may_work_ahead for one in self._shared.tenants)

    @property
    def wants_work(self) -> bool:
        if not (self._may_work_ahead and self._contexts and self._passes.takes_steps):
            return False
        with self._passes.turn() as drafter:
            assert drafter.capabilities.works_ahead is not None
            return drafter.capabilities.works_ahead.wants_work

    def width(self, width_chooser: WidthChooser, time_s: float) -> int:
        with self._passes.turn() as drafter:
            ahead = drafter.capabilities.works_ahead
            assert ahead is not None
            return ahead.width(width_chooser, time_s) if ahead.wants_work else 0

    def work(self, width: int = 0, num_passes: int = 1) -> Step:  # noqa: ARG002  steps of tenants are merged pass by pass
        return self._passes.step(width or self._shared.step_width)

    def prepared(self, context: Context) -> bool:
        with self._passes.turn() as drafter:
            assert drafter.capabilities.works_ahead is not None
            return drafter.capabilities.works_ahead.prepared(context)

    def previews(self) -> list[DraftPreview]:
        return self._shared.previews_of(self)

    def prefetched(self, context: Context, budget: int, tree: TokenTree) -> None:
        self._answered_at = time.monotonic()
        if self._streams:  # whose draft this is, the engine knows and counts
            self._work_behind(context, budget, tree)
            return
        self.counts.num_drafts += 1
        self._offered(context, tree)
        with self._passes.turn() as drafter:
            can = drafter.capabilities
            assert can.sends_previews is not None
            assert can.works_ahead is not None
            if can.works_ahead.prepared(context):  # else its rows were given back since the preview
                can.sends_previews.prefetched(context, budget, tree)

    def _work_behind(self, context: Context, budget: int, tree: TokenTree) -> None:
        """The drafter works ahead of what is verified, of which it may have prepared nothing, if there is room."""
        if context.request_id not in self._fitting():
            self.counts.num_beyond_share += 1
            return
        self._read([context], leave=self._shared.read_chunk)
        with self._passes.turn() as drafter:
            if context.request_id in self._with_rows:
                assert drafter.capabilities.sends_previews is not None
                drafter.capabilities.sends_previews.prefetched(context, budget, tree)
                self._num_read[context.request_id] = len(context.token_ids)

    @property
    def num_requests(self) -> int:
        return len(self._contexts)

    @property
    def num_rows(self) -> int:
        """KV rows of its texts. From any thread."""
        return sum([*self._num_read.values()])

    # --- the share ----------------------------------------------------------------------------------------------------

    def _fitting(self) -> set[int]:
        with self._passes.turn():
            fitting = self._within_share()
            self.drop_beyond_share(fitting)
            return fitting

    def _within_share(self) -> set[int]:
        share = self._shared.share
        if share is None:
            return set(self._contexts)
        lengths = ((number, len(context.token_ids)) for number, context in self._contexts.items())
        return within_share(lengths, share, self._rows_beside)

    def drop_beyond_share(self, fitting: set[int] | None = None) -> None:
        """Give back the rows of requests that do not fit any more; they decode plainly, or are read again later. Call
        it in turn."""
        fitting = self._within_share() if fitting is None else fitting
        self.restart(self._with_rows - fitting)
        self._with_rows &= fitting

    def restart(self, request_ids: Collection[int] | None) -> None:
        """Give back the rows of those of these requests that are its own, None: of all of its own. Call it in turn."""
        for request_id in [*self._contexts] if request_ids is None else request_ids:
            if request_id in self._contexts:
                self._passes.drafter.release(request_id)
                self._passes.drafter.open(self._contexts[request_id])
                self._num_read.pop(request_id, None)

    def release_all(self) -> None:
        for request_id in [*self._contexts]:
            self.release(request_id)
