"""`drafter=auto`: several drafters in one draft role, of which one drafts for each request.

Drafters without a model answer within microseconds, so all of them draft in every round; models and cascades draft only
for the requests that they are chosen for. `actors/policy/drafter_choice.py` chooses. Every draft is scored against the
tokens that the target then commits, used or not, since the output does not depend on the draft; a draft that
agrees with all of them is scored when later tokens have reached its end.

A model reads a few tokens that others drafted with its next draft, whose cost is fitted against them. More text, as a
prompt, it reads only if that is expected to pay: as the request arrives, or else before its first draft.

A request that names a drafter is drafted for by that one alone, with `pipeline.adaptive=false` in every round. The
choice follows from earlier verdicts and from drafts that are no random draws, never from a token that was drawn, so it
is exact under every rule that is exact for each of the drafters. It knows drafters by their contract only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import compress

from actors.drafters.auto.config import AutoDrafterConfig
from actors.drafters.auto.members import (
    Member,
    Members,
    MembersAhead,
    MembersFeatures,
    MembersRows,
    build_members,
    named_parts,
)
from actors.drafters.config import DraftSetup
from actors.drafters.draft_ahead.width import Step
from actors.drafters.interface import Context, Draft, DraftsByPass, Prefills
from actors.policy.drafter_choice import NO_DRAFTER, DrafterChoice, Offer, RoundTimes
from actors.protocol.messages import MOST_READ_WITH_DRAFT, Commit, TokenTree

Picks = list[tuple[int, int]]
"""The number of a drafter and draft tokens, for each request."""
Orders = Sequence[tuple[Context, int]]
"""Requests, and the draft tokens that were ordered for each."""
_LONGEST_RUN = 7
"""Tokens in a row that a drafter was right about, beyond which a longer run predicts no more."""
UNMEASURED = RoundTimes(lambda *_: (0.0, 0.0), 1.0, 0.0)
"""Stands for the times of rounds before one was measured, for which any drafts serve, and of those where no pass
verifies drafts, which are not asked for."""


@dataclass(slots=True)
class _Shown:
    """A draft that is compared with the text after its first `start` tokens."""

    member: int
    kind: tuple[int, int]
    tree: TokenTree
    start: int


@dataclass(slots=True)
class _Begun:
    """A draft that was begun: `made`, or by a member that makes it pass by pass. `num_unread` tokens were to be read;
    its passes took `seconds` so far."""

    member: int
    length: int
    num_unread: int = 0
    seconds: float = 0.0
    made: Draft | None = None


@dataclass(slots=True)
class _Request:
    """One request: drafts that are not scored yet, which drafter drafted, and how far each has read and is right."""

    context: Context
    drafts: list[_Shown] = field(default_factory=list)
    used: int = NO_DRAFTER
    runs: dict[int, int] = field(default_factory=dict)
    """Shown drafters -> last tokens in a row that they were right about."""
    read: dict[int, int] = field(default_factory=dict)
    """Other drafters -> tokens of the text that they have read."""
    read_by_shown: int = 0
    """Tokens of the text that all shown drafters have read."""


class AutoDrafter(Members):
    """Chooses among `members`; `agree` returns rank 0's choice on every rank, because their clocks differ. With
    `keeps_lengths` a request that names a drafter gets its longest draft, whatever that costs."""

    def __init__(
        self,
        members: Sequence[Member],
        agree: Callable[[Picks], Picks] = lambda picks: picks,
        clock: Callable[[], float] = time.monotonic,
        *,
        keeps_lengths: bool = False,
    ) -> None:
        super().__init__(members, MembersAhead(members))
        self._keeps_lengths = keeps_lengths
        can = [one.drafter.capabilities for one in members]
        readers = [one.reads_features for one in can if one.reads_features is not None]
        sharing = [one.shares_rows for one in can if one.shares_rows is not None]
        self.capabilities = replace(
            self.capabilities,
            times_reading=self,
            reads_features=MembersFeatures(readers) if readers else None,
            shares_rows=MembersRows(sharing) if sharing else None,
            drafts_by_pass=self if any(one.drafts_by_pass is not None for one in can) else None,
        )
        self.choice = DrafterChoice([one.longest for one in members], [one.is_shown for one in members])
        self._agree = agree
        self._clock = clock
        self._requests: dict[int, _Request] = {}
        self._begun: dict[int, _Begun] = {}
        self._reading_s = 0.0

    # --- the contract of drafters -------------------------------------------------------------------------------------

    def open(self, context: Context) -> None:
        for one in self.members:
            one.drafter.open(context)
        self._requests[context.request_id] = _Request(context)

    def prefill(self, contexts: Sequence[Context]) -> None:
        """Text is entered into lookups, and read by those models for which that is expected to pay."""
        for i, one in enumerate(self.members):
            if (prefills := one.drafter.capabilities.prefills) is None:
                continue
            reading = contexts
            if one.reads_text:
                answers = self._agree([(i, self._should_read(i, context)) for context in contexts])
                reading = [context for context, (_, reads) in zip(contexts, answers, strict=True) if reads]
            if not reading:
                continue
            self._read(i, prefills, reading)
        self._note_shown(contexts)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        """What a drafter has prepared is used; for the others drafters are chosen."""
        orders = list(zip(contexts, budgets, strict=True))
        is_prepared = [self._ahead.prepared(context) for context in contexts]
        drafts, rest = dict[int, Draft](), orders
        if any(is_prepared):
            drafts = self._prepared(list(compress(orders, is_prepared)))
            rest = [one for one, is_ready in zip(orders, is_prepared, strict=True) if not is_ready]
        drafts |= self._finished([context for context, _ in rest if context.request_id in self._begun])
        drafts |= self._chosen([one for one in rest if one[0].request_id not in drafts])
        return [drafts[context.request_id] for context in contexts]

    def prefetched(self, context: Context, budget: int, tree: TokenTree) -> None:
        number = self._ahead.prepared_by(context)
        assert number is not None, "a preview is of something prepared"
        sends = self.members[number].drafter.capabilities.sends_previews
        assert sends is not None
        sends.prefetched(context, min(budget, self.members[number].longest), tree)
        self._uses(context, number, tree)

    def observe(self, context: Context, commit: Commit) -> None:
        request = self._requests[context.request_id]
        unused = replace(commit, path=()) if commit.path else commit
        for i, one in enumerate(self.members):
            one.drafter.observe(context, commit if i == request.used else unused)
        if request.used != NO_DRAFTER:
            self._count_accepted(request.used, commit)
        request.used = NO_DRAFTER
        self._score(context, request, commit.token_ids)

    def release(self, request_id: int) -> None:
        self._begun.pop(request_id, None)
        for one in self.members:
            one.drafter.release(request_id)
        self.choice.release(request_id)
        self.choice.lengths.ended(_num_generated(self._requests.pop(request_id).context))

    def reading_s(self) -> float:
        seconds, self._reading_s = self._reading_s, 0.0
        return seconds

    # --- drafting -----------------------------------------------------------------------------------------------------

    def _prepared(self, orders: Orders) -> dict[int, Draft]:
        """Drafts that were prepared, by request; they cost nothing now."""
        drafts: dict[int, Draft] = {}
        for i, one in enumerate(self.members):
            own = [order for order in orders if self._ahead.prepared_by(order[0]) == i]
            if not own:
                continue
            budgets = [min(budget, one.longest) for _, budget in own]
            found = one.drafter.propose([context for context, _ in own], budgets)
            self._count_call(i, 0.0)
            for (context, _), draft in zip(own, found, strict=True):
                drafts[context.request_id] = self._taken(context, i, draft)
        return drafts

    def _chosen(self, orders: Orders) -> dict[int, Draft]:
        """Drafts of the drafters that are chosen, by request."""
        if not orders:
            return {}
        contexts, (picks, shown) = [context for context, _ in orders], self._choose(orders)
        drafts = {context.request_id: Draft.nothing(context) for context in contexts}
        for i in range(len(self.members)):
            rows = [row for row, (number, _) in enumerate(picks) if number == i]
            if i in shown:
                found = [_first_tokens(shown[i][row], picks[row][1]) for row in rows]
            else:
                found = self._draft(i, [contexts[row] for row in rows], [picks[row][1] for row in rows])
            for row, draft in zip(rows, found, strict=True):
                drafts[contexts[row].request_id] = self._taken(contexts[row], i, draft)
        return drafts

    def _choose(self, orders: Orders) -> tuple[Picks, dict[int, list[Draft]]]:
        """The drafter and the length for each request, and the drafts of those that are shown."""
        contexts, budgets = [context for context, _ in orders], [budget for _, budget in orders]
        times = self._times(contexts)
        shown = {i: self._draft(i, contexts, budgets) for i, one in enumerate(self.members) if one.is_shown}
        self._note_shown(contexts)
        return self._pick(contexts, budgets, shown, times), shown

    def _taken(self, context: Context, number: int, draft: Draft) -> Draft:
        """The draft of this drafter, which goes to the target."""
        self._uses(context, number, draft.tree)
        return named_parts(self.members[number].name, draft)

    def _pick(
        self, contexts: Sequence[Context], budgets: Sequence[int], shown: dict[int, list[Draft]], times: RoundTimes
    ) -> Picks:
        """The drafter and the length for each request, on every rank those of rank 0."""
        offers = []
        for row, (context, budget) in enumerate(zip(contexts, budgets, strict=True)):
            offers.append(self._offers(context, budget, {i: drafted[row] for i, drafted in shown.items()}))
        if contexts[0].is_unverified:  # which take no row, so nothing is weighed
            return self._agree([_most_accepted(own) for own in offers])
        if times is not UNMEASURED:
            request_ids = [context.request_id for context in contexts]
            offers = self.choice.weigh_reading(request_ids, [_num_generated(one) for one in contexts], offers, times)
        picks = self.choice.choose(offers, times).picks
        if self._keeps_lengths:
            for row, (context, own) in enumerate(zip(contexts, offers, strict=True)):
                if context.drafter is not None and own and own[0].lengths:
                    picks[row] = own[0].drafter, own[0].lengths[-1]
        return self._agree(picks)

    def _uses(self, context: Context, number: int, tree: TokenTree) -> None:
        """This draft of this drafter goes to the target."""
        request = self._requests[context.request_id]
        request.used = number
        self._count_used(number, tree)
        if not self.members[number].is_shown:  # those were noted as they were shown
            self._remember(context, number, (0, 0), tree)
            request.read[number] = len(context.token_ids)

    def _draft(self, number: int, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        """Drafts of one drafter, timed."""
        if not contexts:
            return []
        one = self.members[number]
        budgets = [min(budget, one.longest) for budget in budgets]
        read_s = self._read_missed(number, contexts)
        unread = [self._unread(number, context) for context in contexts]
        started = self._clock()
        drafts = one.drafter.propose(contexts, budgets)
        seconds = self._clock() - started
        if not one.is_shown:
            _measure(one, max(budgets), unread, seconds)
        seconds += read_s
        self._count_call(number, seconds)
        return drafts

    def _read_missed(self, number: int, contexts: Sequence[Context]) -> float:
        """Texts of which this drafter has much to read are read before its drafts; returns the seconds."""
        one = self.members[number]
        if (prefills := one.drafter.capabilities.prefills) is None or not (one.is_shown or one.reads_text):
            return 0.0
        missed = [
            context
            for context in contexts
            if self._read_len(number, context) < len(context.token_ids) - MOST_READ_WITH_DRAFT
        ]
        if not missed:
            return 0.0
        seconds = self._read(number, prefills, missed)
        self._reading_s += seconds
        return seconds

    def _read(self, number: int, prefills: Prefills, contexts: Sequence[Context]) -> float:
        """This drafter reads texts; returns the seconds."""
        num_tokens = sum(self._unread(number, context) for context in contexts)
        started = self._clock()
        prefills.prefill(contexts)
        seconds = self._clock() - started
        if num_tokens:
            self.members[number].read_s.update(seconds / num_tokens, num_tokens)
            for context in contexts:
                self._requests[context.request_id].read[number] = len(context.token_ids)
        return seconds

    def _note_shown(self, contexts: Sequence[Context]) -> None:
        for context in contexts:
            self._requests[context.request_id].read_by_shown = len(context.token_ids)

    def _unread(self, number: int, context: Context) -> int:
        """Tokens of the text that the drafter has yet to read."""
        if not self.members[number].reads_text:
            return 0
        return len(context.token_ids) - self._read_len(number, context)

    def _read_len(self, number: int, context: Context) -> int:
        """Tokens of the text that the drafter has read."""
        request = self._requests[context.request_id]
        return request.read_by_shown if self.members[number].is_shown else request.read.get(number, 0)

    def _should_read(self, number: int, context: Context) -> bool:
        """Whether a model should read text that it is not asked to draft for: the rest of a prompt that it began, and
        what pays; at first a text to measure what reading costs."""
        one, length = self.members[number], max(context.prompt_len, len(context.token_ids))
        if context.drafter is not None:
            return context.drafter == one.name
        read = self._requests[context.request_id].read.get(number, 0)
        if not one.read_s.weight or 0 < read < context.prompt_len:
            return True
        read_s = one.read_s.mean * (length - read)
        num_requests, num_generated = len(self._requests), _num_generated(context)
        return self.choice.should_read(number, context.request_id, num_requests, num_generated, read_s)

    def _offers(self, context: Context, budget: int, shown: Mapping[int, Draft]) -> list[Offer]:
        """What every drafter could contribute; drafts that were shown are remembered, to be scored."""
        request, offers = self._requests[context.request_id], []
        for i, one in enumerate(self.members):
            longest, draft = min(budget, one.longest), shown.get(i)
            is_chain, depth, kind = one.is_chain, longest, (0, 0)
            unread = self._unread(i, context)
            read_s = one.read_s.mean * unread if unread > MOST_READ_WITH_DRAFT else 0.0
            if draft is not None:
                num_tokens = draft.tree.num_draft_tokens
                if not num_tokens:
                    request.runs[i] = 0
                    continue
                is_chain, depth = draft.tree.is_chain, draft.tree.depth
                longest, kind = num_tokens, (request.runs.get(i, 0).bit_length(), num_tokens.bit_length())
                self._remember(context, i, kind, draft.tree)
            if context.drafter not in (None, one.name) or (context.is_unverified and not one.is_shown):
                continue
            read_s = 0.0 if context.drafter else read_s  # the request asked for it
            acceptance = self.choice.acceptance[i]
            expected = acceptance.expected(context.request_id, kind, depth)
            error = 0.0 if one.is_shown else acceptance.error(context.request_id)
            if is_chain:
                offers.append(Offer(i, range(1, depth + 1), expected, read_s, error))
            else:
                offers.append(Offer(i, (longest,), expected[-1:], read_s, error))
        return offers

    def _times(self, contexts: Sequence[Context]) -> RoundTimes:
        """What rounds of so many requests cost."""
        costs = contexts[0].costs
        if not costs.round_s or contexts[0].is_unverified:
            return UNMEASURED
        unread = [
            [count for context in contexts if (count := self._unread(i, context)) <= MOST_READ_WITH_DRAFT]
            for i in range(len(self.members))
        ]
        means = [sum(counts) / len(counts) if counts else 0.0 for counts in unread]

        @cache  # asked for again and again in a round
        def draft_line(drafter: int, users: int) -> tuple[float, float]:
            return self.members[drafter].draft_line(means[drafter], users)

        return RoundTimes(draft_line, costs.round_s, costs.row_s, len(contexts))

    # --- drafts that are made pass by pass ----------------------------------------------------------------------------

    def begin(self, contexts: Sequence[Context], budgets: Sequence[int]) -> None:
        """A drafter is chosen for each; those that make drafts by calls make theirs now."""
        orders = [order for order in zip(contexts, budgets, strict=True) if not self._ahead.prepared(order[0])]
        if not orders:
            return
        picks, shown = self._choose(orders)
        for row, ((context, _), (number, length)) in enumerate(zip(orders, picks, strict=True)):
            begun = _Begun(number, length)
            if number == NO_DRAFTER:
                begun.made = Draft.nothing(context)
            elif number in shown:
                begun.made = _first_tokens(shown[number][row], length)
            elif (by_pass := self._by_pass(number)) is not None:
                begun.num_unread = self._unread(number, context)
                started = self._clock()
                by_pass.begin([context], [length])
                begun.seconds = self._clock() - started
            else:
                (begun.made,) = self._draft(number, [context], [length])
            self._begun[context.request_id] = begun

    def is_drafting(self, request_id: int) -> bool:
        begun = self._begun.get(request_id)
        by_pass = None if begun is None or begun.made is not None else self._by_pass(begun.member)
        return by_pass is not None and by_pass.is_drafting(request_id)

    def advance(self, width: int | None) -> Step:
        """A pass of each drafter that drafts; draft-ahead is that of the first of them."""
        drafting = {number: self._begun[number] for number in self._begun if self.is_drafting(number)}
        step: Step | None = None
        for i in sorted({begun.member for begun in drafting.values()}):
            by_pass = self._by_pass(i)
            assert by_pass is not None
            started = self._clock()
            done = by_pass.advance(width if step is None else None)
            seconds, step = self._clock() - started, step or done
            for begun in drafting.values():
                begun.seconds += seconds if begun.member == i else 0.0
        if step is None and width is not None and self._ahead.wants_work:
            step = self._ahead.work(width)
        return step or Step(0)

    def _by_pass(self, number: int) -> DraftsByPass | None:
        return self.members[number].drafter.capabilities.drafts_by_pass

    def _finished(self, contexts: Sequence[Context]) -> dict[int, Draft]:
        """The drafts that were begun, by request."""
        drafts = {}
        for context in contexts:
            begun = self._begun.pop(context.request_id)
            draft = begun.made
            if draft is None:
                one = self.members[begun.member]
                (draft,) = one.drafter.propose([context], [begun.length])
                _measure(one, begun.length, [begun.num_unread], begun.seconds)
                self._count_call(begun.member, begun.seconds)
            drafts[context.request_id] = (
                draft if begun.member == NO_DRAFTER else self._taken(context, begun.member, draft)
            )
        return drafts

    # --- scoring ------------------------------------------------------------------------------------------------------

    def _remember(self, context: Context, number: int, kind: tuple[int, int], tree: TokenTree) -> None:
        shown = _Shown(number, kind, tree, len(context.token_ids))
        self._requests[context.request_id].drafts.append(shown)

    def _score(self, context: Context, request: _Request, token_ids: Sequence[int]) -> None:
        """Compare drafts with the text and the tokens that follow it; keep those that these do not decide."""
        length, undecided = len(context.token_ids), []
        for shown in request.drafts:
            text = [*context.token_ids[shown.start :], *token_ids]
            # of 0 where it had no room; what is read off a preview is as deep as the longest drafter's
            depth = min(max(1, shown.tree.depth), self.members[shown.member].longest)
            agreed = min(shown.tree.agreed_depth(text), depth)
            if shown.start == length and self.members[shown.member].is_shown:
                run = request.runs.get(shown.member, 0)
                request.runs[shown.member] = min(run + agreed, _LONGEST_RUN) if agreed == len(token_ids) else 0
            if agreed < min(len(text), depth) or len(text) >= depth:
                self.choice.acceptance[shown.member].update(context.request_id, shown.kind, depth, agreed)
            else:
                undecided.append(shown)
        request.drafts = undecided


def _measure(member: Member, longest: int, unread: Sequence[int], seconds: float) -> None:
    """Drafts of at most `longest` tokens, behind so many tokens that were to be read, took so long."""
    if late := [count for count in unread if count > MOST_READ_WITH_DRAFT]:
        read_s = max(0.0, seconds - member.draft_s(longest, 0.0, len(unread)))
        member.read_s.update(read_s / sum(late), sum(late))
    else:
        member.drafted(longest, sum(unread) / len(unread), len(unread), seconds)


def _most_accepted(offers: Sequence[Offer]) -> tuple[int, int]:
    """The offer with the most tokens, as long as it can be."""
    best = max(offers, key=lambda offer: offer.expected[-1], default=None)
    return (NO_DRAFTER, 0) if best is None else (best.drafter, best.lengths[-1])


def _num_generated(context: Context) -> int:
    return max(0, len(context.token_ids) - context.prompt_len)


def _first_tokens(draft: Draft, length: int) -> Draft:
    """The first tokens of a chain; a tree as it is."""
    tree = draft.tree
    if tree.num_draft_tokens == length:
        return draft
    shorter = TokenTree(tree.token_ids[: length + 1], tree.parents[: length + 1])
    return Draft(shorter, draft.sampling_kinds[: length + 1], draft.distributions[: length + 1])


def build_auto(config: AutoDrafterConfig, setup: DraftSetup) -> tuple[AutoDrafter, dict[str, object]]:
    members, facts = build_members(config, setup)

    def agree(picks: Picks) -> Picks:
        numbers = setup.group.agree([number for pick in picks for number in pick], setup.device)
        return list(zip(numbers[::2], numbers[1::2], strict=True))

    return AutoDrafter(members, agree, keeps_lengths=not setup.adaptive), facts
