"""`drafter=routed`: several draft models in one role, each of which drafts for the requests that it is given.

The router gives a request to a member by its prompt, once all of it is there: on ranks of its own a drafter is sent a
long one in chunks. A request that names a member gets that one. Only that member reads the text and, if it learns,
learns from it, so that each becomes the drafter of its own kind of text (Online Speculative Decoding, arXiv 2310.07177,
which routes by topic). Knows drafters by their contract only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from actors.drafters.auto.members import Member, Members, MembersAhead, build_members, named_parts
from actors.drafters.config import DraftSetup
from actors.drafters.interface import Context, Draft, LearnsWhenIdle
from actors.drafters.routed.router import PromptRouter
from actors.protocol.messages import Commit, LearningWork, TokenTree

if TYPE_CHECKING:
    from actors.drafters.routed.config import RoutedDrafterConfig


class RoutedDrafter(Members):
    """Hands each call on to the member of its request."""

    def __init__(self, members: Sequence[Member], router: PromptRouter) -> None:
        self._member_of: dict[int, int] = {}  # by request; none yet while its prompt arrives
        super().__init__(members, RoutedAhead(members, self._member_of))
        able = [one.drafter.capabilities.learns for one in members]
        learning = [one for one in able if one is not None]
        self.capabilities = replace(self.capabilities, learns=MembersLearning(learning) if learning else None)
        self._router = router

    # --- the contract of drafters -------------------------------------------------------------------------------------

    def open(self, context: Context) -> None:
        names = [one.name for one in self.members]
        if context.drafter is not None and context.drafter in names:
            self._give(context, names.index(context.drafter))
        elif len(context.token_ids) >= context.prompt_len:
            self._give(context, self._router.route(context.prompt))

    def _give(self, context: Context, number: int) -> None:
        self._member_of[context.request_id] = number
        self.members[number].drafter.open(context)

    def prefill(self, contexts: Sequence[Context]) -> None:
        for number, rows in self._by_member(contexts):
            if (prefills := self.members[number].drafter.capabilities.prefills) is not None:
                prefills.prefill([contexts[row] for row in rows])

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        drafts: dict[int, Draft] = {}
        for number, rows in self._by_member(contexts):
            one = self.members[number]
            asked = [min(budgets[row], one.longest) for row in rows]
            started = time.monotonic()
            found = one.drafter.propose([contexts[row] for row in rows], asked)
            self._count_call(number, time.monotonic() - started)
            for draft in found:
                self._count_used(number, draft.tree)
            drafts |= {row: named_parts(one.name, draft) for row, draft in zip(rows, found, strict=True)}
        return [drafts.get(row) or Draft.nothing(context) for row, context in enumerate(contexts)]

    def observe(self, context: Context, commit: Commit) -> None:
        if (number := self._member_of.get(context.request_id)) is None:
            return  # of its prompt
        self._count_accepted(number, commit)
        self.members[number].drafter.observe(context, commit)

    def release(self, request_id: int) -> None:
        if (number := self._member_of.pop(request_id, None)) is not None:
            self.members[number].drafter.release(request_id)

    # --- what members can do besides ----------------------------------------------------------------------------------

    def prefetched(self, context: Context, budget: int, tree: TokenTree) -> None:
        number = self._member_of[context.request_id]
        sends = self.members[number].drafter.capabilities.sends_previews
        assert sends is not None, "a preview is of something prepared"
        sends.prefetched(context, budget, tree)
        self._count_used(number, tree)

    def _by_member(self, contexts: Sequence[Context]) -> Iterable[tuple[int, list[int]]]:
        """(member, indices of its requests), of those whose prompts are there."""
        for context in contexts:
            if context.request_id not in self._member_of:
                self.open(context)
        numbers = [self._member_of.get(context.request_id) for context in contexts]
        given = sorted({number for number in numbers if number is not None})
        return [(number, [row for row, own in enumerate(numbers) if own == number]) for number in given]


class RoutedAhead(MembersAhead):
    """Draft-ahead of each member for its own requests."""

    def __init__(self, members: Sequence[Member], member_of: Mapping[int, int]) -> None:
        super().__init__(members)
        self._member_of = member_of

    def prepared_by(self, context: Context) -> int | None:
        number = self._member_of.get(context.request_id)
        ahead = self._ahead.get(number) if number is not None else None
        return number if ahead is not None and ahead.prepared(context) else None


class MembersLearning:
    """`LearnsWhenIdle` of several drafters, which take turns."""

    def __init__(self, learning: Sequence[LearnsWhenIdle]) -> None:
        self._turns = list(learning)
        self.idle_share = max(one.idle_share for one in learning)

    @property
    def wants_learning(self) -> bool:
        return any(one.wants_learning for one in self._turns)

    def learn(self) -> None:
        number = next(i for i, one in enumerate(self._turns) if one.wants_learning)
        chosen = self._turns.pop(number)
        self._turns.append(chosen)
        chosen.learn()

    def save(self) -> None:
        for one in self._turns:
            one.save()

    def learning(self) -> LearningWork:
        """Sums; loss and shares are means over the positions that were learned."""
        works = [one.learning() for one in self._turns]
        num_positions = sum(one.num_positions for one in works)

        def mean(name: str) -> float:
            return sum(getattr(one, name) * one.num_positions for one in works) / max(1, num_positions)

        return LearningWork(
            version=sum(one.version for one in works),
            is_served=any(one.is_served for one in works),
            num_steps=sum(one.num_steps for one in works),
            num_positions=num_positions,
            num_held=sum(one.num_held for one in works),
            num_rollbacks=sum(one.num_rollbacks for one in works),
            loss=mean("loss"),
            adapted_share=mean("adapted_share"),
            shipped_share=mean("shipped_share"),
        )


def build_routed(config: RoutedDrafterConfig, setup: DraftSetup) -> tuple[RoutedDrafter, dict[str, object]]:
    members, facts = build_members(config, setup)
    return RoutedDrafter(members, PromptRouter(len(members))), facts
