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
    depth: int


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
    read: list[int] = field(default_factory=list)
    """Tokens of the text that each drafter has read."""


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
        self._shown = [i for i, one in enumerate(members) if one.is_shown]
        self._sharing = [i for i, one in enumerate(can) if one.shares_rows is not None]
        self._reads_at_once = {*self._shown, *self._sharing}
        self._draft_line = cache(self._fresh_draft_line)  # asked for again and again in a round
        self._weighed: Sequence[Context] = ()
        self._agree = agree
        self._clock = clock
        self._requests: dict[int, _Request] = {}
        self._begun: dict[int, _Begun] = {}
        self._reading_s = 0.0

    # --- the contract of drafters -------------------------------------------------------------------------------------

    def open(self, context: Context) -> None:
        for one in self.members:
            one.drafter.open(context)
        self._requests[context.request_id] = _Request(context, read=[0] * len(self.members))

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
        orders, drafts = list(zip(contexts, budgets, strict=True)), dict[int, Draft]()
        if self.capabilities.works_ahead is not None:
            drafts = self._prepared([order for order in orders if self._ahead.prepared(order[0])])
        if self._begun:
            begun = [one for one in contexts if one.request_id in self._begun and one.request_id not in drafts]
            drafts |= self._finished(begun)
        rest = orders
        if drafts:
            rest = [order for order in orders if order[0].request_id not in drafts]
        drafts |= self._chosen(rest)
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
        unused = commit
        if commit.path:
            own = commit.request_id, commit.epoch, commit.prefix_len
            unused = Commit(*own, (), commit.token_ids, commit.settled_len)
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
        picks, shown = self._choose(orders)
        drafts, asked = dict[int, Draft](), dict[int, list[tuple[Context, int]]]()
        for row, ((context, _), (number, length)) in enumerate(zip(orders, picks, strict=True)):
            if number == NO_DRAFTER:
                drafts[context.request_id] = Draft.nothing(context)
            elif number in shown:
                draft = _first_tokens(shown[number][row], length)
                drafts[context.request_id] = self._taken(context, number, draft)
            else:
                asked.setdefault(number, []).append((context, length))
        for number in sorted(asked):
            contexts, lengths = zip(*asked[number], strict=True)
            found = self._draft(number, contexts, lengths)
            for context, draft in zip(contexts, found, strict=True):
                drafts[context.request_id] = self._taken(context, number, draft)
        return drafts

    def _choose(self, orders: Orders) -> tuple[Picks, dict[int, list[Draft]]]:
        """The drafter and the length for each request, and the drafts of those that are shown."""
        contexts, budgets = zip(*orders, strict=True)
        times = self._times(contexts)
        shown = dict[int, list[Draft]]()
        for i in self._shown:
            shown[i] = self._draft(i, contexts, budgets)
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
            offers.append(self._offers(row, context, budget, shown))
        if contexts[0].is_unverified:  # which take no row, so nothing is weighed
            return self._agree([_most_accepted(own) for own in offers])
        if times is not UNMEASURED:
            generated = [(one.request_id, _num_generated(one)) for one in contexts]
            request_ids, num_generated = zip(*generated, strict=True)
            offers = self.choice.weigh_reading(request_ids, num_generated, offers, times)
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
            self._remember(context, number, (0, 0), tree, tree.depth)
            request.read[number] = len(context.token_ids)

    def _draft(self, number: int, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        """Drafts of one drafter, timed."""
        one = self.members[number]
        budgets = [min(budget, one.longest) for budget in budgets]
        read_s, unread = 0.0, self._unread_by(number, contexts)
        if max(unread) > MOST_READ_WITH_DRAFT and (prefills := one.drafter.capabilities.prefills) is not None:
            missed = [text for text, count in zip(contexts, unread, strict=True) if count > MOST_READ_WITH_DRAFT]
            read_s = self._read(number, prefills, missed)
            self._reading_s += read_s
            unread = self._unread_by(number, contexts)
        started = self._clock()
        drafts = one.drafter.propose(contexts, budgets)
        seconds = self._clock() - started
        if not one.is_shown:
            _measure(one, max(budgets), unread, seconds)
        self._count_call(number, seconds + read_s)
        return drafts

    def _unread_by(self, number: int, contexts: Sequence[Context]) -> list[int]:
        """Tokens of each text that the drafter has yet to read."""
        if number in self._sharing:
            return [0] * len(contexts)
        requests = self._requests
        return [len(one.token_ids) - requests[one.request_id].read[number] for one in contexts]

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
            read, length = self._requests[context.request_id].read, len(context.token_ids)
            for number in self._shown:
                read[number] = length

    def _unread(self, number: int, context: Context) -> int:
        """Tokens of the text that the drafter has yet to read; the target's own layers and a shown one read at once."""
        if number in self._reads_at_once:
            return 0
        return len(context.token_ids) - self._requests[context.request_id].read[number]

    def _should_read(self, number: int, context: Context) -> bool:
        """Whether a model should read text that it is not asked to draft for: the rest of a prompt that it began, and
        what pays; at first a text to measure what reading costs."""
        one, length = self.members[number], max(context.prompt_len, len(context.token_ids))
        if context.drafter is not None:
            return context.drafter == one.name
        read = self._requests[context.request_id].read[number]
        if not one.read_s.weight or 0 < read < context.prompt_len:
            return True
        read_s = one.read_s.mean * (length - read)
        num_requests, num_generated = len(self._requests), _num_generated(context)
        return self.choice.should_read(number, context.request_id, num_requests, num_generated, read_s)

    def _offers(self, row: int, context: Context, budget: int, shown: Mapping[int, Sequence[Draft]]) -> list[Offer]:
        """What every drafter could contribute; drafts that were shown are remembered, to be scored."""
        request, offers = self._requests[context.request_id], []
        for i, one in enumerate(self.members):
            is_chain, depth, kind, draft = one.is_chain, min(budget, one.longest), (0, 0), None
            unread = 0 if i in shown else self._unread(i, context)
            if i in shown:
                draft = shown[i][row]
                num_tokens = len(draft.tree.token_ids) - 1
                if not num_tokens:
                    request.runs[i] = 0
                    continue
                is_chain = draft.tree.is_chain
                depth = num_tokens if is_chain else draft.tree.depth
                kind = (request.runs.get(i, 0).bit_length(), num_tokens.bit_length())
                self._remember(context, i, kind, draft.tree, depth)
            if context.drafter not in (None, one.name) or (context.is_unverified and draft is None):
                continue
            # a request that names its drafter asked for the reading
            read_s = one.read_s.mean * unread if unread > MOST_READ_WITH_DRAFT and not context.drafter else 0.0
            acceptance = self.choice.acceptance[i]
            expected = acceptance.expected(context.request_id, kind, depth)
            error = acceptance.error(context.request_id) if draft is None else 0.0
            if is_chain:
                offers.append(Offer(i, range(1, depth + 1), expected, read_s, error))
            else:
                longest = depth if draft is None else len(draft.tree.token_ids) - 1
                offers.append(Offer(i, (longest,), expected[-1:], read_s, error))
        return offers

    def _times(self, contexts: Sequence[Context]) -> RoundTimes:
        """What rounds of so many requests cost."""
        costs = contexts[0].costs
        if not costs.round_s or contexts[0].is_unverified:
            return UNMEASURED
        self._weighed = contexts
        self._draft_line.cache_clear()
        return RoundTimes(self._draft_line, costs.round_s, costs.row_s, len(contexts))

    def _fresh_draft_line(self, drafter: int, users: int) -> tuple[float, float]:
        """Seconds of a drafter that drafts for so many requests of the round, as in `RoundTimes`."""
        if drafter in self._shown:
            return 0.0, 0.0
        unread = [count for count in self._unread_by(drafter, self._weighed) if count <= MOST_READ_WITH_DRAFT]
        return self.members[drafter].draft_line(sum(unread) / len(unread) if unread else 0.0, users)

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

    def _remember(self, context: Context, number: int, kind: tuple[int, int], tree: TokenTree, depth: int) -> None:
        """This draft is to be scored."""
        # one that had no room is 0 deep, and what is read off a preview may be as deep as the longest drafter's
        depth = min(max(1, depth), self.members[number].longest)
        shown = _Shown(number, kind, tree, len(context.token_ids), depth)
        self._requests[context.request_id].drafts.append(shown)

    def _score(self, context: Context, request: _Request, token_ids: Sequence[int]) -> None:
        """Compare drafts with the text and the tokens that follow it; keep those that these do not decide."""
        length, undecided = len(context.token_ids), []
        for shown in request.drafts:
            number, tree, is_latest = shown.member, shown.tree, shown.start == length
            text = token_ids if is_latest else [*context.token_ids[shown.start :], *token_ids]
            agreed = min(tree.agreed_depth(text), shown.depth)
            if is_latest and number in self._shown:
                run = request.runs.get(number, 0)
                request.runs[number] = min(run + agreed, _LONGEST_RUN) if agreed == len(token_ids) else 0
            if agreed < len(text) < shown.depth or len(text) >= shown.depth:
                self.choice.acceptance[number].update(context.request_id, shown.kind, shown.depth, agreed)
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
    if len(tree.token_ids) == length + 1:
        return draft
    shorter = TokenTree(tree.token_ids[: length + 1], tree.parents[: length + 1])
    return Draft(shorter, draft.sampling_kinds[: length + 1], draft.distributions[: length + 1])


def build_auto(config: AutoDrafterConfig, setup: DraftSetup) -> tuple[AutoDrafter, dict[str, object]]:
    members, facts = build_members(config, setup)
    if setup.group.size == 1:
        return AutoDrafter(members, keeps_lengths=not setup.adaptive), facts

    def agree(picks: Picks) -> Picks:
        numbers = setup.group.agree([number for pick in picks for number in pick], setup.device)
        return list(zip(numbers[::2], numbers[1::2], strict=True))

    return AutoDrafter(members, agree, keeps_lengths=not setup.adaptive), facts
