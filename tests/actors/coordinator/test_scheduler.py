"""Continuous batching: bounds of every pass, preemption, fairness and refusals, over random lives of requests."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.coordinator.scheduler import MOST_NEW, Capacity, Scheduler
from actors.coordinator.sequence import Sequence
from actors.options import SchedulerConfig
from actors.protocol.messages import Proposal, Request, SamplingParams, TokenTree, Verdict
from tests.examples import examples


def count_scopes(sequences: Iterable[Sequence]) -> Counter[int]:
    return Counter([sequence.request.scope for sequence in sequences])


def sequence_of(
    prompt_len: int,
    max_tokens: int = 10,
    request_id: int = 0,
    max_model_len: int = 64,
    scope: int = 0,
    source_len: int = 0,
) -> Sequence:
    sampling, source = SamplingParams(max_tokens=max_tokens), (6,) * source_len
    request = Request(request_id, (5,) * prompt_len, sampling, scope=scope, source=source)
    return Sequence.start(request, max_model_len)


def proposal_for(sequence: Sequence, num_draft_tokens: int) -> Proposal:
    tree = TokenTree.chain(sequence.token_ids[-1], (5,) * num_draft_tokens)
    return Proposal(sequence.request_id, sequence.epoch, sequence.prefix_len, sequence.prefix_hash, tree)


def plan_with(scheduler: Scheduler, proposals: dict[int, Proposal], most_text: int | None = None):
    """The next pass if the running sequences hold these proposals, which it uses up."""
    for sequence in (*scheduler.running, *scheduler.waiting):
        sequence.draft.proposal = proposals.get(sequence.request_id)
    plan = scheduler.plan(most_text=lambda _: most_text)
    for sequence in (*scheduler.running, *scheduler.waiting):
        sequence.draft.proposal = None
    return plan


def follow(plan, accept=lambda num_draft_tokens: 0) -> None:
    """What the coordinator does with a plan and its verdicts."""
    for sequence, rows, proposal in plan.rows:
        if rows < sequence.uncached_len:
            sequence.cached_len += rows
            continue
        path = tuple(range(1, 1 + accept(proposal.tree.num_draft_tokens if proposal else 0)))
        verdict = Verdict(sequence.request_id, sequence.epoch, sequence.prefix_len, path, (7,))
        sequence.commit(verdict, proposal)


class Lives(RuleBasedStateMachine):
    """Requests arrive, are drafted for, accepted in part, aborted and finished, in any order."""

    @initialize(
        seats=st.integers(1, 4),
        rows=st.integers(2, 30),
        chunk=st.integers(1, 12),
        slots=st.integers(24, 90),
        max_model_len=st.integers(8, 40),
        max_source_len=st.sampled_from([0, 0, 20]),
        most_text=st.sampled_from([None, 1, 5]),
    )
    def open(self, seats, rows, chunk, slots, max_model_len, max_source_len, most_text):
        self.scheduler = Scheduler(SchedulerConfig(seats, rows, chunk), Capacity(slots, max_model_len))
        self.max_source_len, self.most_text = max_source_len, most_text
        self.arrived = 0
        self.live: list[Sequence] = []
        self.order: dict[int, int] = {}

    @rule(
        prompt_len=st.integers(1, 40),
        max_tokens=st.integers(1, 20),
        scope=st.integers(0, 2),
        source_len=st.integers(1, 20),
    )
    def arrive(self, prompt_len, max_tokens, scope, source_len):
        self.arrived += 1
        max_model_len = self.scheduler.capacity.max_model_len
        prompt_len, source_len = min(prompt_len, max_model_len - 1), min(source_len, self.max_source_len)
        sequence = sequence_of(prompt_len, max_tokens, self.arrived, max_model_len, scope, source_len)
        if self.scheduler.refusal(sequence) is None:
            self.scheduler.add(sequence)
            self.live.append(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        self.end(data.draw(st.sampled_from(self.live)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def take_a_pass(self, data):
        self.step(lambda: data.draw(st.integers(0, 5)), lambda most: data.draw(st.integers(0, most)))

    def step(self, draft_length, accept):
        scheduler, running = self.scheduler, list(self.scheduler.running)
        waiting = list(scheduler.waiting)
        drafted = [sequence for sequence in running if sequence.uncached_len == 1]
        lengths = {sequence.request_id: min(draft_length(), sequence.remaining - 1) for sequence in drafted}
        proposals = {s.request_id: proposal_for(s, lengths[s.request_id]) for s in drafted if lengths[s.request_id]}
        plan = plan_with(scheduler, proposals, self.most_text)
        self.check_pass(plan)
        self.check_moves(plan, running, waiting)
        follow(plan, accept)
        for sequence in list(scheduler.running):
            if sequence.finish_reason is not None:
                self.end(sequence)

    def end(self, sequence):
        self.live.remove(sequence)
        self.scheduler.remove(sequence)

    def check_pass(self, plan):
        scheduler, rows = self.scheduler, plan.rows
        assert rows, "there is work, and none is done"
        fed = {s.request_id: n + (p.tree.num_draft_tokens if p else 0) for s, n, p in rows}
        sources = [sequence.source_len for sequence, *_ in rows if sequence.reads_source]
        texts = [sequence for sequence, *_ in rows if sequence.uncached_len > 1 or sequence.reads_source]
        if len(texts) > 1 or not sources:
            assert sum(fed.values()) + sum(sources) <= scheduler.limits.max_num_batched_tokens + len(sources)
        held = sum(sequence.cached_len + sequence.source_len for sequence in scheduler.running)
        assert held + sum(fed.values()) <= scheduler.capacity.kv_slots
        assert len(fed) == len(rows) <= len(scheduler.running) <= scheduler.limits.max_num_seqs
        for sequence, num_rows, proposal in rows:
            assert sequence in scheduler.running
            assert 0 < num_rows <= min(sequence.uncached_len, scheduler.limits.prefill_chunk)
            assert proposal is None or num_rows == sequence.uncached_len, "a proposal hangs below the root"
        roots = [one for one in scheduler.running if one.uncached_len == 1 and not one.reads_source]
        prompts_fed = any(sequence.uncached_len > 1 for sequence, _, _ in rows)
        if prompts_fed or any(proposal for _, _, proposal in rows):
            assert all(sequence.request_id in fed for sequence in roots), (
                "a root waits for the extras of another request"
            )

    def check_moves(self, plan, running, waiting):
        scheduler, preempted = self.scheduler, plan.preempted
        assert not set(map(id, plan.admitted)) & set(map(id, preempted))
        self.check_shares(plan, running, waiting)
        assert scheduler.running == [one for one in running if one not in preempted] + plan.admitted
        had_places = [sequence.num_preemptions > 0 for sequence in scheduler.waiting]
        assert had_places == sorted(had_places, reverse=True), "what was put back comes before what never ran"
        assert all(sequence.cached_len == 0 for sequence in preempted)
        if running:
            assert running[0] in scheduler.running, "the oldest is never put back"

    def check_shares(self, plan, running, waiting):
        """Each client is served in order, and above an even share of the places it gets no further one."""
        counts, before = count_scopes(self.scheduler.running), count_scopes(running)
        clients = {*count_scopes(running), *count_scopes(waiting)}
        for scope in clients:
            own, came = [[one for one in some if one.request.scope == scope] for some in (waiting, plan.admitted)]
            assert came == own[: len(came)], "they are served in the order in which they wait"
            share = -(-self.scheduler.limits.max_num_seqs // len(clients))
            assert counts[scope] <= max(share, before[scope])
            assert len(came) <= MOST_NEW or len(clients) == 1
        lost = [one for one in plan.preempted if counts[one.request.scope] + 1 < max(counts.values(), default=0)]
        assert not lost or not plan.admitted, "a place is taken from the client with the most"

    @invariant()
    def everybody_is_in_one_place(self):
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        places = [*scheduler.running, *scheduler.waiting]
        assert sorted(map(id, places)) == sorted(map(id, self.live)) and len(places) == len(self.live)

    def teardown(self):
        """No request starves: what is left ends within the passes that one after the other would take."""
        if not hasattr(self, "scheduler"):
            return
        share = -(-self.scheduler.limits.max_num_batched_tokens // 3)  # of three clients
        chunk = min(self.scheduler.limits.prefill_chunk, share)
        if self.most_text is not None:
            chunk = min(chunk, -(-self.most_text // 3))
        budget = sum(s.max_len * (2 + s.max_len // chunk) for s in self.live)
        while self.live:
            budget -= 1
            assert budget >= 0, f"{len(self.live)} requests starve"
            self.step(lambda: 3, lambda most: 0)


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


def running_scheduler(limits: SchedulerConfig, slots: int, *prompt_lens: int, generated: int = 1) -> Scheduler:
    """A scheduler whose sequences all lack only their root."""
    scheduler = Scheduler(limits, Capacity(slots, 64))
    for request_id, prompt_len in enumerate(prompt_lens):
        scheduler.add(sequence_of(prompt_len, 20, request_id))
    for _ in range(generated):
        follow(scheduler.plan())
    return scheduler


def test_decode_rows_come_before_prompt_chunks():
    scheduler = running_scheduler(SchedulerConfig(8, 24, 16), 400, 4, 4)
    scheduler.add(sequence_of(30, request_id=9))
    plan = plan_with(scheduler, {0: proposal_for(scheduler.running[0], 5)})
    rows = {sequence.request_id: (rows, proposal is not None) for sequence, rows, proposal in plan.rows}
    assert rows == {0: (1, True), 1: (1, False), 9: (16, False)}
    assert [sequence.request_id for sequence, _, _ in plan.rows] == [0, 1, 9]


def test_less_text_is_read_beside_requests_that_decode():
    scheduler = running_scheduler(SchedulerConfig(8, 100, 40, text_pass_ms=250.0), 400, 4)
    for request_id in (8, 9):
        scheduler.add(sequence_of(50, request_id=request_id))

    times = []

    def rows(most: int | None, held=()) -> dict[int, int]:
        plan = scheduler.plan(held, lambda pass_s: times.append(pass_s) or most)
        return {sequence.request_id: rows for sequence, rows, _ in plan.rows}

    assert rows(None) == rows(1000) == {0: 1, 8: 40, 9: 40}
    assert rows(60) == {0: 1, 8: 40, 9: 20}
    assert rows(10) == rows(10, [3]) == {0: 1, 8: 10}
    assert rows(10, [0]) == {8: 10}, "it decodes, though not in this pass"
    assert times == [0.25] * 6
    scheduler.remove(scheduler.running[0])
    assert rows(10) == {8: 40, 9: 40}, "nothing waits for them"
    assert times == [0.25] * 6, "and nothing has to be known"


def test_the_bounded_text_of_a_pass_is_shared_by_clients():
    scheduler = running_scheduler(SchedulerConfig(8, 100, 40), 400, 4)
    for request_id, scope in ((7, 1), (8, 1), (9, 2)):
        scheduler.add(sequence_of(50, request_id=request_id, scope=scope))
    rows = {sequence.request_id: rows for sequence, rows, _ in scheduler.plan(most_text=lambda _: 30).rows}
    assert rows == {0: 1, 7: 10, 9: 10}


def test_passes_over_masks_and_of_a_tested_request_read_as_much_as_fits():
    masks = Scheduler(SchedulerConfig(8, 100, 40), Capacity(400, 64, block_size=4))
    for request_id, prompt_len in enumerate((1, 50)):
        masks.add(sequence_of(prompt_len, request_id=request_id))
    assert [rows for _, rows, _ in masks.plan(most_text=lambda _: 10).rows] == [1, 40]
    tested = running_scheduler(SchedulerConfig(8, 100, 40), 400, 4)
    tested.add(sequence_of(50, request_id=9))
    tested.plan()
    tested.running[1].probation = True
    assert [(one.request_id, rows) for one, rows, _ in tested.plan(most_text=lambda _: 10).rows] == [(9, 40)]


def test_an_older_prompt_does_not_push_a_root_out_of_the_pass():
    scheduler = Scheduler(SchedulerConfig(8, 6, 4), Capacity(400, 64))
    for request_id, prompt_len in enumerate((40, 1, 1, 1)):
        scheduler.add(sequence_of(prompt_len, request_id=request_id))
    follow(scheduler.plan())
    assert [(sequence.request_id, rows) for sequence, rows, _ in scheduler.plan().rows] == [
        (1, 1),
        (2, 1),
        (3, 1),
        (0, 3),
    ]


def test_a_draft_never_costs_another_sequence_its_root():
    scheduler = running_scheduler(SchedulerConfig(8, 12, 12), 400, 2, 2, 2)
    first, second, _ = scheduler.running
    plan = plan_with(scheduler, {0: proposal_for(first, 10), 1: proposal_for(second, 4)})
    rows = [(sequence.request_id, rows, proposal is not None) for sequence, rows, proposal in plan.rows]
    assert rows == [(0, 1, False), (1, 1, True), (2, 1, False)]


def test_short_pool_costs_drafts_first_and_the_youngest_its_place_then():
    scheduler = running_scheduler(SchedulerConfig(8, 100, 100), 23, 6, 6, 6)
    oldest, middle, youngest = scheduler.running
    proposals = {sequence.request_id: proposal_for(sequence, 2) for sequence in scheduler.running}
    plan = plan_with(scheduler, proposals)  # 18 cached, 3 roots, 2 slots left
    assert [(s.request_id, p is not None) for s, _, p in plan.rows] == [(0, True), (1, False), (2, False)]
    follow(plan)
    follow(scheduler.plan())  # 21 cached; the roots need 24 of 23
    assert scheduler.running == [oldest, middle] and list(scheduler.waiting) == [youngest]
    assert (youngest.epoch, youngest.cached_len, youngest.num_preemptions) == (1, 0, 1)
    scheduler.add(sequence_of(1, request_id=9))
    assert not scheduler.plan().admitted, "a later arrival does not overtake"
    scheduler.remove(oldest)
    assert [sequence.request_id for sequence in scheduler.plan().admitted] == [2, 9]


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "capacity", "refusal"),
    [
        (49, 5, Capacity(100, 50), None),
        (20, 20, Capacity(39, 50), "prompt: 40 tokens .* do not fit 39 KV slots; raise target.kv_slots"),
        (20, 20, Capacity(40, 50), None),
        (20, 500, Capacity(50, 50), None),
        (20, 500, Capacity(49, 50), "do not fit 49 KV slots"),
    ],
)
def test_what_can_never_run_is_refused_with_a_remedy(prompt_len, max_tokens, capacity, refusal):
    said = Scheduler(SchedulerConfig(), capacity).refusal(sequence_of(prompt_len, max_tokens, max_model_len=50))
    if refusal is None:
        assert said is None
    else:
        assert said is not None and re.search(refusal, said) and "\n" not in said


def test_a_source_counts_in_slots():
    scheduler = Scheduler(SchedulerConfig(), Capacity(50, 50))
    assert scheduler.refusal(sequence_of(1, 19, source_len=30)) is None
    too_long = scheduler.refusal(sequence_of(1, 20, source_len=30))
    assert too_long is not None and too_long.startswith("source: 51 tokens") and "50 KV slots" in too_long
    first, second = (sequence_of(1, 9, number, source_len=20) for number in (1, 2))
    scheduler.add(first)
    scheduler.add(second)
    assert [one.request_id for one in scheduler.plan().admitted] == [1, 2] and scheduler.load().kv_slots_used == 40


def test_whole_texts_have_slots_for_all_their_tokens_from_the_start():
    """Two of three fit; the third has to wait, and none loses its place."""
    scheduler = Scheduler(SchedulerConfig(), Capacity(63, 50, whole_texts=True))
    for number in (1, 2, 3):
        scheduler.add(sequence_of(10, 20, number))
    for _ in range(20):
        plan = scheduler.plan()
        assert not plan.preempted and scheduler.load().kv_slots_used == 60
        assert [sequence.request_id for sequence in scheduler.running] == [1, 2]
        follow(plan)
    for sequence in [*scheduler.running]:
        scheduler.remove(sequence)
    assert [one.request_id for one in scheduler.plan().admitted] == [3]


def test_a_long_source_is_read_beside_the_roots_and_no_other_text():
    """It cannot be read in parts; those behind it wait for a pass."""
    scheduler = Scheduler(SchedulerConfig(8, 16, 8), Capacity(200, 50))
    running = [sequence_of(1, 9, number, source_len=1) for number in (1, 2)]
    for sequence in running:
        scheduler.add(sequence)
    follow(scheduler.plan())
    for number in (3, 4):
        scheduler.add(sequence_of(1, 9, number, source_len=40))
    plan = scheduler.plan()
    assert [sequence.request_id for sequence, *_ in plan.rows] == [1, 2, 3]
    follow(plan)
    assert [sequence.request_id for sequence, *_ in scheduler.plan().rows] == [1, 2, 3, 4]


def test_a_request_that_just_fits_runs_alone_to_its_end():
    scheduler = Scheduler(SchedulerConfig(4, 8, 3), Capacity(20, 64))
    sequence = sequence_of(12, 8)
    assert scheduler.refusal(sequence) is None
    scheduler.add(sequence)
    passes = 0
    while sequence.finish_reason is None and passes < 50:
        proposals = {0: proposal_for(sequence, 4)} if sequence.uncached_len == 1 else {}
        follow(plan_with(scheduler, proposals), lambda most: most)
        passes += 1
    assert sequence.finish_reason == "length" and sequence.prefix_len == 20


def test_removing_twice_is_harmless():
    scheduler = running_scheduler(SchedulerConfig(), 400, 3)
    (sequence,) = scheduler.running
    scheduler.remove(sequence)
    scheduler.remove(sequence)
    assert not scheduler.running and not scheduler.waiting


# --- clients --------------------------------------------------------------------------------------------------------


def crowded(limits: SchedulerConfig, *counts: int, prompt_len: int = 2) -> Scheduler:
    """So many requests of clients 0, 1, 2, ..., those of 0 first."""
    scheduler = Scheduler(limits, Capacity(4000, 64))
    for scope, count in enumerate(counts):
        for _ in range(count):
            arrive(scheduler, scope, prompt_len)
    return scheduler


def arrive(scheduler: Scheduler, scope: int, prompt_len: int = 2) -> None:
    number = len(scheduler.running) + len(scheduler.waiting)
    scheduler.add(sequence_of(prompt_len, 20, number, scope=scope))


@pytest.mark.parametrize(
    ("counts", "places"),
    [((20,), [8]), ((20, 2), [4, 2]), ((20, 0, 9, 1), [3, 0, 3, 1]), ((1, 1, 1), [1, 1, 1]), ((9,) * 3, [3, 3, 2])],
)
def test_a_client_has_an_even_share_of_the_places_while_others_have_requests(counts, places):
    scheduler = crowded(SchedulerConfig(8), *counts)
    assert scheduler.num_joining == sum(places)
    plan = scheduler.plan()
    held = count_scopes(scheduler.running)
    assert [held[scope] for scope in range(len(counts))] == places and len(plan.rows) == sum(places)
    assert scheduler.num_joining == 0


def test_a_client_joins_with_few_requests_a_pass_while_others_have_some():
    alone, crowd = crowded(SchedulerConfig(20), 9), crowded(SchedulerConfig(20), 9, 1)
    assert (alone.num_joining, crowd.num_joining) == (9, MOST_NEW + 1)
    assert len(alone.plan().admitted) == 9 and len(crowd.plan().admitted) == MOST_NEW + 1
    assert len(crowd.plan().admitted) == MOST_NEW


@pytest.mark.parametrize(("num_clients", "places"), [(1, 9), (2, 2)])
def test_a_request_with_long_lists_counts_more_places_of_its_client(num_clients, places):
    scheduler = crowded(SchedulerConfig(20), 0, num_clients - 1)
    lists = dict(logit_bias=((3, 1.0),) * 100, bad_words=((3,),) * 148, allowed_token_ids=(3,) * 200)
    sampling = SamplingParams(**lists)  # 8 places each
    for number in range(100, 109):
        scheduler.add(Sequence.start(Request(number, (5, 6), sampling), 64))
    scheduler.plan()
    assert count_scopes(scheduler.running)[0] == places


def test_a_client_alone_gives_places_up_to_one_that_comes():
    scheduler = crowded(SchedulerConfig(4), 9)
    follow(scheduler.plan())
    youngest = scheduler.running[:1:-1]
    for _ in range(3):
        arrive(scheduler, 1)
    plan = scheduler.plan()
    assert plan.preempted == youngest and count_scopes(scheduler.running) == {0: 2, 1: 2}
    assert [sequence.request_id for sequence in scheduler.waiting][:2] == [2, 3], "they come before what never ran"
    follow(plan)
    assert not scheduler.plan().preempted


def test_places_are_not_exchanged_without_end():
    """Three clients and four places: the one with two has no more than its share."""
    scheduler = crowded(SchedulerConfig(4), 5, 5)
    follow(scheduler.plan())
    arrive(scheduler, 2)
    arrive(scheduler, 2)
    plan = scheduler.plan()
    assert sorted(count_scopes(scheduler.running).values()) == [1, 1, 2] and len(plan.preempted) == 1
    for _ in range(4):
        follow(plan)
        plan = scheduler.plan()
        assert not plan.preempted and not plan.admitted


def test_no_place_is_given_up_for_a_request_that_does_not_fit_the_pool():
    scheduler = Scheduler(SchedulerConfig(2), Capacity(30, 64))
    for request_id in range(2):
        scheduler.add(sequence_of(4, 20, request_id))
    follow(scheduler.plan())
    scheduler.add(sequence_of(25, 1, 2, scope=1))
    assert not scheduler.plan().preempted


def test_a_client_that_fills_the_pool_gives_slots_up_to_one_that_comes():
    scheduler = Scheduler(SchedulerConfig(8), Capacity(40, 64))
    for request_id in range(4):
        scheduler.add(sequence_of(8, 20, request_id))
    follow(scheduler.plan())
    for request_id in (4, 5):
        scheduler.add(sequence_of(8, 20, request_id, scope=1))
    plan = scheduler.plan()
    assert {one.request_id for one in plan.preempted} == {2, 3} and [one.request_id for one in plan.admitted] == [4, 5]
    follow(plan)
    assert not scheduler.plan().admitted and count_scopes(scheduler.running) == {0: 2, 1: 2}


def test_a_client_has_an_even_share_of_the_rows_of_text():
    scheduler = crowded(SchedulerConfig(9, 20, 16), 3, prompt_len=30)
    arrive(scheduler, 1, 8)
    rows = {sequence.request_id: num_rows for sequence, num_rows, _ in scheduler.plan().rows}
    assert rows == {0: 10, 3: 8}


def test_requests_join_by_priority_and_age():
    scheduler = Scheduler(SchedulerConfig(1, 64, 64), Capacity(200, 64))
    for number, (priority, at) in enumerate(((0, 0.0), (2, 1.0), (0, 2.0), (0, 30.0)), start=1):
        sequence = Sequence.start(Request(number, (5,) * 3, SamplingParams(max_tokens=2), priority=priority), 64)
        sequence.arrived_at = at
        scheduler.add(sequence)
    joined = []
    while scheduler.waiting or scheduler.running:
        (sequence,) = scheduler.plan().admitted
        joined.append(sequence.request_id)
        scheduler.remove(sequence)
    assert joined == [1, 3, 2, 4], "20 s of waiting make up for a priority of 2"
