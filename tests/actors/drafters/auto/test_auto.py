"""`drafter=auto` between its drafters and the choice: scoring, the records that reach each drafter, and costs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from actors.drafters.auto.drafter import UNMEASURED, AutoDrafter
from actors.drafters.auto.members import Member
from actors.drafters.draft_ahead.width import Step
from actors.drafters.interface import Capabilities, Context, Draft
from actors.policy.drafter_choice import NO_DRAFTER
from actors.protocol.messages import (
    Admit,
    Commit,
    LevelWork,
    MeasuredCosts,
    SamplingKind,
    SamplingParams,
    SparseDistribution,
    TokenTree,
)

TEXT = list(range(100, 1100))
"""The target's text: token i of it stands at position i."""
PROMPT = 10


@dataclass
class Scripted:
    """Drafts the text itself, right for `num_right` tokens; a call takes `call_s` and `read_s` a token to read."""

    clock: Clock
    num_right: int
    length: int
    call_s: float = 0.0
    read_s: float = 0.0
    kind: SamplingKind = SamplingKind.DETERMINISTIC
    capabilities: Capabilities = field(default_factory=Capabilities)
    observed: list = field(default_factory=list)
    budgets: list = field(default_factory=list)
    read: int = 0

    def open(self, context):
        self.read = 0

    def propose(self, contexts, budgets):
        self.budgets.append(list(budgets))
        drafts = []
        for context, budget in zip(contexts, budgets, strict=True):
            start, count = len(context.token_ids), min(budget, self.length)
            self.clock.now += self.read_s * (start - self.read)
            self.read = start
            tokens = [TEXT[start + i] if i < self.num_right else 7 for i in range(count)]
            drafts.append(self.draft(TokenTree.chain(context.token_ids[-1], tokens)))
            self.clock.now += self.call_s * budget
        return drafts

    def draft(self, tree):
        if self.kind is SamplingKind.DETERMINISTIC:
            return Draft.chosen(tree)
        kinds = (SamplingKind.ROOT, *[self.kind] * tree.num_draft_tokens)
        distributions = (*(SparseDistribution((token,), (1.0,)) for token in tree.token_ids[1:]), None)
        return Draft(tree, kinds, distributions)

    def observe(self, context, commit):
        self.observed.append(commit.path)

    def release(self, request_id):
        pass


@dataclass
class Reader(Scripted):
    """Also reads text ahead; `ahead` has the tokens of each time."""

    ahead: list = field(default_factory=list)

    def __post_init__(self):
        self.capabilities = Capabilities(prefills=self)

    def prefill(self, contexts):
        for context in contexts:
            self.ahead.append(len(context.token_ids) - self.read)
            self.clock.now += self.read_s * self.ahead[-1]
            self.read = len(context.token_ids)


@dataclass
class ByPass(Scripted):
    """Makes drafts pass by pass, one token each; another request's pass before each takes `others_s`."""

    others_s: float = 0.0
    begun: dict = field(default_factory=dict)

    def __post_init__(self):
        self.capabilities = Capabilities(drafts_by_pass=self)

    def begin(self, contexts, budgets):
        self.begun |= {one.request_id: budget for one, budget in zip(contexts, budgets, strict=True)}

    def is_drafting(self, request_id):
        return self.begun.get(request_id, 0) > 0

    def advance(self, width):
        self.clock.now += self.call_s + self.others_s
        self.begun = {number: max(0, left - 1) for number, left in self.begun.items()}
        return Step(0)

    def propose(self, contexts, budgets):
        now = self.clock.now
        drafts = super().propose(contexts, budgets)
        if all(context.request_id in self.begun for context in contexts):
            self.clock.now = now
        for context in contexts:
            self.begun.pop(context.request_id, None)
        return drafts


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Table:
    """A drafter over one request, which may name one, and whose target takes `pass_s`; `agree` as rank 0 sends it."""

    def __init__(self, lookup, model, clock, pass_s=0.010, name=None, **options):
        self.clock, self.pass_s, self.model, self.name = clock, pass_s, model, name
        self.drafter = AutoDrafter(
            [
                Member("lookup", lookup, lookup.length, is_shown=True, is_chain=True),
                Member("model", model, model.length, is_shown=False, is_chain=True),
            ],
            clock=clock,
            **options,
        )
        self.used = []
        self.open(PROMPT)

    def open(self, prompt_len, first=None):
        """A request of which the role knows the `first` tokens, if not all."""
        admit = Admit(0, 0, tuple(TEXT[: first or prompt_len]), prompt_len, SamplingParams(), drafter=self.name)
        self.context = Context.admitted(admit, None)
        self.drafter.open(self.context)

    def request(self, prompt_len, num_tokens=60):
        """A request from its prompt to its end; returns the tokens that the model read ahead of its drafts."""
        self.drafter.release(0)
        self.open(prompt_len)
        num_before = len(self.model.ahead)
        self.drafter.prefill([self.context])
        while len(self.context.token_ids) < prompt_len + num_tokens:
            self.round()
        return sum(self.model.ahead[num_before:])

    def round(self, budget=8):
        self.context.costs = MeasuredCosts(self.pass_s)
        if (by_pass := self.drafter.capabilities.drafts_by_pass) is not None:
            by_pass.begin([self.context], [budget])
            while by_pass.is_drafting(0):
                by_pass.advance(None)
        (draft,) = self.drafter.propose([self.context], [budget])
        self.used.append(self.drafter._requests[0].used)
        self.clock.now += self.pass_s
        start = len(self.context.token_ids)
        depth = draft.tree.agreed_depth(TEXT[start : start + draft.tree.num_draft_tokens])
        tokens = tuple(TEXT[start : start + depth + 1])
        commit = Commit(0, 0, start, tuple(range(1, depth + 1)), tokens)
        self.drafter.observe(self.context, commit)
        self.context.extend(tokens)
        return draft

    def seen(self, number):
        return self.drafter.choice.acceptance[number]


@pytest.fixture
def clock():
    return Clock()


@pytest.mark.parametrize(("name", "number"), [("lookup", 0), ("model", 1)])
def test_a_request_that_names_a_drafter_gets_drafts_of_no_other(clock, name, number):
    """Though the model is the better one, and has to read a long prompt first."""
    lookup, model = Scripted(clock, 1, 4), Reader(clock, 4, 4, call_s=0.001, read_s=0.01)
    table = Table(lookup, model, clock, name=name)
    table.request(300)
    assert number in table.used and {*table.used} <= {number, NO_DRAFTER}


@pytest.mark.parametrize("keeps_lengths", [False, True])
def test_a_drafter_that_was_named_is_weighed_unless_lengths_are_kept(clock, keeps_lengths):
    """Each of its drafts takes as long as eight passes of the target."""
    table = Table(
        Scripted(clock, 1, 4), Scripted(clock, 4, 4, call_s=0.08), clock, name="model", keeps_lengths=keeps_lengths
    )
    sizes = [table.round(budget).tree.num_draft_tokens for budget in (4, 3, 4, 4, 4, 4, 4, 4)]
    assert (sizes == [4, 3, 4, 4, 4, 4, 4, 4]) is keeps_lengths


def test_the_one_with_the_most_tokens_per_second_drafts(clock):
    cheap, good = Scripted(clock, 1, 4), Scripted(clock, 4, 4, call_s=0.001)
    table = Table(cheap, good, clock)
    for _ in range(30):
        table.round()
    assert table.used[-10:].count(1) >= 9, "four tokens for 4 ms beat one for nothing"
    dear = Table(Scripted(clock, 1, 4), Scripted(clock, 4, 4, call_s=0.02), clock)
    for _ in range(30):
        dear.round()
    assert dear.used[-10:].count(0) >= 9


@pytest.mark.parametrize("others_s", [0.0, 0.019])
def test_drafts_made_pass_by_pass_are_chosen_by_the_time_that_they_take(clock, others_s):
    """Four passes of 1 ms pay beside a target's of 10 ms, of 20 ms with what others draft in between they do not."""
    model = ByPass(clock, 4, 4, call_s=0.001, others_s=others_s)
    table = Table(Scripted(clock, 1, 4), model, clock)
    for _ in range(30):
        table.round()
    assert table.used[-10:].count(1 if not others_s else 0) >= 9
    assert table.drafter.members[1].draft_s(4, 5, 1) == pytest.approx(4 * (0.001 + others_s), rel=0.1)
    assert (1, 2, 3, 4) in model.observed


def test_a_request_that_ends_while_its_draft_is_made_is_forgotten(clock):
    table = Table(Scripted(clock, 0, 4), model := ByPass(clock, 4, 4, call_s=0.001), clock)
    table.drafter.choice.choose = lambda offers, times: replace_picks([(1, 4)])
    table.drafter.begin([table.context], [4])
    assert table.drafter.is_drafting(0)
    table.drafter.release(0)
    model.begun.clear()
    assert not table.drafter.is_drafting(0)
    table.open(PROMPT)
    assert table.drafter.advance(None) == Step(0)
    assert table.round().tree.num_draft_tokens == 4


def test_a_draft_that_was_not_used_is_scored_too(clock):
    """The lookup is right for 3 tokens. The model is used, and brings 2 a round: what it would have brought is known
    once the text has grown past it."""
    table = Table(Scripted(clock, 3, 5), Scripted(clock, 2, 2, call_s=1e-6), clock)
    table.drafter.choice.choose = lambda offers, times: replace_picks([(1, 2)])
    for _ in range(6):
        table.round()
    undecided = [one for one in table.drafter._requests[0].drafts if one.member == 0]
    assert len(undecided) == 1 and undecided[0].start == len(table.context.token_ids) - 3
    chances = table.seen(0).expected(7, None, 4)
    assert table.seen(0).num_drafts == pytest.approx(5) and chances == pytest.approx([1, 2, 3, 3], abs=1e-3)


def test_a_draft_that_no_pass_verifies_takes_none_of_a_model(clock):
    """Though the model is the better one; what the lookup drafts is scored as ever."""
    lookup, model = Scripted(clock, 2, 4), Scripted(clock, 4, 4, call_s=0.001)
    table = Table(lookup, model, clock)
    for _ in range(30):
        table.round()
    num_calls, num_drafts = len(model.budgets), table.seen(0).num_drafts
    for _ in range(5):
        table.context.is_unverified = True
        (draft,) = table.drafter.propose([table.context], [4])
        assert draft.tree.token_ids[1:3] == tuple(TEXT[len(table.context.token_ids) :][:2])
        for _ in range(4):
            token = (TEXT[len(table.context.token_ids)],)
            table.drafter.observe(table.context, Commit(0, 0, len(table.context.token_ids), (), token))
            table.context.extend(token)
    assert len(model.budgets) == num_calls and model.observed[-20:] == [()] * 20
    assert table.seen(0).num_drafts > num_drafts
    table.context.is_unverified = False
    for _ in range(5):
        table.round()
    assert 1 in table.used[-5:]


def replace_picks(picks):
    from actors.policy.drafter_choice import Assignment

    return Assignment(picks, 1.0, 1.0)


def test_only_the_drafter_that_drafted_hears_of_a_path(clock):
    lookup, model = Scripted(clock, 2, 4), Scripted(clock, 3, 4)
    table = Table(lookup, model, clock)
    for picks in ([(0, 4)], [(1, 4)], [(NO_DRAFTER, 0)]):
        table.drafter.choice.choose = lambda offers, times, picks=picks: replace_picks(picks)
        table.round()
    assert lookup.observed == [(1, 2), (), ()]
    assert model.observed == [(), (1, 2, 3), ()]


def test_text_that_others_drafted_is_part_of_the_models_price(clock):
    """Reading costs 1 ms a token: after a lookup's long drafts the model's next draft is dear, and known to be."""
    model = Scripted(clock, 4, 4, call_s=0.001, read_s=0.001)
    table = Table(Scripted(clock, 8, 8), model, clock)
    for turn in range(40):
        picks = [(1, 4)] if turn % 5 in (0, 1, 3) else [(0, 8)]
        table.drafter.choice.choose = lambda offers, times, picks=picks: replace_picks(picks)
        table.round()
        if len(table.context.token_ids) > 280:
            break
    cost = table.drafter.members[1]
    assert cost.draft_s(4, 14, 1) - cost.draft_s(4, 5, 1) == pytest.approx(9 * 0.001, rel=0.2)


def reading(clock, lookup_right, read_s):
    """A table whose model is right for 4 tokens, for 1 ms each, after the first request, which measures reading."""
    table = Table(Scripted(clock, lookup_right, 6), Reader(clock, 4, 4, call_s=0.001, read_s=read_s), clock)
    table.request(40)
    return table


def test_a_model_reads_no_long_prompt_where_lookups_are_good(clock):
    table = reading(clock, lookup_right=6, read_s=0.0001)
    num_used = table.used.count(1)
    assert [table.request(500) for _ in range(5)] == [0] * 5
    assert table.used.count(1) == num_used and table.model.read == 0, "nor as it drafts"


def test_a_model_reads_prompts_ahead_where_lookups_are_bad(clock):
    table = reading(clock, lookup_right=0, read_s=0.0001)
    assert [table.request(500) for _ in range(3)] == [500] * 3
    assert table.used[-10:] == [1] * 10


def test_the_seconds_of_reading_decide(clock):
    """Drafts save about 7 ms a token, requests have 60 to 128 tokens, reading takes 4 ms a token."""
    table = reading(clock, lookup_right=0, read_s=0.004)
    assert table.request(500) == 0 and table.request(60) == 60


def test_a_prompt_that_arrives_in_parts_is_read_to_its_end(clock):
    """What it saves is not known before the first draft; to stop would leave the rest to that draft."""
    model = Reader(clock, 4, 4, read_s=0.0001)
    table = Table(Scripted(clock, 6, 6), model, clock)
    table.drafter.release(0)
    table.open(600, first=250)
    for end in (500, 600):
        table.drafter.prefill([table.context])
        table.context.extend(TEXT[len(table.context.token_ids) : end])
    table.drafter.prefill([table.context])
    assert model.ahead == [250, 250, 100]


def test_a_draft_that_reads_long_text_measures_reading_not_drafting(clock):
    table = Table(Scripted(clock, 1, 4), Scripted(clock, 4, 4, call_s=0.001, read_s=0.0005), clock)
    table.drafter.choice.choose = lambda offers, times: replace_picks([(1, 4)])
    for _ in range(3):
        table.round()
    table.drafter.release(0)
    table.open(500)
    before = table.drafter.members[1].draft_s(4, 5, 1)
    table.round()
    model = table.drafter.members[1]
    assert model.read_s.mean == pytest.approx(0.0005, rel=0.05) and model.draft_s(4, 5, 1) == before


def test_rank_0_decides(clock):
    """A rank whose clock would choose the model follows."""
    agreed = []

    def agree(picks):
        agreed.append(picks)
        return [(0, 2)]

    table = Table(Scripted(clock, 1, 4), Scripted(clock, 4, 4), clock, agree=agree)
    draft = table.round()
    assert draft.tree.num_draft_tokens == 2 and len(agreed) == 1


def test_rank_0_decides_what_is_read(clock):
    model = Reader(clock, 4, 4)
    table = Table(Scripted(clock, 1, 4), model, clock, agree=lambda picks: [(i, 0) for i, _ in picks])
    table.drafter.prefill([table.context])
    assert model.ahead == []


def test_how_tokens_were_drawn_travels_with_them(clock):
    """The kinds of a lookup that is cut are cut too; those of the model are its own."""
    drawn = SamplingKind.WITHOUT_REPLACEMENT
    table = Table(Scripted(clock, 4, 4), Scripted(clock, 4, 4, kind=drawn), clock)
    table.drafter.choice.choose = lambda offers, times: replace_picks([(0, 2)])
    assert table.round().sampling_kinds == (SamplingKind.ROOT, *[SamplingKind.DETERMINISTIC] * 2)
    table.drafter.choice.choose = lambda offers, times: replace_picks([(1, 3)])
    draft = table.round()
    assert draft.sampling_kinds == (SamplingKind.ROOT, drawn, drawn, drawn)
    assert [one is not None for one in draft.distributions] == [True, True, True, False]


def test_the_budget_bounds_every_draft(clock):
    table = Table(Scripted(clock, 8, 8), Scripted(clock, 4, 4), clock)
    for budget in (1, 2, 3, 8):
        assert table.round(budget).tree.num_draft_tokens <= budget


def test_work_and_acceptance_are_counted_by_drafter(clock):
    table = Table(Scripted(clock, 2, 4), Scripted(clock, 3, 4, call_s=0.001), clock)
    table.drafter.choice.choose = lambda offers, times: replace_picks([(1, 4)])
    for _ in range(3):
        table.round()
    work = {one.level: one for one in table.drafter.level_stats()}
    assert work["model"].num_accepted_tokens == 9 and work["lookup"].num_accepted_tokens == 0
    assert work["model"].num_drafts == 3 and work["model"].busy_s == pytest.approx(0.012)
    lookup = work["lookup"]
    assert (lookup.num_passes, lookup.num_drafts, lookup.num_draft_tokens) == (3, 0, 0), "shown, and not used"
    assert table.drafter.level_stats() == ()


# --- what the choice is given, and what is measured -------------------------------------------------------------------


def watched(table, *picks):
    """The choice picks these in turn, the last from then on; returns what it was given: offers and times."""
    given, rest = [], list(picks)

    def choose(offers, times):
        given.append((offers, times))
        return replace_picks([rest.pop(0) if len(rest) > 1 else rest[0]] * len(offers))

    table.drafter.choice.choose = choose
    return given


def opened(table, *request_ids):
    """More requests, each with a text of 10 tokens."""
    contexts = [Context.admitted(Admit(i, 0, tuple(TEXT[:10]), 10, SamplingParams()), None) for i in request_ids]
    for context in contexts:
        table.drafter.open(context)
    return contexts


def lookups(clock, **options):
    return Table(Scripted(clock, 4, 8), Scripted(clock, 4, 8), clock, **options)


def test_a_draft_is_weighed_against_what_the_coordinator_measured(clock):
    table = lookups(clock)
    given = watched(table, (0, 4))
    table.context.costs = MeasuredCosts(0.040, 0.002, 0.3)
    table.drafter.propose([table.context], [4])
    ((_, times),) = given
    assert (times.rest_s, times.per_row_s, times.num_requests) == (0.040, 0.002, 1)


@pytest.mark.parametrize(("costs", "is_unverified"), [(MeasuredCosts(), False), (MeasuredCosts(0.040, 0.002), True)])
def test_nothing_is_weighed_against_unknown_costs_or_where_no_pass_verifies_a_draft(clock, costs, is_unverified):
    """Such a draft shows what the whole of it would bring."""
    table = lookups(clock)
    given = watched(table, (0, 4))
    table.context.costs, table.context.is_unverified = costs, is_unverified
    (draft,) = table.drafter.propose([table.context], [4])
    assert draft.tree.num_draft_tokens == 4
    assert [times is UNMEASURED for _, times in given] == ([] if is_unverified else [True])


def test_drafts_for_many_have_a_price_of_their_own(clock):
    """A call for one takes 1 ms a token, one for eight eight times as long; four are nearer to eight."""
    member = Member("model", None, longest=8, is_shown=False, is_chain=True)
    assert member.draft_s(4, 1, 5) == 0.0, "a question is no measurement"
    for length in (2, 4, 6, 2, 4, 6):
        member.drafted(length, 1, 1, 0.001 * length)
        member.drafted(length, 1, 8, 0.008 * length)
    assert [member.draft_s(4, 1, count) for count in (1, 8)] == pytest.approx([0.004, 0.032], rel=0.1)
    for _ in range(3):
        member.drafted(4, 1, 8, 0.032)
    assert member.draft_s(4, 1, 5) == member.draft_s(4, 1, 8), "what was never seen begins with the nearest"
    for _ in range(3):
        member.drafted(4, 1, 5, 0.020)
    assert member.draft_s(4, 1, 5) == pytest.approx(0.023, rel=0.1)
    assert member.draft_s(4, 1, 8) == pytest.approx(0.032, rel=0.1)


@pytest.mark.parametrize(("prompt_len", "is_read_apart"), [(32, False), (33, True)])
def test_more_than_32_unread_tokens_have_a_price_of_their_own(clock, prompt_len, is_read_apart):
    model = Scripted(clock, 4, 4, call_s=0.001)
    table = Table(Scripted(clock, 1, 4), model, clock)
    given = watched(table, (1, 4))
    table.round()
    model.read_s = 0.0005
    for _ in range(2):
        table.drafter.release(0)
        table.open(prompt_len)
        table.round()
    member = table.drafter.members[1]
    assert bool(member.read_s.weight) == is_read_apart
    assert (member.draft_times.known(1).length_s.weight > 2) != is_read_apart
    (offer,) = [one for one in given[-1][0][0] if one.drafter == 1]
    assert (offer.read_s > 0) == is_read_apart
    if is_read_apart:
        assert member.read_s.weight == pytest.approx(0.97 * prompt_len + prompt_len)
        assert offer.read_s == pytest.approx(prompt_len * 0.0005)


def test_the_price_of_a_draft_is_that_of_its_length_and_mean_unread_text(clock):
    """Two requests, 10 and 13 tokens that are not read yet, 4 passes of 6 ms in all."""
    table = Table(Scripted(clock, 1, 4), Scripted(clock, 4, 4, call_s=0.001), clock)
    one, two = opened(table, 1, 2)
    two.extend(TEXT[10:13])
    picks = [(1, 2), (1, 4)]
    table.drafter.choice.choose = lambda offers, times: replace_picks(picks)
    table.drafter.propose([one, two], [4, 4])
    member = table.drafter.members[1]
    times = member.draft_times.known(2)
    assert (times.length_s.mean_x, times.unread_s.mean_x) == (4, 11.5)
    assert member.draft_s(4, 11.5, 2) == pytest.approx(0.006)


@pytest.mark.parametrize("call_s", [0.0, 0.002])
@pytest.mark.parametrize("read_s", [0.0, 0.0001])
def test_a_draft_costs_a_call_its_tokens_and_what_it_reads(call_s, read_s):
    member = Member("model", None, longest=8, is_shown=False, is_chain=True)
    draw = random.Random(3)
    for _ in range(200):
        length, unread = draw.randint(1, 8), draw.randint(1, 9)
        member.drafted(length, unread, 1, call_s + 0.001 * length + read_s * unread)
    for length, unread in ((1, 1), (4, 5), (8, 9)):
        assert member.draft_s(length, unread, 1) == pytest.approx(call_s + 0.001 * length + read_s * unread, abs=2e-4)


def test_before_lengths_vary_half_of_a_draft_is_taken_for_its_tokens():
    member = Member("model", None, longest=8, is_shown=False, is_chain=True)
    member.drafted(4, 1, 1, 0.004)
    assert [member.draft_s(length, 1, 1) for length in (2, 4, 8)] == pytest.approx([0.003, 0.004, 0.006])


def test_reading_ahead_is_measured_per_token(clock):
    table = Table(Scripted(clock, 1, 4), Reader(clock, 4, 4, read_s=0.0005), clock)
    table.drafter.prefill([table.context])
    cost = table.drafter.members[1].read_s
    assert cost.mean == pytest.approx(0.0005) and cost.weight == PROMPT


def test_texts_of_which_much_is_unread_are_read_before_the_drafts_and_timed_apart(clock):
    """The lookup takes 0.1 ms a token and the model 0.5; ten tokens are part of a draft's price, forty are not."""
    lookup, model = Reader(clock, 1, 4, read_s=0.0001), Reader(clock, 4, 4, call_s=0.001, read_s=0.0005)
    table = Table(lookup, model, clock)
    watched(table, (1, 4))
    table.drafter.propose([table.context], [4])
    assert table.drafter.reading_s() == 0.0 and not model.ahead
    table.context.extend(TEXT[10:50])
    before = clock.now
    table.drafter.propose([table.context], [4])
    assert table.drafter.reading_s() == pytest.approx(40 * 0.0006) and table.drafter.reading_s() == 0.0
    assert lookup.ahead == model.ahead == [40] and clock.now - before == pytest.approx(40 * 0.0006 + 4 * 0.001)
    table.context.extend(TEXT[50:90])
    table.drafter.prefill([table.context])
    table.drafter.propose([table.context], [4])
    assert table.drafter.reading_s() == pytest.approx(40 * 0.0005), "the model left its text for its draft"
    assert lookup.ahead == model.ahead == [40, 40]


def test_text_reaches_lookups_without_being_measured(clock):
    lookup = Reader(clock, 1, 4, read_s=0.0005)
    table = Table(lookup, Scripted(clock, 4, 4), clock)
    table.drafter.prefill([table.context])
    assert lookup.ahead == [PROMPT] and not table.drafter.members[0].read_s.weight


def test_kinds_of_drafts_are_how_long_they_were_right_and_are(clock):
    """Three tokens a round continue a run, of which 7 count; a draft of nothing ends it."""
    lookup = Scripted(clock, 8, 4)
    table = Table(lookup, Scripted(clock, 4, 4), clock)
    watched(table, (0, 2))
    kinds, acceptance = [], table.seen(0)
    real = acceptance.expected
    acceptance.expected = lambda request_id, kind, depth: kinds.append((kind, depth)) or real(request_id, kind, depth)
    for _ in range(4):
        table.round()
    lookup.length = 0
    table.drafter.choice.choose = lambda offers, times: replace_picks([(NO_DRAFTER, 0)])
    table.round()
    lookup.length = 2
    table.round()
    assert kinds == [((0, 3), 4), ((2, 3), 4), ((3, 3), 4), ((3, 3), 4), ((0, 2), 2)]


class Branching(Scripted):
    """Its draft is the tree of three tokens and a sibling of the first."""

    def propose(self, contexts, budgets):
        (context,) = contexts
        start = len(context.token_ids)
        return [self.draft(TokenTree((TEXT[start - 1], *TEXT[start : start + 3], 7), (-1, 0, 1, 2, 0)))]


def test_a_chain_is_offered_in_every_length_and_a_tree_whole(clock):
    table = Table(Branching(clock, 4, 8), Scripted(clock, 4, 4), clock)
    given = watched(table, (0, 4))
    draft = table.round()
    tree, chain = given[0][0][0]
    assert tuple(tree.lengths) == (4,) and len(tree.expected) == 1
    assert tuple(chain.lengths) == (1, 2, 3, 4) and len(chain.expected) == 4
    assert draft.tree.num_draft_tokens == 4 and draft.tree.parents == (-1, 0, 1, 2, 0)
    table.round()
    assert table.seen(0).num_drafts == 2, "each was 3 deep, and 4 tokens of text were enough to see it"


def test_top_tokens_reach_those_that_read_them(clock):
    heard = []

    class Hearing(Scripted):
        def read_top_tokens(self, top_tokens):
            heard.append(top_tokens)

    hearing, deaf = Hearing(clock, 1, 4), Scripted(clock, 4, 4)
    hearing.capabilities = Capabilities(700, reads_top_tokens=hearing)
    deaf.capabilities = Capabilities(900)
    table = Table(hearing, deaf, clock)
    assert table.drafter.capabilities.vocab_size == 700
    table.drafter.read_top_tokens("top")  # pyright: ignore[reportArgumentType]  only handed on
    assert heard == ["top"]
    silent = Table(Scripted(clock, 1, 4), deaf, clock).drafter.capabilities
    assert silent.vocab_size == 900 and silent.reads_top_tokens is None


def test_what_ended_is_forgotten_and_its_length_counts(clock):
    released = []

    class Ending(Scripted):
        def release(self, request_id):
            released.append(request_id)

    table = Table(Ending(clock, 1, 4), Ending(clock, 4, 4), clock)
    while len(table.context.token_ids) < PROMPT + 60:
        table.round()
    num_tokens = len(table.context.token_ids) - PROMPT
    acceptance = table.seen(1)
    assert acceptance.expected(0, (0, 0), 4) != acceptance.expected(99, (0, 0), 4)
    table.drafter.release(0)
    assert released == [0, 0]
    assert acceptance.expected(0, (0, 0), 4) == acceptance.expected(99, (0, 0), 4)
    assert table.drafter.choice.lengths.to_come(0) == pytest.approx(128 + (num_tokens - 128) / 1.97)


def test_only_tokens_that_were_committed_count_as_accepted(clock):
    """The last tokens of a request are cut at its limit; a second verdict belongs to no draft."""
    table = Table(Scripted(clock, 4, 4), Scripted(clock, 4, 4), clock)
    watched(table, (0, 4))
    table.drafter.propose([table.context], [4])
    for length, path in ((2, (1, 2, 3, 4)), (1, (1,))):
        start = len(table.context.token_ids)
        tokens = tuple(TEXT[start : start + length])
        table.drafter.observe(table.context, Commit(0, 0, start, path, tokens))
        table.context.extend(tokens)
    (work,) = table.drafter.level_stats()
    assert (work.level, work.num_accepted_tokens, work.num_passes) == ("lookup", 2, 1)
    assert (work.num_drafts, work.num_draft_tokens) == (1, 4)


def test_a_draft_of_nothing_is_no_draft_in_the_counts_and_levels_are_passed_on(clock):
    inner = LevelWork("inner", 3)

    class Levels(Scripted):
        def level_stats(self):
            return (inner,)

    empty = Levels(clock, 0, 0)
    empty.capabilities = Capabilities(has_levels=empty)
    table = Table(empty, Scripted(clock, 4, 4), clock)
    watched(table, (NO_DRAFTER, 0))
    table.round()
    lookup, below = table.drafter.level_stats()
    assert below is inner and (lookup.level, lookup.num_passes) == ("lookup", 1)
    assert (lookup.num_drafts, lookup.num_draft_tokens) == (0, 0)
