"""The contract every drafter fulfils, and the role that speaks for it.

A drafter turns committed text into a guess. It is told of requests (`open`), of what became of its guesses
(`observe`) and of their end (`release`); `propose` never changes the text. Everything a drafter says is only a
guess: a wrong, short or missing one costs speed, never correctness. The role keeps the committed text and its
digest, so that a drafter without a model is a single function.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from actors.drafters.draft_ahead.timing import DraftAheadTiming
from actors.drafters.draft_ahead.width import WidthChooser
from actors.drafters.interface import Context, Draft, Drafter, _readable, _readable_sampling
from actors.protocol.messages import (
    HASH_SEED,
    Commit,
    DraftBatch,
    DraftPreviewBatch,
    Proposal,
    ProposalBatch,
    extend_hash,
)

LEVEL_WAIT_S = 0.5
"""How long at a time a rank listens for the level beneath, which wakes it."""


@dataclass(slots=True)
class DraftRole:
    """Answers each `DraftBatch`, first with what is prepared, then with what had to be drafted; works ahead between."""

    drafter: Drafter
    clock: Callable[[], float] = time.monotonic
    adapts: bool = False  # the width of draft-ahead to what its passes cost
    contexts: dict[int, Context] = field(default_factory=dict)
    _ahead: list[tuple[float, float, bool]] = field(default_factory=list)
    _timing: DraftAheadTiming = field(default_factory=DraftAheadTiming)
    _width_chooser: WidthChooser = field(default_factory=WidthChooser)

    @property
    def wants_work(self) -> bool:
        return self.drafter.wants_work

    def width(self) -> int:
        """Of the next step: its argument. What was measured here decides for all ranks of the role."""
        return self.drafter.width(self._width_chooser, self._timing.interval_s) if self.adapts else 0

    def work(self, width: int = 0) -> None:
        started = self.clock()
        step = self.drafter.work(width)
        finished = self.clock()
        self._ahead.append((started, finished, step.refreshed))
        self._timing.record_pass(started, finished)
        if step.num_rows and not step.refreshed:
            self._width_chooser.update(step.num_rows, finished - started)

    def pause_s(self) -> float:
        """Seconds to wait for the next record before another step, which might keep it waiting, or lead nowhere."""
        return LEVEL_WAIT_S if self.drafter.waits else self._timing.pause_s(self.clock())

    def preview(self, *, last: bool) -> DraftPreviewBatch | None:
        """What is prepared and not told yet, if it is time for that; `last` if nothing more will be prepared."""
        if not last and not self._timing.is_preview_due(self.clock()):
            return None
        previews = self.drafter.previews()
        return DraftPreviewBatch(tuple(previews)) if previews else None

    def answer(self, batch: DraftBatch) -> Iterator[ProposalBatch]:
        self._timing.record_arrival(self.clock())
        yield from self._answers(batch)
        if any(order.num_draft_tokens for order in batch.orders):
            self._timing.record_answer(self.clock())

    def _answers(self, batch: DraftBatch) -> Iterator[ProposalBatch]:
        started = self.clock()
        asked = self._follow_all(batch)
        hits = [(context, budget) for context, budget in asked if self.drafter.prepared(context)]
        misses = [(context, budget) for context, budget in asked if not self.drafter.prepared(context)]
        ahead, self._ahead = tuple(self._ahead), []
        if hits:
            self._timing.preview_missed()
        if hits or (misses and self.drafter.works_ahead):
            proposals = self._propose(hits, prepared=True)
            levels = self.drafter.account()
            yield ProposalBatch(batch.round, proposals, started, self.clock(), len(misses), ahead, levels)
            if not misses:
                return
            started, ahead = self.clock(), ()
        proposals = self._propose(misses, prepared=False)
        yield ProposalBatch(batch.round, proposals, started, self.clock(), 0, ahead, self.drafter.account())

    def forget(self) -> None:
        """Drop every request; the drafter keeps its model."""
        for request_id in self.contexts:
            self.drafter.release(request_id)
        self.contexts.clear()
        self._ahead.clear()

    def _follow_all(self, batch: DraftBatch) -> list[tuple[Context, int]]:
        """Bring the contexts up to the batch; returns what to propose for."""
        for request_id in batch.releases:
            if self.contexts.pop(request_id, None) is not None:
                self.drafter.release(request_id)
        for admit in batch.admits:
            if admit.request_id in self.contexts:  # told again by a level above that cannot know whether it was heard
                self.drafter.release(admit.request_id)
            context = Context(
                admit.request_id,
                admit.epoch,
                _readable(admit.token_ids, self.drafter.vocab_size),
                admit.prompt_len,
                _readable_sampling(admit.sampling, self.drafter.vocab_size),
                extend_hash(HASH_SEED, admit.token_ids),
                admit.admission,
                settled_len=admit.prompt_len,
            )
            self.contexts[admit.request_id] = context
            self.drafter.open(context)
        for commit in batch.commits:
            self._follow(commit)
        wanted = []
        for order in batch.orders:
            context = self.contexts[order.request_id]
            if order.prefetched is not None:
                self.drafter.take(context, order.num_draft_tokens, order.prefetched)
                self._timing.preview_used()
            else:
                wanted.append((context, order.num_draft_tokens))
        idle = [context for context, budget in wanted if not budget]
        if idle:
            self.drafter.prepare(idle)
        return [(context, budget) for context, budget in wanted if budget]

    def _propose(self, asked: list[tuple[Context, int]], *, prepared: bool | None) -> tuple[Proposal, ...]:
        if not asked:
            return ()
        contexts, budgets = zip(*asked, strict=True)
        drafts = self.drafter.propose(contexts, budgets)
        if not self.drafter.works_ahead:
            prepared = None
        return tuple(_proposal(context, draft, prepared) for context, draft in zip(contexts, drafts, strict=True))

    def _follow(self, commit: Commit) -> None:
        context = self.contexts[commit.request_id]
        assert commit.epoch == context.epoch and commit.prefix_len <= len(context.token_ids)
        if commit.prefix_len < len(context.token_ids):
            context.cut(commit.prefix_len)
            self.drafter.truncate(context)
        self.drafter.observe(context, commit)
        context.extend(commit.token_ids, self.drafter.vocab_size)
        context.settled_len = len(context.token_ids) if commit.settled_len is None else commit.settled_len


def _proposal(context: Context, draft: Draft, prepared: bool | None) -> Proposal:
    return Proposal(
        context.request_id,
        context.epoch,
        len(context.token_ids),
        context.prefix_hash,
        draft.tree,
        tuple(int(draw) for draw in draft.sampling_kinds),
        draft.distributions,
        prepared,
        draft.parts,
    )
