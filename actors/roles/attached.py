"""A drafter on the target's ranks: it drafts right behind each verdict, and the two leave in one record, unless it has
to read much text before.

A `DraftRole` does the work; what the coordinator would send it, batch by batch, follows here from the target's own
batch and its verdicts. A verdict that the coordinator cuts ends its request, so nothing assumed here is ever taken
back. Every rank of the target runs the same drafter on the same verdicts, which rank 0 shares. Where nothing is
ordered, the drafter gets the features alone, and nothing is done for it: requests that came and went, and text, wait
for the next order, with which it gets what the target's texts have beyond its own. A request that it knows and that
ends gets the rest of its text at once: the target has it no longer then, and lookups draft from whole answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import torch

from actors.coordinator.outbox import Outbox
from actors.drafters.interface import Drafter, FeatureRows
from actors.protocol.messages import (
    MOST_READ_WITH_DRAFT,
    Commit,
    DraftBatch,
    DraftOrder,
    Verdict,
    VerdictBatch,
    VerifyBatch,
    VerifyItem,
)
from actors.protocol.records import replace
from actors.roles.after_verdicts import AfterVerdicts
from actors.roles.draft import DraftRole
from parallel.comm.group import Group
from parallel.runtime.decoder_runner import DecoderRunner

if TYPE_CHECKING:
    from actors.roles.target import TargetContext

_MOST_OWN = 1
"""Tokens of its own that the target of these ranks brings with a verdict."""


class AttachedDrafter(AfterVerdicts):
    """`group` are the target's ranks, on `device`; `rebuild` as of `DraftRole`."""

    keeps_at_once = True  # the drafter may read them

    def __init__(
        self,
        drafter: Drafter,
        group: Group,
        device: torch.device | str,
        rebuild: Callable[[], Drafter] | None = None,
    ) -> None:
        self.role = DraftRole(drafter, rebuild=rebuild)
        self._group = group
        self._device = device
        self._outbox = Outbox()
        self._paths: dict[int, tuple[int, ...]] = {}  # accepted of drafts, of which it has not heard yet

    def verifying(self, target: DecoderRunner) -> DecoderRunner:
        shares = self.role.drafter.capabilities.shares_rows
        return target if shares is None else shares.verifying(target)

    def begin(self, batch: VerifyBatch) -> None:
        """Rows lent to the drafter return. Of requests that come and go it learns with its next batch."""
        self._release_rows()
        for request_id in batch.releases:
            self._outbox.release(request_id)
            self._paths.pop(request_id, None)
        for admit in batch.admits:
            if admit.speculates:
                self._outbox.open(admit)

    def ended(self, request_id: int, token_ids: list[int]) -> None:
        self.role.ended(request_id, token_ids)

    def wants_features(self, batch: VerifyBatch) -> bool:  # noqa: ARG002 (its state follows every pass)
        return True

    def agree(self, verdicts: Sequence[Verdict], items: Sequence[VerifyItem], *, is_lead: bool) -> tuple[Verdict, ...]:
        """The verdicts of the lead on every rank: one broadcast of whole numbers."""
        if self._group.size == 1:
            return tuple(verdicts)
        room = 1 + sum(7 + _MOST_OWN + (max(item.proposal.tree.depths()) if item.proposal else 0) for item in items)
        record = torch.zeros(room, dtype=torch.int64, device=self._device)
        if is_lead:
            numbers = [len(verdicts)]
            for one in verdicts:
                numbers += [one.request_id, one.epoch, one.prefix_len, one.none_follows, bool(one.forced)]
                numbers += [len(one.path), len(one.token_ids), *one.path, *one.token_ids]
            record[: len(numbers)] = torch.tensor(numbers)
        numbers = iter(self._group.broadcast(record).tolist())
        shared = []
        for _ in range(next(numbers)):
            request_id, epoch, prefix_len, none_follows, is_forced, path_len, num_own = islice(numbers, 7)
            path, own = tuple(islice(numbers, path_len)), tuple(islice(numbers, num_own))
            forced = own if is_forced else ()  # some: which ones, only the lead has to know
            shared.append(Verdict(request_id, epoch, prefix_len, path, own, bool(none_follows), forced=forced))
        return tuple(verdicts if is_lead else shared)  # what else they carry is the lead's alone

    def reads_much(
        self, batch: VerifyBatch, verdicts: Sequence[Verdict], contexts: Mapping[int, TargetContext]
    ) -> bool:
        """Whether the drafts behind these verdicts begin with reading a prompt, or what was generated at rest."""
        unread = [
            item.request_id
            for item in batch.items
            if (item.num_draft_tokens or item.reads_text)
            and item.request_id in self._outbox.known
            and self._unread_len(item.request_id, contexts[item.request_id]) > MOST_READ_WITH_DRAFT
        ]
        if not (unread and verdicts):
            return False
        return any(order.request_id in unread for order in self._orders(batch, verdicts, contexts))

    def _unread_len(self, request_id: int, context: TargetContext) -> int:
        """Tokens of the text that the drafter has not been shown."""
        known = None if request_id in self._outbox.admits else self.role.contexts[request_id]
        return len(context.token_ids) - (0 if known is None else len(known.token_ids))

    def follow(
        self,
        batch: VerifyBatch,
        answer: VerdictBatch,
        features: Sequence[FeatureRows],
        contexts: Mapping[int, TargetContext],
    ) -> VerdictBatch:
        """Drafts for the prefixes that the verdicts lead to. The pass's top tokens stay here."""
        top_tokens = () if answer.top_tokens is None else (answer.top_tokens,)
        orders = self._orders(batch, answer.verdicts, contexts)
        # features are read of requests that the drafter knows
        is_due = self._outbox.is_due and self.role.drafter.capabilities.reads_features is not None
        if not (orders or is_due or top_tokens):
            if any(item.proposal is not None for item in batch.items):
                self._committed(batch.items, answer.verdicts)
            self.role.read_features(features)
            return answer
        self._note_texts(self._committed(batch.items, answer.verdicts), contexts)
        order = DraftBatch(
            batch.round,
            *self._outbox.flush(),
            orders=tuple(orders),
            works_ahead=False,
            top_tokens=top_tokens,
            costs=batch.costs,
            unverified=batch.unverified,
        )
        (drafts,) = self.role.answer(order, features)
        return replace(answer, drafts=drafts, top_tokens=None)

    def _orders(
        self, batch: VerifyBatch, verdicts: Sequence[Verdict], contexts: Mapping[int, TargetContext]
    ) -> list[DraftOrder]:
        """Those of the batch that the verdicts leave room for."""
        asked = {item.request_id: item for item in batch.items if item.num_draft_tokens or item.reads_text}
        if not asked:
            return []
        known = self._outbox.known
        orders: list[DraftOrder] = []
        if len(verdicts) < len(batch.items):  # others are in the middle of their prompts
            reading = known - {verdict.request_id for verdict in verdicts}
            orders = [DraftOrder(id_, 0) for id_, item in asked.items() if item.reads_text and id_ in reading]
        for verdict in verdicts:
            request_id = verdict.request_id
            if request_id not in known or verdict.none_follows or (item := asked.get(request_id)) is None:
                continue
            admit, length = contexts[request_id].admit, verdict.prefix_len + len(verdict.path) + len(verdict.token_ids)
            left = admit.prompt_len + admit.sampling.max_tokens - length
            # the target adds one token of its own after the path, so the last one is never worth drafting
            if (num_draft_tokens := min(item.num_draft_tokens, left - 1)) > 0 and not verdict.forced:
                orders.append(DraftOrder(request_id, num_draft_tokens))
            elif item.reads_text:
                orders.append(DraftOrder(request_id, 0))
        return orders

    def _committed(self, items: Sequence[VerifyItem], verdicts: Sequence[Verdict]) -> dict[int, tuple[int, ...]]:
        """The tokens of each request that goes on. Of its last draft the drafter hears with its next batch."""
        proposals, committed = {item.request_id: item.proposal for item in items}, {}
        for verdict in verdicts:
            if verdict.none_follows:
                continue
            request_id, token_ids = verdict.request_id, verdict.token_ids
            if (proposal := proposals[request_id]) is not None:
                token_ids = (*[proposal.tree.token_ids[node] for node in verdict.path], *token_ids)
                if not proposal.is_forced:
                    self._paths[request_id] = verdict.path
            committed[request_id] = token_ids
        return committed

    def _note_texts(self, committed: Mapping[int, tuple[int, ...]], contexts: Mapping[int, TargetContext]) -> None:
        """What the texts have beyond those of the drafter, these tokens included, leaves with its next batch."""
        outbox, known = self._outbox, self.role.contexts
        for request_id, context in contexts.items():
            if request_id not in outbox.known:
                continue
            start = len((outbox.admits.get(request_id) or known[request_id]).token_ids)
            if token_ids := (*context.token_ids[start:], *committed.get(request_id, ())):
                path = self._paths.pop(request_id, ())
                outbox.add_commit(Commit(request_id, context.admit.epoch, start, path, token_ids))

    def _release_rows(self) -> None:
        if (shares := self.role.drafter.capabilities.shares_rows) is not None:
            shares.release_rows()

    def forget(self) -> None:
        """The drafter keeps its model."""
        self._release_rows()
        self.role.forget()
        self._outbox = Outbox()
        self._paths.clear()

    def rejoin(self) -> None:
        self.role.rejoin(None)
