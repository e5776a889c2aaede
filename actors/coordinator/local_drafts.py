"""Drafts of a lookup beside the coordinator, for prefixes that a far drafter has nothing for yet.

It reads the committed text that the coordinator has anyway, so no record is exchanged and nothing is waited for. It
knows one drafter and no pipeline.
"""

from __future__ import annotations

from typing import cast

from actors.coordinator.outbox import admission_of
from actors.coordinator.port import Orders
from actors.coordinator.sequence import Sequence
from actors.drafters.config import DraftSetup
from actors.drafters.interface import Context, Drafter
from actors.drafters.registry import DRAFTERS
from actors.protocol.messages import Proposal


class LocalDrafts:
    """`name` is named as the proposer of what `drafter` drafts."""

    def __init__(self, name: str, drafter: Drafter) -> None:
        self._name = name
        self._drafter = drafter
        self._contexts: dict[int, Context] = {}

    @classmethod
    def of(cls, name: str) -> LocalDrafts:
        """Those of a lookup with its default options, which needs nothing of a rank."""
        setup = cast(DraftSetup, None)
        return cls(name, DRAFTERS[name]().build(setup)[0])

    def draft(self, orders: Orders) -> None:
        """Gives these sequences their proposals, where the drafter finds one."""
        contexts = [self._read(sequence) for sequence, _ in orders]
        drafts = self._drafter.propose(contexts, [length for _, length in orders])
        for (sequence, _), draft in zip(orders, drafts, strict=True):
            if count := draft.tree.num_draft_tokens:
                drawn = draft.tree, draft.sampling_kinds, draft.distributions
                parts = ((self._name, count),)
                sequence.draft.proposal = Proposal(*sequence.prefix, *drawn, prepared=False, parts=parts)

    def release(self, request_id: int) -> None:
        if self._contexts.pop(request_id, None) is not None:
            self._drafter.release(request_id)

    def _read(self, sequence: Sequence) -> Context:
        """The request's context, brought up to its text."""
        context = self._contexts.get(sequence.request_id)
        if context is not None:
            context.extend(sequence.token_ids[len(context.token_ids) :])
            return context
        context = self._contexts[sequence.request_id] = Context.admitted(admission_of(sequence), None)
        context.settled_len = None  # no level of a cascade takes any of it back
        self._drafter.open(context)
        return context
