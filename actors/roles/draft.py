"""The draft role: keeps the committed text and its digest, and turns the drafts of one drafter into proposals.

Every rank of the role receives the same records and runs the same drafter, so their state agrees without messages.
Knows the contract of drafters; must not know a pipeline or a socket.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from actors.drafters.interface import Context, Drafter, FeatureRows
from actors.protocol.membership import Weights
from actors.protocol.messages import (
    MOST_READ_WITH_DRAFT,
    Commit,
    DraftBatch,
    DraftPreviewBatch,
    LearningWork,
    Proposal,
    ProposalBatch,
)

if TYPE_CHECKING:
    from actors.drafters.draft_ahead.timing import DraftAheadTiming
    from actors.drafters.draft_ahead.width import WidthChooser
    from actors.drafters.online.idle_time import IdleTime

CHILD_WAIT_S = 0.5
"""Seconds for which a rank waits at a time for the child level, whose records end the wait."""


class DraftRole:
    """Answers each `DraftBatch`: first with prepared drafts, then with those drafted on demand. Works ahead in between.

    With `adapts`, the measured cost of passes decides how many nodes a step of draft-ahead feeds. `rebuild` makes the
    drafter anew, as one that has learned nothing, for each further epoch of a role with several ranks.
    """

    def __init__(
        self,
        drafter: Drafter,
        clock: Callable[[], float] = time.monotonic,
        *,
        adapts: bool = False,
        rebuild: Callable[[], Drafter] | None = None,
    ) -> None:
        self.clock = clock
        self.contexts: dict[int, Context] = {}
        self._rebuild = rebuild
        self._use(drafter)
        can = self._capabilities
        self._idle_time: IdleTime | None = None
        if can.learns is not None:
            from actors.drafters.online.idle_time import IdleTime  # for drafters that learn alone

            self._idle_time = IdleTime(can.learns.idle_share, clock())
        self._width_chooser: WidthChooser | None = None
        if adapts:
            from actors.drafters.draft_ahead.width import WidthChooser  # for roles that adapt alone

            self._width_chooser = WidthChooser()
        self._read_len: dict[int, int] = {}  # tokens of a text up to the last call that read it, by request
        self._steps: list[tuple[float, float, bool]] = []  # (started, finished, refreshed) since the last answer
        self._timing: DraftAheadTiming | None = None
        if can.works_ahead is not None or can.sends_previews is not None:
            from actors.drafters.draft_ahead.timing import DraftAheadTiming  # for drafters that work ahead alone

            self._timing = DraftAheadTiming()

    def _use(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._capabilities = can = drafter.capabilities
        self._works_ahead, self._learns = can.works_ahead, can.learns

    @property
    def wants_work(self) -> bool:
        """Whether `work` has something to do before the next record arrives."""
        return self._drafts_ahead or (self._learns is not None and self._learns.wants_learning)

    @property
    def _drafts_ahead(self) -> bool:
        """Whether the next step is one of draft-ahead; a drafter learns in the time that this leaves."""
        return self._works_ahead is not None and self._works_ahead.wants_work

    def width(self) -> int:
        """Nodes for each request in the next step, the argument of `work`; rank 0 decides for all ranks of the role."""
        if self._works_ahead is None or self._width_chooser is None or self._timing is None or not self._drafts_ahead:
            return 0
        return self._works_ahead.width(self._width_chooser, self._timing.interval_s)

    def num_passes(self) -> int:
        """Passes that the next step may make at once, an argument of `work`; rank 0 decides for all ranks."""
        return self._timing.num_passes(self.clock()) if self._timing is not None and self._drafts_ahead else 1

    def work(self, width: int = 0, num_passes: int = 1) -> None:
        """One step of draft-ahead, if the drafter works ahead and has one left, else one of learning."""
        if self._works_ahead is None or self._timing is None or not self._drafts_ahead:
            self._learn()
            return
        started = self.clock()
        step = self._works_ahead.work(width, num_passes)
        finished = self.clock()
        self._steps.append((started, finished, step.refreshed))
        self._timing.record_pass(started, finished, step.num_passes)
        if self._width_chooser is not None and step.num_rows and not step.refreshed:
            self._width_chooser.update(step.num_rows, (finished - started) / step.num_passes)

    def _learn(self) -> None:
        """One step of learning, if the time allows it."""
        if self._learns is None or self._idle_time is None or self.pause_s():
            return
        started = self.clock()
        self._learns.learn()
        self._idle_time.learned(started, self.clock())

    def pause_s(self) -> float:
        """Seconds to wait for the next record before another step, which could delay the answer to it."""
        if self._idle_time is not None and not self._drafts_ahead:
            return self._idle_time.pause_s(self.clock())
        if self._works_ahead is not None and self._works_ahead.waits_for_child:
            return CHILD_WAIT_S
        return 0.0 if self._timing is None else self._timing.pause_s(self.clock())

    def preview(self, *, last: bool) -> DraftPreviewBatch | None:
        """What was prepared since the last preview, if one is due; `last`: no step follows before the next record."""
        now, sender, timing = self.clock(), self._capabilities.sends_previews, self._timing
        if sender is None or timing is None or not (last or timing.is_preview_due(now)):
            return None
        previews = sender.previews()
        timing.record_preview(now)
        return DraftPreviewBatch(tuple(previews)) if previews else None

    def answer(self, batch: DraftBatch, features: Sequence[FeatureRows] = ()) -> Iterator[ProposalBatch]:
        """Bring the contexts up to the batch and propose: one batch of prepared drafts, one of the others.

        `features` are the target's hidden states at tokens of known requests, in order, for a drafter that reads them.
        """
        started, ahead, timing = self.clock(), self._works_ahead, self._timing
        arrived = started if self._idle_time is None else self._idle_time.record_arrived(started)
        if timing is not None:
            timing.record_arrival(arrived)
            timing.streams = batch.streams
            timing.round_s = batch.costs.round_s
        if ahead is not None:
            ahead.may_work_ahead = batch.works_ahead
        orders = self._update_contexts(batch, features)
        hits = [order for order in orders if ahead is not None and ahead.prepared(order[0])]
        misses = [order for order in orders if order not in hits] if hits else orders
        if hits and timing is not None:
            timing.preview_was_late()
        if ahead is not None and orders:
            yield self._batch(batch.round, hits, started, len(misses), prepared=True)
            started = self.clock()
        if misses or ahead is None or not orders:
            yield self._batch(batch.round, misses, started, 0, prepared=None if ahead is None else False)
        if timing is not None and any(order.num_draft_tokens for order in batch.orders):
            timing.record_answer(self.clock())
        if self._idle_time is not None:
            self._idle_time.answered(self.clock())

    def ended(self, request_id: int, token_ids: list[int]) -> None:
        """A request ended with this text, of which the drafter may not have heard the end; its release follows."""
        if (context := self.contexts.get(request_id)) is not None:
            context.extend(token_ids[len(context.token_ids) :])
            context.settled_len = len(context.token_ids)

    def close(self) -> None:
        """The rank ends: a drafter that learns keeps what it learned."""
        if self._learns is not None:
            self._learns.save()

    def forget(self) -> None:
        """Release every request; the drafter keeps its model."""
        for request_id in self.contexts:
            self.drafter.release(request_id)
        if self._capabilities.has_levels is not None:
            self._capabilities.has_levels.forget()
        self.contexts.clear()
        self._read_len.clear()
        self._steps.clear()

    def rejoin(self, weights: Weights | None) -> None:  # noqa: ARG002 (a drafter keeps those that it has)
        """Ranks of one drafter make the same passes, so none may have learned what a new one has not."""
        if self._rebuild is not None:
            self._use(self._rebuild())

    def _update_contexts(self, batch: DraftBatch, features: Sequence[FeatureRows]) -> list[tuple[Context, int]]:
        """Bring the contexts up to the batch; returns (context, draft tokens wanted) of the orders to propose for."""
        if (reader := self._capabilities.reads_top_tokens) is not None:
            for top_tokens in batch.top_tokens:
                reader.read_top_tokens(top_tokens)
        for request_id in batch.releases:
            self._read_len.pop(request_id, None)
            if self.contexts.pop(request_id, None) is not None:
                self.drafter.release(request_id)
        for admit in batch.admits:
            if admit.request_id in self.contexts:  # a parent level that lost its answer admits again
                self.drafter.release(admit.request_id)
                self._read_len.pop(admit.request_id, None)
            self.contexts[admit.request_id] = Context.admitted(admit, self._capabilities.vocab_size)
            self.drafter.open(self.contexts[admit.request_id])
        for commit in batch.commits:
            self._commit(commit)
        self.read_features(features)
        wanted = []
        for order in batch.orders:
            context = self.contexts[order.request_id]
            context.costs, context.is_unverified = batch.costs, batch.unverified
            if order.prefetched is not None and self._capabilities.sends_previews is not None:
                self._capabilities.sends_previews.prefetched(context, order.num_draft_tokens, order.prefetched)
                if self._timing is not None:
                    self._timing.preview_used()
            else:
                wanted.append((context, order.num_draft_tokens))
        idle = [context for context, budget in wanted if not budget]
        if idle and self._capabilities.prefills is not None:
            self._capabilities.prefills.prefill(idle)
            self._note_read(idle)
        return [(context, budget) for context, budget in wanted if budget]

    def read_features(self, features: Sequence[FeatureRows]) -> None:
        """The target's hidden states at tokens of known requests, in order, also of tokens that are committed later."""
        reader = self._capabilities.reads_features
        for rows in features:
            if reader is not None and rows.request_id in self.contexts:
                reader.read_features(rows)

    def _commit(self, commit: Commit) -> None:
        context = self.contexts[commit.request_id]
        assert commit.epoch == context.epoch
        assert commit.prefix_len <= len(context.token_ids)
        if commit.prefix_len < len(context.token_ids):
            context.cut(commit.prefix_len)
            if self._capabilities.truncates is not None:
                self._capabilities.truncates.truncate(context)
            else:
                self.drafter.release(context.request_id)
                self.drafter.open(context)
        self.drafter.observe(context, commit)
        context.extend(commit.token_ids)
        context.settled_len = len(context.token_ids) if commit.settled_len is None else commit.settled_len

    def _batch(
        self,
        round: int,
        orders: Sequence[tuple[Context, int]],
        started: float,
        num_missing: int,
        *,
        prepared: bool | None,
    ) -> ProposalBatch:
        """Drafts for these orders, and the work since the last batch."""
        steps, self._steps = tuple(self._steps), []
        contexts, budgets = [context for context, _ in orders], [budget for _, budget in orders]
        drafts, read_s = [], 0.0
        if orders:
            read_s = 0.0 if prepared else self._read_missed(contexts)
            drafts = self.drafter.propose(contexts, budgets)
            self._note_read(contexts)
            if (timed := self._capabilities.times_reading) is not None:
                read_s = timed.reading_s()
        proposals = tuple(
            Proposal(
                context.request_id,
                context.epoch,
                len(context.token_ids),
                context.prefix_hash,
                draft.tree,
                sampling_kinds=tuple(int(kind) for kind in draft.sampling_kinds),
                distributions=draft.distributions,
                prepared=prepared,
                parts=draft.parts,
            )
            for context, draft in zip(contexts, drafts, strict=True)
        )
        levels = self._capabilities.has_levels.level_stats() if self._capabilities.has_levels is not None else ()
        learning = self._learning()
        return ProposalBatch(
            round,
            proposals,
            started,
            self.clock(),
            num_missing,
            ahead=steps,
            levels=levels,
            learning=learning,
            read_s=read_s,
        )

    def _read_missed(self, contexts: Sequence[Context]) -> float:
        """Texts of which much is unread are read before the drafts, so that what these cost is known; the seconds."""
        prefills = self._capabilities.prefills
        if prefills is None or self._capabilities.times_reading is not None:
            return 0.0
        missed = [
            one for one in contexts if len(one.token_ids) - self._read_len.get(one.request_id, 0) > MOST_READ_WITH_DRAFT
        ]
        if not missed:
            return 0.0
        started = self.clock()
        prefills.prefill(missed)
        return self.clock() - started

    def _note_read(self, contexts: Sequence[Context]) -> None:
        for context in contexts:
            self._read_len[context.request_id] = len(context.token_ids)

    def _learning(self) -> LearningWork | None:
        """What the drafter has learned so far, and the time it took."""
        if self._learns is None or self._idle_time is None:
            return None
        times = self._idle_time
        return replace(self._learns.learning(), busy_s=times.spent_s, delayed_s=times.delayed_s)
