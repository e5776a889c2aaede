"""One drafter that several threads share: what they ask for at the same time is answered by the same passes.

All passes run in one thread, which also builds the drafter: orders of whatever threads wait are one call of `propose`,
steps of draft-ahead one step. Orders come first, because targets wait for them; the reading of text and steps take
turns, one part of a text at a time. `order_choice.py` says which orders are left out of a call. Everything else of the
drafter is called by the threads themselves in `turn`, and so are drafts that were prepared. A pass that fails is
repeated order by order, so that it fails for those alone whose requests are the reason. It knows no coordinator.
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
from actors.drafters.interface import Context, Draft, Drafter
from actors.pool.order_choice import CallCost, OrderHistory, choose_orders

log = logging.getLogger(__name__)

NO_STEPS_S = 60.0
"""Seconds without draft-ahead after a step that failed: whose requests are the reason is not known."""


@dataclass(frozen=True, slots=True)
class MergeCounts:
    """Calls of the drafter so far, and what asked for them; orders that were left out are not among `num_orders`."""

    num_proposals: int = 0
    num_orders: int = 0
    num_left_out: int = 0
    num_steps: int = 0
    num_wanted_steps: int = 0
    num_failed: int = 0


@dataclass(slots=True, eq=False)
class _OrderedDrafts:
    contexts: Sequence[Context]
    budgets: Sequence[int]
    history: OrderHistory
    drafts: Future[list[Draft] | None] = field(default_factory=Future)


@dataclass(slots=True, eq=False)
class _WantedReading:
    contexts: Sequence[Context]
    done: Future[None] = field(default_factory=Future)


@dataclass(slots=True, eq=False)
class _WantedStep:
    width: int
    done: Future[Step] = field(default_factory=Future)


class MergedPasses:
    """`build` is called in the thread of the passes; what it raises, the constructor raises."""

    def __init__(self, build: Callable[[], Drafter], clock: Callable[[], float] = time.monotonic) -> None:
        self.counts = MergeCounts()
        self._clock = clock
        self._cost = CallCost()
        self._turn = threading.RLock()
        self._changed = threading.Condition()
        self._orders: list[_OrderedDrafts] = []
        self._readings: list[_WantedReading] = []
        self._steps: list[_WantedStep] = []
        self._has_read = False  # after the last step
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
        """As the drafter's, in one call with those of other threads; None: left out for the sake of the others.
        `history` is that of all orders of this thread."""
        with self.turn() as drafter:
            ahead = drafter.capabilities.works_ahead
            if ahead is not None and all(ahead.prepared(context) for context in contexts):
                return drafter.propose(contexts, budgets)  # runs no pass
            order = _OrderedDrafts(contexts, budgets, history)
            self._ask(self._orders, order)  # before the turn ends, so that the next pass is of this order
        return order.drafts.result()

    def prefill(self, contexts: Sequence[Context]) -> None:
        """As the drafter's."""
        reading = _WantedReading(contexts)
        self._ask(self._readings, reading)
        reading.done.result()

    def step(self, width: int) -> Step:
        """One step of draft-ahead for the requests of all threads: the next one that is taken."""
        step = _WantedStep(width)
        self._ask(self._steps, step)
        return step.done.result()

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
        while (asked := self._next()) is not None:
            with self._turn:
                match asked[0]:
                    case _OrderedDrafts():
                        self._propose(drafter, asked)
                    case _WantedReading(contexts, done):
                        _fulfil([done], partial(_read, drafter, contexts))
                    case _WantedStep():
                        self._work(drafter, asked)

    def _next(self) -> list | None:
        """Everything of the first kind that waits, of readings one; None to end."""
        with self._changed:
            while self._num_turns or not (self._orders or self._readings or self._steps):
                if self._is_closed and not self._num_turns:
                    return None
                self._changed.wait()
            if self._orders:
                asked, self._orders = self._orders, []
            elif self._readings and not (self._has_read and self._steps):
                asked, self._has_read = [self._readings.pop(0)], True
            else:
                asked, self._steps, self._has_read = self._steps, [], False
            return asked

    def _propose(self, drafter: Drafter, orders: list[_OrderedDrafts]) -> None:
        waiting = [order.history.order(order.budgets) for order in orders]
        chosen = choose_orders(waiting, self._cost)
        left_out = [order for i, order in enumerate(orders) if i not in chosen]
        orders = [orders[i] for i in chosen]
        for order in orders:
            order.history.num_left_out = 0
        for order in left_out:
            order.history.num_left_out += 1
            order.drafts.set_result(None)
        counts = self.counts
        self.counts = replace(
            counts,
            num_proposals=counts.num_proposals + 1,
            num_orders=counts.num_orders + len(orders),
            num_left_out=counts.num_left_out + len(left_out),
        )
        contexts = list(chain.from_iterable(order.contexts for order in orders))
        budgets = list(chain.from_iterable(order.budgets for order in orders))

        started = self._clock()
        try:
            made = iter(drafter.propose(contexts, budgets))
        except Exception as error:
            self._failed("draft", error)
            if len(orders) == 1:
                orders[0].drafts.set_exception(error)
                return
            self.restart([context.request_id for context in contexts])
            for order in orders:
                _fulfil([order.drafts], partial(_propose_alone, drafter, order))
            return
        self._cost.update(len(contexts), max(budgets), self._clock() - started)
        for order in orders:
            order.drafts.set_result([next(made) for _ in order.contexts])

    def _failed(self, what: str, error: Exception) -> None:
        log.error("a %s of the pool failed", what, exc_info=error)
        self.counts = replace(self.counts, num_failed=self.counts.num_failed + 1)

    def _work(self, drafter: Drafter, steps: list[_WantedStep]) -> None:
        ahead = drafter.capabilities.works_ahead
        assert ahead is not None
        counts = self.counts
        self.counts = replace(
            counts, num_steps=counts.num_steps + 1, num_wanted_steps=counts.num_wanted_steps + len(steps)
        )

        try:
            done = ahead.work(max(step.width for step in steps)) if ahead.wants_work else Step(0)
        except Exception as error:
            self._failed("step of draft-ahead", error)
            self._no_steps_until = self._clock() + NO_STEPS_S
            self.restart(None)
            done = Step(0)
        for step in steps:
            step.done.set_result(done)


def _propose_alone(drafter: Drafter, order: _OrderedDrafts) -> Iterator[list[Draft]]:
    return iter([drafter.propose(order.contexts, order.budgets)])


def _read(drafter: Drafter, contexts: Sequence[Context]) -> Iterator[None]:
    if (reader := drafter.capabilities.prefills) is not None:
        reader.prefill(contexts)
    return iter([None])


def _fulfil(futures: Sequence[Future], results: Callable[[], Iterator]) -> None:
    """A failure is one of all that wait for the results."""
    try:
        values = results()
    except Exception as error:
        for future in futures:
            future.set_exception(error)
        return
    for future, value in zip(futures, values, strict=True):
        future.set_result(value)
