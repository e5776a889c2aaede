"""Passes that threads share: what waits together is one call, orders come first, and a failure is
that of the order which fails by itself."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from actors.drafters.draft_ahead.width import Step
from actors.drafters.interface import Capabilities, Context, Draft
from actors.pool.merged_passes import NO_STEPS_S, MergedPasses
from actors.pool.order_choice import OrderHistory
from actors.protocol.messages import SamplingParams, TokenTree


class GatedDrafter:
    """Notes its calls; each waits until `gate` is open."""

    wants_work = True

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.thread = threading.current_thread().name
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.capabilities = Capabilities(works_ahead=self, prefills=self)  # pyright: ignore[reportArgumentType]

    def prepared(self, context: Context) -> bool:
        return context.request_id < 0

    def propose(self, contexts: list[Context], budgets: list[int]) -> list[Draft]:
        if all(self.prepared(context) for context in contexts):
            return [Draft(TokenTree.root(context.request_id)) for context in contexts]
        self._call("propose", [context.request_id for context in contexts])
        if 13 in budgets:
            raise RuntimeError("a bad pass")
        return [
            Draft(TokenTree.chain(context.request_id, [budget]))
            for context, budget in zip(contexts, budgets, strict=True)
        ]

    def prefill(self, contexts: list[Context]) -> None:
        self._call("prefill", [context.request_id for context in contexts])

    def work(self, width: int) -> Step:
        self._call("work", [width])
        if width == 13:
            raise RuntimeError("a bad step")
        return Step(width)

    def _call(self, name: str, of: list[int]) -> None:
        assert threading.current_thread().name == self.thread == "pool-passes"
        self.calls.append((name, of))
        self.entered.set()
        assert self.gate.wait(10)


class DrafterByPass(GatedDrafter):
    """Makes drafts of as many passes as their budget; each pass waits for a permit."""

    def __init__(self) -> None:
        super().__init__()
        self.left: dict[int, int] = {}
        self.permits = threading.Semaphore(0)
        self.gate.set()
        self.capabilities = Capabilities(works_ahead=self, prefills=self, drafts_by_pass=self)  # pyright: ignore

    def begin(self, contexts: list[Context], budgets: list[int]) -> None:
        self.left |= {one.request_id: budget for one, budget in zip(contexts, budgets, strict=True)}

    def is_drafting(self, request_id: int) -> bool:
        return self.left.get(request_id, 0) > 0

    def advance(self, width: int | None) -> Step:
        drafting = [number for number, left in self.left.items() if left]
        self.calls.append(("advance", [*drafting, *([] if width is None else [-width])]))
        self.entered.set()
        assert self.permits.acquire(timeout=10)
        if 99 in drafting:
            raise RuntimeError("a bad pass")
        self.left = {number: max(0, left - 1) for number, left in self.left.items()}
        return Step(width or 0)


@pytest.fixture
def by_pass():
    merged = MergedPasses(DrafterByPass)  # pyright: ignore[reportArgumentType]
    yield merged
    merged.drafter.permits.release(100)  # pyright: ignore[reportAttributeAccessIssue]
    merged.close()


def context(request_id: int) -> Context:
    return Context(request_id, 1, [request_id], 1, SamplingParams())


@pytest.fixture
def passes():
    merged = MergedPasses(GatedDrafter)  # pyright: ignore[reportArgumentType]
    yield merged
    merged.drafter.gate.set()  # pyright: ignore[reportAttributeAccessIssue]
    merged.close()


def waiting(passes: MergedPasses, count: int) -> None:
    """Returns once so many calls wait; orders wait for their turn first."""
    while passes._num_turns + len(passes._readings) + len(passes._steps) < count:
        pass


def test_what_waits_together_is_one_call_and_orders_come_first(passes):
    drafter: Any = passes.drafter
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(passes.propose, [context(1)], [1], OrderHistory())
        assert drafter.entered.wait(10)
        steps = [pool.submit(passes.step, width) for width in (2, 3)]
        reading = pool.submit(passes.prefill, [context(2)])
        orders = [pool.submit(passes.propose, [context(n), context(n + 1)], [4, 5], OrderHistory()) for n in (10, 20)]
        waiting(passes, 5)
        drafter.gate.set()
        assert [draft.tree.token_ids for draft in first.result() or ()] == [(1, 1)]
        found = sorted([draft.tree.token_ids for draft in order.result() or ()] for order in orders)
        assert found == [[(10, 4), (11, 5)], [(20, 4), (21, 5)]]
        assert [step.result() for step in steps] == [Step(3)] * 2
        reading.result()
    assert [name for name, _ in drafter.calls] == ["propose", "propose", "prefill", "work"]
    assert sorted(drafter.calls[1][1]) == [10, 11, 20, 21]
    counts = passes.counts
    assert (counts.num_proposals, counts.num_orders, counts.num_steps, counts.num_wanted_steps) == (2, 3, 1, 2)
    assert (counts.num_calls, counts.num_in_calls) == (4, 6) and passes.time.spent()[0] > 0


def test_readings_and_steps_take_turns(passes):
    drafter: Any = passes.drafter
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(passes.propose, [context(1)], [1], OrderHistory())
        assert drafter.entered.wait(10)
        readings = [pool.submit(passes.prefill, [context(n)]) for n in (2, 3, 4)]
        step = pool.submit(passes.step, 2)
        waiting(passes, 4)
        drafter.gate.set()
        for one in (first, *readings, step):
            one.result()
    assert [name for name, _ in drafter.calls] == ["propose", "prefill", "work", "prefill", "prefill"]


def test_no_pass_begins_while_a_thread_waits_for_its_turn(passes):
    drafter: Any = passes.drafter
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(passes.step, 1)
        assert drafter.entered.wait(10)
        in_turn, goes_on = threading.Event(), threading.Event()

        def answer() -> None:
            with passes.turn():
                in_turn.set()
                assert goes_on.wait(10)
            passes.propose([context(1)], [1], OrderHistory())

        answering = pool.submit(answer)
        while not passes._num_turns:
            pass
        step = pool.submit(passes.step, 2)
        waiting(passes, 1)
        drafter.gate.set()
        first.result()
        assert in_turn.wait(10)
        assert len(drafter.calls) == 1
        goes_on.set()
        answering.result()
        step.result()


def test_a_prepared_draft_waits_for_the_pass_that_runs_alone(passes):
    drafter: Any = passes.drafter
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(passes.step, 1)
        assert drafter.entered.wait(10)
        prepared = pool.submit(passes.propose, [context(-1)], [4], OrderHistory())
        while not passes._num_turns:
            pass
        orders = [pool.submit(passes.propose, [context(n)], [4], OrderHistory()) for n in (1, 2)]
        drafter.gate.set()
        assert prepared.result() == [Draft(TokenTree.root(-1))]
        for one in (first, *orders):
            one.result()
    assert passes.counts.num_orders == 2


def test_an_order_that_costs_the_others_more_than_it_gains_is_left_out(passes):
    drafter: Any = passes.drafter
    histories = []
    for num_accepted in (4, 0, 4):
        history = OrderHistory()
        for _ in range(30):
            history.accepted(5, num_accepted)
            history.rest_s.update(0.01)
        histories.append(history)
    for num_requests in (1, 2, 3) * 10:
        passes._cost.update(num_requests, 5, 5 * 2e-3 * num_requests)
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(passes.step, 1)
        assert drafter.entered.wait(10)
        orders = [
            pool.submit(passes.propose, [context(n)], [5], history) for n, history in enumerate(histories, start=1)
        ]
        waiting(passes, 3)
        drafter.gate.set()
        first.result()
        found = [order.result() for order in orders]
    assert found[1] is None and None not in (found[0], found[2])
    assert [history.num_left_out for history in histories] == [0, 1, 0]
    assert (passes.counts.num_orders, passes.counts.num_left_out) == (2, 1)


def test_an_order_joins_at_the_next_pass_and_is_answered_after_its_own_last_one(by_pass):
    drafter: Any = by_pass.drafter
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(by_pass.propose, [context(1)], [3], OrderHistory())
        assert drafter.entered.wait(10)
        second = pool.submit(by_pass.propose, [context(2)], [1], OrderHistory())
        step = pool.submit(by_pass.step, 5)
        waiting(by_pass, 2)
        drafter.permits.release(2)
        assert [one.tree.token_ids for one in second.result() or ()] == [(2, 1)]
        assert step.result() == Step(5)
        assert not first.done()
        drafter.permits.release()
        assert [one.tree.token_ids for one in first.result() or ()] == [(1, 3)]
    passes = [sorted(of) for name, of in drafter.calls if name == "advance"]
    assert passes == [[1], [-5, 1, 2], [1]]
    assert by_pass.counts.num_orders == 2
    assert (by_pass.counts.num_calls, by_pass.counts.num_in_calls) == (3, 5)


def test_an_order_that_slows_the_drafts_that_are_made_is_left_out(by_pass):
    drafter: Any = by_pass.drafter
    histories = []
    for num_accepted in (4, 0):
        history = OrderHistory()
        for _ in range(30):
            history.accepted(5, num_accepted)
            history.rest_s.update(0.01)
        histories.append(history)
    for num_requests in (1, 2, 3) * 10:
        by_pass._cost.update(num_requests, 1, 2e-3 * num_requests)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(by_pass.propose, [context(1)], [3], histories[0])
        assert drafter.entered.wait(10)
        second = pool.submit(by_pass.propose, [context(2)], [3], histories[1])
        third = pool.submit(by_pass.propose, [context(3)], [3], OrderHistory())  # of an engine that is not known
        waiting(by_pass, 2)
        drafter.permits.release(9)
        assert second.result() is None
        assert first.result() is not None and third.result() is not None
    assert (by_pass.counts.num_orders, by_pass.counts.num_left_out, histories[1].num_left_out) == (2, 1, 1)
    assert {number for name, of in drafter.calls for number in of} == {1, 3}


def test_texts_are_read_although_drafts_are_always_missing(by_pass):
    drafter: Any = by_pass.drafter
    with ThreadPoolExecutor(4) as pool:
        order = pool.submit(by_pass.propose, [context(1)], [12], OrderHistory())
        assert drafter.entered.wait(10)
        readings = [pool.submit(by_pass.prefill, [context(n)]) for n in (2, 3)]
        waiting(by_pass, 2)
        drafter.permits.release(12)
        for one in (order, *readings):
            one.result()
    names = "".join(name[0] for name, _ in drafter.calls)
    assert names == "a" + "aaaap" * 2 + "aaa" + "p"


def test_a_pass_that_fails_leaves_its_orders_to_calls_of_their_own(by_pass):
    drafter: Any = by_pass.drafter
    by_pass.restart = lambda _: drafter.left.clear()
    drafter.permits.release(10)
    assert [one.tree.token_ids for one in by_pass.propose([context(99)], [4], OrderHistory())] == [(99, 4)]
    assert by_pass.counts.num_failed == 1 and by_pass.takes_steps
    assert [one.tree.token_ids for one in by_pass.propose([context(1)], [2], OrderHistory())] == [(1, 2)]


def test_a_failure_is_raised_for_those_alone_whose_order_fails(passes):
    drafter: Any = passes.drafter
    restarted: list[Any] = []
    passes.restart = restarted.append
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(passes.step, 1)
        assert drafter.entered.wait(10)
        orders = [pool.submit(passes.propose, [context(n)], [n], OrderHistory()) for n in (2, 13, 4)]
        waiting(passes, 3)
        drafter.gate.set()
        first.result()
        with pytest.raises(RuntimeError, match="a bad pass"):
            orders[1].result()
        assert [[one.tree.token_ids for one in orders[i].result() or ()] for i in (0, 2)] == [[(2, 2)], [(4, 4)]]
    assert [sorted(some) for some in restarted] == [[2, 4, 13]]
    assert passes.counts.num_failed == 1


def test_an_order_that_fails_by_itself_is_not_repeated(passes):
    drafter: Any = passes.drafter
    drafter.gate.set()
    with pytest.raises(RuntimeError, match="a bad pass"):
        passes.propose([context(1)], [13], OrderHistory())
    assert len(drafter.calls) == 1
    drafts = passes.propose([context(1)], [2], OrderHistory()) or []
    assert [draft.tree.token_ids for draft in drafts] == [(1, 2)]


def test_after_a_step_that_fails_there_is_none_for_a_while():
    now = [0.0]
    merged = MergedPasses(GatedDrafter, clock=lambda: now[0])  # pyright: ignore[reportArgumentType]
    drafter: Any = merged.drafter
    restarted: list[Any] = []
    merged.restart = restarted.append
    drafter.gate.set()
    assert merged.step(13) == Step(0)
    assert restarted == [None] and not merged.takes_steps
    now[0] = NO_STEPS_S
    assert merged.takes_steps and merged.step(2) == Step(2)
    merged.close()


@pytest.mark.parametrize("ask", ["step", "orders"])
def test_an_error_beside_the_drafters_is_raised_for_what_was_asked_and_the_others_are_answered(passes, ask):
    """As of the restart after a pass that failed: the thread of the passes does not end with it."""
    drafter: Any = passes.drafter

    def restart(_: Any) -> None:
        raise KeyError("no such request")

    passes.restart = restart
    with ThreadPoolExecutor(2) as threads:
        if ask == "step":
            asked = [threads.submit(passes.step, 13)]
        else:
            with passes.turn():
                asked = [threads.submit(passes.propose, [context(number)], [13], OrderHistory()) for number in (1, 2)]
                waiting(passes, 3)
        drafter.gate.set()
        for one in asked:
            with pytest.raises(KeyError, match="no such request"):
                one.result(10)
    passes.prefill([context(3)])
    assert drafter.calls[-1] == ("prefill", [3])


def test_nothing_is_asked_for_after_the_end(passes):
    passes.close()
    with pytest.raises(RuntimeError, match="the draft pool ends"):
        passes.propose([context(1)], [1], OrderHistory())


def test_what_building_raises_the_constructor_raises():
    def build():
        raise ValueError("no checkpoint")

    with pytest.raises(ValueError, match="no checkpoint"):
        MergedPasses(build)
