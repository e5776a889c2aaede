"""One drafter that several threads share: what they ask for at the same time is answered by the same passes.

All passes run in one thread, which also builds the drafter. Where the drafter makes drafts pass by pass, an order joins
at the next pass, and steps of draft-ahead are part of it; else all orders that wait are one call of `propose`. Some
may be left out by `order_choice.py`. Orders come first, because targets wait for them; the reading of text and steps
take turns, one part of a text at a time, and a part is read after `MOST_PASSED` passes at the latest. A pass that fails
is repeated order by order, so that it fails for those alone whose requests are the reason. Everything else of the
drafter is called by the threads themselves in `turn`, and so are drafts that were prepared. It knows no coordinator.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from actors.drafters.draft_ahead.width import Step
from actors.drafters.interface import Context, Draft, Drafter, DraftsByPass
from actors.pool.order_choice import CallCost, OrderHistory, choose_orders
from actors.pool.pool_time import PoolTime

log = logging.getLogger(__name__)

MOST_PASSED = 4
"""Passes, or calls, for drafts that a text waits for before a part of it is read: else it would never be, by a pool
whose targets always wait for drafts."""
NO_STEPS_S = 60.0
"""Seconds without draft-ahead after a step that failed: whose requests are the reason is not known."""


@dataclass(frozen=True, slots=True)
class MergeCounts:
    """Calls of the drafter so far, or passes where it drafts pass by pass, and what asked for them; orders that were
    left out are not among `num_orders`. `num_calls` are those of any kind, `num_in_calls` the leases that each had work
    of, in all."""

    num_proposals: int = 0
    num_orders: int = 0
    num_left_out: int = 0
    num_steps: int = 0
    num_wanted_steps: int = 0
    num_failed: int = 0
    num_calls: int = 0
    num_in_calls: int = 0


@dataclass(slots=True, eq=False)
class _OrderedDrafts:
    contexts: Sequence[Context]
    budgets: Sequence[int]
    history: OrderHistory
    answer: Future[list[Draft] | None] = field(default_factory=Future)


@dataclass(slots=True, eq=False)
class _WantedReading:
    contexts: Sequence[Context]
    answer: Future[None] = field(default_factory=Future)


@dataclass(slots=True, eq=False)
class _WantedStep:
    width: int
    answer: Future[Step] = field(default_factory=Future)


class MergedPasses:
    """`build` is called in the thread of the passes; what it raises, the constructor raises."""

    def __init__(self, build: Callable[[], Drafter], clock: Callable[[], float] = time.monotonic) -> None:
        self.counts = MergeCounts()
        self.time = PoolTime(clock)
        self._clock = clock
        self._cost = CallCost()
        self._turn = threading.RLock()
        self._changed = threading.Condition()
        self._orders: list[_OrderedDrafts] = []
        self._readings: list[_WantedReading] = []
        self._steps: list[_WantedStep] = []
        self._active: list[_OrderedDrafts] = []  # whose drafts are being made pass by pass
        self._has_read = False  # after the last step
        self._num_passed = 0  # passes and calls for drafts while a text waits to be read
        self._no_steps_until = -math.inf
        self.restart: Callable[[Sequence[int] | None], None] = lambda _: None
        """Called in the thread of the passes, in turn, after a pass that failed: the drafter forgets what it had begun
        for these requests, None: for all."""
        self._num_turns = 0  # threads in turn, or waiting for it
        self._is_closed = False
        built: Future[Drafter] = Future()
        self._thread = threading.Thread(target=self._run, args=(build, built), name="pool-passes", daemon=True)
        self._thread.start()
        self.drafter = built.result()

    @contextmanager
    def turn(self) -> Iterator[Drafter]:
        """The drafter, between two passes; for calls that run none. No pass begins while a thread waits for this: what
        it is about to ask for would miss that pass."""
        with self._changed:
            self._num_turns += 1
        try:
            with self._turn:
                yield self.drafter
        finally:
            with self._changed:
                self._num_turns -= 1
                self._changed.notify()

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int], history: OrderHistory) -> list[Draft] | None:
        """Calls the drafter's `propose` once for the orders of several threads; None if this order was left out so that
        the others are not delayed. `history` is that of all orders of this thread."""
        with self.turn() as drafter:
            ahead = drafter.capabilities.works_ahead
            if ahead is not None and all(ahead.prepared(context) for context in contexts):
                return drafter.propose(contexts, budgets)  # runs no pass
            order = _OrderedDrafts(contexts, budgets, history)
            self._ask(self._orders, order)  # before the turn ends, so that the next pass is of this order
        return order.answer.result()

    def prefill(self, contexts: Sequence[Context]) -> None:
        """Lets the drafter read these texts, and waits until it has."""
        reading = _WantedReading(contexts)
        self._ask(self._readings, reading)
        reading.answer.result()

    def step(self, width: int) -> Step:
        """One step of draft-ahead for the requests of all threads: the next one that is taken."""
        step = _WantedStep(width)
        self._ask(self._steps, step)
        return step.answer.result()

    @property
    def takes_steps(self) -> bool:
        return self._clock() >= self._no_steps_until

    def close(self) -> None:
        """End the thread; what is asked for afterwards raises."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _ask(self, queue: list, asked: object) -> None:
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the draft pool ends")
            queue.append(asked)
            self._changed.notify()

    def _run(self, build: Callable[[], Drafter], built: Future[Drafter]) -> None:
        try:
            drafter = build()
        except BaseException as error:
            built.set_exception(error)
            return
        built.set_result(drafter)
        by_pass = drafter.capabilities.drafts_by_pass
        self._cost.by_pass = by_pass is not None
        while (asked := self._next()) is not None:
            with self._turn, self.time.passing():
                try:
                    self._serve(drafter, by_pass, asked)
                except Exception as error:  # else the thread would end, and no later call be answered
                    self._failed("call", error)
                    self._refuse([*asked, *self._active], error)

    def _serve(self, drafter: Drafter, by_pass: DraftsByPass | None, asked: list) -> None:
        match asked[0] if asked else by_pass:
            case _OrderedDrafts() if by_pass is not None:
                self._begin(drafter, by_pass, asked)
            case _OrderedDrafts():
                self._propose(drafter, asked)
            case _WantedReading(contexts, answer):
                self._called(1)
                _fulfil(answer, partial(_read, drafter, contexts))
            case _WantedStep() if self._active and by_pass is not None:
                self._advance(drafter, by_pass, asked)
            case _WantedStep():
                self._work(drafter, asked)
            case _ if by_pass is not None:
                self._advance(drafter, by_pass, [])

    def _refuse(self, asked: Sequence[_OrderedDrafts | _WantedReading | _WantedStep], error: Exception) -> None:
        """What was asked for and has no answer fails with the error."""
        self._active = []
        for one in asked:
            if not one.answer.done():
                one.answer.set_exception(error)

    def _next(self) -> list | None:
        """Everything of the first kind that waits, of readings one; an empty list for the next pass of drafts that are
        being made; None to end."""
        with self._changed:
            while self._num_turns or not (self._orders or self._readings or self._steps or self._active):
                if self._is_closed and not self._num_turns:
                    return None
                self._changed.wait()
            is_due = self._readings and self._num_passed >= MOST_PASSED
            if self._orders and not is_due:
                asked, self._orders = self._orders, []
                self._num_passed += bool(self._readings)
            elif self._active and not is_due:
                asked, self._steps = self._steps, []
                self._num_passed += bool(self._readings)
            elif self._readings and (is_due or not (self._has_read and self._steps)):
                asked, self._has_read, self._num_passed = [self._readings.pop(0)], True, 0
            else:
                asked, self._steps, self._has_read = self._steps, [], False
            return asked

    def _chosen(self, orders: list[_OrderedDrafts]) -> list[_OrderedDrafts]:
        """Those that are drafted for; the others are answered."""
        num_begun = len(self._active)
        waiting = [order.history.order(order.budgets) for order in (*self._active, *orders)]
        chosen = {i - num_begun for i in choose_orders(waiting, self._cost, num_begun)}
        left_out = [order for i, order in enumerate(orders) if i not in chosen]
        orders = [order for i, order in enumerate(orders) if i in chosen]
        for order in orders:
            order.history.num_left_out = 0
        for order in left_out:
            order.history.num_left_out += 1
            order.answer.set_result(None)
        self._count(num_orders=len(orders), num_left_out=len(left_out))
        return orders

    def _propose(self, drafter: Drafter, orders: list[_OrderedDrafts]) -> None:
        orders = self._chosen(orders)
        self._count(num_proposals=1)
        contexts = list(chain.from_iterable(order.contexts for order in orders))
        budgets = list(chain.from_iterable(order.budgets for order in orders))

        started = self._clock()
        try:
            made = iter(drafter.propose(contexts, budgets))
        except Exception as error:
            self._failed("draft", error)
            if len(orders) == 1:
                orders[0].answer.set_exception(error)
                return
            self.restart([context.request_id for context in contexts])
            for order in orders:
                _fulfil(order.answer, partial(drafter.propose, order.contexts, order.budgets))
            return
        self._cost.update(len(contexts), max(budgets), self._clock() - started)
        self._called(len(orders))
        for order in orders:
            order.history.took_part(len(orders))
            order.answer.set_result([next(made) for _ in order.contexts])

    def _begin(self, drafter: Drafter, by_pass: DraftsByPass, orders: list[_OrderedDrafts]) -> None:
        for order in self._chosen(orders):
            try:
                by_pass.begin(order.contexts, order.budgets)
            except Exception as error:
                self._failed("draft", error)
                order.answer.set_exception(error)
            else:
                self._active.append(order)
        self._finish(drafter, by_pass)

    def _advance(self, drafter: Drafter, by_pass: DraftsByPass, steps: list[_WantedStep]) -> None:
        """One pass for all drafts that are being made, and a step of draft-ahead in it if one is wanted."""
        done = Step(0)
        self._count(num_proposals=1, num_steps=bool(steps), num_wanted_steps=len(steps))
        for order in self._active:
            order.history.took_part(len(self._active))
        started = self._clock()
        try:
            done = by_pass.advance(max((step.width for step in steps), default=None))
            self._called(len(self._active) + len(steps))
            if not steps:
                num_requests = sum(len(order.contexts) for order in self._active)
                self._cost.update(num_requests, 1, self._clock() - started)
        except Exception as error:
            self._failed("pass", error)
            if steps:
                self._no_steps_until = self._clock() + NO_STEPS_S
            self.restart(None)  # their drafts end with it, and `propose` makes them order by order
        self._finish(drafter, by_pass)
        for step in steps:
            step.answer.set_result(done)

    def _finish(self, drafter: Drafter, by_pass: DraftsByPass) -> None:
        """Answer the orders whose drafts are made."""
        active, self._active = self._active, []
        for order in active:
            if any(by_pass.is_drafting(context.request_id) for context in order.contexts):
                self._active.append(order)
            else:
                _fulfil(order.answer, partial(drafter.propose, order.contexts, order.budgets))

    def _called(self, num_leases: int) -> None:
        """A call had work of so many leases; of none if it ran no pass."""
        self._count(num_calls=bool(num_leases), num_in_calls=num_leases)

    def _failed(self, what: str, error: Exception) -> None:
        log.error("a %s of the pool failed", what, exc_info=error)
        self._count(num_failed=1)

    def _count(self, **more: int) -> None:
        """Other threads read the counts, all of them of one moment."""
        self.counts = replace(self.counts, **{name: getattr(self.counts, name) + num for name, num in more.items()})

    def _work(self, drafter: Drafter, steps: list[_WantedStep]) -> None:
        ahead = drafter.capabilities.works_ahead
        assert ahead is not None
        self._count(num_steps=1, num_wanted_steps=len(steps))
        try:
            done = ahead.work(max(step.width for step in steps)) if ahead.wants_work else Step(0)
            self._called(len(steps) * bool(done.num_rows or done.refreshed))
        except Exception as error:
            self._failed("step of draft-ahead", error)
            self._no_steps_until = self._clock() + NO_STEPS_S
            self.restart(None)
            done = Step(0)
        for step in steps:
            step.answer.set_result(done)


def _read(drafter: Drafter, contexts: Sequence[Context]) -> None:
    if (reader := drafter.capabilities.prefills) is not None:
        reader.prefill(contexts)


def _fulfil(answer: Future, call: Callable[[], object]) -> None:
    """The answer is what the call returns, or what it raises."""
    try:
        answer.set_result(call())
    except Exception as error:
        answer.set_exception(error)
